"""Scores of levels as rows of the ledger, with what they were measured under."""

import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import version

import torch

from sigma0.bench.core.conditions import device_name, git_commit
from sigma0.bench.core.rows import Conditions, Figure
from sigma0.bench.core.rows_tasks import StrategyQARow
from sigma0.bench.strategyqa.measure import Score
from sigma0.bench.strategyqa.opening import Bench, Opened

_LIBRARIES = ("sigma0-lm", "torch", "transformers")


def to_rows(scores: Sequence[Score], opened: Opened) -> list[StrategyQARow]:
    """The rows of a run, which has just ended.

    Args:
        scores: Of levels on its items.
        opened: What it went through.
    """
    conditions = conditions_of(opened)
    ended = datetime.now(timezone.utc).isoformat()
    return [_row(each, conditions, opened.bench, ended) for each in scores]


def conditions_of(opened: Opened) -> Conditions:
    """What a run is measured under."""
    bench, asked, model = opened.bench, opened.bench.asked, opened.bench.asked.model
    known = [(item.qid, item.question, item.answer) for item in opened.items]
    return Conditions(
        model=asked.chat.name,
        model_sha256=asked.identity,
        settings_sha256=asked.settings,
        total_loops=0 if model is None else getattr(model, "num_loops", 1),
        parameters=0 if model is None else sum(parameter.numel() for parameter in model.parameters()),
        device="endpoint" if model is None else device_name(model.device),
        dtype=asked.dtype,
        threads=torch.get_num_threads(),
        prompts=opened.where,
        prompts_sha256=sha256(repr(known).encode()).hexdigest(),
        n=len(opened.items),
        batch_size=bench.concurrency,
        max_new_tokens=bench.settings.max_tokens,
        commit=git_commit(),
        versions={"python": platform.python_version(), **{each: version(each) for each in _LIBRARIES}},
    )


def _row(found: Score, conditions: Conditions, bench: Bench, ended: str) -> StrategyQARow:
    low, high = found.accuracy.interval
    return StrategyQARow(
        **conditions.model_dump(),
        time=ended,
        level=found.level,
        variant=found.variant,
        labels=found.labels,
        effort=bench.settings.effort,
        temperature=bench.settings.temperature,
        seed=bench.settings.seed,
        accuracy=Figure(value=found.accuracy.value, low=low, high=high),
        majority=found.majority,
        misses=found.misses,
        against=found.against,
        difference=found.difference,
        p_value=found.p_value,
        p_holm=found.p_holm,
        calls=found.calls,
        prompt_tokens=found.usage.prompt_tokens,
        completion_tokens=found.usage.completion_tokens,
        loop_passes=found.usage.loop_passes,
        bytes_read=found.usage.bytes_read,
        seconds=found.usage.seconds,
        doors=found.doors,
    )
