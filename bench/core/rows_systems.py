"""Rows about what is built of models: ladders, servers, and fleets of them in simulation."""

import json
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from sigma0.bench.core.rows import Figure, Measured


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


class Percentiles(BaseModel):
    """Of times, milliseconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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


class Tail(BaseModel):
    """Of times, milliseconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    p50: float
    p95: float
    p99: float


class SimulationRow(Measured):
    """A SIMULATED fleet of replicas under one routing and one rate: computed from measured inputs, never measured.

    The conditions are those of the inputs; commit and versions are those of the simulation.
    """

    benchmark: Literal["simulation"] = "simulation"
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

    @property
    def key(self) -> str:
        """What makes two rows of a run simulations of the same thing."""
        sizes = {name: getattr(self, name) for name in SIMULATION_SIZES}
        return simulation_key(self.inputs_sha256, self.routing, sizes, self.rate, self.traffic)


# What a row's key tells of how much was simulated.
SIMULATION_SIZES = ("replicas", "group", "requests", "warm", "waiting", "seed", "runs")


def simulation_key(
    inputs_sha256: str, routing: str, sizes: dict[str, int], rate: float, traffic: dict[str, float]
) -> str:
    """The key of a row.

    Args:
        inputs_sha256: Of the file of inputs.
        routing: Its name.
        sizes: By the names in `SIMULATION_SIZES`.
        rate: Requests a second for each replica.
        traffic: What is assumed of users.
    """
    return json.dumps(["simulation", inputs_sha256, routing, sizes, rate, traffic], sort_keys=True)


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
