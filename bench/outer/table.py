"""The tables of `python -m sigma0.bench outer`."""

from collections.abc import Sequence

from sigma0.bench.core.tables import BenchTable
from sigma0.bench.outer.measure import Difference, Summary
from sigma0.calibrate.bootstrap import Estimate


def ways_table(summaries: Sequence[Summary]) -> BenchTable:
    """A row for each way."""
    headings = ("way", "right, %", "wrong accepted, %", "accepted, %", "passes", "cost", "tokens", "questions", "ms")
    cells = [
        (
            one.way,
            _percent(one.right),
            _percent(one.accepted_wrong),
            _percent(one.accepted),
            f"{one.passes.value:.0f}",
            f"{one.cost:.0f}",
            f"{one.tokens:.0f}",
            f"{one.calls:.1f}",
            f"{1000 * one.seconds:.0f}",
        )
        for one in summaries
    ]
    return BenchTable(headings, cells, f"{summaries[0].n} held-out questions of the hard half")


def differences_table(differences: Sequence[Difference]) -> BenchTable:
    """A row for each comparison."""
    cells = [(one.first, one.second, _percent(one.points), f"{one.p:.2g}") for one in differences]
    return BenchTable(("first", "second", "more right, points", "p (McNemar)"), cells, "On the same questions")


def _percent(value: Estimate) -> str:
    low, high = value.interval
    return f"{100 * value.value:.1f} ({100 * low:.1f} to {100 * high:.1f})"
