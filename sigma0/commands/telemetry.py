"""Request log: one JSON line per generated text, with its depths, exits, verdict and cost.

A line holds no prompt, no answer and no key. Lines are built and written in a separate thread, so that requests never
wait for a disk.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from logging.handlers import RotatingFileHandler
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sigma0.commands.options import KEPT_FILES
from sigma0.config import ExitConfig
from sigma0.decode.exits import Reason
from sigma0.jsonl import parse_lines
from sigma0.signals.generation import Generation
from sigma0.signals.verdict import Door, ReasonVerdict

logger = logging.getLogger(__name__)
MAX_BYTES = 64 * 2**20
# Lines in the queue at most: a disk that hangs must not fill the memory.
WAITING_LINES = 10_000
# Seconds that closing waits for a disk, twice.
CLOSING_S = 5.0
_SAVED = ("depth_saved", "passes_saved", "rows_saved")


class _Part(BaseModel):
    """Frozen; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Route(_Part):
    """Which model wrote a text.

    `engine`: the served model. `ladder`: a ladder, as the request asked. `routed`: the served model's verdict was
    escalate, and the ladder's answer replaced its answer.
    """

    kind: Literal["engine", "ladder", "routed"]
    unit: Literal["token", "draft", "answer"] | None = None  # What a ladder hands up; None without a ladder
    rungs: dict[str, int] = Field(default_factory=dict)  # Tokens of the text by model name
    why: tuple[str, ...] = ()  # Distinct reasons for hand-ups; of a routed text also the door
    top_rung: bool = False  # Whether the highest rung was asked


class Costs(_Part):
    """What a text cost; mean depth and the savings are over the tokens after the first, as `Savings` has them."""

    seconds: float  # From the request to its end, waiting included
    first_token_seconds: float | None = None  # From the request to its first token; None where there was none
    passes: int = 0  # Calls of the shared block with a row of a new token
    rows: int = 0  # Rows in them
    head_rows: int | None = None  # Rows that the output head read; None where they are not counted for each request
    mean_depth: float | None = None
    depth_saved: float | None = None
    passes_saved: float | None = None
    rows_saved: float | None = None
    tokens_forced: int = 0  # Tokens that were fed without a reading, since a grammar allowed no other
    preemptions: int = 0  # How often it was preempted, its K/V freed and recomputed
    large_model_tokens: int = 0  # Tokens that rungs above the lowest wrote
    rungs: tuple[dict[str, Any], ...] = ()  # What each rung of a ladder did (`sigma0.ladder.RungCost`)


class RequestLine(_Part):
    """One requested text.

    Its outcome is `done`, `cancelled` where the client disconnected or another choice failed, or `failed`.
    """

    time: datetime  # When it ended, UTC
    request_id: str | None = None  # As the response's `x-request-id` has it; None from the command line
    choice: int = 0  # Its number in the request, from 0
    kind: Literal["chat", "completion", "generate"]  # The endpoint, or the command
    model: str  # Name of the served model
    stream: bool = False  # Whether tokens were sent as they came
    outcome: Literal["done", "cancelled", "failed"] = "done"
    error: str | None = None  # The kind of failure; its message may quote a prompt and is not kept
    finish_reason: str | None = None  # As the response has it; None where there was no end
    prompt_tokens: int  # Ids of the prompt
    cached_tokens: int = 0  # How many of those were in the prefix cache
    new_tokens: int  # Tokens written
    total_loops: int  # T
    exit: ExitConfig  # The exit setting in force
    effort: str | None = None  # The effort that it was derived from; None where none was named
    depths: tuple[int, ...] = ()  # Loop at which each new token was read
    reasons: tuple[Reason | None, ...] = ()  # Why each was read there
    proximity: tuple[float | None, ...] = ()  # The repetition score of the text at each token
    verdict: ReasonVerdict | None = None  # On the whole text; None where verdicts are off
    door: Door | None = None  # The routing decision on it
    route: Route
    costs: Costs


def of_generation(done: Generation, model: str, exit_config: ExitConfig, seconds: float) -> RequestLine:
    """The line of a finished generation: by which model, under which exit setting, in how many seconds."""
    return RequestLine(
        time=datetime.now(timezone.utc),
        kind="generate",
        model=model,
        finish_reason=done.stop_reason,
        prompt_tokens=done.prompt_tokens,
        new_tokens=len(done.tokens),
        total_loops=done.total_loops,
        exit=exit_config,
        depths=tuple(token.depth for token in done.tokens),
        reasons=tuple(token.reason for token in done.tokens),
        proximity=tuple(token.proximity for token in done.tokens),
        verdict=done.verdict,
        door=done.door,
        route=Route(kind="engine", rungs={model: len(done.tokens)}),
        costs=Costs(
            seconds=seconds,
            passes=done.loop_passes,
            rows=done.loop_rows,
            **{name: getattr(done, name) for name in ("head_rows", "mean_depth", *_SAVED, "tokens_forced")},
        ),
    )


class _File(RotatingFileHandler):
    """A rotated file whose write errors lose lines, and no answers: it warns once until lines are written again."""

    path: Path  # As it was named
    _failed = _warned = False

    def format(self, record: logging.LogRecord) -> str:
        """Makes the line, in the writing thread."""
        make: Any = record.msg
        line: RequestLine = make()
        return line.model_dump_json()

    def emit(self, record: logging.LogRecord) -> None:
        self._failed = False
        super().emit(record)
        self._warned = self._warned and self._failed

    def handleError(self, record: logging.LogRecord) -> None:
        self._failed = True
        error = sys.exc_info()[1]
        self.warn(error if isinstance(error, OSError) else type(error).__name__)

    def warn(self, error: object) -> None:
        if not self._warned:
            logger.warning("telemetry: lines for %s are lost: %s", self.path, error)
        self._warned = True


class TelemetryLog:
    """Appends lines to a file, which is rotated: FILE, then FILE.1 (the next older), FILE.2, ...

    It is rotated ahead of a line that would bring it over `max_bytes`, and so many older ones are kept.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, keep: int = KEPT_FILES) -> None:
        if max_bytes < 1 or keep < 1:
            # logging would take either 0 for "never rotate"
            raise ValueError(f"telemetry needs at least 1 byte and 1 kept file, got {max_bytes} and {keep}")
        try:
            self._file = _File(path, maxBytes=max_bytes, backupCount=keep, encoding="utf-8")
            self._file.path = path
        except OSError as error:
            raise ValueError(
                f"--telemetry {str(path)!r} cannot be written: {error.strerror or error}; name a file in a folder "
                "that is there"
            ) from error
        self._queue: Queue[Callable[[], RequestLine] | None] = Queue(WAITING_LINES)
        self._thread = Thread(target=self._write_queued, daemon=True)
        self._thread.start()

    def _write_queued(self) -> None:
        while (make := self._queue.get()) is not None:
            self._file.handle(logging.LogRecord(__name__, logging.INFO, "", 0, make, None, None))

    def write(self, make: Callable[[], RequestLine]) -> None:
        """Has a line made and written later, by the writing thread; never waits and never raises."""
        try:
            self._queue.put_nowait(make)
        except Full:
            self._file.warn(f"more than {WAITING_LINES} wait to be written")

    def close(self) -> None:
        """Writes what is queued, and closes the file; after `CLOSING_S` of a disk that hangs the rest is dropped."""
        with suppress(Full):
            self._queue.put(None, timeout=CLOSING_S)
            self._thread.join(CLOSING_S)
        if self._thread.is_alive():
            # it holds the file's lock
            return
        try:
            self._file.close()
        except OSError as error:
            # the flush to a full disk failed
            self._file.warn(error)


def read_telemetry(path: Path) -> Iterator[RequestLine]:
    """The lines of one file; a ValueError names the first bad one."""
    with path.open(encoding="utf-8") as file:
        yield from parse_lines(path, file, RequestLine.model_validate_json, "telemetry line")
