"""All rows of the ledger: what each bench measured, with its figures, under which conditions."""

import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from sigma0.bench.core.conditions import Conditions, Figure, Strict
from sigma0.models.exit_thresholds import CalibratedThreshold
from sigma0.reason.progressive.policies import Level

Outcome = Literal["passed", "syntax", "exception", "wrong", "time", "limits"]


class Measured(Conditions):
    """A row: what was measured, under which conditions."""

    keyed: ClassVar[tuple[str, ...]]  # Fields that make two rows of a run measurements of the same thing

    time: str  # when its run began or ended, ISO 8601, UTC; the same for all rows of a run that times ways in turn

    @property
    def key(self) -> str:
        """What makes two rows of a run measurements of the same thing."""
        return row_key(*(getattr(self, name) for name in ("benchmark", *self.keyed)))


def row_key(*parts: Any) -> str:
    """What makes two rows of a run measurements of the same thing: the benchmark and the fields in `keyed`."""
    return json.dumps(parts, sort_keys=True)


class Promise(Strict):
    """What a threshold was calibrated to keep (`sigma0 calibrate`)."""

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
    head_rows: int  # Rows that the head read after the prompts
    new_tokens: int  # New tokens of the free runs
    reasons: dict[str, int]  # How many of them stopped for which reason; empty for depths given beforehand
    # New tokens over time, prompts included, of the timed runs; the time of a prompt is its median over some
    # rounds
    tokens_per_second: float
    speed_ratio: Figure | None  # The same over full depth's, run in turn with it; None for full depth
    timed: int  # Prompts that were timed, the first ones


class DepthSample(Strict):
    """A prompt as the model reads it, and text and depth of each new token."""

    prompt: str
    tokens: tuple[tuple[str, int], ...]


class DepthRow(Measured):
    """The depth of every new token after some of the prompts."""

    benchmark: Literal["depth"] = "depth"
    keyed: ClassVar = ("mode", "after_exit", "settings")
    mode: str  # The exit rule
    after_exit: Literal["finish", "drop", "verify"]  # What became of the deeper loops
    settings: dict[str, float | int | str]  # Parameters of the mode
    samples: tuple[DepthSample, ...]  # The texts


class Course(Strict):
    """The course of the tokens that a run replays in place of the model's own."""

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


class LadderRow(Measured):
    """One setting of a ladder from one model to a larger one; the conditions are those of the lower model."""

    benchmark: Literal["ladder"] = "ladder"
    keyed: ClassVar = ("time", "part", "family", "policy", "stay", "unit", "warm_start")
    # "choice" for the questions on which a curve's setting is chosen, "report" for those it is reported on
    part: Literal["choice", "report"] = "report"
    above: str  # Name of the larger model
    above_sha256: str  # Of its weights
    exit_config: dict[str, Any]  # Of the lower model; the larger one has its checkpoint's own
    family: str  # The curve that the setting lies on
    policy: dict[str, Any]  # What goes up, as JSON
    stay: int  # Further tokens that the larger model writes
    unit: Literal["token", "draft", "answer"]  # What goes up
    warm_start: bool  # Whether the larger model is given what the small one wrote
    accuracy: Figure  # Share of right answers
    cost: Figure  # Passes times block bytes of both models, prompts included, over those of the larger model alone
    seconds: Figure  # Wall-clock over that of the larger model alone, in the same run
    row_cost: float  # Rows times block parameters, over those of the larger model alone
    handed_up: float  # Share of all written tokens that the larger model wrote
    catch_ups: float  # Times that it caught up, for each answer; its first reading not counted


class Percentiles(Strict):
    """Of times, milliseconds."""

    p50: float
    p90: float
    p99: float


class ServeRow(Measured):
    """One way of asking a server under one load, measured in turn with the others of its run."""

    benchmark: Literal["serve"] = "serve"
    keyed: ClassVar = ("time", "way", "load", "amount")
    # `full`, `never` (an exit rule that is never met), `finish`, `drop`, `verify`, or `transformers` for
    # `transformers serve` on the same weights
    way: Literal["full", "never", "finish", "drop", "verify", "transformers"]
    runner: Literal["eager", "compile"] = "eager"  # What called the step; "eager" for transformers
    exit_config: dict[str, Any] | None  # What every request asked for; None of a server that has none
    load: Literal["closed", "open"]  # "closed": clients that ask on and on; "open": requests that come at random
    amount: float  # Clients; or requests a second
    requests: int  # In a round
    rounds: int  # How often every way was measured, in turn
    failed: int  # Requests that were not answered whole, over all rounds
    tokens_per_second: Figure  # New tokens of all clients; median of the rounds, the least and the greatest
    # Rows of the block, prompts included; None where the server does not tell, as is the next
    rows_per_second: float | None
    passes_per_second: float | None  # Calls of the block
    speed_ratio: Figure  # Tokens a second over those of `full` in the same round; median, least and greatest
    first_token_ms: Percentiles  # From request to first token, last round
    between_tokens_ms: Percentiles  # From token to token, last round


class VllmRow(Measured):
    """One server of the same checkpoint under one load, in turn with the others of its run."""

    benchmark: Literal["vllm"] = "vllm"
    keyed: ClassVar = ("time", "way", "clients")
    # `vllm` at full depth, `vllm-drafts`, or `full`, `verify` and `finish` of our server
    way: Literal["vllm", "vllm-drafts", "full", "verify", "finish"]
    vllm: str  # Version
    drafts: int | None  # Of `vllm-drafts`: drafts of a step at most; None elsewhere, as are the next two
    draft_loops: int | None  # Loops of a draft
    accepted_length: float | None  # Tokens that a step at full depth gave a sequence, where it had drafts
    clients: int  # That ask on and on
    requests: int  # In a round
    rounds: int  # How often each way was measured, in turn
    failed: int  # Requests that were not answered whole, over all rounds
    tokens_per_second: Figure  # New tokens of all clients; median of the rounds, the least and the greatest
    speed_ratio: Figure  # Tokens a second over those of `vllm` in the same round; median, least and greatest
    same_text: float  # Share of the answers that are, letter for letter, those of our server at full depth
    first_token_ms: Percentiles  # From request to first token, last round
    answer_ms: Percentiles  # From request to the whole answer, last round


class Tail(Strict):
    """Of times, milliseconds."""

    p50: float
    p95: float
    p99: float


# What a row's key tells of how much was simulated.
SIMULATION_SIZES = ("replicas", "group", "requests", "warm", "waiting", "seed", "runs")


class SimulationRow(Measured):
    """A SIMULATED fleet of replicas under one routing and one rate: computed from measured inputs, never measured.

    The conditions are those of the inputs; commit and versions are those of the simulation.
    """

    benchmark: Literal["simulation"] = "simulation"
    keyed: ClassVar = ("inputs_sha256", "routing", *SIMULATION_SIZES, "rate", "traffic")
    inputs_sha256: str  # Of the file of inputs
    routing: str  # Which replica a request goes to
    replicas: int  # Of the fleet
    group: int  # Replicas that share a router: all those of a run. A fleet of several groups was not simulated whole
    rate: float  # Requests a second for each replica
    requests: int  # Simulated requests that the figures are of, over all runs
    warm: int  # Requests for each replica before them, in each run
    waiting: int  # Requests that wait at a replica at most; more are refused
    seed: int  # Of all draws
    runs: int  # Independent runs of a group, each with draws of its own and the same ones under every routing
    traffic: dict[str, float]  # What is assumed of users
    # From arrival to admission, of the requests that were answered, as are all times; percentiles of each run,
    # and their mean over the runs
    queue_ms: Tail
    first_token_ms: Tail  # From arrival to first token
    latency_ms: Tail  # From arrival to last token
    by_kind_ms: dict[str, Tail]  # The same by kind of traffic
    latency_by_run_ms: tuple[Tail, ...]  # `latency_ms` of each run
    by_kind_by_run_ms: dict[str, tuple[Tail, ...]]  # `by_kind_ms` of each run
    refused: float  # Share of the requests that found everything full
    # Of each run, the mean latency of the later half of its requests over that of the earlier: above 1 where the
    # queue was still growing
    drift_by_run: tuple[float, ...]
    busy: float  # Share of the time in which a replica ran a pass
    slots: float  # Share of the slots that was taken
    rows_per_pass: float  # Mean
    beyond: float  # Share of the passes with more rows than any that was measured
    cached: float  # Share of prompt columns that were found in a prefix cache
    # Requests a second for each replica that came: fewer than `rate` where chats are refused and end, or turns
    # come later because answers do
    asked: float
    answered: float  # Requests a second that a replica answered
    # What the real engine took and what the simulation made of the same arrivals, at that of the rates at which
    # one engine was measured at which they are furthest apart; empty where it was not
    check_ms: dict[Literal["measured", "simulated"], Tail]

    @property
    def fleet_rate(self) -> float:
        """Requests a second of the whole fleet."""
        return self.rate * self.replicas


class OverheadRow(Measured):
    """Host time of a pass whose block computes nothing."""

    benchmark: Literal["overhead"] = "overhead"
    keyed: ClassVar = ("time", "way", "runner", "telemetry", "sequences", "lanes")
    # What runs the passes; with "transformers" a pass is a token of every sequence
    way: Literal["library", "engine", "transformers"]
    runner: Literal["eager", "compile"] | None  # What calls the step; None for transformers
    telemetry: bool  # Whether statistics are computed
    sequences: int  # How many
    lanes: int  # Tokens of each that are in flight
    rounds: int  # How often every way was measured, in turn
    rows_per_pass: float  # Mean, the passes at the end of a text included
    microseconds_per_pass: Figure  # Time of the thread that runs the passes; median of the rounds, least and greatest
    microseconds_per_row: Figure  # The same over the rows
    operations_per_pass: float  # Operations that torch dispatches


class HumanEvalRow(Measured):
    """How many problems of HumanEval a model solves at one setting; intervals are over problems."""

    benchmark: Literal["humaneval"] = "humaneval"
    keyed: ClassVar = (
        "exit_config",
        "temperature",
        "seed",
        "stop",
        "strip_prompt",
        "samples",
        "timeout_s",
        "memory_mb",
    )
    exit_config: dict[str, Any] | None  # Of a looped model, whole; None of others
    temperature: float  # 0 is greedy
    seed: int  # Of the sampling
    stop: tuple[str, ...]  # Strings that end a completion
    strip_prompt: bool  # Whether white space at the end of prompts was left for the model to write
    samples: int  # Completions of each problem
    sample_commits: tuple[str | None, ...]  # Of the code that wrote them, as `commit` is of the code that judged them
    timeout_s: float  # For one completion's check
    memory_mb: int  # Likewise
    # Unbiased estimate of the share of problems that k samples solve, by k. The interval is none where no sample
    # passed, or all did: `solved` tells the noise of those
    pass_at_k: dict[int, Figure]
    solved: Figure  # Share of problems that any of their samples solved, with its exact interval
    outcomes: dict[Outcome, int]  # How many samples ended how
    unfinished: int  # How many samples were cut off at the limit of new tokens
    new_tokens: int  # Of all samples
    # Exit depth over the tokens after each first; None of a model without loops, as are the next two
    mean_depth: Figure | None
    passes_saved: Figure | None  # 1 - passes / (T tokens), counted, over the same tokens
    rows_saved: Figure | None  # 1 - rows / (T tokens), counted


class StrategyQARow(Measured):
    """A level of control on yes or no questions, at most once an item.

    Of an endpoint, `model_sha256` is that of its address, and loops and parameters are 0: they are not known.
    """

    benchmark: Literal["strategyqa"] = "strategyqa"
    keyed: ClassVar = ("time", "level", "variant", "effort", "temperature", "seed")
    level: str  # Name of the level
    variant: str  # What it was made with, where that is not always the same: who routes, which file it was shown
    labels: str  # What it used of labels
    effort: str  # As the model was asked with
    temperature: float  # 0 is greedy
    seed: int  # Of the sampling
    accuracy: Figure  # Share of right answers with its exact interval; an item without an answer is wrong
    majority: float  # Share of the commoner label: what always saying it would score
    misses: dict[str, int]  # Items without an answer, by the step that failed
    against: str  # The level that it is held against
    # Accuracy less that of `against` on the same items; None for that one, and where it was not run
    difference: float | None
    p_value: float | None  # Of McNemar's exact test against it on the same items
    p_holm: float | None  # The same, corrected by Holm's method for all levels of the run
    calls: float  # Questions to the model for each item
    prompt_tokens: int  # Ids read, all items together
    completion_tokens: int  # Ids written, likewise
    loop_passes: int  # Of looped blocks, prompts left out, likewise; 0 of a model without them, or one that tells none
    bytes_read: int  # Passes times block bytes, over the rungs of a ladder; else 0
    seconds: float  # From question to answer, summed over all questions; of a batch each has its share
    doors: dict[str, int]  # That the verdicts on answers opened; empty of a model without verdicts


class LevelRates(Strict):
    """Progressive effort at one level of verification."""

    reached: int  # Questions that were verified at it
    passed: Figure  # Share of those that got out of it: to a higher one, or out of the last
    checks: int  # Verifications at it
    checks_passed: Figure  # Share of those that passed; its interval knows that those of one question go together


class OuterRow(Measured):
    """A way to answer, at once or by an outer loop, on the same questions as every way of its run."""

    benchmark: Literal["outer"] = "outer"
    keyed: ClassVar = ("time", "way", "seed")
    way: str  # Its name
    seed: int  # Of the stories and the samples
    right: Figure  # Share of right answers with its exact interval
    accepted_wrong: Figure  # Share of all questions on which the way stood behind a wrong answer
    accepted: Figure  # Share on which it stood behind its answer
    # Of the looped block a question, those over its prompts included; without loops one a token and prompt
    passes: Figure
    cost: float  # Those passes times the weights of a block, in passes of the run's first model
    calls: float  # Questions to the model for each item
    prompt_tokens: float  # Ids read for each item
    completion_tokens: float  # Ids written for each item
    seconds: float  # From question to answer, for each item
    # Points that it has right more than other ways of the run, on the same questions, by their names
    beats: dict[str, Figure]
    p_values: dict[str, float]  # Of McNemar's exact test against them
    # Of progressive effort, the levels of verification that were reached; of another way none
    levels: dict[Level, LevelRates] = Field(default_factory=dict)


AnyRow = (
    FidelityRow
    | DepthRow
    | SpeedRow
    | LadderRow
    | ServeRow
    | HumanEvalRow
    | StrategyQARow
    | SimulationRow
    | OverheadRow
    | OuterRow
    | QuantizationRow
    | KVRow
    | VllmRow
)
