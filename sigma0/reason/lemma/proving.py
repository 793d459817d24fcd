"""One attempt at a lemma: a proof, an attempt to refute it, and a program whose assertions must hold when it is run."""

from dataclasses import dataclass
from typing import Literal

import sigma0.reason.lemma.prompts as prompts
from sigma0.reason.lemma.asking import Questions
from sigma0.reason.lemma.boxed import boxed
from sigma0.reason.lemma.counting import Count, ExhaustiveSearcher
from sigma0.reason.lemma.gate import (
    GateRefused,
    Program,
    fenced_code,
    numbers_in,
    refuse_without_assertions,
    refuse_without_numbers,
)
from sigma0.reason.lemma.graph import FINAL, MAX_TEXT, shortened
from sigma0.reason.lemma.prompts import Step
from sigma0.reason.lemma.running import Runner, objection_to, run_written_down
from sigma0.reason.messages import Completion
from sigma0.reason.sandbox.sandbox import SandboxUnavailable

SOUND, FLAWED = "SOUND", "FLAWED"
# characters of an objection in a reason
_OBJECTION = 400


@dataclass(frozen=True)
class Attempt:
    """What became of an attempt."""

    outcome: Literal["verified", "failed", "unverified"]  # `unverified` where no program could be run
    why: str  # In a sentence
    proof: str  # Its text
    value: str | None = None  # What a program counted


class LemmaVerifier:
    """Proposes a proof, tries to refute it, and has it checked by a program.

    Args:
        questions: How models are asked.
        runner: Where programs are run.
    """

    def __init__(self, questions: Questions, runner: Runner) -> None:
        self.questions = questions
        self.runner = runner
        self.searcher = ExhaustiveSearcher(runner, questions.desk, questions.settings)

    def propose(self, step: Step, attempt: int, of_above: bool = False) -> Completion:
        """A proof.

        Args:
            step: What is to be proved.
            attempt: Its number, from 1.
            of_above: Whether the larger model is asked.

        Raises:
            LimitReached, LemmaLimitReached, ChatFailed: As `Questions.ask` does, here and below.
        """
        purpose = _purpose("prove", step, attempt)
        return self.questions.ask("prove", purpose, prompts.proof(step), step.lemma.id, of_above)

    def examine(self, step: Step, attempt: int, proposed: Completion) -> Attempt:
        """Whether a proof stands.

        Args:
            step: What it proves.
            attempt: Its number, from 1.
            proposed: It.
        """
        proof = proposed.text.strip()[:MAX_TEXT]
        objection = _lacks(step, proof) or self._refuted(step, attempt, proof)
        if objection is not None:
            return Attempt("failed", objection, proof)
        completion = self.questions.ask(
            "code", _purpose("code for", step, attempt), prompts.code(step, proof), step.lemma.id
        )
        try:
            return self._run(step, attempt, proof, fenced_code(completion.text[:MAX_TEXT]))
        except GateRefused as error:
            return Attempt("failed", str(error), proof)
        except SandboxUnavailable as error:
            return Attempt("unverified", f"its program could not be run: {error}", proof)

    def _refuted(self, step: Step, attempt: int, proof: str) -> str | None:
        """The objection that a proof does not stand up to; None where it does."""
        question = prompts.objection(step, proof)
        objected = self.questions.ask("check", _purpose("object to", step, attempt), question, step.lemma.id).text
        judged = prompts.judgement(question, objected[:MAX_TEXT], (SOUND, FLAWED))
        label = self.questions.choose("check", _purpose("judge", step, attempt), judged, (SOUND, FLAWED), step.lemma.id)
        if label == SOUND:
            return None
        reason = shortened(objected, _OBJECTION) or "no reason was given"
        return f"the check {'found it flawed' if label else 'gave no clear judgement'}: {reason}"

    def _run(self, step: Step, attempt: int, proof: str, code: str) -> Attempt:
        purpose = _purpose("check", step, attempt)
        if step.counts:
            return self._count(step, proof, code, purpose)
        program = Program(code, step.values)
        refuse_without_assertions(program)
        held = program.numbers(program.vacuous)
        refuse_without_numbers(held, numbers_in(step.lemma.statement))
        if step.lemma.id == FINAL:
            refuse_without_numbers(held, numbers_in(boxed(proof) or ""), "the answer")
        checked = program.with_tests(dict.fromkeys(program.vacuous))
        result = run_written_down(self.runner, self.questions.desk, self.questions.settings, purpose, checked)
        objection = objection_to(result, self.questions.settings)
        if objection is not None:
            return Attempt("failed", objection, proof)
        return Attempt("verified", f"{result.assertions_held} assertions held", proof)

    def _count(self, step: Step, proof: str, code: str, purpose: str) -> Attempt:
        count = self.searcher.search(step.lemma, proof, code, purpose, step.values, step.problem)
        if count.value is None:
            return Attempt("failed", count.objection or "", proof)
        if count.overruled:
            claims = ", ".join(f"{shortened(claim, 40)} in the {where}" for where, claim in count.overruled.items())
            why = f"{step.lemma.id} was {_how(step, count)}: it is {count.value}, not {claims}"
            state = {"lemma": step.lemma.id, "value": count.value, "claimed": dict(count.overruled)}
            self.questions.desk.trail.decide("overruled", why, **state)
        return Attempt("verified", f"it was {_how(step, count)}: {count.value}", proof, count.value)


def _how(step: Step, count: Count) -> str:
    if not count.derived:
        return "enumerated"
    return "computed from " + ", ".join(f"{name} = {value}" for name, value in step.values.items())


def _lacks(step: Step, proof: str) -> str | None:
    if not proof:
        return "the proof is empty"
    if step.lemma.id == FINAL and not step.counts and boxed(proof) is None:
        return "the proof does not end with the answer in \\boxed{}"
    return None


def _purpose(what: str, step: Step, attempt: int) -> str:
    return f"{what} {step.lemma.id}, attempt {attempt}"
