"""Levels spread over workers: items a few at a time, but a level that learns goes through all of its items in one."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from pydantic import TypeAdapter

from sigma0.bench.core.workers import KeptResults, Pool
from sigma0.bench.strategyqa.level import Answered, Level, LevelRun, labels_used
from sigma0.bench.strategyqa.opening import Opened, Opening
from sigma0.bench.strategyqa.registry import EXPERIMENTS

_ANSWERED = TypeAdapter(list[Answered])


Levels = Sequence[tuple[str, Level]]


def pieces_of(levels: Levels, opening: Opening, opened: Opened) -> list[dict[str, Any]]:
    """What workers do one by one, levels that learn first: each of them takes one worker for long.

    Workers get model and items by the opening, which is opened here.
    """
    # with the digest, what was kept of other weights or items is not taken for theirs
    shared = {"opening": opening.model_dump(mode="json"), "sha256": opened.sha256()}
    pieces, n = [], len(opened.items)
    for name, level in sorted(levels, key=lambda item: item[1].learn is None):
        step = n if level.learn else opened.concurrency
        pieces += [{**shared, "level": name, "first": first, "step": step} for first in range(0, n, step)]
    return pieces


def run_pieces(
    levels: Levels, pieces: list[dict[str, Any]], pool: Pool, kept: KeptResults, advance: Callable[[int], None]
) -> list[LevelRun]:
    """Runs levels by workers that have the model each; `advance` is told how many pieces are done."""
    obtained: dict[str, list[Answered]] = {name: [] for name, _ in levels}
    for piece, result in zip(pieces, pool.spread(do_level, pieces, kept, advance), strict=True):
        obtained[piece["level"]] += _ANSWERED.validate_python(result)
    return [LevelRun(level.name, labels_used(level), tuple(obtained[name])) for name, level in levels]


def do_level(piece: Any) -> Any:
    """Runs a level over some items, in a worker."""
    opened, obtained = _opened(json.dumps(piece["opening"]))
    if obtained != piece["sha256"]:
        raise ValueError("a worker found other weights, items or files under the same names than this process did")
    level = _level(json.dumps(piece["opening"]), piece["level"])
    if level.learn:
        # one that knows of no item
        level = EXPERIMENTS[level.name](opened.makings)
    run = opened.run(level, opened.items[piece["first"] : piece["first"] + piece["step"]], lambda: None)
    return [asdict(item) for item in run.answered]


@lru_cache(maxsize=1)
def _opened(output: str) -> tuple[Opened, str]:
    """What a worker opens, once, and its digest; keyed by its text."""
    opening = Opening.model_validate_json(output)
    torch.set_num_threads(opening.threads)
    opened = opening.open()
    return opened, opened.sha256()


@lru_cache(maxsize=len(EXPERIMENTS))
def _level(output: str, name: str) -> Level:
    """A level, made once: some read files or index paragraphs."""
    return EXPERIMENTS[name](_opened(output)[0].makings)
