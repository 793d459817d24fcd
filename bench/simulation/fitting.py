"""How the time of a pass grows with what is in it, by least squares over measured passes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sigma0.bench.simulation.inputs import TERMS, PassTime, PassTimes
from sigma0.bench.simulation.replica import PassWork

# Rows at which the line by rows may bend.
KNOTS = (1, 4, 16, 64, 128, 256, 512, 1024)
APART = 1.5
# Passes that took longer than the others by so many times their spread were disturbed.
OUTLIERS = 6.0
FEWEST = 50
# The fit and the paces of the rounds are found in turn.
STEPS = 3


class TimedPass(NamedTuple):
    """What a pass held, and the seconds that it took."""

    work: PassWork
    seconds: float


def fit_passes(rounds: Sequence[Sequence[TimedPass]]) -> PassTimes:
    """Fits times that nothing in a pass can make shorter, more rows neither.

    Passes that something else on the machine disturbed do not bend the fit, but their time counts: all fitted times
    together are all measured ones.

    Args:
        rounds: Passes of different sizes, and much the same in each round.

    Raises:
        ValueError: If they are too few, hold no row, or took no time.
    """
    passes = [each for found in rounds for each in found]
    if len(passes) < FEWEST or not all(rounds):
        raise ValueError(f"{len(passes)} passes are too few to tell how their time grows: give more prompts")
    bad = next((each for each in passes if each.work.rows < 1 or not 0 < each.seconds < float("inf")), None)
    if bad is not None:
        raise ValueError(f"a pass has at least 1 row and takes more than 0 seconds, got {bad}")
    rows = np.array([each.work.rows for each in passes], dtype=np.float64)
    knots = knots_for(int(rows.min()), int(rows.max()))
    # how much of each rise from knot to knot the line has taken at some rows; of the first all
    hats = np.column_stack([np.interp(rows, knots, each) for each in np.eye(len(knots))])
    rises = np.cumsum(hats[:, ::-1], axis=1)[:, ::-1]
    others = [[term(each.work) for term in TERMS.values()] for each in passes]
    parts = np.column_stack([rises, np.array(others, dtype=np.float64)])
    took = 1000 * np.array([each.seconds for each in passes])
    number = np.repeat(np.arange(len(rounds)), [len(found) for found in rounds])
    paces = np.ones(len(rounds))
    for _ in range(STEPS):
        weights, kept = _undisturbed(parts, took / paces[number])
        fitted = parts @ weights
        whole = took.sum() / fitted.sum()
        paces = np.bincount(number, took) / np.bincount(number, fitted) / whole
    by_rows = np.cumsum(whole * weights[: len(knots)]).tolist()
    left = (took - paces[number] * fitted)[kept]
    return PassTimes(
        by_rows=tuple(PassTime(rows=knot, milliseconds=value) for knot, value in zip(knots, by_rows, strict=True)),
        **dict(zip(TERMS, (whole * weights[len(knots) :]).tolist(), strict=True)),
        passes=len(passes),
        paces=tuple(paces.tolist()),
        explained=float(1 - left.var() / max(float(took[kept].var()), 1e-12)),
    )


def _undisturbed(
    parts: NDArray[np.float64], took: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The least squares of passes that did not take far longer than the others say, and which those are."""
    from scipy.optimize import nnls

    kept = np.ones(len(took), dtype=np.bool_)
    for _ in range(2):
        weights: NDArray[np.float64] = nnls(parts[kept], took[kept])[0]
        errors = took - parts @ weights
        middle = np.median(errors[kept])
        kept = errors <= middle + OUTLIERS * max(float(np.median(np.abs(errors[kept] - middle))), 1e-9)
    return weights, kept


def knots_for(least: int, most: int) -> list[int]:
    """Rows at which the line by rows may bend, and its ends; the last two well apart, since it goes on behind them."""
    return [least, *(knot for knot in KNOTS if least < knot < most / APART), max(most, least + 1)]
