"""The experiments by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sigma0.bench.strategyqa.direct import Direct
from sigma0.bench.strategyqa.items import Item
from sigma0.bench.strategyqa.level import Level
from sigma0.bench.strategyqa.prompted import ChainOfCode, ChainOfThought, ProgramTrace


@dataclass(frozen=True)
class Makings:
    """What levels are made from, beside the questions.

    Attributes:
        train: Items that a level may be seeded from.
    """

    train: Sequence[Item] = ()


EXPERIMENTS: dict[str, Callable[[Makings], Level]] = {
    "L0": lambda makings: Direct(),
    "L0-baseline": lambda makings: Direct(),
    "L1-cot": lambda makings: ChainOfThought(),
    "L1-coc": lambda makings: ChainOfCode(),
    "L1-ptp": lambda makings: ProgramTrace(),
}
