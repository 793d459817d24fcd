"""Rows about ways of decoding: their fidelity, their depths, their speed."""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from sigma0.bench.core.rows import Figure, Measured
from sigma0.models.exit_thresholds import CalibratedThreshold


class Promise(BaseModel):
    """What a threshold was calibrated to keep (`sigma0 calibrate`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agreement: float  # Least share of new tokens with full depth's argmax
    confidence: float  # With which it is kept
    prompts: int  # Prompts that it was chosen on, none of which is measured here

    @classmethod
    def of(cls, record: CalibratedThreshold) -> "Promise":
        """That of a model's record."""
        return cls(agreement=record.agreement, confidence=record.confidence, prompts=record.prompts)


class FidelityRow(Measured):
    """One way of decoding beside full depth."""

    benchmark: Literal["fidelity"] = "fidelity"
    keyed: ClassVar = ("mode", "after_exit", "settings")
    mode: str  # The exit rule, or a baseline
    after_exit: Literal["finish", "drop", "verify"]  # What became of the deeper loops
    settings: dict[str, float | int | str]  # Parameters of the mode
    promise: Promise | None = None  # Of a calibrated threshold; None for the others
    agreement: Figure  # Share of teacher-forced tokens, prompts included, with full depth's argmax at the exit
    agreement_on_answers: Figure  # The same over the new tokens
    kl: Figure  # Mean KL(full || exit) over the same tokens, nats
    kl_on_answers: Figure  # The same over the new tokens
    exact_match: Figure  # Share of free runs equal to full depth's, token for token
    # New tokens before the first that differs, mean over the runs that differ; None without
    first_divergence: Figure | None
    # Share of free runs that give the known answer; None unless the answer to every prompt is known
    accuracy: Figure | None
    mean_depth: Figure | None  # Mean exit depth of free runs, as the next three over the tokens after each first
    depth_saved: Figure | None  # 1 - sum of exit depths / (T tokens): notional
    passes_saved: Figure | None  # 1 - passes / (T tokens), counted
    rows_saved: Figure | None  # 1 - rows / (T tokens), counted
    prompt_rows: int  # Rows that reading the prompts took: nothing is saved there
    head_rows: int  # Rows that the head read behind the prompts
    new_tokens: int  # New tokens of the free runs
    reasons: dict[str, int]  # How many of them stopped for which reason; empty for depths given beforehand
    # New tokens over time, prompts included, of the timed runs; the time of a prompt is its median over some
    # rounds
    tokens_per_second: float
    speed_ratio: Figure | None  # The same over full depth's, run in turn with it; None for full depth
    timed: int  # Prompts that were timed, the first ones


class DepthSample(BaseModel):
    """A prompt as the model reads it, and text and depth of each new token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    tokens: tuple[tuple[str, int], ...]


class DepthRow(Measured):
    """The depth of every new token behind some of the prompts."""

    benchmark: Literal["depth"] = "depth"
    keyed: ClassVar = ("mode", "after_exit", "settings")
    mode: str  # The exit rule
    after_exit: Literal["finish", "drop", "verify"]  # What became of the deeper loops
    settings: dict[str, float | int | str]  # Parameters of the mode
    samples: tuple[DepthSample, ...]  # The texts


class Course(BaseModel):
    """The course of the tokens that a run replays in place of the model's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str  # Where it comes from
    exits: tuple[int, ...]  # Loop at which each token stops
    settled: tuple[int, ...]  # Loop from which on its readout is that of loop T


class SpeedRow(Measured):
    """The time of one way of decoding, measured in turn with the others of its run."""

    benchmark: Literal["speed"] = "speed"
    keyed: ClassVar = ("time", "way")
    # `full`, `judged` (the same with every token's statistics, as a verdict needs them), `never`, `finish`,
    # `drop`, `verify`, `huggingface` for transformers' own decoding, `huggingface-static` for the same with a
    # static cache and a compiled forward, `self-speculation` for drafts of fixed depth and length, `two-branches`
    # for `verify` with a second proposal (`one-branch` without, by the same code), or `published` for a model's
    # published code (which `versions` names the libraries of)
    way: Literal[
        "full", "judged", "never", "finish", "drop", "verify", "huggingface", "huggingface-static", "self-speculation",
        "one-branch", "two-branches", "published",
    ]  # fmt: skip
    # "library", or "engine" for the server's engine with all sequences as requests under way at once
    by: Literal["library", "engine"] = "library"
    # What called the step, as it turned out; "eager" for `huggingface`, branches and `published`
    runner: Literal["eager", "compile", "cudagraph"] = "eager"
    mode: str  # The exit rule; "replay" where the course of the tokens is given
    after_exit: Literal["finish", "drop", "verify"]  # What became of the deeper loops
    # Parameters of the mode; for `verify` also `redraft`, 0 or 1; for `self-speculation` the `depth` and the
    # `length` of its drafts
    settings: dict[str, float | int | str]
    course: Course | None  # The course, where one is replayed
    context: int  # Prompt tokens of each sequence
    rounds: int  # How often every way was timed, in turn
    milliseconds_per_token: Figure  # Median over the rounds, prompt left out; a token of each sequence of the batch
    tokens_per_second: Figure  # New tokens of all sequences over the same time
    prompt_tokens_per_second: float  # Prompt tokens of all sequences over the median time of reading them
    passes_per_token: float  # Calls of the shared block for each token after the first, the tail's checks included
    tail_passes_per_token: float  # How many of them only checked the tail
    rows_per_token: float  # Rows in them, for each token of each sequence
    head_rows_per_token: float  # Rows that the head read, likewise
    # Time of `full` over this way's, median of the rounds' own ratios; None where `full` did not run
    speed_ratio: Figure | None
    ideal: float  # T / passes_per_token
    share_of_ideal: Figure | None  # speed_ratio / ideal
    weight_bandwidth: float  # Bytes of the block's weights read in a second of decoding, at least
    # Whether it wrote what `full` wrote; None where `full` did not run, or where a course is replayed
    same_tokens: bool | None
    kv_bytes_in_use: int  # K/V that hold tokens at the end
    kv_bytes_allocated: int  # K/V reserved at the end
    # Most memory that was in use: on a GPU while this way decoded, the K/V that the other ways keep included;
    # else of the process in the whole run
    peak_bytes: int
    # Bytes that a plain copy read and wrote in a second, measured in the same run; None, as the next three, in
    # rows that were written before it was measured
    copy_bandwidth: float | None = None
    # Bytes of the block's weights that are read for a token of each sequence
    block_bytes_per_token: float | None = None
    # The same of the head, as `sigma0.bench.speed.roofline` counts its readings
    head_bytes_per_token: float | None = None
    kv_bytes_per_token: float | None = None  # The same of K/V: every row reads its plane up to its position


class QuantizationRow(Measured):
    """A model whose block has quantised weights, beside the same model with floats, both under one exit rule.

    Fidelity is None of random weights, whose text means nothing.
    """

    benchmark: Literal["quantization"] = "quantization"
    keyed: ClassVar = ("time", "mode", "runner", "dtype_of_floats", "settings")
    mode: str  # The exit rule
    settings: dict[str, float | int | str]  # Parameters of the mode
    runner: Literal["eager", "compile", "cudagraph"]  # What called the step
    dtype_of_floats: str  # Of the model with floats
    block_bytes: int  # In which the weights of the block are held
    block_bytes_of_floats: int  # The same of the model with floats
    model_bytes: int  # Of all weights
    model_bytes_of_floats: int  # Likewise
    context: int  # Prompt tokens of what is timed
    timed_tokens: int  # New tokens of it
    rounds: int  # How often both were timed, in turn
    milliseconds_per_token: float  # Of the fastest round, prompt left out
    milliseconds_per_token_of_floats: float  # Likewise
    speed_ratio: Figure  # Time with floats over time with quantised weights, median of the rounds' own ratios
    # Share of the new tokens that floats wrote with the same argmax, each read at the model's own exit
    agreement: Figure | None = None
    kl: Figure | None = None  # Mean KL(floats || quantised) over the same tokens, nats
    exact_match: Figure | None = None  # Share of free runs that say the same
    mean_depth: Figure | None = None  # Mean exit depth of free runs, over the tokens after each first
    mean_depth_of_floats: Figure | None = None  # Likewise


class KVRow(Measured):
    """A model whose K/V are stored in few bits, beside the same model with K/V as it computes them."""

    benchmark: Literal["kv"] = "kv"
    keyed: ClassVar = ("time", "codec", "bits", "group", "segment", "context")
    codec: str  # What K/V are stored in
    bits: tuple[int, ...]  # Of a code, for each loop
    group: int  # Numbers that share a scale
    segment: int  # Cache positions that are encoded together
    number_bits: float  # Bits of a number, its share of a scale included
    token_bytes: int  # Bytes of K/V of a token, once they are encoded
    token_bytes_computed: int  # As the model computes them
    context: int  # Ids of each prompt; 0 where each has its own length
    coded_share: float  # Share of what the new tokens are read over that is in few bits
    tokens: int  # New tokens that are compared
    # Share of the new tokens with the same argmax at full depth, along the model's own full-depth text
    agreement: Figure
    kl: Figure  # Mean KL(computed || coded) over the same tokens, nats
    depths_changed: Figure  # Share of them that the model's own exit rule reads at another loop
    same_text: Figure | None = None  # Share of free runs at full depth that say the same; None where none were made
    timed_context: int = 0  # Prompt tokens of what is timed
    rounds: int = 0  # How often both were timed, in turn; 0 for none
    # Under the model's own exit rule, of the fastest round, prompt left out; None as above
    milliseconds_per_token: float | None = None
    milliseconds_per_token_computed: float | None = None  # Likewise
    speed_ratio: Figure | None = None  # Time as computed over time in few bits, median of the rounds' own ratios
    kv_memory: int = 0  # Bytes of K/V of an engine; 0 where none was run
    concurrent_tokens: int = 0  # Tokens of each of its requests, prompt and answer
    concurrent: int = 0  # Most requests that ran at once before one was preempted
    concurrent_computed: int = 0  # Likewise, with K/V as computed in the same memory
    compared_alone: int = 0  # Of the first answers, how many were compared with what is answered alone
    same_alone: int = 0  # How many of those were the same
