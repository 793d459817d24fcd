"""The evidence trail: one JSON line for each decision, and how the same decisions are made again from it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from sigma0.jsonl import dump_line, parse_by_kind, read_lines
from sigma0.ladder.budget import Budget, BudgetTracker, Spending
from sigma0.ladder.triggers import Hysteresis, Parking, ShutDoor, Signs, Trigger, trigger_from_dict, trigger_to_dict
from sigma0.signals.verdict import DoorPolicy

Unit = Literal["token", "draft", "answer"]
Outcome = Literal["accept", "hand_up", "stay", "abort", "decline", "error", "top_rung"]
# of lines read back: unknown keys are refused
CLOSED = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Heading:
    """The first line: what was decided by."""

    unit: Unit  # What went up
    rungs: tuple[dict[str, Any], ...]  # What `to_dict` of each says, the lowest first
    policy: dict[str, Any]  # The trigger, as JSON
    budget: dict[str, Any]  # The limits that are set
    hysteresis: dict[str, Any]  # How long a larger model stays, where the unit is the token; else empty
    versions: dict[str, str]  # Of the libraries
    # Thresholds of the converge door, where whole texts of drafts or tokens go up by it
    doors: dict[str, Any] = field(default_factory=dict)
    kind: Literal["heading"] = field(default="heading", kw_only=True)
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Spent:
    """A rung at work, for one or more units: a reading of a local model, or a request."""

    rung: int  # Its place, 0 the lowest
    step: str  # Kind of step, for its time
    cost: Spending  # What it cost
    seconds: float  # It took
    told: str = "ok"  # Outcome of a request to an endpoint: "ok", or the kind of failure
    kind: Literal["spent"] = field(default="spent", kw_only=True)
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Decision:
    """What became of one unit at one rung."""

    sequence: int  # Batch index
    position: int  # Number of the token, draft or answer in its sequence, from 0
    rung: int  # Place of the rung that the signs are of, 0 the lowest
    signs: dict[str, Any] | None  # As JSON; None where the rung gave nothing, or a stay there was refused
    why: str | None  # The trigger's reason; None where it did not fire
    # `accept`; `hand_up`; `stay`: written by this rung since the one before had gone up; `abort`: would have gone
    # up, had the budget allowed; `decline`: this rung gave no answer; `error`: it failed; `top_rung`: there is no
    # rung above
    outcome: Outcome
    asked: Spending | None = None  # Upper bound of the cost of going up; None if it was not tried
    lacking: str | None = None  # The limit that refused it
    token_id: int | None = None  # What was written, where this settles a token
    whole: bool = False  # Whether the whole text of single tokens or drafts is judged, by the converge door
    kind: Literal["decision"] = field(default="decision", kw_only=True)
    __pydantic_config__ = CLOSED


Line = Heading | Spent | Decision
_LINES: dict[str, TypeAdapter[Any]] = {
    "heading": TypeAdapter(Heading),
    "spent": TypeAdapter(Spent),
    "decision": TypeAdapter(Decision),
}


@dataclass
class Trail:
    """Lines as they come.

    Attributes:
        lines: The heading first.
    """

    lines: list[Line] = field(default_factory=list)

    @property
    def decisions(self) -> list[Decision]:
        """The decisions alone."""
        return [line for line in self.lines if isinstance(line, Decision)]

    def decisions_of(self, sequence: int) -> list[Decision]:
        """Those of one sequence."""
        return [line for line in self.decisions if line.sequence == sequence]

    def to_jsonl(self) -> str:
        """One JSON object a line."""
        return "".join(dump_line(line) for line in self.lines)

    def write(self, path: Path) -> None:
        """Writes the lines to a file."""
        path.write_text(self.to_jsonl(), encoding="utf-8")


def open_trail(
    unit: Unit,
    rungs: Iterable[Mapping[str, Any]],
    policy: Trigger,
    budget: Budget,
    hysteresis: Hysteresis | None,
    versions: Mapping[str, str],
    doors: DoorPolicy | None = None,
) -> Trail:
    """A trail with its heading."""
    rung_settings = tuple(dict(rung) for rung in rungs)
    stay = {} if hysteresis is None else asdict(hysteresis)
    door_settings = {} if doors is None else doors.to_dict()
    return Trail(
        [Heading(unit, rung_settings, trigger_to_dict(policy), budget.to_dict(), stay, dict(versions), door_settings)]
    )


def read_trail(path: Path) -> Trail:
    """A trail out of a file.

    Raises:
        ValueError: If it cannot be read, or a line is malformed; names the line.
    """
    lines: list[Line] = read_lines(path, partial(parse_by_kind, _LINES), "line of a trail")
    if not lines or not isinstance(lines[0], Heading) or any(isinstance(line, Heading) for line in lines[1:]):
        raise ValueError(f"{str(path)!r} does not begin with one heading")
    return Trail(lines)


def reason_up(policy: Trigger, signs: Signs, unit: Unit) -> str | None:
    """Why a unit goes up: the policy's reason, or that a token's logits are no numbers, which no policy can weigh."""
    if unit == "token" and signs.entropy is None:
        return "no numbers"
    return policy.fires(signs)


def replay(trail: Trail) -> list[str]:
    """Makes every decision again out of the recorded signs and costs.

    Whether time was short cannot be made again: there a recorded refusal is believed.

    Returns:
        What came out otherwise, a sentence each; empty if nothing did.
    """
    heading = trail.lines[0]
    assert isinstance(heading, Heading)
    again = _Replay(heading)
    differences = []
    for number, line in enumerate(trail.lines, start=1):
        if isinstance(line, Spent):
            again.purse.pay(line.cost, line.step, line.seconds)
        elif isinstance(line, Decision):
            differences += [f"line {number}: {difference}" for difference in again.differences(line)]
    return differences


class _Replay:
    """The state that decisions depend on, made up again line by line."""

    def __init__(self, heading: Heading) -> None:
        self.policy = trigger_from_dict(heading.policy)
        self._door = ShutDoor(DoorPolicy.parse(heading.doors))
        self.top = len(heading.rungs) - 1
        self._unit = heading.unit
        self.purse = BudgetTracker(
            Budget(**{name: limit for name, limit in heading.budget.items() if name != "seconds"})
        )
        self._parking = Parking(Hysteresis(**heading.hysteresis)) if heading.unit == "token" else None
        self._under_way: dict[int, tuple[int, bool, bool]] = {}  # position, parked, climbed

    def differences(self, line: Decision) -> Iterator[str]:
        """What comes out otherwise; then the line is taken as it stands."""
        if line.whole:
            if (outcome := self._outcome(line, False)) != line.outcome:
                yield f"{outcome} in place of {line.outcome}"
            return
        position, parked, climbed = self._under_way.get(line.sequence, (-1, False, False))
        if position != line.position:
            start = 0 if self._parking is None else self._parking.start(line.sequence)
            parked, climbed = start > 0, False
            if line.rung != start:
                yield f"began at rung {line.rung} in place of {start}"
        outcome = self._outcome(line, parked)
        if outcome != line.outcome:
            yield f"{outcome} in place of {line.outcome}"
        if line.outcome == "hand_up":
            parked, climbed = False, True
        elif line.outcome == "abort" and line.signs is None:
            parked = False
        elif self._parking is not None and line.signs is not None:
            self._parking.wrote(line.sequence, line.rung, climbed, Signs.from_dict(line.signs).margin)
        self._under_way[line.sequence] = (line.position, parked, climbed)

    def _outcome(self, line: Decision, parked: bool) -> Outcome:
        """The outcome that signs and budget lead to; what a rung itself reported, it reported."""
        if line.outcome in ("decline", "error"):
            return line.outcome
        short = line.lacking == "seconds" or (line.asked is not None and self.purse.lacks(line.asked, "") is not None)
        if line.signs is None:
            return "abort" if short else "stay"
        signs = Signs.from_dict(line.signs)
        why = self._door.fires(signs) if line.whole else reason_up(self.policy, signs, self._unit)
        if why is not None and line.rung < self.top:
            return "abort" if short else "hand_up"
        return "stay" if parked else "accept" if why is None else "top_rung"
