"""What takes time, a prompt or a text at a time: in this process, or by workers that have the model each.

Free generation with its counts, a given continuation decoded under `drop`, and texts read at every loop. Workers do the
same to the last bit in float32 on the same kind of machine, seconds apart.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter

from sigma0.bench.core.replay import Trace, replaying
from sigma0.calibrate import teacher_forcing as forcing
from sigma0.calibrate.agreement import continue_alone
from sigma0.config import ExitConfig
from sigma0.models.load import load

FULL = ExitConfig(mode="full")
# of the arrays of `LoopReadings`: every float32 comes back from JSON as it went
_ARRAYS: dict[str, Any] = {"text": np.int64, "is_new": np.bool_, "same": np.bool_, "kl": np.float32}


@dataclass(frozen=True)
class FreeJob:
    """A prompt to be continued."""

    prompt: tuple[int, ...]  # Its ids
    config: ExitConfig  # When tokens stop
    max_new_tokens: int  # At most
    trace: Trace | None = None  # Depths given beforehand in place of the rule; None without


@dataclass(frozen=True)
class FreeRun:
    """A prompt continued greedily."""

    ids: tuple[int, ...]  # The new tokens
    depths: tuple[int, ...]  # Loop at which each was read
    reasons: tuple[str, ...]  # Why each stopped there
    passes: int  # Calls of the shared block after the prompt
    rows: int  # Rows in them
    prompt_rows: int  # Rows that reading the prompt took
    head_rows: int  # Rows that the head read after the prompt
    seconds: float  # Wall-clock time, prompt included


_JOB, _RUN, _TEXT = TypeAdapter(FreeJob), TypeAdapter(FreeRun), TypeAdapter(forcing.ForcedText)


def run_free(model: Any, prompt: tuple[int, ...], config: ExitConfig, max_new_tokens: int) -> FreeRun:
    """Continues a prompt of ids greedily, alone in its batch."""
    _wait(model.device)
    start = time.perf_counter()
    outputs = continue_alone(model, prompt, config, max_new_tokens)
    _wait(model.device)
    seconds = time.perf_counter() - start
    return FreeRun(
        ids=tuple(outputs.sequences[0, len(prompt) :].tolist()),
        depths=tuple(outputs.exit_depths[0].tolist()),
        reasons=tuple(outputs.exit_reasons[0]),
        passes=outputs.loop_passes,
        rows=outputs.loop_rows,
        prompt_rows=outputs.prompt_rows,
        head_rows=outputs.head_rows,
        seconds=seconds,
    )


def run_job(model: Any, job: FreeJob) -> FreeRun:
    """Continues a prompt by its rule or its trace."""
    if job.trace is None:
        return run_free(model, job.prompt, job.config, job.max_new_tokens)
    # the trace takes the rule's place; one that reads a gate costs what reading it costs, where there is one
    rule = replace(FULL, mode="qexit", q=1.0) if model.has_gate else replace(FULL, mode="converge")
    with replaying(model, job.trace):
        return run_free(model, job.prompt, rule, job.max_new_tokens)


class Work:
    """Whoever does it: a looped model in this process, or workers, each by `do_item`, to whom items are spread."""

    def __init__(self, model: Any, spread: Callable[[list[Any]], list[Any]] | None = None) -> None:
        self._spread = spread or (lambda items: [_done(model, item) for item in items])

    def free(self, jobs: Sequence[FreeJob]) -> list[FreeRun]:
        """Continues prompts."""
        result = self._spread([{"what": "free", "job": _JOB.dump_python(job, mode="json")} for job in jobs])
        return [_RUN.validate_python(output) for output in result]

    def forced(
        self, texts: Sequence[forcing.ForcedText], config: ExitConfig
    ) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Decodes given continuations one token at a time, so that `drop` sees the planes that it would see.

        Returns:
            Of all new tokens, whether the argmax at the exit is full depth's, and KL(full || exit) in nats, `[N]`.
        """
        items = [{"what": "forced", "text": asdict(text), "config": config.to_dict()} for text in texts]
        same, kl = zip(*self._spread(items), strict=True)
        return np.concatenate(same).astype(np.bool_), np.concatenate(kl).astype(np.float32)

    def read(self, texts: Sequence[forcing.ForcedText], configs: Mapping[str, ExitConfig]) -> forcing.LoopReadings:
        """Reads texts at every loop, for rules by name; those go to one worker that are read together."""
        rules = {name: config.to_dict() for name, config in configs.items()}
        groups = [[asdict(text) for text in group] for group in forcing.groups_of(texts)]
        result = self._spread([{"what": "read", "texts": group, "rules": rules} for group in groups])
        return forcing.join_readings([_readings(output) for output in result])


def do_item(item: Any) -> Any:
    """Does an item in a worker, which has the model by the arguments of `sigma0.load` in `loaded`."""
    return _done(_model(json.dumps(item["loaded"])), item)


def _done(model: Any, item: Any) -> Any:
    if item["what"] == "free":
        return asdict(run_job(model, _JOB.validate_python(item["job"])))
    if item["what"] == "forced":
        return _run_forced(model, _TEXT.validate_python(item["text"]), ExitConfig.parse(item["config"]))
    rules = {name: model.exit_rule(ExitConfig.parse(config)) for name, config in item["rules"].items()}
    result = forcing.read_forced(model, rules, [_TEXT.validate_python(text) for text in item["texts"]])
    exits = {name: depths.tolist() for name, depths in result.exits.items()}
    return {**{name: getattr(result, name).tolist() for name in _ARRAYS}, "exits": exits}


@torch.no_grad()
def _run_forced(model: Any, text: forcing.ForcedText, config: ExitConfig) -> list[Any]:
    """The prompt is read as prompts are, at full depth."""
    ids = torch.tensor([text.ids], device=model.device)
    prompt = ids.shape[1] - text.new
    full = model(ids, use_cache=False, exit_config=FULL, logits_to_keep=text.new + 1)
    reference = torch.log_softmax(forcing.check_finite(full.logits[0, :-1], model.num_loops).float(), -1)  # [new, V]
    cache = model.new_cache(ids.shape[1])
    parts = [model(ids[:, :prompt], past_key_values=cache, exit_config=config, logits_to_keep=1).logits[0]]
    for place in range(prompt, ids.shape[1] - 1):
        parts.append(model(ids[:, place : place + 1], past_key_values=cache, exit_config=config).logits[0])
    result = torch.log_softmax(torch.cat(parts).float(), -1)  # [new, V]
    same = reference.argmax(-1) == result.argmax(-1)
    return [same.tolist(), forcing.divergence(reference, result).tolist()]


def _readings(output: Any) -> forcing.LoopReadings:
    arrays = {name: np.array(output[name], dtype=kind) for name, kind in _ARRAYS.items()}
    exits = {name: np.array(depths, dtype=np.int64) for name, depths in output["exits"].items()}
    return forcing.LoopReadings(**arrays, exits=exits)


@lru_cache(maxsize=1)
def _model(loaded: str) -> Any:
    output = json.loads(loaded)
    torch.set_num_threads(output["threads"])
    return load(output["name"], **output["options"])[0]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
