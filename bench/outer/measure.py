"""Ways to answer a question of the micro-world, run over the same questions: right, accepted wrong, and what it took.

A way (at once, by a vote, by an outer loop) is asked about one problem by a desk of its own, and gives the answer that
stands and whether it stands behind it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count, islice
from random import Random
from typing import NamedTuple

from sigma0.bench.core.conditions import Conditions, Figure, mean_of
from sigma0.bench.core.ledger import runs_of
from sigma0.bench.core.output import BenchTable, with_interval
from sigma0.bench.core.rows import LevelRates, OuterRow
from sigma0.bench.pocket.forms import in_form
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.prompts import HARD
from sigma0.bench.pocket.world import draw
from sigma0.bench.strategyqa.statistics import mcnemar
from sigma0.calibrate.bootstrap import clustered_share, share
from sigma0.checkpoints.about import Form
from sigma0.config import Effort
from sigma0.reason.desk import Desk
from sigma0.reason.forms import FORMS, acting, checking, looking, part, planning, read_action, read_check, settled
from sigma0.reason.lemma.form_solver import FormSolver
from sigma0.reason.lemma.graph import FINAL
from sigma0.reason.lemma.planning import parse_lemmas
from sigma0.reason.lemma.settings import LemmaSettings
from sigma0.reason.messages import ChatModel, ChatSettings, Usage
from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.form_task import FormTask
from sigma0.reason.progressive.policies import LEVELS, Level, ProgressiveConfig
from sigma0.reason.progressive.verify_loop import VerifyLoop
from sigma0.reason.trail import Trail

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


_SHOWN_DIFFICULTY = 3


@dataclass(frozen=True)
class MeasuredModel:
    """A model that ways ask."""

    chat: ChatModel  # It
    conditions: Conditions  # Of its rows
    weight: float  # Numbers of its block over those of the run's first model

    def passes(self, result: Answered) -> float:
        """Passes after prompts and over them, T for each; a model without loops has one a token."""
        used, loops = result.usage, self.conditions.total_loops
        return float((used.completion_tokens if loops == 1 else used.loop_passes) + loops * used.calls)

    def cost(self, results: Sequence[Answered]) -> float:
        """Mean passes, in those of the first model."""
        return self.weight * sum(map(self.passes, results)) / len(results)


def hard_questions(n: int, seed: int, split: str = "test") -> list[Item]:
    """One question about each of n stories of the hard half."""
    return list(islice((item for item in questions(split, seed) if item.difficulty >= HARD), n))


def where_from(seed: int) -> str:
    """What `hard_questions` of the test split are, for the conditions of a row."""
    return f"micro-world, test split, hard half, one question a story, seed {seed}"


def questions(split: str, seed: int) -> Iterator[Item]:
    """One question about each story of a split."""
    return (draw(split, seed, index, questions=1).items[0] for index in count())


def examples(n: int) -> dict[Form, list[tuple[str, str]]]:
    """Questions and replies of every form about n stories of the training split, of two or three hops mostly."""
    items = [draw("train", 0, index, _SHOWN_DIFFICULTY, 1).items[0] for index in range(n)]
    return {
        form: [(asked.prompt, asked.answer) for asked in (in_form(item, form, Random(form)) for item in items)]
        for form in FORMS
    }


def run(way: Way, model: ChatModel, items: Sequence[Item], seed: int, advance: Callable[[], None]) -> list[Answered]:
    """A way on each question, each with a desk of its own."""
    results = []
    for place, item in enumerate(items):
        desk = Desk(Trail(), seed=seed + place)
        answered = way(model, desk, item.prompt)
        results.append(replace(answered, right=answered.answer == item.answer, usage=desk.usage))
        if isinstance(way, Learned):
            # prequential: it is shown an answer once it has given its own
            way.learn(item.prompt, answered, item.answer)
        advance()
    return results


def run_vote(items: Sequence[Item], drawn: Sequence[Sequence[Answered]], by_rule: bool) -> list[Answered]:
    """Votes of answers that were drawn: for each number of a sample its results on every question."""
    results = []
    for item, current in zip(items, zip(*drawn, strict=True), strict=True):
        answer = vote([one.answer for one in current], item.prompt, by_rule)
        usage = reduce(Usage.plus, (one.usage for one in current))
        results.append(Answered(answer, True, right=answer == item.answer, usage=usage))
    return results


def to_row(
    way: str,
    asked: MeasuredModel,
    results: Sequence[Answered],
    beside: Mapping[str, Sequence[Answered]],
    seed: int,
    time: str,
) -> OuterRow:
    """A row of the ledger: a way of a run that began at a time, beside other ways on the same questions."""
    n = len(results)
    used = [one.usage for one in results]
    return OuterRow(
        **asked.conditions.model_dump(),
        time=time,
        way=way,
        seed=seed,
        right=_share(one.right for one in results),
        accepted_wrong=_share(one.accepted and not one.right for one in results),
        accepted=_share(one.accepted for one in results),
        passes=Figure.known(mean_of([asked.passes(one) for one in results])),
        cost=asked.cost(results),
        calls=sum(one.calls for one in used) / n,
        prompt_tokens=sum(one.prompt_tokens for one in used) / n,
        completion_tokens=sum(one.completion_tokens for one in used) / n,
        seconds=sum(one.seconds for one in used) / n,
        beats={name: difference(results, other) for name, other in beside.items()},
        p_values={
            name: mcnemar([one.right for one in results], [one.right for one in other])
            for name, other in beside.items()
        },
        levels=level_rates([one.checks for one in results]),
    )


def level_rates(checks: Sequence[Sequence[Check]]) -> dict[Level, LevelRates]:
    """How verification went at each level that was reached, by the checks of each question."""
    rates = {}
    for level in LEVELS:
        reached = [current for current in ([one for one in entry if one.level == level] for entry in checks) if current]
        if reached:
            made = [len(current) for current in reached]
            rates[level] = LevelRates(
                reached=len(reached),
                passed=_share(any(one.opened for one in current) for current in reached),
                checks=sum(made),
                checks_passed=Figure.known(
                    clustered_share([sum(one.passed for one in current) for current in reached], made)
                ),
            )
    return rates


def difference(first: Sequence[Answered], second: Sequence[Answered]) -> Figure:
    """Share that the first has right less that of the second; by Student's t over their paired differences."""
    paired = [float(one.right) - float(other.right) for one, other in zip(first, second, strict=True)]
    return Figure.known(mean_of(paired))


def _share(flags: Iterable[bool]) -> Figure:
    values = list(flags)
    return Figure.known(share(sum(values), len(values)))


def points(figure: Figure) -> str:
    """A share or a difference of shares in points, with its interval."""
    return with_interval(figure, unit="")


# Of a way; `beats` has the points that it has right more than others, with their names.
COLUMNS: Mapping[str, Callable[[OuterRow], str]] = {
    "model": lambda row: row.named,
    "way": lambda row: row.way,
    "right, %": lambda row: points(row.right),
    "wrong accepted, %": lambda row: points(row.accepted_wrong),
    "accepted, %": lambda row: points(row.accepted),
    "cost": lambda row: f"{row.cost:.0f}",
    "tokens": lambda row: f"{row.completion_tokens:.0f}",
    "questions": lambda row: f"{row.calls:.1f}",
    "ms": lambda row: f"{1000 * row.seconds:.0f}",
    "beats": lambda row: "; ".join(f"{name}: {points(more)}" for name, more in row.beats.items()),
}
# Of a level of verification that a way with progressive effort reached.
LEVEL_COLUMNS: Mapping[str, Callable[[LevelRates], str]] = {
    "reached": lambda rates: str(rates.reached),
    "passed it, %": lambda rates: points(rates.passed),
    "checks of each": lambda rates: f"{rates.checks / rates.reached:.1f}",
    "checks passed, %": lambda rates: points(rates.checks_passed),
}


def table(rows: Sequence[OuterRow]) -> BenchTable:
    """A row for each way."""
    return BenchTable.of(COLUMNS, rows, f"{rows[0].n} questions: {rows[0].prompts}", ("model", "way", "beats"))


def levels_table(rows: Sequence[OuterRow]) -> BenchTable:
    """A row for each level that a way with progressive effort reached; none of other ways."""
    levels = [(row.way, level, rates) for row in rows for level, rates in row.levels.items()]
    cells = [[way, level, *(column(rates) for column in LEVEL_COLUMNS.values())] for way, level, rates in levels]
    return BenchTable(("way", "level", *LEVEL_COLUMNS), cells, "By level of verification", left=("way", "level"))


def latest_outer(rows: Sequence[object]) -> list[list[OuterRow]]:
    """The latest run of each first model and command, its rows in the order they were measured."""
    runs = runs_of(rows, OuterRow, lambda row: row.time)
    # a run of ways begins with the plain answer, one of a program or an agent with that
    return list({(run[0].model, run[0].way.split()[0]): run for run in runs.values()}.values())
