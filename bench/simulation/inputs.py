"""What the simulation is fed with: measured times of passes and measured exit depths, with their conditions."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError, model_validator

from sigma0.bench.core.conditions import Conditions, Strict
from sigma0.bench.core.rows import Tail
from sigma0.bench.simulation.replica import PassWork, ReplicaLimits
from sigma0.errors import one_line

Count = Annotated[int, Field(ge=1)]
Time = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0)]


def percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median, 95th and 99th percentile in milliseconds."""
    p50, p95, p99 = (1000 * np.percentile(seconds, (50, 95, 99))).tolist()
    return p50, p95, p99


def tail_of(values: Sequence[float]) -> Tail:
    """What `percentiles` gives, as a row has it."""
    return Tail(**dict(zip(Tail.model_fields, values, strict=True)))


# What of a pass takes time beside the line by its rows: the field of `PassTimes`, and how many of it a pass holds.
TERMS: Mapping[str, Callable[[PassWork], int]] = {
    "request_ms": lambda work: work.requests,
    "chunk_ms": lambda work: work.chunks,
    "telling_ms": lambda work: work.tokens > 0,
    "token_ms": lambda work: work.tokens,
    "begun_ms": lambda work: work.begun,
    "ended_ms": lambda work: work.ended,
}


class PassTime(Strict):
    """Fitted milliseconds of a pass of so many rows, for the rows alone."""

    rows: Count
    milliseconds: Share


class PassTimes(Strict):
    """Time of a pass, fitted to measured ones: a line through points by its rows, and what else is in it."""

    by_rows: Annotated[tuple[PassTime, ...], Field(min_length=2)]  # Points by rising rows
    request_ms: Share  # For each request that runs: a row of its own costs more than one in a stretch of a prompt
    chunk_ms: Share  # For each chunk of a prompt, which attention reads the cache for apart
    telling_ms: Share  # For telling any token
    token_ms: Share  # For each token that is told
    begun_ms: Share  # For each request that is admitted
    ended_ms: Share  # For each request that ends: its text, savings and verdict
    passes: Count  # That were measured
    # Time that passes of each round took over what the fit says: what the machine's speed did meanwhile
    paces: Annotated[tuple[Time, ...], Field(min_length=1)]
    # Share of the variance of the passes that the fit and the paces explain; disturbed ones are left out
    explained: float

    @model_validator(mode="after")
    def _in_order(self) -> "PassTimes":
        rows = [item.rows for item in self.by_rows]
        if rows != sorted(set(rows)):
            raise ValueError(f"points must stand by rising rows, each once, got {rows}: sort them")
        # there is no pass without a request
        if not self.by_rows[0].milliseconds + self.request_ms > 0:
            raise ValueError("a pass takes more than 0 milliseconds, got 0 for its rows and for a request")
        return self


class MeasuredAnswer(Strict):
    """One answer of the model: ids of its prompt, and the exit depth of each new token."""

    prompt: Count
    depths: Annotated[tuple[Count, ...], Field(min_length=1)]


class Kind(Strict):
    """Answers to the prompts, in their order, under one exit setting."""

    exit_config: dict[str, Any]
    answers: Annotated[tuple[MeasuredAnswer, ...], Field(min_length=1)]

    @property
    def passes(self) -> float:
        """Mean passes of an answer that runs alone."""
        return sum(sum(answer.depths) for answer in self.answers) / len(self.answers)


class Check(Strict):
    """The real engine under random arrivals beside the simulation of the very same arrivals, milliseconds.

    Some courses of arrivals in each round, at loads of which no pass was fitted. The speed of a machine changes between
    them, so each is simulated at its own pace; fleets are simulated at the mean pace of the fit.
    """

    rate: Time  # Requests a second
    requests: Count  # How many
    # Time that the passes of each course took over what the fit says of them
    paces: Annotated[tuple[Time, ...], Field(min_length=1)]
    measured: tuple[float, float, float]  # Median, 95th and 99th percentile of the time from arrival to last token
    simulated: tuple[float, float, float]  # The same

    @property
    def off(self) -> float:
        """By which share of the measured one the simulated median or 95th percentile is off, whichever is more."""
        return max(abs(mine / theirs - 1) for mine, theirs in zip(self.simulated[:2], self.measured, strict=False))


class Inputs(Strict):
    """A file of inputs."""

    conditions: Conditions  # Of the measurement
    clock: str  # What the times were taken with
    # Programs that wanted to run at the end, a mean over 15 minutes, on how many processors
    machine_load: tuple[float, Count]
    loops: Count  # As `ReplicaLimits` has it, like `running`, `pass_rows`, `page` and `kept`
    running: Count
    pass_rows: Count
    page: Count
    kept: Count
    pass_times: PassTimes  # What a pass takes
    kinds: Annotated[dict[str, Kind], Field(min_length=1)]  # Answers by the name of their traffic: `short` and `long`
    checks: tuple[Check, ...] = ()  # What the simulation makes of arrivals that the real engine was given too

    @property
    def limits(self) -> ReplicaLimits:
        """Of the engine that was measured."""
        return ReplicaLimits(self.loops, self.running, self.pass_rows, self.page, self.kept)

    @model_validator(mode="after")
    def _possible(self) -> "Inputs":
        deepest = max(depth for kind in self.kinds.values() for answer in kind.answers for depth in answer.depths)
        if deepest > self.loops:
            raise ValueError(f"a token exits at loop {deepest} of {self.loops}: loops or depths are of another model")
        if self.kept < self.page:
            raise ValueError(f"kept must be at least {self.page}, got {self.kept}")
        return self


def read_inputs(path: Path) -> tuple[Inputs, str]:
    """A file of inputs, and its sha256."""
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}: python -m sigma0.bench passes --out {path} writes one")
    content = path.read_bytes()
    try:
        return Inputs.model_validate_json(content), sha256(content).hexdigest()
    except ValidationError as error:
        raise ValueError(f"{str(path)!r} holds no inputs of a simulation: {one_line(error)}") from error


class PassClock:
    """Seconds of a pass.

    Beyond the last point of the times the line goes on as between the last two, and never falls below the first.
    Every pass takes `pace` times as long.
    """

    def __init__(self, times: PassTimes, pace: float = 1.0) -> None:
        self._times = times
        self._pace = pace
        self._rows = [item.rows for item in times.by_rows]
        # passes so far, and those of more rows than any that was measured
        self.asked = self.beyond = 0
        self._known: dict[PassWork, float] = {}

    def __call__(self, work: PassWork) -> float:
        """Seconds of a pass that holds so much."""
        self.asked += 1
        self.beyond += work.rows > self._rows[-1]
        seconds = self._known.get(work)
        if seconds is None:
            points = self._times.by_rows
            right = min(max(bisect_left(self._rows, work.rows), 1), len(points) - 1)
            low, high = points[right - 1], points[right]
            slope = (high.milliseconds - low.milliseconds) / (high.rows - low.rows)
            by_rows = max(low.milliseconds + slope * (max(work.rows, low.rows) - low.rows), points[0].milliseconds)
            beside = sum(getattr(self._times, name) * term(work) for name, term in TERMS.items())
            seconds = self._known[work] = self._pace * (by_rows + beside) / 1000
        return seconds
