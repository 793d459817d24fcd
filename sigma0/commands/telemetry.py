"""Request log: one JSON line per generated text, with its depths, exits, verdict and cost.

A line holds no prompt, no answer and no key. Lines are built and written in a separate thread, so that requests never
wait for a disk.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Full, Queue
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


class _Part(BaseModel):
    """Frozen; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Route(_Part):
    """Which model wrote a text.

    Attributes:
        kind: `engine`: the served model. `ladder`: a ladder, as the request asked. `routed`: the served model's verdict
            was escalate, and the ladder's answer replaced its answer.
        unit: What a ladder hands up; None without a ladder.
        rungs: Tokens of the text by model name.
        why: Distinct reasons for hand-ups; of a routed text also the door.
        top_rung: Whether the highest rung was asked.
    """

    kind: Literal["engine", "ladder", "routed"]
    unit: Literal["token", "draft", "answer"] | None = None
    rungs: dict[str, int] = Field(default_factory=dict)
    why: tuple[str, ...] = ()
    top_rung: bool = False


class Costs(_Part):
    """What a text cost.

    Attributes:
        seconds: From the request to its end, waiting included.
        first_token_seconds: From the request to its first token; None where there was none.
        passes: Calls of the shared block with a row of a new token.
        rows: Rows in them.
        head_rows: Rows that the output head read; None where they are not counted for each request.
        mean_depth: Over the tokens after the first; so are the three savings.
        depth_saved: See `sigma0.signals.savings.Savings`.
        passes_saved: Passes saved.
        rows_saved: Rows saved.
        tokens_forced: Tokens that were fed without a reading, since a grammar allowed no other.
        preemptions: How often it was preempted, its K/V freed and recomputed.
        large_model_tokens: Tokens that rungs above the lowest wrote.
        rungs: What each rung of a ladder did (`sigma0.ladder.RungCost`).
    """

    seconds: float
    first_token_seconds: float | None = None
    passes: int = 0
    rows: int = 0
    head_rows: int | None = None
    mean_depth: float | None = None
    depth_saved: float | None = None
    passes_saved: float | None = None
    rows_saved: float | None = None
    tokens_forced: int = 0
    preemptions: int = 0
    large_model_tokens: int = 0
    rungs: tuple[dict[str, Any], ...] = ()


class RequestLine(_Part):
    """One requested text.

    Attributes:
        time: When it ended, UTC.
        request_id: As the response's `x-request-id` has it; None from the command line.
        choice: Its number in the request, from 0.
        kind: The endpoint, or the command.
        model: Name of the served model.
        stream: Whether tokens were sent as they came.
        outcome: `done`; `cancelled`: the client disconnected, or another choice failed; `failed`.
        error: The kind of failure; None where there was none. Its message may quote a prompt and is not kept.
        finish_reason: As the response has it; None where there was no end.
        prompt_tokens: Ids of the prompt.
        cached_tokens: How many of those were in the prefix cache.
        new_tokens: Tokens written.
        total_loops: T.
        exit: The exit setting in force.
        effort: The effort that it was derived from; None where none was named.
        depths: Loop at which each new token was read.
        reasons: Why each was read there.
        proximity: The repetition score of the text at each token.
        verdict: On the whole text; None where verdicts are off.
        door: The routing decision on it.
        route: Which model wrote it.
        costs: What it took.
    """

    time: datetime
    request_id: str | None = None
    choice: int = 0
    kind: Literal["chat", "completion", "generate"]
    model: str
    stream: bool = False
    outcome: Literal["done", "cancelled", "failed"] = "done"
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int
    cached_tokens: int = 0
    new_tokens: int
    total_loops: int
    exit: ExitConfig
    effort: str | None = None
    depths: tuple[int, ...] = ()
    reasons: tuple[Reason | None, ...] = ()
    proximity: tuple[float | None, ...] = ()
    verdict: ReasonVerdict | None = None
    door: Door | None = None
    route: Route
    costs: Costs


def of_generation(done: Generation, model: str, exit_config: ExitConfig, seconds: float) -> RequestLine:
    """The line of a finished generation.

    Args:
        done: The generation.
        model: Name of the model.
        exit_config: The setting in force.
        seconds: Its duration.
    """
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
            head_rows=done.head_rows,
            mean_depth=done.mean_depth,
            depth_saved=done.depth_saved,
            passes_saved=done.passes_saved,
            rows_saved=done.rows_saved,
            tokens_forced=done.tokens_forced,
        ),
    )


class _Lines(logging.Formatter):
    """Builds the line, in the writing thread."""

    def format(self, record: logging.LogRecord) -> str:
        make: Any = record.msg
        line: RequestLine = make()
        return line.model_dump_json()


class _LossWarning:
    """Warns that lines are lost, once until they are written again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned = False

    def warn(self, error: object) -> None:
        if not self._warned:
            logger.warning("telemetry: lines for %s are lost: %s", self._path, error)
        self._warned = True

    def reset(self) -> None:
        self._warned = False


class _File(RotatingFileHandler):
    """A rotated file whose write errors lose lines, and no answers."""

    def __init__(self, path: Path, max_bytes: int, keep: int, loss: _LossWarning) -> None:
        self._loss: _LossWarning | None = None
        super().__init__(path, maxBytes=max_bytes, backupCount=keep, encoding="utf-8")
        self._loss = loss
        self.setFormatter(_Lines())

    def emit(self, record: logging.LogRecord) -> None:
        self._failed = False
        super().emit(record)
        if not self._failed and self._loss is not None:
            self._loss.reset()

    def handleError(self, record: logging.LogRecord) -> None:
        self._failed = True
        if self._loss is not None:
            error = sys.exc_info()[1]
            self._loss.warn(error if isinstance(error, OSError) else type(error).__name__)


class _Queue(QueueHandler):
    """Enqueues lines unformatted; a line is lost when the queue is full."""

    def __init__(self, queue: "Queue[Any]", loss: _LossWarning) -> None:
        super().__init__(queue)
        self._loss = loss

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def handleError(self, record: logging.LogRecord) -> None:
        self._loss.warn(f"more than {WAITING_LINES} wait to be written")


class TelemetryLog:
    """Appends lines to a file, which is rotated: FILE, then FILE.1 (the next older), FILE.2, ...

    Args:
        path: The file.
        max_bytes: A file that a line would bring over it is rotated first.
        keep: Older files that are kept.

    Raises:
        ValueError: If the file cannot be written, or for a limit below 1.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, keep: int = KEPT_FILES) -> None:
        if max_bytes < 1 or keep < 1:
            # logging would take either 0 for "never rotate"
            raise ValueError(f"telemetry needs at least 1 byte and 1 kept file, got {max_bytes} and {keep}")
        loss = self._loss = _LossWarning(path)
        try:
            self._file = _File(path, max_bytes, keep, loss)
        except OSError as error:
            raise ValueError(
                f"--telemetry {str(path)!r} cannot be written: {error.strerror or error}; name a file in a folder "
                "that is there"
            ) from error
        queue: Queue[Any] = Queue(WAITING_LINES)
        self._entry = _Queue(queue, loss)
        self._listener = _Listener(queue, self._file)
        self._listener.start()

    def write(self, make: Callable[[], RequestLine]) -> None:
        """Writes a line later; never waits and never raises.

        Args:
            make: Makes the line; called in the writing thread.
        """
        self._entry.handle(logging.LogRecord("sigma0.commands.telemetry", logging.INFO, "", 0, make, None, None))

    def close(self) -> None:
        """Writes what is queued, and closes the file."""
        self._listener.stop()
        if self._listener.hangs:
            # the writing thread holds the file's lock
            return
        try:
            self._file.close()
        except OSError as error:
            # the flush to a full disk failed
            self._loss.warn(error)


class _Listener(QueueListener):
    """Stops even if the disk hangs; lines still queued after `CLOSING_S` are dropped.

    Attributes:
        hangs: Whether a line was still being written when it stopped.
    """

    hangs = False

    def stop(self) -> None:
        """Writes what is queued, within the time limit."""
        thread = self._thread
        if thread is None:
            return
        assert isinstance(self.queue, Queue)
        with suppress(Full):
            self.queue.put(None, timeout=CLOSING_S)
            thread.join(CLOSING_S)
        self.hangs = thread.is_alive()
        self._thread = None


def read_telemetry(path: Path) -> Iterator[RequestLine]:
    """The lines of one file.

    Raises:
        ValueError: Naming the first bad line.
    """
    with path.open(encoding="utf-8") as file:
        yield from parse_lines(path, file, RequestLine.model_validate_json, "telemetry line")
