"""Rows about what is built of models: ladders, servers, and fleets of them in simulation."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from sigma0.bench.core.rows import Conditions, Figure


class LadderRow(Conditions):
    """One setting of a ladder from one model to a larger one; the conditions are those of the lower model.

    Attributes:
        benchmark: "ladder".
        time: When the run began, ISO 8601, UTC; the same for all its rows.
        part: "choice" for the questions on which a curve's setting is chosen, "report" for those it is reported on.
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
    part: Literal["choice", "report"] = "report"
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
            [self.benchmark, self.time, self.part, self.family, self.policy, self.stay, self.unit, self.warm_start],
            sort_keys=True,
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
        runner: What called the step; "eager" for transformers.
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
    runner: Literal["eager", "compile"] = "eager"
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


class VllmRow(Conditions):
    """One server of the same checkpoint under one load, in turn with the others of its run.

    Attributes:
        benchmark: "vllm".
        time: When the run ended, ISO 8601, UTC; the same for all its rows.
        way: `vllm` at full depth, `vllm-drafts`, or `full`, `verify` and `finish` of our server.
        vllm: Version.
        drafts: Of `vllm-drafts`: drafts of a step at most; None elsewhere, as are the next two.
        draft_loops: Loops of a draft.
        accepted_length: Tokens that a step at full depth gave a sequence, where it had drafts.
        clients: That ask on and on.
        requests: In a round.
        rounds: How often each way was measured, in turn.
        failed: Requests that were not answered whole, over all rounds.
        tokens_per_second: New tokens of all clients; median of the rounds, the least and the greatest.
        speed_ratio: Tokens a second over those of `vllm` in the same round; median, least and greatest.
        same_text: Share of the answers that are, letter for letter, those of our server at full depth.
        first_token_ms: From request to first token, last round.
        answer_ms: From request to the whole answer, last round.
    """

    benchmark: Literal["vllm"] = "vllm"
    time: str
    way: Literal["vllm", "vllm-drafts", "full", "verify", "finish"]
    vllm: str
    drafts: int | None
    draft_loops: int | None
    accepted_length: float | None
    clients: int
    requests: int
    rounds: int
    failed: int
    tokens_per_second: Figure
    speed_ratio: Figure
    same_text: float
    first_token_ms: Percentiles
    answer_ms: Percentiles

    @property
    def key(self) -> str:
        """What makes two rows measurements of the same thing: another run is another measurement."""
        return json.dumps([self.benchmark, self.time, self.way, self.clients])


class Tail(BaseModel):
    """Of times, milliseconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    p50: float
    p95: float
    p99: float


class SimulationRow(Conditions):
    """A SIMULATED fleet of replicas under one routing and one rate: computed from measured inputs, never measured.

    The conditions are those of the inputs; commit and versions are those of the simulation.

    Attributes:
        benchmark: "simulation".
        time: When the run began, ISO 8601, UTC; the same for all its rows.
        inputs_sha256: Of the file of inputs.
        routing: Which replica a request goes to.
        replicas: Of the fleet.
        group: Replicas that share a router: all those of a run. A fleet of several groups was not simulated whole.
        rate: Requests a second for each replica.
        requests: Simulated requests that the figures are of, over all runs.
        warm: Requests for each replica before them, in each run.
        waiting: Requests that wait at a replica at most; more are refused.
        seed: Of all draws.
        runs: Independent runs of a group, each with draws of its own and the same ones under every routing.
        traffic: What is assumed of users.
        queue_ms: From arrival to admission, of the requests that were answered, as are all times; percentiles of each
            run, and their mean over the runs.
        first_token_ms: From arrival to first token.
        latency_ms: From arrival to last token.
        by_kind_ms: The same by kind of traffic.
        latency_by_run_ms: `latency_ms` of each run.
        by_kind_by_run_ms: `by_kind_ms` of each run.
        refused: Share of the requests that found everything full.
        drift_by_run: Of each run, the mean latency of the later half of its requests over that of the earlier: above 1
            where the queue was still growing.
        busy: Share of the time in which a replica ran a pass.
        slots: Share of the slots that was taken.
        rows_per_pass: Mean.
        beyond: Share of the passes with more rows than any that was measured.
        cached: Share of prompt columns that were found in a prefix cache.
        asked: Requests a second for each replica that came: fewer than `rate` where chats are refused and end, or turns
            come later because answers do.
        answered: Requests a second that a replica answered.
        check_ms: What the real engine took and what the simulation made of the same arrivals, at that of the rates at
            which one engine was measured at which they are furthest apart; empty where it was not.
    """

    benchmark: Literal["simulation"] = "simulation"
    time: str
    inputs_sha256: str
    routing: str
    replicas: int
    group: int
    rate: float
    requests: int
    warm: int
    waiting: int
    seed: int
    runs: int
    traffic: dict[str, float]
    queue_ms: Tail
    first_token_ms: Tail
    latency_ms: Tail
    by_kind_ms: dict[str, Tail]
    latency_by_run_ms: tuple[Tail, ...]
    by_kind_by_run_ms: dict[str, tuple[Tail, ...]]
    refused: float
    drift_by_run: tuple[float, ...]
    busy: float
    slots: float
    rows_per_pass: float
    beyond: float
    cached: float
    asked: float
    answered: float
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


class OverheadRow(Conditions):
    """Host time of a pass whose block computes nothing.

    Attributes:
        benchmark: "overhead".
        time: When the run ended, ISO 8601, UTC; the same for all its rows.
        way: What runs the passes; with "transformers" a pass is a token of every sequence.
        runner: What calls the step; None for transformers.
        telemetry: Whether statistics are computed.
        sequences: How many.
        lanes: Tokens of each that are in flight.
        rounds: How often every way was measured, in turn.
        rows_per_pass: Mean, the passes at the end of a text included.
        microseconds_per_pass: Time of the thread that runs the passes; median of the rounds, least and greatest.
        microseconds_per_row: The same over the rows.
        operations_per_pass: Operations that torch dispatches.
    """

    benchmark: Literal["overhead"] = "overhead"
    time: str
    way: Literal["library", "engine", "transformers"]
    runner: Literal["eager", "compile"] | None
    telemetry: bool
    sequences: int
    lanes: int
    rounds: int
    rows_per_pass: float
    microseconds_per_pass: Figure
    microseconds_per_row: Figure
    operations_per_pass: float

    @property
    def key(self) -> str:
        """What makes two rows measurements of the same thing: another run is another measurement."""
        return json.dumps(
            [self.benchmark, self.time, self.way, self.runner, self.telemetry, self.sequences, self.lanes]
        )
