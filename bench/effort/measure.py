"""Runs of progressive verification whose outcome is known: with dice for models, and with real ones.

**Simulated**, nothing is measured: a solution is right or wrong. A verification at a level lets a wrong one pass and a
right one fail by that level's rates, or is cut off, which passes nothing and corrects nothing. A correction mends a
wrong solution, and spoils a right one that failed, by rates of their own. With probability `correlation` a verification
of a solution says what the first one at that level said: what is overlooked once is overlooked again, so that five
passes are worth less than five dice.

**Measured**: the shipped models know nothing but their world, so that each step is a question of that world. A solution
is the answer to "Where is the coin?". A verification asks "Is the coin in the kitchen?" about the place that it names,
and passes if the whole answer is "Yes, the coin is in the kitchen.": a sentence of another form passes nothing. A
correction asks the first question anew, with a new seed: these models cannot read a bug report.

Sums over runs tell how often a policy accepts, how often rightly, and at what cost, with 95 % intervals.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from random import Random
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from sigma0.bench.core.conditions import mean_of
from sigma0.bench.core.output import BenchTable, with_interval
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.prompts import HARD
from sigma0.bench.pocket.world import draw
from sigma0.calibrate.bootstrap import Estimate, share
from sigma0.reason.chat import ChatModel, ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.policies import (
    DUAL_TRACK,
    FLAT_HIGH,
    HYBRID_DEFAULT,
    ITERATION_SCHEDULE,
    MULTI_STAGE,
    SUCCESS_BASED,
    Level,
    ProgressiveConfig,
)
from sigma0.reason.progressive.verify_loop import Turn, Verification, VerifyLoop
from sigma0.reason.trail import Trail

MAX_TOKENS = 24
_WHERE = re.compile(r"(?P<name>(?:The )?\w+) is in the (?P<place>\w+)\.")
Share = Annotated[float, Field(ge=0, le=1)]
Shares = dict[Level, Share]


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Rates:
    """The odds; every figure of the simulation holds for these alone."""

    first_right: Share = 0.4  # A first solution is right
    repaired: Share = 0.4  # A corrected wrong solution is right
    spoiled: Share = 0.3  # A right solution is wrong after a correction that it did not need
    # A wrong solution passes a verification, by level
    false_pass: Shares = field(default_factory=lambda: {"low": 0.5, "medium": 0.25, "high": 0.1})
    # A right one fails it
    false_fail: Shares = field(default_factory=lambda: {"low": 0.03, "medium": 0.06, "high": 0.1})
    # A verification is cut off
    cut_off: Shares = field(default_factory=lambda: {"low": 0.0, "medium": 0.02, "high": 0.1})
    correlation: Share = 0.5  # A verification repeats what the first one of this solution at this level said
    # Cost of a verification, by level, in any unit
    tokens: dict[Level, Annotated[float, Field(ge=0)]] = field(
        default_factory=lambda: {"low": 1.0, "medium": 3.0, "high": 8.0}
    )
    generation: Annotated[float, Field(ge=0)] = 2.0  # Cost of a solution or a correction in the same unit


def unlike_default(rates: dict[str, Any]) -> str:
    """The odds of a simulation that are not the default ones, in words."""
    default = asdict(Rates())
    return ", ".join(f"{name} {value}" for name, value in rates.items() if value != default[name])


@dataclass(frozen=True)
class Ended:
    """How one run ended."""

    accepted: bool  # Whether the policy accepted a solution
    right: bool  # Whether the solution that stood at the end was right
    verifications: int  # Calls of the verifier: iterations of the loop
    cost: float  # Of all steps: in the unit of `Rates.tokens`, or passes of the block after the prompts
    first_right: bool = False  # Whether the first solution was, where that is counted


class Dice:
    """Solves, verifies and corrects by chance, see `Rates`."""

    def __init__(self, rates: Rates, seed: int) -> None:
        self.rates = rates
        self.cost = 0.0
        self.verifications = 0
        self._random = Random(f"effort/{seed}")
        self._first: dict[tuple[str, str], bool] = {}
        self._written = 0

    def solve(self, turn: Turn) -> str:
        """See `ProgressiveTask`."""
        return self._write(self._random.random() < self.rates.first_right)

    def verify(self, turn: Turn, solution: str) -> Verification:
        """See `ProgressiveTask`."""
        level: Level = turn.effort  # type: ignore[assignment]
        self.verifications += 1
        self.cost += self.rates.tokens[level]
        if self._random.random() < self.rates.cut_off[level]:
            return Verification(False, None, "cut off")
        right = is_right(solution)
        odds = 1 - self.rates.false_fail[level] if right else self.rates.false_pass[level]
        fresh, repeats = self._random.random() < odds, self._random.random() < self.rates.correlation
        first = self._first.setdefault((solution, level), fresh)
        passed = first if repeats else fresh
        return Verification(passed, None if passed else "a fault", "by chance")

    def correct(self, turn: Turn, solution: str, report: str) -> str:
        """See `ProgressiveTask`."""
        odds = 1 - self.rates.spoiled if is_right(solution) else self.rates.repaired
        return self._write(self._random.random() < odds)

    def _write(self, right: bool) -> str:
        self.cost += self.rates.generation
        self._written += 1
        return f"{'right' if right else 'wrong'} {self._written}"


def is_right(solution: str) -> bool:
    """Whether a simulated solution is right."""
    return solution.startswith("right")


def simulate(config: ProgressiveConfig, rates: Rates, seed: int) -> Ended:
    """One run of the very loop that users run, with dice for models."""
    dice = Dice(rates, seed)
    report = VerifyLoop(dice, Desk(Trail()), ScriptedChat([]), manager=ProgressiveReasoningManager(config)).run()
    return Ended(report.solved, is_right(report.solution or ""), dice.verifications, dice.cost)


class WhereIs:
    """One question after a place."""

    def __init__(self, item: Item) -> None:
        if item.family != "where":
            raise ValueError(f"a question of the family {item.family!r} has no place to verify")
        self.item = item
        self.first: str | None = None

    def solve(self, turn: Turn) -> str:
        """See `ProgressiveTask`."""
        answer = self._ask(turn, self.item.question)
        self.first = self.first or answer
        return answer

    def verify(self, turn: Turn, solution: str) -> Verification:
        """See `ProgressiveTask`."""
        named = _WHERE.fullmatch(solution)
        if named is None:
            return Verification(False, "no place is named", f"{solution!r} names no place")
        name, place = named["name"], named["place"]
        said = self._ask(turn, f"Is {name[0].lower() + name[1:] if ' ' in name else name} in the {place}?")
        if said == f"Yes, {solution[0].lower() + solution[1:] if ' ' in name else solution}":
            return Verification(True, None, said)
        return Verification(False, said, said)

    def correct(self, turn: Turn, solution: str, report: str) -> str:
        """See `ProgressiveTask`."""
        return self._ask(turn, self.item.question)

    def _ask(self, turn: Turn, question: str) -> str:
        return turn.text([{"role": "user", "content": f"{self.item.story} {question}"}]).text.strip()


def questions(n: int, seed: int) -> Iterator[Item]:
    """Questions after places, one about each held-out story of the hard half."""
    items = (draw("test", seed, index, questions=1).items[0] for index in count())
    return islice((item for item in items if item.difficulty >= HARD and item.family == "where"), n)


def check(
    config: ProgressiveConfig, item: Item, solver: ChatModel, verifier: ChatModel, temperature: float, seed: int
) -> Ended:
    """One run on one question."""
    task = WhereIs(item)
    report = VerifyLoop(
        task,
        Desk(Trail(), seed=seed),
        solver,
        verifier,
        manager=ProgressiveReasoningManager(config),
        problem=item.prompt,
        temperature=temperature,
        max_tokens=MAX_TOKENS,
    ).run()
    cost, right = float(report.usage.loop_passes), report.solution == item.answer
    return Ended(report.solved, right, report.status["iteration"], cost, task.first == item.answer)


POLICIES = (ITERATION_SCHEDULE, SUCCESS_BASED, DUAL_TRACK, MULTI_STAGE, HYBRID_DEFAULT, FLAT_HIGH)


@dataclass(frozen=True)
class PolicySummary:
    """One policy over many runs."""

    policy: str  # Its name
    runs: int  # How many
    accepted_right: Estimate  # Share of runs that accepted a right solution
    accepted_wrong: Estimate  # Share of runs that accepted a wrong one: false accepts
    wrong_of_accepted: Estimate | None  # Share of the accepted that were wrong; None where none was accepted
    right: Estimate  # Share of runs that ended with a right solution, accepted or not
    verifications: Estimate  # Mean, which is also the mean number of iterations
    cost: Estimate  # Mean, in the unit of the run


@dataclass(frozen=True)
class EffortReport:
    """What the command writes."""

    kind: Literal["simulation", "measurement"]  # Whether models or dice were at work
    settings: dict[str, Any]  # All that the figures hold for
    unit: str  # Of `cost`
    policies: tuple[PolicySummary, ...]  # One summary each
    # Share of first solutions that were right; of a simulation its own odds are in the settings
    first_right: Estimate | None = None


def summarise(policy: str, runs: Sequence[Ended]) -> PolicySummary:
    """Sums up the runs of one policy, at least one."""
    n = len(runs)
    accepted = [run for run in runs if run.accepted]
    right = sum(run.right for run in accepted)
    return PolicySummary(
        policy=policy,
        runs=n,
        accepted_right=share(right, n),
        accepted_wrong=share(len(accepted) - right, n),
        wrong_of_accepted=share(len(accepted) - right, len(accepted)) if accepted else None,
        right=share(sum(run.right for run in runs), n),
        verifications=mean_of([run.verifications for run in runs]),
        cost=mean_of([run.cost for run in runs]),
    )


HEADINGS = ("policy", "right, accepted", "wrong, accepted", "wrong of accepted", "right in the end", "verifications")


def table(report: EffortReport) -> BenchTable:
    """A row for each policy, for a terminal or a page of results."""
    cells = [
        (
            item.policy,
            *map(with_interval, (item.accepted_right, item.accepted_wrong, item.wrong_of_accepted, item.right)),
            with_interval(item.verifications, times=1, unit=""),
            with_interval(item.cost, times=1, unit=""),
        )
        for item in report.policies
    ]
    return BenchTable((*HEADINGS, report.unit), cells, title(report))


def title(report: EffortReport) -> str:
    """What the figures are."""
    if report.kind == "simulation":
        return "SIMULATED with stated odds, not measured"
    return f"measured: {report.settings['solver']} verified by {report.settings['verifier']}"
