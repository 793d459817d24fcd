"""Whether a stated risk is kept, and how often a door is found at all, in worlds whose true risk is known.

A world says how often an answer is wrong, by its place from the surest to the least sure. Sets of judged answers are
drawn from it, and thresholds are ranked and tested by the library's own `rank` and `passing_policies`. Beside them:

* `least_p_value`, begun at the least p-value of a fit as large as the test (arXiv 2210.07913);
* `several_starts`, where the level is shared between three starts and passed on down each sequence (the fallback
  procedure, Wiens 2003; a graph of Bretz et al. 2009);
* an oracle that knows beforehand which one threshold has the greatest chance to pass, and tests it alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import binom

from sigma0.calibrate.bootstrap import Estimate, share
from sigma0.calibrate.doors import Judged, most_wrong, passing_policies, predicted_power, rank, risk_p_value
from sigma0.calibrate.risk import split
from sigma0.signals.evidence import Floats
from sigma0.signals.verdict import DoorPolicy

Procedure = Callable[[Judged, Judged, "World"], list[DoorPolicy]]
_SHARES = np.arange(1, 10001) / 10000
_BASE = DoorPolicy()
# Share of the level, and the answers let through as a multiple of those of the threshold most likely to pass.
_STARTS = ((0.6, 1.0), (0.2, 0.5), (0.2, 2.0))


@dataclass(frozen=True)
class World:
    """How often answers are wrong, and what is asked of a calibration."""

    name: str  # Its name
    chance: Callable[[Floats], Floats]  # Of being wrong, by the share of the answers that are surer
    prompts: int  # Of a calibration, those of the check included
    risk: float  # Allowed
    confidence: float  # With which it is to be kept

    def draw(self, answers: int, rng: np.random.Generator) -> Judged:
        """Judged answers; their confidence is one less their place, which is uniform."""
        place = rng.random(answers)
        right = rng.random(answers) >= self.chance(place)
        return Judged(1 - place, np.zeros(answers, dtype=np.bool_), right)

    def true_risk(self, opened: float | Floats) -> Floats:
        """Chance of a wrong answer among the surest, by the share that is let through."""
        means = np.cumsum(self.chance(_SHARES - _SHARES[0] / 2)) / np.arange(1, len(_SHARES) + 1)
        return np.asarray(np.interp(opened, _SHARES, means))

    def allowed(self) -> float:
        """The largest share that may be let through; 0 where there is none."""
        keeping = _SHARES[self.true_risk(_SHARES) <= self.risk]
        return float(keeping[-1]) if len(keeping) else 0.0


def _rises(start: float, by: float, power: float = 1.0) -> Callable[[Floats], Floats]:
    return lambda place: start + by * place**power


def _steps(*steps: tuple[float, float]) -> Callable[[Floats], Floats]:
    """Chances up to each share."""
    ends, chances = np.array([end for end, _ in steps]), np.array([chance for _, chance in steps])
    return lambda place: chances[np.minimum(np.searchsorted(ends, place), len(steps) - 1)]


WORLDS = (
    World("a hair over", _steps((1.0, 0.105)), 750, 0.1, 0.95),
    World("a hair over, less sure", _steps((1.0, 0.105)), 750, 0.1, 0.8),
    World("rises at once", _rises(0.01, 0.4), 750, 0.1, 0.95),
    World("rises late", _rises(0.005, 0.5, 2.0), 750, 0.1, 0.95),
    World("near the limit", _steps((1.0, 0.09)), 1000, 0.1, 0.8),
    World("easy, less sure", _rises(0.01, 0.41), 1000, 0.1, 0.8),
    World("easy", _rises(0.01, 0.41), 2500, 0.1, 0.95),
    World("small risk", _rises(0.005, 0.2), 2500, 0.05, 0.95),
    World("small risk, many prompts", _rises(0.005, 0.2), 6000, 0.05, 0.95),
    World("right, then wrong", _steps((0.15, 0.02), (1.0, 0.25)), 750, 0.1, 0.95),
    World("sure and wrong", _steps((0.05, 0.6), (0.6, 0.01), (1.0, 0.3)), 750, 0.1, 0.95),
    World("like pocket", lambda place: 0.005 + 0.95 / (1 + np.exp(18 * (0.87 - place))), 2500, 0.05, 0.95),
)


@dataclass(frozen=True)
class Found:
    """What calibrations of one kind found over all sets."""

    fit: int  # Answers of the fit
    test: int  # Of the test
    chose: Estimate  # Share of the sets in which a door was found
    violated: Estimate  # Share in which a policy passed whose true risk is above the allowed one
    opened: float  # Mean share of the answers let through, none where no door was found


@dataclass(frozen=True)
class WorldRow:
    """One world."""

    world: str  # Its name
    risk: float  # Allowed
    confidence: float  # With which it is to be kept
    allowed: float  # Largest share of the answers that may be let through
    found: Found  # By the library, beside it with several starts, and from the least p-value on
    several: Found
    before: Found
    oracle: float  # Chance that the one threshold most likely to pass does


def by_power(fitting: Judged, testing: Judged, world: World) -> list[DoorPolicy]:
    """What passes in the library's order."""
    ranked = rank(fitting, _BASE, world.risk, world.confidence, len(testing.right))
    return passing_policies(testing, ranked, world.risk, world.confidence)[0]


def least_p_value(fitting: Judged, testing: Judged, world: World) -> list[DoorPolicy]:
    """What passes from the threshold with the least p-value on the fit to ever looser ones."""
    policies = [replace(_BASE, min_confidence=threshold) for threshold in _thresholds(fitting).tolist()]
    p_values = [risk_p_value(*fitting.opened_and_wrong(policy), world.risk) for policy in policies]
    return passing_policies(testing, policies[int(np.argmin(p_values)) :], world.risk, world.confidence)[0]


def several_starts(fitting: Judged, testing: Judged, world: World) -> list[DoorPolicy]:
    """What passes where a start that fails leaves the others their shares of the level."""
    thresholds, level = _thresholds(fitting), 1 - world.confidence
    opened = np.array([fitting.opened_and_wrong(replace(_BASE, min_confidence=item))[0] for item in thresholds])
    first = int(np.argmax(predicted_power(fitting, thresholds, world.risk, level, len(testing.right))))
    shares = np.zeros(len(thresholds))
    for part, multiple in _STARTS:
        shares[min(np.searchsorted(opened, multiple * opened[first]), len(shares) - 1)] += part
    passed, held = [], 0.0
    for threshold, part in zip(thresholds.tolist(), shares, strict=True):
        held += part
        policy = replace(_BASE, min_confidence=threshold)
        if held and risk_p_value(*testing.opened_and_wrong(policy), world.risk) <= held * level:
            passed.append(policy)
        else:
            held = 0.0
    return passed


def _thresholds(answers: Judged) -> Floats:
    """Quantiles of the confidence, the highest first."""
    levels = np.quantile(answers.confidence, np.linspace(1, 0, min(200, len(answers.right))), method="lower")
    return np.array(list(dict.fromkeys(levels.tolist())))


def measure(worlds: Sequence[World], sets: int, on_set: Callable[[int], None] = lambda done: None) -> list[WorldRow]:
    """Calibrates in every world."""
    rows = []
    for number, world in enumerate(worlds, start=1):
        fit, test = parts(world.prompts)
        half = (fit + test) // 2
        fitted = calibrated(world, fit, test, sets)
        several = calibrated(world, fit, test, sets, procedure=several_starts)
        before = calibrated(world, half, half, sets, procedure=least_p_value)
        asked = (world.name, world.risk, world.confidence, world.allowed())
        rows.append(WorldRow(*asked, fitted, several, before, oracle(world, test)))
        on_set(number * sets)
    return rows


def parts(prompts: int) -> tuple[int, int]:
    """How many answers fit, and how many test."""
    (_, fit), (start, end), _ = split(prompts)
    return fit, end - start


def calibrated(world: World, fit: int, test: int, sets: int, procedure: Procedure = by_power) -> Found:
    """Counts over as many calibrations as there are sets, on answers drawn anew for each fit and test."""
    rng = np.random.default_rng(0)
    chose, violated, opened = 0, 0, 0.0
    for _ in range(sets):
        fitting, testing = world.draw(fit, rng), world.draw(test, rng)
        passed = procedure(fitting, testing, world)
        let_through = 1 - np.array([policy.min_confidence for policy in passed])
        chose += bool(passed)
        violated += bool((world.true_risk(let_through) > world.risk).any())
        opened += float(let_through[-1]) if passed else 0.0
    return Found(fit, test, share(chose, sets), share(violated, sets), opened / sets)


def oracle(world: World, test: int) -> float:
    """The greatest chance that one threshold which keeps the risk passes its test; exact, on a grid of thresholds."""
    opened = np.arange(1, test + 1)
    most = most_wrong(opened, world.risk, 1 - world.confidence)
    best = 0.0
    for let_through in _SHARES[99::100]:
        chance = float(world.true_risk(float(let_through)))
        if chance <= world.risk:
            best = max(best, float((binom.pmf(opened, test, let_through) * binom.cdf(most, opened, chance)).sum()))
    return best


def report_worlds(rows: Sequence[WorldRow], sets: int, commit: str | None) -> dict[str, Any]:
    """Plain JSON values: the rows of `measure`, and the commit and libraries that drew them."""
    import scipy
    import sklearn

    versions = {"numpy": np.__version__, "scipy": scipy.__version__, "sklearn": sklearn.__version__}
    return {"sets": sets, "seed": 0, "commit": commit, **versions, "worlds": [asdict(row) for row in rows]}
