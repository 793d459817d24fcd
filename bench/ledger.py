"""The ledger: one JSON line for each measured setting, under one published schema.

A row is appended whole, by one writer at a time. A last line that a killed run left half-written is cut off by the next
writer; anything else that is not a row is refused, naming the line, so that nothing is silently mixed.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from sigma0.estimates import Estimate
from sigma0.settings import explain

LEDGER = Path("bench/results/leaderboard.jsonl")


class Figure(BaseModel):
    """A measured figure and its 95 % bootstrap interval over prompts."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, estimate: Estimate | None) -> "Figure | None":
        """The figure of an estimate."""
        if estimate is None:
            return None
        return cls(value=estimate.value, low=estimate.interval[0], high=estimate.interval[1])

    @model_validator(mode="after")
    def _in_order(self) -> "Figure":
        if not self.low <= self.high:
            raise ValueError(f"the interval from {self.low} to {self.high} is upside down")
        return self


class Conditions(BaseModel):
    """Under which a row was measured; two rows of one run share all of them.

    Attributes:
        model: Name of the model, as it was loaded.
        model_sha256: Of its weights: of the one safetensors file, or of "sha256  name" lines where there are several.
        settings_sha256: Of the "sha256  name" lines of its other files (configs, tokenizer).
        total_loops: T.
        parameters: How many.
        device: Device type and the processor's name.
        dtype: Of the weights.
        threads: CPU threads.
        prompts: Where they come from: a file's name, or a task and its split and seed.
        prompts_sha256: Of the prompts' ids and their known answers.
        n: Prompts.
        batch_size: Prompts in a batch.
        max_new_tokens: New tokens of each prompt at most.
        commit: Git commit of the code, "+" and a digest of the differences behind it where there are some; None outside
            a repository.
        versions: Of Python and of the libraries that compute.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    model_sha256: str
    settings_sha256: str
    total_loops: int
    parameters: int
    device: str
    dtype: str
    threads: int
    prompts: str
    prompts_sha256: str
    n: int
    batch_size: int
    max_new_tokens: int
    commit: str | None
    versions: dict[str, str]

    @property
    def run(self) -> str:
        """A short name for these conditions, the same for all rows of a run."""
        shared = {name: getattr(self, name) for name in Conditions.model_fields}
        return sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]


class FidelityRow(Conditions):
    """One way of decoding beside full depth.

    Attributes:
        benchmark: "fidelity".
        time: When it was measured, ISO 8601, UTC.
        mode: The exit rule, or a baseline.
        after_exit: What became of the deeper loops.
        settings: Parameters of the mode.
        agreement: Share of teacher-forced tokens, prompts included, with full depth's argmax at the exit.
        agreement_on_answers: The same over the new tokens.
        kl: Mean KL(full || exit) over the same tokens, nats.
        kl_on_answers: The same over the new tokens.
        exact_match: Share of free runs equal to full depth's, token for token.
        first_divergence: New tokens before the first that differs, mean over the runs that differ; None without.
        accuracy: Share of free runs that give the known answer; None unless the answer to every prompt is known.
        mean_depth: Mean exit depth of free runs, as the next three over the tokens after each first.
        depth_saved: 1 - sum of exit depths / (T tokens): notional.
        passes_saved: 1 - passes / (T tokens), counted.
        rows_saved: 1 - rows / (T tokens), counted.
        prompt_rows: Rows that reading the prompts took: nothing is saved there.
        head_rows: Rows that the head read behind the prompts.
        new_tokens: New tokens of the free runs.
        reasons: How many of them stopped for which reason; empty for depths given beforehand.
        tokens_per_second: New tokens over time, prompts included, of the timed runs; the time of a prompt is its median
            over some rounds.
        speed_ratio: The same over full depth's, run in turn with it; None for full depth.
        timed: Prompts that were timed, the first ones.
    """

    benchmark: Literal["fidelity"] = "fidelity"
    time: str
    mode: str
    after_exit: Literal["finish", "drop", "verify"]
    settings: dict[str, float | int | str]
    agreement: Figure
    agreement_on_answers: Figure
    kl: Figure
    kl_on_answers: Figure
    exact_match: Figure
    first_divergence: Figure | None
    accuracy: Figure | None
    mean_depth: Figure | None
    depth_saved: Figure | None
    passes_saved: Figure | None
    rows_saved: Figure | None
    prompt_rows: int
    head_rows: int
    new_tokens: int
    reasons: dict[str, int]
    tokens_per_second: float
    speed_ratio: Figure | None
    timed: int

    @property
    def key(self) -> str:
        """What makes two rows of a run measurements of the same thing."""
        return row_key(self.benchmark, self.mode, self.after_exit, self.settings)


class DepthSample(BaseModel):
    """A prompt as the model reads it, and text and depth of each new token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    tokens: tuple[tuple[str, int], ...]


class DepthRow(Conditions):
    """The depth of every new token behind some of the prompts.

    Attributes:
        benchmark: "depth".
        time: When it was measured, ISO 8601, UTC.
        mode: The exit rule.
        after_exit: What became of the deeper loops.
        settings: Parameters of the mode.
        samples: The texts.
    """

    benchmark: Literal["depth"] = "depth"
    time: str
    mode: str
    after_exit: Literal["finish", "drop", "verify"]
    settings: dict[str, float | int | str]
    samples: tuple[DepthSample, ...]

    @property
    def key(self) -> str:
        """What makes two rows of a run measurements of the same thing."""
        return row_key(self.benchmark, self.mode, self.after_exit, self.settings)


class Course(BaseModel):
    """The course of the tokens that a run replays in place of the model's own.

    Attributes:
        source: Where it comes from.
        exits: Loop at which each token stops.
        settled: Loop from which on its readout is that of loop T.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    exits: tuple[int, ...]
    settled: tuple[int, ...]


class SpeedRow(Conditions):
    """The time of one way of decoding, measured in turn with the others of its run.

    Attributes:
        benchmark: "speed".
        time: When the run began, ISO 8601, UTC; the same for all its rows.
        way: `full`, `judged` (the same with every token's statistics, as a verdict needs them), `never`, `finish`,
            `drop`, `verify`, or `huggingface` for transformers' own decoding.
        mode: The exit rule; "replay" where the course of the tokens is given.
        after_exit: What became of the deeper loops.
        settings: Parameters of the mode; for `verify` also `redraft`, 0 or 1.
        course: The course, where one is replayed.
        context: Prompt tokens of each sequence.
        rounds: How often every way was timed, in turn.
        milliseconds_per_token: Median over the rounds, prompt left out; a token of each sequence of the batch.
        tokens_per_second: New tokens of all sequences over the same time.
        prompt_tokens_per_second: Prompt tokens of all sequences over the median time of reading them.
        passes_per_token: Calls of the shared block for each token after the first, the tail's checks included.
        tail_passes_per_token: How many of them only checked the tail.
        rows_per_token: Rows in them, for each token of each sequence.
        head_rows_per_token: Rows that the head read, likewise.
        speed_ratio: Time of `full` over this way's, median of the rounds' own ratios; None where `full` did not run.
        ideal: T / passes_per_token.
        share_of_ideal: speed_ratio / ideal.
        weight_bandwidth: Bytes of the block's weights read in a second of decoding, at least.
        same_tokens: Whether it wrote what `full` wrote; None where `full` did not run, or where a course is replayed.
        kv_bytes_in_use: K/V that hold tokens at the end.
        kv_bytes_allocated: K/V reserved at the end.
        peak_bytes: Most memory that was in use: on a GPU while this way decoded, the K/V that the other ways keep
            included; else of the process in the whole run.
    """

    benchmark: Literal["speed"] = "speed"
    time: str
    way: Literal["full", "judged", "never", "finish", "drop", "verify", "huggingface"]
    mode: str
    after_exit: Literal["finish", "drop", "verify"]
    settings: dict[str, float | int | str]
    course: Course | None
    context: int
    rounds: int
    milliseconds_per_token: Figure
    tokens_per_second: Figure
    prompt_tokens_per_second: float
    passes_per_token: float
    tail_passes_per_token: float
    rows_per_token: float
    head_rows_per_token: float
    speed_ratio: Figure | None
    ideal: float
    share_of_ideal: Figure | None
    weight_bandwidth: float
    same_tokens: bool | None
    kv_bytes_in_use: int
    kv_bytes_allocated: int
    peak_bytes: int

    @property
    def key(self) -> str:
        """What makes two rows measurements of the same thing: another run is another measurement."""
        return json.dumps([self.benchmark, self.time, self.way])


class LadderRow(Conditions):
    """One setting of a ladder from one model to a larger one; the conditions are those of the lower model.

    Attributes:
        benchmark: "ladder".
        time: When the run began, ISO 8601, UTC; the same for all its rows.
        above: Name of the larger model.
        above_sha256: Of its weights.
        exit_config: Of the lower model; the larger one has its checkpoint's own.
        family: The curve that the setting lies on.
        policy: What goes up, as JSON.
        stay: Further tokens that the larger model writes.
        unit: What goes up.
        warm_start: Whether the larger model is given what the small one wrote.
        accuracy: Share of right answers.
        cost: Passes times block bytes of both models, prompts included, over those of the larger model alone.
        seconds: Wall-clock over that of the larger model alone, in the same run.
        row_cost: Rows times block parameters, over those of the larger model alone.
        handed_up: Share of all written tokens that the larger model wrote.
        catch_ups: Times that it caught up, for each answer; its first reading not counted.
    """

    benchmark: Literal["ladder"] = "ladder"
    time: str
    above: str
    above_sha256: str
    exit_config: dict[str, Any]
    family: str
    policy: dict[str, Any]
    stay: int
    unit: Literal["token", "draft", "answer"]
    warm_start: bool
    accuracy: Figure
    cost: Figure
    seconds: Figure
    row_cost: float
    handed_up: float
    catch_ups: float

    @property
    def key(self) -> str:
        """What makes two rows measurements of the same thing: another run is another measurement."""
        return json.dumps(
            [self.benchmark, self.time, self.family, self.policy, self.stay, self.unit, self.warm_start], sort_keys=True
        )


class Percentiles(BaseModel):
    """Of times, milliseconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    p50: float
    p90: float
    p99: float


class ServeRow(Conditions):
    """One way of asking a server under one load, measured in turn with the others of its run.

    Attributes:
        benchmark: "serve".
        time: When the run ended, ISO 8601, UTC; the same for all its rows.
        way: `full`, `never` (an exit rule that is never met), `finish`, `drop`, `verify`, or `transformers` for
            `transformers serve` on the same weights.
        exit_config: What every request asked for; None of a server that has none.
        load: "closed": clients that ask on and on; "open": requests that come at random.
        amount: Clients; or requests a second.
        requests: In a round.
        rounds: How often every way was measured, in turn.
        failed: Requests that were not answered whole, over all rounds.
        tokens_per_second: New tokens of all clients; median of the rounds, the least and the greatest.
        rows_per_second: Rows of the block, prompts included; None where the server does not tell, as is the next.
        passes_per_second: Calls of the block.
        speed_ratio: Tokens a second over those of `full` in the same round; median, least and greatest.
        first_token_ms: From request to first token, last round.
        between_tokens_ms: From token to token, last round.
    """

    benchmark: Literal["serve"] = "serve"
    time: str
    way: Literal["full", "never", "finish", "drop", "verify", "transformers"]
    exit_config: dict[str, Any] | None
    load: Literal["closed", "open"]
    amount: float
    requests: int
    rounds: int
    failed: int
    tokens_per_second: Figure
    rows_per_second: float | None
    passes_per_second: float | None
    speed_ratio: Figure
    first_token_ms: Percentiles
    between_tokens_ms: Percentiles

    @property
    def key(self) -> str:
        """What makes two rows measurements of the same thing: another run is another measurement."""
        return json.dumps([self.benchmark, self.time, self.way, self.load, self.amount])


AnyRow = FidelityRow | DepthRow | SpeedRow | LadderRow | ServeRow
Row = Annotated[AnyRow, Field(discriminator="benchmark")]
_ROW: TypeAdapter[AnyRow] = TypeAdapter(Row)


def row_key(benchmark: str, mode: str, after_exit: str, settings: Mapping[str, float | int | str]) -> str:
    """What makes two rows of a run measurements of the same thing."""
    return json.dumps([benchmark, mode, after_exit, dict(settings)], sort_keys=True)


def row_schema() -> dict[str, Any]:
    """The JSON Schema of a row."""
    return _ROW.json_schema()


def parse_row(line: str | bytes) -> AnyRow:
    """One line of a ledger.

    Raises:
        ValueError: If it is no row.
    """
    try:
        return _ROW.validate_json(line)
    except ValidationError as error:
        raise ValueError(explain(error)) from error


def read_rows(path: Path) -> list[AnyRow]:
    """All rows of a ledger; none where the file is missing.

    Raises:
        ValueError: For a line that is no row, named by its number; a last line without its end included.
    """
    if not path.exists():
        return []
    rows = []
    lines = path.read_bytes().split(b"\n")
    if lines[-1]:
        raise ValueError(f"{str(path)!r} ends in a half-written line: measure again with it, which cuts the line off")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(parse_row(line))
        except ValueError as error:
            raise ValueError(f"line {number} of {str(path)!r} is no row of this schema: {error}") from error
    return rows


def append_row(path: Path, row: AnyRow) -> bool:
    """Adds a row, whole, unless its run holds one of the same key.

    Returns:
        Whether it was added: another process may have measured the same meanwhile.

    Raises:
        ValueError: If the ledger holds a line that is no row.
    """
    with _alone(path):
        _cut(path)
        if any((known.run, known.key) == (row.run, row.key) for known in read_rows(path)):
            return False
        with path.open("ab") as file:
            file.write(row.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return True


def repair(path: Path) -> bytes:
    """Cuts off a last line that a killed writer left without its end, and returns it."""
    with _alone(path):
        return _cut(path)


def _cut(path: Path) -> bytes:
    if not path.exists():
        return b""
    content = path.read_bytes()
    kept = content.rfind(b"\n") + 1
    if kept < len(content):
        with path.open("r+b") as file:
            file.truncate(kept)
    return content[kept:]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield
