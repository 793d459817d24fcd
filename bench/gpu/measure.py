"""Where a decode pass goes on a device, kernel by kernel; and prompts of a warm model beside transformers' own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from sigma0.bench.core.conditions import device_name, git_commit
from sigma0.bench.speed.courses import STATED
from sigma0.bench.speed.decoders import FULL, Ours, PromptedCache, now
from sigma0.bench.speed.peer import StockLoopedModel
from sigma0.bench.speed.roofline import block_bytes, copy_bandwidth
from sigma0.bench.speed.shapes import open_model, prompt_ids
from sigma0.config import ExitConfig
from sigma0.decode.runners import choose_runner
from sigma0.models.cache_name import named_cache

_WARM = 3


def passes(
    device: str, dtype: str, shape: str, runner: str, context: int, new_tokens: int, ways: tuple[str, ...], out: Path
) -> None:
    """Writes a profile of one run of each way as JSON: what `pass_profile` tells, under the name of the way."""
    model, _ = open_model("", shape, device, dtype)
    chosen = choose_runner(runner, model)
    model.runner = chosen.name
    ids, _ = prompt_ids(model, None, "", 1, context, new_tokens)
    trace, rule = STATED.scaled(model.num_loops), model.resolve_exit_config(ExitConfig().filled())
    prompted = PromptedCache(model, ids, new_tokens)
    report: dict[str, Any] = {
        **_conditions(model, shape, dtype),
        "runner": chosen.name,
        "context": context,
        "new_tokens": new_tokens,
        "block_bytes": block_bytes(model),
        "copy_bandwidth": copy_bandwidth(model.device),
        "ways": {},
    }
    for way in ways:
        config = FULL if way == "full" else replace(rule, after_exit=way)
        report["ways"][way] = pass_profile(Ours(prompted, config, None if way == "full" else trace))
        out.write_text(json.dumps(report, indent=1) + "\n")


def _conditions(model: Any, shape: str, dtype: str) -> dict[str, Any]:
    output = {"shape": shape, "dtype": dtype, "device": device_name(model.device), "torch": torch.__version__}
    return {**output, "commit": git_commit()}


def pass_profile(decoder: Ours) -> dict[str, Any]:
    """Of one run, on the device, or on the CPU where there is none.

    Returns:
        `passes`; of one pass `microseconds` by the clock of a run that nobody watched, `launches`, `busy` (microseconds
        in which any of them ran) and `gaps` (microseconds between the first and the last in which none ran); and of
        every kernel, the longest first, its name, launches a pass, microseconds each and a pass.
    """
    for _ in range(_WARM):
        run = decoder.decode()
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as watched:
        decoder.decode()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in watched.events() or []
        if (event.device_type.name == "CUDA" if on_gpu else event.cpu_parent is None)
    )
    return {"passes": run.passes, "microseconds": 1e6 * run.seconds / run.passes, **kernels_of(spans, run.passes)}


def kernels_of(spans: list[tuple[float, float, str]], passes: int) -> dict[str, Any]:
    """What `pass_profile` tells of kernels, spread over some passes.

    `spans` are start, end (microseconds) and name of each, by their start; those of the prompt's last token count too.
    """
    took: dict[str, list[float]] = {}
    busy, until = 0.0, float("-inf")
    for start, end, name in spans:
        took.setdefault(name, []).append(end - start)
        # those that overlap, as with dependent launch, are counted once
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - spans[0][0] if spans else 0.0
    kernels = [
        {"name": name, "launches": len(entry) / passes, "each": sum(entry) / len(entry), "a_pass": sum(entry) / passes}
        for name, entry in sorted(took.items(), key=lambda item: -sum(item[1]))
    ]
    return {
        "launches": len(spans) / passes,
        "busy": busy / passes,
        "gaps": (whole - busy) / passes,
        "kernels": kernels,
    }


def prompts(device: str, dtype: str, shape: str, contexts: tuple[int, ...], rounds: int, out: Path) -> None:
    """Writes tokens a second, and the time to the first token, of each context and reader as JSON.

    Medians over the rounds after one that warms up.
    """
    model, _ = open_model("", shape, device, dtype)
    stock = StockLoopedModel(model)
    output = _conditions(model, shape, dtype)
    rows: list[dict[str, Any]] = []
    for context in contexts:
        ids, _ = prompt_ids(model, None, "", 1, context, 2)
        mask, positions = torch.ones_like(ids), torch.arange(context, device=ids.device)[None]

        def read(reader: Any) -> None:
            if reader is stock:
                stock(ids, position_ids=positions, **named_cache(DynamicCache()), logits_to_keep=1)  # noqa: B023
            else:
                model(ids, past_key_values=model.new_cache(context), exit_config=FULL, logits_to_keep=1)  # noqa: B023

        def first(reader: Any) -> None:
            settings = {} if reader is stock else {"exit_config": FULL}
            reader.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, **settings)  # noqa: B023

        for name, reader in (("sigma0", model), ("huggingface", stock)):
            seconds, until = (_seconds(call, reader, ids, rounds) for call in (read, first))
            row = {"reader": name, "context": context, "rounds": rounds, "tokens_per_second": context / seconds}
            rows.append({**output, **row, "milliseconds_to_first_token": 1e3 * until})
        out.write_text(json.dumps(rows, indent=1) + "\n")


@torch.no_grad()
def _seconds(call: Callable[[Any], None], reader: Any, like: torch.Tensor, rounds: int) -> float:
    call(reader)
    taken = []
    for _ in range(rounds):
        start = now(like)
        call(reader)
        taken.append(now(like) - start)
    return median(taken)
