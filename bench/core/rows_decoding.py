"""Rows about ways of decoding: their fidelity, their depths, their speed."""

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict

from sigma0.bench.core.rows import Conditions, Figure, row_key
from sigma0.models.exit_thresholds import CalibratedThreshold


class Promise(BaseModel):
    """What a threshold was calibrated to keep (`sigma0 calibrate`).

    Attributes:
        agreement: Least share of new tokens with full depth's argmax.
        confidence: With which it is kept.
        prompts: Prompts that it was chosen on, none of which is measured here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    agreement: float
    confidence: float
    prompts: int

    @classmethod
    def of(cls, record: CalibratedThreshold) -> "Promise":
        """That of a model's record."""
        return cls(agreement=record.agreement, confidence=record.confidence, prompts=record.prompts)


class FidelityRow(Conditions):
    """One way of decoding beside full depth.

    Attributes:
        benchmark: "fidelity".
        time: When it was measured, ISO 8601, UTC.
        mode: The exit rule, or a baseline.
        after_exit: What became of the deeper loops.
        settings: Parameters of the mode.
        promise: Of a calibrated threshold; None for the others.
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
    promise: Promise | None = None
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
            `drop`, `verify`, `huggingface` for transformers' own decoding, `huggingface-static` for the same with a
            static cache and a compiled forward, `self-speculation` for drafts of fixed depth and length,
            `two-branches` for `verify` with a second proposal (`one-branch` without, by the same code), or `published`
            for a model's published code (which `versions` names the libraries of).
        by: "library", or "engine" for the server's engine with all sequences as requests under way at once.
        runner: What called the step, as it turned out; "eager" for `huggingface`, branches and `published`.
        mode: The exit rule; "replay" where the course of the tokens is given.
        after_exit: What became of the deeper loops.
        settings: Parameters of the mode; for `verify` also `redraft`, 0 or 1; for `self-speculation` the `depth` and
            the `length` of its drafts.
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
        copy_bandwidth: Bytes that a plain copy read and wrote in a second, measured in the same run; None, as the next
            three, in rows that were written before it was measured.
        block_bytes_per_token: Bytes of the block's weights that are read for a token of each sequence.
        head_bytes_per_token: The same of the head, as `sigma0.bench.speed.roofline` counts its readings.
        kv_bytes_per_token: The same of K/V: every row reads its plane up to its position.
    """

    benchmark: Literal["speed"] = "speed"
    time: str
    way: Literal[
        "full", "judged", "never", "finish", "drop", "verify", "huggingface", "huggingface-static", "self-speculation",
        "one-branch", "two-branches", "published",
    ]  # fmt: skip
    by: Literal["library", "engine"] = "library"
    runner: Literal["eager", "compile", "cudagraph"] = "eager"
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
    copy_bandwidth: float | None = None
    block_bytes_per_token: float | None = None
    head_bytes_per_token: float | None = None
    kv_bytes_per_token: float | None = None

    @property
    def key(self) -> str:
        """What makes two rows measurements of the same thing: another run is another measurement."""
        return json.dumps([self.benchmark, self.time, self.way])


class QuantizationRow(Conditions):
    """A model whose block has quantised weights, beside the same model with floats, both under one exit rule.

    Fidelity is None of random weights, whose text means nothing.

    Attributes:
        benchmark: "quantization".
        time: When it was measured, ISO 8601, UTC.
        mode: The exit rule.
        settings: Parameters of the mode.
        runner: What called the step.
        dtype_of_floats: Of the model with floats.
        block_bytes: In which the weights of the block are held.
        block_bytes_of_floats: The same of the model with floats.
        model_bytes: Of all weights.
        model_bytes_of_floats: Likewise.
        context: Prompt tokens of what is timed.
        timed_tokens: New tokens of it.
        rounds: How often both were timed, in turn.
        milliseconds_per_token: Of the fastest round, prompt left out.
        milliseconds_per_token_of_floats: Likewise.
        speed_ratio: Time with floats over time with quantised weights, median of the rounds' own ratios.
        agreement: Share of the new tokens that floats wrote with the same argmax, each read at the model's own exit.
        kl: Mean KL(floats || quantised) over the same tokens, nats.
        exact_match: Share of free runs that say the same.
        mean_depth: Mean exit depth of free runs, over the tokens after each first.
        mean_depth_of_floats: Likewise.
    """

    benchmark: Literal["quantization"] = "quantization"
    time: str
    mode: str
    settings: dict[str, float | int | str]
    runner: Literal["eager", "compile", "cudagraph"]
    dtype_of_floats: str
    block_bytes: int
    block_bytes_of_floats: int
    model_bytes: int
    model_bytes_of_floats: int
    context: int
    timed_tokens: int
    rounds: int
    milliseconds_per_token: float
    milliseconds_per_token_of_floats: float
    speed_ratio: Figure
    agreement: Figure | None = None
    kl: Figure | None = None
    exact_match: Figure | None = None
    mean_depth: Figure | None = None
    mean_depth_of_floats: Figure | None = None

    @property
    def key(self) -> str:
        """What makes two rows measurements of the same thing: another time is another measurement."""
        what = [self.benchmark, self.time, self.mode, self.runner, self.dtype_of_floats, dict(self.settings)]
        return json.dumps(what, sort_keys=True)


class KVRow(Conditions):
    """A model whose K/V are stored in few bits, beside the same model with K/V as it computes them.

    Attributes:
        benchmark: "kv".
        time: When it was measured, ISO 8601, UTC.
        codec: What K/V are stored in.
        bits: Of a code, for each loop.
        group: Numbers that share a scale.
        segment: Cache positions that are encoded together.
        number_bits: Bits of a number, its share of a scale included.
        token_bytes: Bytes of K/V of a token, once they are encoded.
        token_bytes_computed: As the model computes them.
        context: Ids of each prompt; 0 where each has its own length.
        coded_share: Share of what the new tokens are read over that is in few bits.
        tokens: New tokens that are compared.
        agreement: Share of the new tokens with the same argmax at full depth, along the model's own full-depth text.
        kl: Mean KL(computed || coded) over the same tokens, nats.
        depths_changed: Share of them that the model's own exit rule reads at another loop.
        same_text: Share of free runs at full depth that say the same; None where none were made.
        timed_context: Prompt tokens of what is timed.
        rounds: How often both were timed, in turn; 0 for none.
        milliseconds_per_token: Under the model's own exit rule, of the fastest round, prompt left out; None as above.
        milliseconds_per_token_computed: Likewise.
        speed_ratio: Time as computed over time in few bits, median of the rounds' own ratios.
        kv_memory: Bytes of K/V of an engine; 0 where none was run.
        concurrent_tokens: Tokens of each of its requests, prompt and answer.
        concurrent: Most requests that ran at once before one was preempted.
        concurrent_computed: Likewise, with K/V as computed in the same memory.
        compared_alone: Of the first answers, how many were compared with what is answered alone.
        same_alone: How many of those were the same.
    """

    benchmark: Literal["kv"] = "kv"
    time: str
    codec: str
    bits: tuple[int, ...]
    group: int
    segment: int
    number_bits: float
    token_bytes: int
    token_bytes_computed: int
    context: int
    coded_share: float
    tokens: int
    agreement: Figure
    kl: Figure
    depths_changed: Figure
    same_text: Figure | None = None
    timed_context: int = 0
    rounds: int = 0
    milliseconds_per_token: float | None = None
    milliseconds_per_token_computed: float | None = None
    speed_ratio: Figure | None = None
    kv_memory: int = 0
    concurrent_tokens: int = 0
    concurrent: int = 0
    concurrent_computed: int = 0
    compared_alone: int = 0
    same_alone: int = 0

    @property
    def key(self) -> str:
        """What makes two rows measurements of the same thing: another time is another measurement."""
        return json.dumps([self.benchmark, self.time, self.codec, self.bits, self.group, self.segment, self.context])
