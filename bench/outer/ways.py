"""Ways to answer a question of the micro-world: at once, by a vote, and by each outer loop; each says what it took.

A way is asked about one problem by a desk of its own, and gives the answer that stands and whether it stands behind it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sigma0.config import Effort
from sigma0.reason.desk import Desk
from sigma0.reason.forms import acting, checking, looking, part, planning, read_action, read_check, settled
from sigma0.reason.lemma.form_solver import FormSolver
from sigma0.reason.lemma.graph import FINAL
from sigma0.reason.lemma.planning import parse_lemmas
from sigma0.reason.lemma.settings import LemmaSettings
from sigma0.reason.messages import ChatModel, ChatSettings, Usage
from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.form_task import FormTask
from sigma0.reason.progressive.policies import Level, ProgressiveConfig
from sigma0.reason.progressive.verify_loop import VerifyLoop

# A reply of a form ends long before.
MAX_TOKENS = 320
# Steps of a walk: the longest way has nine sentences, eight sums and an answer.
MAX_STEPS = 20
# Of answers that are drawn, and of progressive effort.
TEMPERATURE = 0.7
Way = Callable[[ChatModel, Desk, str], "Answered"]


class Check(NamedTuple):
    """A verification of progressive effort at a level, and whether it opened its gate: to a higher one, or the end."""

    level: Level
    passed: bool
    opened: bool


@dataclass(frozen=True)
class Answered:
    """One way on one question."""

    answer: str  # That stands at the end; empty where there is none
    accepted: bool  # Whether the way's own gate was passed; of a way without one always
    checks: tuple[Check, ...] = ()  # Verifications of progressive effort, in order; of another way none
    right: bool = False  # Whether it is the known answer, once that was looked at
    usage: Usage = field(default_factory=Usage)  # Of its desk, once it is done


def plain(effort: Effort = "medium", purpose: str = "answer", temperature: float = 0.0) -> Way:
    """The answer, asked for once; greedy by default."""
    return lambda model, desk, problem: Answered(_ask(model, desk, purpose, problem, effort, temperature), True)


def sampled(number: int) -> Way:
    """One drawn answer, of the seed of its number: what a vote counts."""
    return plain(purpose=f"answer {number}", temperature=TEMPERATURE)


def vote(answers: Sequence[str], problem: str, by_rule: bool) -> str:
    """Self-consistency (arXiv 2203.11171): the commonest of some drawn answers, of several the one drawn first.

    By rule, yes or no is computed from each answer's own statement, as the lemma graph does.
    """
    question = part(problem).question
    counted = [settled(question, answer) for answer in answers] if by_rule else answers
    return Counter(counted).most_common(1)[0][0]


def reasoned(model: ChatModel, desk: Desk, problem: str) -> Answered:
    """The plain answer, replaced by what one check of it concludes: reasons written once, in one text."""
    answer = _ask(model, desk, "answer", problem)
    conclusion = read_check(_ask(model, desk, "check", checking(part(problem), answer))).conclusion
    return Answered(conclusion or answer, conclusion == answer)


def planned(model: ChatModel, desk: Desk, problem: str) -> Answered:
    """What one plan says at its end; nothing in it is checked."""
    text = _ask(model, desk, "plan", planning(part(problem)))
    try:
        final = next((lemma for lemma in parse_lemmas(text) if lemma.id == FINAL), None)
    except ValueError:
        final = None
    return Answered("" if final is None else final.statement, final is not None)


def lemmas(model: ChatModel, desk: Desk, problem: str) -> Answered:
    """The lemma graph, each step asked for again."""
    solution = FormSolver(model, desk, LemmaSettings(max_tokens=MAX_TOKENS)).solve(problem)
    return Answered(solution.answer or solution.best_guess or "", solution.verified)


def walked(model: ChatModel, desk: Desk, problem: str) -> Answered:
    """One action at a time, each look-up asked for by itself, up to an answer."""
    parts, known = part(problem), list[str]()
    for step in range(MAX_STEPS):
        try:
            action = read_action(_ask(model, desk, f"act {step}", acting(parts, known)))
        except ValueError:
            return Answered("", False)
        if action.act == "answer":
            return Answered(action.what, True)
        if action.act == "look":
            output = _ask(model, desk, f"look {step}", looking(parts.text, action.what))
            if output not in parts.sentences:
                return Answered("", False)
            known.append(output)
        else:
            known.append(action.what)
    return Answered("", False)


def routed(dear: Way) -> Way:
    """The plain answer where its verdict opens the door `converge`; else the dearer way."""

    def way(model: ChatModel, desk: Desk, problem: str) -> Answered:
        settings = ChatSettings("medium", MAX_TOKENS)
        completion = desk.ask(model, "answer", [{"role": "user", "content": problem}], settings)
        return Answered(completion.text.strip(), True) if completion.door == "converge" else dear(model, desk, problem)

    return way


class Learned:
    """The plain answer for kinds of questions that it was seen to answer well; else the dearer way.

    A kind is a question's first two words. Of one that was seen less often than `FEWEST` times the plain answer is
    given too, to be learned from.
    """

    # Share of right plain answers from which on no more is asked.
    FEWEST, ENOUGH = 10, 0.95

    def __init__(self, dear: Way) -> None:
        self._dear = dear
        self._seen: Counter[str] = Counter()
        self._right: Counter[str] = Counter()
        self._was_plain = False

    def __call__(self, model: ChatModel, desk: Desk, problem: str) -> Answered:
        """See `Way`."""
        kind = _kind(problem)
        seen = self._seen[kind]
        self._was_plain = seen < self.FEWEST or self._right[kind] >= self.ENOUGH * seen
        return (plain() if self._was_plain else self._dear)(model, desk, problem)

    def learn(self, problem: str, answered: Answered, known: str) -> None:
        """Takes in the known answer, after its own; of plain answers alone."""
        if self._was_plain:
            self._seen[_kind(problem)] += 1
            self._right[_kind(problem)] += answered.answer == known


def verified(config: ProgressiveConfig) -> Way:
    """Progressive effort: checked at the policy's levels, corrected by what a check concludes."""

    def way(model: ChatModel, desk: Desk, problem: str) -> Answered:
        report = VerifyLoop(
            FormTask(problem),
            desk,
            model,
            manager=ProgressiveReasoningManager(config),
            problem=problem,
            temperature=TEMPERATURE,
            max_tokens=MAX_TOKENS,
        ).run()
        states = (decision.state for decision in desk.trail.decisions)
        checks = tuple(
            Check(state["level"], state["passed"], state["level_upgraded"] or state["success"]) for state in states
        )
        return Answered(report.solution or "", report.solved, checks)

    return way


def _ask(
    model: ChatModel, desk: Desk, purpose: str, text: str, effort: Effort = "medium", temperature: float = 0.0
) -> str:
    settings = ChatSettings(effort, MAX_TOKENS, temperature)
    return desk.ask(model, purpose, [{"role": "user", "content": text}], settings).text.strip()


def _kind(problem: str) -> str:
    return " ".join(part(problem).question.split()[:2])
