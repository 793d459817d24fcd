"""How the figures of sentences are written, each marked as computed."""

from sigma0.bench.core.ledger import Figure
from sigma0.bench.figures.check import computed as c


def percent(value: float, digits: int = 1) -> str:
    """A share in per cent."""
    return c(100 * value, f".{digits}f")


def only(values: set[int]) -> str:
    """The one value that all share."""
    (shared,) = values
    return c(shared, ",")


def value(figure: Figure | None) -> float:
    """The value of a figure that was measured."""
    assert figure is not None
    return figure.value
