"""What models are asked, in short and plain words: all prompts of the lemma graph."""

from collections.abc import Sequence
from dataclasses import dataclass

from sigma0.config import Messages
from sigma0.reason.lemma.graph import FINAL, MAX_LEMMAS, TYPES, Lemma, LemmaGraph, shortened

# characters of a verified proof that later ones may read, from its end
PROOF_SHOWN = 400
FAILURES_SHOWN = 6
# characters of an approach, and of the reason that it failed for
_APPROACH_SHOWN = 200
_WHY_SHOWN = 400

PLAN_FORMAT = f"""LEMMA L1
TYPE: {" | ".join(TYPES)}
STATEMENT: one sentence that can be checked
DEPENDS: none, or ids such as L1, L2
VERIFY: how a short program can check it"""


@dataclass(frozen=True)
class Failure:
    """An approach to a lemma that did not pass."""

    approach: str  # Its proof
    why: str  # In a sentence


@dataclass(frozen=True)
class Step:
    """A lemma with all that may be known while it is proved."""

    problem: str  # That is being solved
    lemma: Lemma  # It
    verified: tuple[Lemma, ...]  # The lemmas that it builds on
    failures: tuple[Failure, ...]  # Approaches to it that did not pass
    counts: bool  # Whether it must be enumerated

    @property
    def values(self) -> dict[str, int]:
        """Counts that were verified before, by the lemmas that they are of: FINAL's program begins with these names."""
        if self.lemma.id != FINAL:
            return {}
        return {lemma.id: int(lemma.value) for lemma in self.verified if lemma.value is not None}


def plan(problem: str) -> list[dict[str, str]]:
    """Asks for a graph."""
    return _asks(
        f"Problem:\n{problem}\n\n"
        f"Split the problem into at most {MAX_LEMMAS} small lemmas, fewer if fewer do. The last one is called {FINAL} "
        "and states the answer; every other lemma must be needed by it. Write nothing but blocks of this form:\n\n"
        f"{PLAN_FORMAT}"
    )


def again(messages: Messages, reply: str, error: str) -> list[dict[str, str]]:
    """Asks once more, with the error."""
    correction = f"That cannot be used: {error}.\nWrite the whole again, in the form that was asked for."
    return [*map(dict, messages), _said("assistant", reply), _said("user", correction)]


def proof(step: Step) -> list[dict[str, str]]:
    """Asks for a proof."""
    end = ""
    if step.lemma.id == FINAL:
        end = " End with the answer to the problem in \\boxed{}."
    elif step.counts:
        end = " End with the number in \\boxed{}."
    return _asks(f"{_situation(step)}{_failures(step)}\n\nProve or work out this step, briefly.{end}")


def objection(step: Step, text: str) -> list[dict[str, str]]:
    """Asks for what is wrong with a proof."""
    leave = ""
    if step.counts:
        leave = " Do not judge the number itself: a program will count."
    return _asks(
        f"{_situation(step)}\n\nProof:\n{text}\n\n"
        "Try to refute this proof: name the first wrong or missing step, with a counterexample if there is one. If you "
        f"find none, write: no objection.{leave}"
    )


def judgement(messages: Messages, objected: str, labels: Sequence[str]) -> list[dict[str, str]]:
    """Asks whether a proof stands."""
    question = f"Does the proof stand? Answer with one word: {' or '.join(labels)}."
    return [*map(dict, messages), _said("assistant", objected), _said("user", question)]


def code(step: Step, text: str) -> list[dict[str, str]]:
    """Asks for a program that checks a step."""
    hint = step.lemma.verification_strategy
    rules = [
        "Put all of it into one block between ```python and ```.",
        "Use the standard library alone; no input, no files, no network. It must end within seconds.",
        "Compute something, then `assert` something of what was computed. An assertion about numbers that are only "
        "written down, such as x = 5; assert x == 5, counts for nothing.",
        "Use the numbers of the step. Do not catch exceptions. Print nothing.",
    ]
    if step.values:
        bound = ", ".join(f"{name} = {value}" for name, value in step.values.items())
        rules.append(f"These counts are verified, and bound before your program begins: {bound}.")
    if step.counts and step.values:
        rules += [
            "Bind the answer to `result`: compute it from them, such as `result = "
            f"{next(iter(step.values))} * 2`, or go through every case with a loop, a comprehension or itertools.",
            "Then `assert` that `result` equals the answer, written as a number.",
        ]
    elif step.counts:
        rules += [
            "Go through every case with a loop, a comprehension or itertools, and bind the count to `result`.",
            "Assert a rule that each counted case obeys, or a small case that is known; `assert result == number` "
            "counts for nothing.",
        ]
    elif step.lemma.id == FINAL:
        rules.append("Assert that what is computed equals the answer, written as a number.")
    instructions = "\n".join(f"- {rule}" for rule in rules) + (f"\nIdea: {hint}" if hint else "")
    return _asks(
        f"{_situation(step)}\n\nProof:\n{text}{_failures(step)}\n\n"
        f"Write a short Python program that checks this step by running it.\n{instructions}"
    )


def restructuring(problem: str, graph: LemmaGraph, step: Step, most: int) -> list[dict[str, str]]:
    """Asks for lemmas that make a failed one easier."""
    others = "\n".join(f"{lemma.id}: {shortened(lemma.statement, 200)}" for lemma in graph.lemmas)
    return _asks(
        f"Problem:\n{problem}\n\nThe plan so far:\n{others}\n\n"
        f"{step.lemma.id} could not be verified.{_failures(step)}\n\n"
        f"Write 1 to {most} new, easier lemmas that {step.lemma.id} can build on. Use ids that the plan does not hold. "
        f"Write nothing but blocks of this form:\n\n{PLAN_FORMAT}"
    )


def guess(problem: str, verified: Sequence[Lemma]) -> list[dict[str, str]]:
    """Asks for an answer without a proof."""
    return _asks(
        f"Problem:\n{problem}\n\nVerified so far:\n{_listed(verified)}\n\n"
        "Give your best answer, briefly, in \\boxed{}."
    )


def _situation(step: Step) -> str:
    return (
        f"Problem:\n{step.problem}\n\nVerified so far:\n{_listed(step.verified)}\n\n"
        f"Step {step.lemma.id}:\n{step.lemma.statement}"
    )


def _listed(verified: Sequence[Lemma]) -> str:
    if not verified:
        return "nothing"
    lines = []
    for lemma in verified:
        if lemma.value is not None:
            evidence = f"a program counted {lemma.value}; any other number for it is wrong"
        else:
            evidence = f"proof: {lemma.proof[-PROOF_SHOWN:]}"
        lines.append(f"{lemma.id}: {lemma.statement} ({evidence})")
    return "\n".join(lines)


def _failures(step: Step) -> str:
    if not step.failures:
        return ""
    last = step.failures[-FAILURES_SHOWN:]
    lines = [
        f"- {shortened(failure.approach, _APPROACH_SHOWN) or 'nothing'} [failed: {shortened(failure.why, _WHY_SHOWN)}]"
        for failure in last
    ]
    return "\n\nThese approaches failed, do not repeat them:\n" + "\n".join(lines)


def _asks(text: str) -> list[dict[str, str]]:
    return [_said("user", text)]


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
