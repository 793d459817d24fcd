"""The trail of an outer loop: one JSON line for each question, each run of code and each decision, as they come."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from sigma0 import jsonl
from sigma0.config import Effort

Strategy = Literal["progressive", "lemma", "agent"]
# of lines read back: unknown keys are refused
CLOSED = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Heading:
    """The first line, and the first one of every resumption."""

    strategy: Strategy  # Which outer loop
    problem: str  # What is to be solved
    models: tuple[str, ...]  # Names of the models, the cheapest first
    settings: dict[str, Any]  # Of the strategy, as JSON
    versions: dict[str, str]  # Of the libraries
    resumed: bool = False  # Whether this goes on with an earlier run
    kind: Literal["heading"] = field(default="heading", kw_only=True)
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Call:
    """A question to a model."""

    purpose: str  # What for, such as "verify 3"
    model: str  # Its name
    effort: Effort  # Asked for
    seed: int  # Of the sampling
    # As `Completion.to_dict` says; of a choice between labels its text is the label. None: there was none
    answer: dict[str, Any] | None
    failed: str | None = None  # Why there was none
    # Of the question itself, as `sigma0.reason.record.question_digest` says; "" in trails from before it
    digest: str = ""
    kind: Literal["call"] = field(default="call", kw_only=True)
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Run:
    """Code that was run in the sandbox."""

    purpose: str  # What for
    code: str  # It, or the command
    result: dict[str, Any]  # As `RunResult.to_dict` says
    kind: Literal["run"] = field(default="run", kw_only=True)
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Decision:
    """What the loop did, and why."""

    what: str  # One of the strategy's own words, such as "upgrade" or "reset"
    why: str  # In a sentence
    state: dict[str, Any]  # What it was decided by, as JSON
    kind: Literal["decision"] = field(default="decision", kw_only=True)
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Outcome:
    """The last line."""

    solved: bool  # Whether the strategy's own gate was passed
    answer: str | None  # What stands, as far as anything does
    why: str  # In a sentence
    usage: dict[str, Any]  # Of all questions, as JSON
    kind: Literal["outcome"] = field(default="outcome", kw_only=True)
    __pydantic_config__ = CLOSED


Line = Heading | Call | Run | Decision | Outcome
_LINES: dict[str, TypeAdapter[Any]] = {
    "heading": TypeAdapter(Heading),
    "call": TypeAdapter(Call),
    "run": TypeAdapter(Run),
    "decision": TypeAdapter(Decision),
    "outcome": TypeAdapter(Outcome),
}


class Trail:
    """Lines of a trail, appended to a file and passed to a listener one by one; several threads may add.

    Args:
        path: Where they are appended; None keeps them in memory alone.
        listener: Called with each line.

    Raises:
        ValueError: If the file exists and cannot be read, or is no trail of an outer loop.
    """

    def __init__(self, path: Path | None = None, listener: Callable[[Line], None] | None = None) -> None:
        self.lines: list[Line] = []
        self._path = path
        self._listener = listener
        self._alone = Lock()
        if path is not None and path.is_file():
            jsonl.cut_torn_line(path, is_heading, "trail of an outer loop")

    def add(self, line: Line) -> None:
        """Adds a line."""
        with self._alone:
            self.lines.append(line)
            if self._path is not None:
                jsonl.append_line(self._path, jsonl.dump_line(line, default=str))
            if self._listener is not None:
                self._listener(line)

    def decide(self, what: str, why: str, **state: Any) -> None:
        """Adds a decision."""
        self.add(Decision(what, why, state))

    @property
    def decisions(self) -> list[Decision]:
        """The decisions alone."""
        return [line for line in self.lines if isinstance(line, Decision)]


def is_heading(line: str) -> bool:
    """Whether a line is the heading of an outer loop's trail, as far as its keys tell."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "strategy" in value


def read_lines(path: Path) -> Sequence[Line]:
    """The lines of a trail; a last one that was not written to its end is left out.

    Raises:
        ValueError: If the file cannot be read, or a line is malformed; names it.
    """
    lines: list[Line] = jsonl.read_lines(path, partial(jsonl.parse_by_kind, _LINES), "line of a trail", drop_torn=True)
    if not lines or not isinstance(lines[0], Heading):
        raise ValueError(f"{str(path)!r} does not begin with a heading")
    return lines
