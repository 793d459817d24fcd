"""Levels beside L0 on the same items, as rows: accuracy with intervals, paired tests, and what it took."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from hashlib import sha256
from typing import Any

import torch

from sigma0.bench.core.conditions import Conditions, Figure, device_name, git_commit, library_versions
from sigma0.bench.core.rows import StrategyQARow
from sigma0.bench.strategyqa.opening import Opened
from sigma0.bench.strategyqa.runner import LevelRun
from sigma0.bench.strategyqa.statistics import holm, majority, mcnemar
from sigma0.calibrate.bootstrap import share

BASELINE = "L0"
# under so many items, differences of 10 points are noise
FEW = 200


def to_rows(runs: Sequence[LevelRun], opened: Opened, against: str = BASELINE) -> list[StrategyQARow]:
    """The rows of a run, which has just ended.

    Args:
        runs: Of levels on its items.
        opened: What it went through.
        against: As of `score`.
    """
    settings = opened.settings
    common = {
        **conditions_of(opened).model_dump(),
        "time": datetime.now(timezone.utc).isoformat(),
        "effort": settings.effort,
        "temperature": settings.temperature,
        "seed": settings.seed,
    }
    return [StrategyQARow(**common, **each) for each in score(runs, against)]


def conditions_of(opened: Opened) -> Conditions:
    """What a run is measured under."""
    asked, model = opened.asked, opened.asked.model
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
        batch_size=opened.concurrency,
        max_new_tokens=opened.settings.max_tokens,
        commit=git_commit(),
        versions=library_versions(),
    )


def score(runs: Sequence[LevelRun], against: str = BASELINE) -> list[dict[str, Any]]:
    """What a row says of each of some levels, by the names of `StrategyQARow`.

    Args:
        runs: On items of one set; each may have gone through fewer of them.
        against: Name of the level that the others are held against: the first of it that there is.
    """
    base = next((run for run in runs if run.level == against), None)
    right = {} if base is None else {each.qid: each.right for each in base.answered}
    pairs = [
        [] if run is base else [(right[each.qid], each.right) for each in run.answered if each.qid in right]
        for run in runs
    ]
    raw = {str(place): mcnemar(*zip(*found, strict=True)) for place, found in enumerate(pairs) if found}
    corrected = holm(raw)
    rows = []
    for place, (run, found) in enumerate(zip(runs, pairs, strict=True)):
        usage = asdict(run.usage)
        del usage["calls"]
        n = len(run.answered)
        rows.append(
            {
                "level": run.level,
                "variant": run.variant,
                "labels": run.labels,
                "accuracy": Figure.of(share(run.right, n)),
                "majority": majority([each.label for each in run.answered]).value,
                "misses": dict(run.misses),
                "against": against,
                "difference": sum(own - first for first, own in found) / len(found) if found else None,
                "p_value": raw.get(str(place)),
                "p_holm": corrected.get(str(place)),
                "calls": sum(len(each.purposes) for each in run.answered) / n,
                "doors": dict(Counter(door for each in run.answered for door in each.doors)),
                **usage,
            }
        )
    return rows
