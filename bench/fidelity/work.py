"""The parts of a measurement that take time, each by itself: in this process, or spread over workers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from sigma0.bench.core.replay import Trace, replaying
from sigma0.bench.core.workers import KeptResults, Pool
from sigma0.bench.fidelity.runs import ForcedRun, FreeRun, run_forced, run_free
from sigma0.calibrate.teacher_forcing import ForcedText, LoopReadings, groups_of, join_readings, read_forced
from sigma0.config import ExitConfig
from sigma0.models.load import load

FULL = ExitConfig(mode="full")


@dataclass(frozen=True)
class FreeJob:
    """A prompt to be continued.

    Attributes:
        prompt: Its ids.
        config: When tokens stop.
        max_new_tokens: At most.
        trace: Depths given beforehand in place of the rule; None without.
    """

    prompt: tuple[int, ...]
    config: ExitConfig
    max_new_tokens: int
    trace: Trace | None = None


class Work(Protocol):
    """Whoever does it; all do the same to the last bit in float32 on the same kind of machine, seconds apart."""

    def free(self, jobs: Sequence[FreeJob]) -> list[FreeRun]:
        """Continues prompts."""

    def forced(self, texts: Sequence[ForcedText], config: ExitConfig) -> list[ForcedRun]:
        """Decodes given continuations."""

    def read(self, texts: Sequence[ForcedText], configs: Mapping[str, ExitConfig]) -> LoopReadings:
        """Reads texts at every loop, for rules by name."""


def run_job(model: Any, job: FreeJob) -> FreeRun:
    """Continues a prompt."""
    if job.trace is None:
        return run_free(model, job.prompt, job.config, job.max_new_tokens)
    # the trace takes the rule's place; one that reads a gate costs what reading it costs, where there is one
    rule = replace(FULL, mode="qexit", q=1.0) if model.has_gate else replace(FULL, mode="converge")
    with replaying(model, job.trace):
        return run_free(model, job.prompt, rule, job.max_new_tokens)


def read_with(model: Any, texts: Sequence[ForcedText], configs: Mapping[str, ExitConfig]) -> LoopReadings:
    """Reads texts at every loop."""
    return read_forced(model, {name: model.exit_rule(config) for name, config in configs.items()}, texts)


class OwnWork:
    """Done in this process.

    Args:
        model: A looped model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def free(self, jobs: Sequence[FreeJob]) -> list[FreeRun]:
        """See `Work`."""
        return [run_job(self._model, job) for job in jobs]

    def forced(self, texts: Sequence[ForcedText], config: ExitConfig) -> list[ForcedRun]:
        """See `Work`."""
        return [run_forced(self._model, text, config) for text in texts]

    def read(self, texts: Sequence[ForcedText], configs: Mapping[str, ExitConfig]) -> LoopReadings:
        """See `Work`."""
        return read_with(self._model, texts, configs)


@dataclass(frozen=True)
class Loaded:
    """How a worker gets the model.

    Attributes:
        model: Shipped name, folder or hub id.
        model_sha256: Of its weights, so that what was kept of other ones is not taken for theirs.
        device: As torch has it.
        dtype: As `sigma0.load` takes it.
        threads: CPU threads.
        quantization: As `sigma0.load` takes it.
        recurrence: Likewise.
        stride: Likewise.
        kv: Likewise, by name or as JSON.
    """

    model: str
    model_sha256: str
    device: str
    dtype: str
    threads: int
    quantization: str | None = None
    recurrence: int | None = None
    stride: int | None = None
    kv: str | None = None


class SpreadWork:
    """Done by workers, each with the model loaded; a text or prompt at a time, but texts that are read together.

    Args:
        pool: The workers.
        loaded: How they get the model.
        kept: Results so far, and where they go.
        advance: Told how many items of each call are done.
    """

    def __init__(
        self,
        pool: Pool,
        loaded: Loaded,
        kept: KeptResults | None = None,
        advance: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._pool, self._loaded, self._kept, self._advance = pool, asdict(loaded), kept, advance

    def free(self, jobs: Sequence[FreeJob]) -> list[FreeRun]:
        """See `Work`."""
        items = [
            {
                "prompt": list(job.prompt),
                "config": job.config.to_dict(),
                "max_new_tokens": job.max_new_tokens,
                "trace": None if job.trace is None else asdict(job.trace),
            }
            for job in jobs
        ]
        return [_free_run(told) for told in self._spread(do_free, items)]

    def forced(self, texts: Sequence[ForcedText], config: ExitConfig) -> list[ForcedRun]:
        """See `Work`."""
        items = [{"text": asdict(text), "config": config.to_dict()} for text in texts]
        return [
            ForcedRun(np.array(told["same"], dtype=np.bool_), np.array(told["kl"], dtype=np.float32))
            for told in self._spread(do_forced, items)
        ]

    def read(self, texts: Sequence[ForcedText], configs: Mapping[str, ExitConfig]) -> LoopReadings:
        """See `Work`."""
        rules = {name: config.to_dict() for name, config in configs.items()}
        items = [{"texts": [asdict(text) for text in group], "rules": rules} for group in groups_of(texts)]
        return join_readings([_readings(told) for told in self._spread(do_read, items)])

    def _spread(self, function: Callable[[Any], Any], items: Sequence[dict[str, Any]]) -> list[Any]:
        # as JSON has it, so that an item has one name
        told = [{**item, "loaded": self._loaded} for item in items]
        return self._pool.spread(function, told, self._kept, self._advance)


def do_free(item: Any) -> Any:
    """Continues a prompt, in a worker."""
    trace = None if item["trace"] is None else Trace(**item["trace"])
    job = FreeJob(tuple(item["prompt"]), ExitConfig.parse(item["config"]), item["max_new_tokens"], trace)
    return asdict(run_job(_model(Loaded(**item["loaded"])), job))


def do_forced(item: Any) -> Any:
    """Decodes a given continuation, in a worker."""
    found = run_forced(_model(Loaded(**item["loaded"])), _text(item["text"]), ExitConfig.parse(item["config"]))
    return {"same": found.same.tolist(), "kl": found.kl.tolist()}


def do_read(item: Any) -> Any:
    """Reads texts at every loop, in a worker."""
    configs = {name: ExitConfig.parse(config) for name, config in item["rules"].items()}
    found = read_with(_model(Loaded(**item["loaded"])), [_text(text) for text in item["texts"]], configs)
    exits = {name: depths.tolist() for name, depths in found.exits.items()}
    arrays = {name: getattr(found, name).tolist() for name in ("text", "is_new", "same", "kl")}
    return {**arrays, "exits": exits}


def _readings(told: Any) -> LoopReadings:
    return LoopReadings(
        text=np.array(told["text"], dtype=np.int64),
        is_new=np.array(told["is_new"], dtype=np.bool_),
        same=np.array(told["same"], dtype=np.bool_),
        # every float32 comes back as it went
        kl=np.array(told["kl"], dtype=np.float32),
        exits={name: np.array(depths, dtype=np.int64) for name, depths in told["exits"].items()},
    )


def _text(told: Any) -> ForcedText:
    return ForcedText(tuple(told["ids"]), told["new"])


def _free_run(told: Any) -> FreeRun:
    lists = {name: tuple(told[name]) for name in ("ids", "depths", "reasons")}
    return FreeRun(**{**told, **lists})


@lru_cache(maxsize=1)
def _model(loaded: Loaded) -> Any:
    """The model of a worker, loaded once."""
    torch.set_num_threads(loaded.threads)
    places: dict[str, Any] = {"device": loaded.device, "dtype": loaded.dtype, "quantization": loaded.quantization}
    return load(loaded.model, recurrence=loaded.recurrence, stride=loaded.stride, kv=loaded.kv, **places)[0]
