"""What a run goes through: items, a model, settings and a cache, out of what the command line says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.cache import AnswerCache
from sigma0.bench.strategyqa.items import Item, Split, load_both, load_items, world_items
from sigma0.bench.strategyqa.level import Level
from sigma0.bench.strategyqa.models import Asked, concurrency_of, open_model
from sigma0.bench.strategyqa.runner import LevelRun, run_level
from sigma0.effort import SHARES

WORLD = "world"
# items of the micro-world: scored where no number is given, and seeded from
WORLD_SCORED, WORLD_SEEDS = 60, 200


@dataclass(frozen=True)
class Bench:
    """Who is asked, and how.

    Attributes:
        asked: The model.
        settings: Of all questions.
        cache: None asks everything.
        concurrency: Items at a time.
        retries: How often an item is begun anew that got no answer.
    """

    asked: Asked
    settings: AskSettings
    cache: AnswerCache | None
    concurrency: int
    retries: int

    def run(self, level: Level, items: Sequence[Item], advance: Callable[[], None]) -> LevelRun:
        """Runs a level over items; see `run_level`."""
        return run_level(
            level, items, self.asked.chat, self.settings, self.cache, self.concurrency, self.retries, advance
        )


def open_bench(
    model: str,
    ladder: str | None,
    base_url: str | None,
    device: str,
    dtype: str,
    concurrency: int,
    retries: int,
    settings: AskSettings,
    cache: Path | None,
) -> Bench:
    """Opens the model and the cache.

    Args:
        model: As `open_model` takes it, like the next four.
        ladder: Rungs.
        base_url: Of an endpoint.
        device: For models here.
        dtype: For models here.
        concurrency: Items at a time, and questions in a batch.
        retries: See `Bench`.
        settings: Of all questions.
        cache: File of answers; None keeps none.

    Raises:
        ValueError: For an effort that there is not, a model that cannot be had or cannot sample, or a bad cache.
    """
    if settings.effort not in SHARES:
        raise ValueError(f"no such effort: {settings.effort!r}; there are {', '.join(SHARES)}")
    asked = open_model(model, ladder, base_url, device, dtype, concurrency)
    if settings.temperature > 0 and not asked.samples:
        raise ValueError(f"{asked.chat.name} hands up whole answers, which are greedy: temperature must be 0")
    # answers in another dtype may differ
    kept = None if cache is None else AnswerCache(cache, {asked.chat.name: f"{asked.identity} {asked.dtype}"})
    return Bench(asked, settings, kept, concurrency_of(asked.chat, concurrency), retries)


def read_items(data: str, split: str, n: int | None, seed: int) -> tuple[list[Item], list[Item], str]:
    """The items to be scored, those that levels may be seeded from, and where they are from.

    Raises:
        ValueError: For a split that there is not, or data that cannot be read.
    """
    if data == WORLD:
        wanted = WORLD_SCORED if n is None else n
        seeds = world_items(WORLD_SEEDS, "train", seed)
        return world_items(wanted, "test", seed), seeds, f"micro-world, test, seed {seed}"
    if split not in get_args(Split):
        raise ValueError(f"no such split: {split!r}; there are {', '.join(get_args(Split))}")
    train, dev = load_both(data) if split == "dev" else (load_items(data, "train"), [])
    # levels are never seeded from what is scored
    items, seeds = (dev, train) if split == "dev" else (train, [])
    return items[:n], seeds, f"StrategyQA, {split}"
