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
    """The first line, and the first one of every resumption.

    Attributes:
        strategy: Which outer loop.
        problem: What is to be solved.
        models: Names of the models, the cheapest first.
        settings: Of the strategy, as JSON.
        versions: Of the libraries.
        resumed: Whether this goes on with an earlier run.
    """

    strategy: Strategy
    problem: str
    models: tuple[str, ...]
    settings: dict[str, Any]
    versions: dict[str, str]
    resumed: bool = False
    kind: Literal["heading"] = field(default="heading", kw_only=True)
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Call:
    """A question to a model.

    Attributes:
        purpose: What for, such as "verify 3".
        model: Its name.
        effort: Asked for.
        seed: Of the sampling.
        answer: As `Completion.to_dict` says; of a choice between labels its text is the label. None: there was none.
        failed: Why there was none.
        digest: Of the question itself, as `sigma0.reason.record.question_digest` says; "" in trails from before it.
    """

    purpose: str
    model: str
    effort: Effort
    seed: int
    answer: dict[str, Any] | None
    failed: str | None = None
    digest: str = ""
    kind: Literal["call"] = field(default="call", kw_only=True)
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Run:
    """Code that was run in the sandbox.

    Attributes:
        purpose: What for.
        code: It, or the command.
        result: As `RunResult.to_dict` says.
    """

    purpose: str
    code: str
    result: dict[str, Any]
    kind: Literal["run"] = field(default="run", kw_only=True)
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Decision:
    """What the loop did, and why.

    Attributes:
        what: One of the strategy's own words, such as "upgrade" or "reset".
        why: In a sentence.
        state: What it was decided by, as JSON.
    """

    what: str
    why: str
    state: dict[str, Any]
    kind: Literal["decision"] = field(default="decision", kw_only=True)
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Outcome:
    """The last line.

    Attributes:
        solved: Whether the strategy's own gate was passed.
        answer: What stands, as far as anything does.
        why: In a sentence.
        usage: Of all questions, as JSON.
    """

    solved: bool
    answer: str | None
    why: str
    usage: dict[str, Any]
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
