"""The rows of a speed run: every way in turn, round after round."""

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sigma0.bench.core.conditions import Conditions, utc_now
from sigma0.bench.core.replay import Trace
from sigma0.bench.core.rows import Course, SpeedRow
from sigma0.bench.fidelity.grid import threshold
from sigma0.bench.speed.branches import Branches
from sigma0.bench.speed.decoders import (
    ADAPTIVE,
    FULL,
    OTHERS,
    PUBLISHED,
    Decoded,
    Decoder,
    Ours,
    PromptedCache,
    median_figure,
    turns,
)
from sigma0.bench.speed.engine import Engined, open_engine
from sigma0.bench.speed.peer import Published, Stock
from sigma0.bench.speed.roofline import block_bytes, bytes_per_token, copy_bandwidth
from sigma0.bench.speed.self_speculation import Drafting, SelfSpeculation
from sigma0.commands.options import check_known
from sigma0.config import AfterExit, ExitConfig

WAYS = ("full", "judged", "never", "finish", "drop", "verify", "huggingface")
# Ways that are timed where they are asked for.
MORE_WAYS = ("huggingface-static", "self-speculation", "one-branch", "two-branches")
# Ways that replay a course where there is one.
REPLAYING = (*ADAPTIVE, "self-speculation")
BRANCHES = ("one-branch", "two-branches")
DECODED_BY = ("library", "engine")
_NEVER = ExitConfig(mode="qexit", q=1.0)


@dataclass(frozen=True)
class Plan:
    """What is timed."""

    ways: tuple[str, ...]  # Some of `WAYS` and `MORE_WAYS`, and perhaps `PUBLISHED`
    config: ExitConfig  # The exit rule of `finish`, `drop`, `verify` and branches
    trace: Trace | None  # A course to replay in place of that rule, or None
    source: str  # Where the course comes from
    new_tokens: int  # New tokens of each run, at least 2
    rounds: int  # How often every way is timed, once more to warm up
    prompt_rounds: int = 3  # How often every reader reads the prompt
    by: str = "library"  # Who decodes: the library, or the server's engine
    drafting: Drafting | None = None  # Depth and length of the drafts of `self-speculation`

    def __post_init__(self) -> None:
        ways, known = set(self.ways), (*WAYS, *MORE_WAYS)
        for way in self.ways:
            if way not in (*known, PUBLISHED):
                raise ValueError(f"no such way: {way!r}; there are {', '.join(known)}")
        if self.trace is not None and (branching := sorted({*BRANCHES} & ways)):
            raise ValueError(
                f"{', '.join(branching)}: a course says nothing of what a second branch reads, leave out with a course"
            )
        if len(ways) < len(self.ways):
            raise ValueError(f"each way once, got {', '.join(self.ways)}")
        check_known("decoder", self.by, DECODED_BY)
        if self.by == "engine" and (other := sorted({"judged", *OTHERS} & ways)):
            raise ValueError(f"{', '.join(other)}: of the library alone, leave out with the engine")

    @property
    def steps(self) -> int:
        """Runs and readings of the prompt."""
        return len(self.ways) * (self.rounds + 1) + self.prompt_rounds * len({_reader(way) for way in self.ways})

    def config_of(self, way: str) -> ExitConfig:
        """The setting of a way."""
        if way in BRANCHES:
            return replace(self.config, after_exit="verify", redraft=False)
        if way in ("full", "judged", *OTHERS):
            return FULL
        if way == "never":
            return _NEVER
        return replace(self.config, after_exit=cast(AfterExit, way))


def measure(
    model: Any,
    ids: Tensor,
    plan: Plan,
    conditions: Conditions,
    on_step: Callable[[], object] = lambda: None,
    peer: Published | None = None,
) -> list[SpeedRow]:
    """Times every way on prompts `[B, S]` without pads; `on_step` is told of each of `plan.steps`."""
    started = utc_now()
    decoders = _decoders(model, ids, plan, peer)
    prompt_seconds = _read_prompts(decoders, plan, on_step)
    runs, peaks = _decode(decoders, plan, ids, on_step)
    # after the runs, so that it is no part of the most memory that was in use
    copy = copy_bandwidth(ids.device)
    rows = []
    for way in plan.ways:
        config = plan.config_of(way)
        replayed = plan.trace if way in REPLAYING else None
        figures = _figures(model, ids.shape[1], runs[way], runs.get("full"))
        if replayed is not None:
            figures["same_tokens"] = None  # a given course says nothing of the text
        drafting = plan.drafting if way == "self-speculation" else None
        course = replayed and Course(source=plan.source, exits=replayed.exits, settled=replayed.settled)
        rows.append(
            SpeedRow.model_validate(
                {
                    **conditions.model_dump(),
                    "time": started,
                    "way": way,
                    "by": plan.by,
                    "runner": runs[way][-1].runner,
                    "mode": config.mode if replayed is None else "replay",
                    "after_exit": config.after_exit,
                    "settings": asdict(drafting) if drafting else _settings(config, replayed is not None),
                    "course": course,
                    "context": ids.shape[1],
                    "rounds": plan.rounds,
                    "prompt_tokens_per_second": ids.shape[0] * (ids.shape[1] - 1) / prompt_seconds[_reader(way)],
                    "peak_bytes": peaks[way],
                    "copy_bandwidth": copy,
                    **figures,
                }
            )
        )
    return rows


def _decoders(model: Any, ids: Tensor, plan: Plan, peer: Published | None) -> dict[str, Decoder]:
    given, prompted = (model, ids, plan.new_tokens), PromptedCache(model, ids, plan.new_tokens)
    engine = open_engine(*given) if plan.by == "engine" else None

    def made(way: str) -> Decoder:
        config, trace = plan.config_of(way), plan.trace if way in ADAPTIVE else None
        if engine is not None:
            return Engined(engine, ids, plan.new_tokens, config, trace)
        if way in BRANCHES:
            return Branches(*given, config, way == "two-branches")
        if way == "self-speculation":
            assert plan.drafting is not None
            return SelfSpeculation(*given, plan.drafting, plan.trace, model.runner in ("compile", "cudagraph"))
        if way == PUBLISHED:
            assert peer is not None
            return peer
        if way in OTHERS:
            return Stock(*given, None if way == "huggingface" else "inductor")
        return Ours(prompted, config, trace, way == "judged")

    return {way: made(way) for way in plan.ways}


def _reader(way: str) -> str:
    """Who reads the prompt: all of ours share one reading."""
    return way if way in OTHERS else "sigma0"


def _read_prompts(decoders: Mapping[str, Decoder], plan: Plan, on_step: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each reader; in turn."""
    by_reader = {_reader(way): decoder for way, decoder in decoders.items()}
    seconds: dict[str, list[float]] = {reader: [] for reader in by_reader}
    for _ in range(plan.prompt_rounds):
        for reader, decoder in by_reader.items():
            seconds[reader].append(decoder.prompt())
            on_step()
    return {reader: median(values) for reader, values in seconds.items()}


def _decode(
    decoders: Mapping[str, Decoder], plan: Plan, ids: Tensor, on_step: Callable[[], object]
) -> tuple[dict[str, list[Decoded]], dict[str, int]]:
    """The runs of each way, the first round left out, and the most memory in use."""
    runs: dict[str, list[Decoded]] = {way: [] for way in plan.ways}
    peaks = dict.fromkeys(plan.ways, 0)
    for number, way in turns(plan.ways, plan.rounds):
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats(ids.device)
        decoded = decoders[way].decode()
        used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peaks[way] = max(peaks[way], torch.cuda.max_memory_allocated(ids.device) if ids.is_cuda else used)
        if number:
            runs[way].append(decoded)
        on_step()
    return runs, peaks if ids.is_cuda else dict.fromkeys(plan.ways, max(peaks.values()))


def _figures(model: Any, context: int, runs: Sequence[Decoded], full: Sequence[Decoded] | None) -> dict[str, Any]:
    last = runs[-1]
    batch, later, passes = len(last.tokens), last.later, last.passes / last.later
    seconds, ideal = np.array([run.seconds for run in runs]), model.num_loops / passes
    ratios = None
    if full is not None:
        ratios = np.array([run.seconds / run.later for run in full]) / (seconds / later)
    return {
        "milliseconds_per_token": median_figure(1000 * seconds / later),
        "tokens_per_second": median_figure(batch * later / seconds),
        "passes_per_token": passes,
        "tail_passes_per_token": last.tail_passes / later,
        "rows_per_token": last.rows / later / batch,
        "head_rows_per_token": last.head_rows / later / batch,
        "speed_ratio": None if ratios is None else median_figure(ratios),
        "ideal": ideal,
        "share_of_ideal": None if ratios is None else median_figure(ratios / ideal),
        "weight_bandwidth": block_bytes(model) * last.passes / float(np.median(seconds)),
        "same_tokens": None if full is None else bool(torch.equal(last.tokens, full[-1].tokens)),
        "kv_bytes_in_use": last.kv_in_use,
        "kv_bytes_allocated": last.kv_allocated,
        **bytes_per_token(model, last, context),
    }


def _settings(config: ExitConfig, replayed: bool) -> dict[str, float | int | str]:
    """What of a config has a say in the run."""
    result = {} if replayed else threshold(config)
    if config.min_loops > 1 and not replayed:
        result["min_loops"] = config.min_loops
    if config.after_exit == "verify":
        result["redraft"] = int(config.redraft)
    return result
