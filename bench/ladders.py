"""Accuracy against cost of a ladder from one looped model to a larger one, beside what it has to beat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from sigma0.estimates import Estimate, ratio
from sigma0.ladder import (
    AnyOf,
    Entropy,
    FidelityLadder,
    Hysteresis,
    LadderGeneration,
    LocalRung,
    Margin,
    Never,
    Random,
    Saturation,
    Trigger,
)
from sigma0.ladder.trail import Unit
from sigma0.prompts import Prompt

Floats = npt.NDArray[np.float64]
LONGEST_ANSWER = 24
SMALL, LARGE = "small only", "large only"
ENTROPIES = (0.02, 0.1, 0.3, 0.5, 0.7, 1.0)


@dataclass(frozen=True)
class Setting:
    """A point of the picture.

    Attributes:
        family: The curve that it lies on.
        policy: What goes up.
        stay: Further tokens that the larger model writes.
        unit: What goes up.
        warm_start: Whether the larger model is given what the small one wrote.
    """

    family: str
    policy: Trigger
    stay: int = 0
    unit: Unit = "token"
    warm_start: bool = False


def settings_of(entropies: Sequence[float] = ENTROPIES) -> list[Setting]:
    """Every point, the baselines first."""
    found = [Setting(SMALL, Never())]
    found += [Setting("random", Random(rate)) for rate in (0.01, 0.03, 0.1, 0.3)]
    found += [Setting("entropy", Entropy(above)) for above in entropies]
    found += [Setting("saturation or entropy", AnyOf((Saturation(), Entropy(above)))) for above in entropies]
    found += [Setting("margin", Margin(below)) for below in (0.1, 0.3, 0.6, 0.9)]
    found += [Setting(f"entropy, stay {stay}", Entropy(0.5), stay) for stay in (1, 3)]
    for warm_start, family in ((False, "whole answers"), (True, "whole answers, warm start")):
        found += [Setting(family, Margin(below), unit="answer", warm_start=warm_start) for below in (0.1, 0.6, 0.9)]
    return found


@dataclass(frozen=True)
class Point:
    """What came of one setting.

    Attributes:
        setting: Which.
        accuracy: Share of right answers.
        cost: Bytes of weights that passes read (both models, prompts included) over those of the large model alone.
        seconds: Wall-clock over that of the large model alone, both measured one answer after the other in this run.
        rows: Rows times parameters, over those of the large model alone.
        handed_up: Share of all written tokens that the larger model wrote.
        catch_ups: Times that it caught up, for each answer; its first reading not counted.
    """

    setting: Setting
    accuracy: Estimate
    cost: Estimate
    seconds: Estimate
    rows: float
    handed_up: float
    catch_ups: float


@dataclass(frozen=True)
class _Runs:
    right: Floats
    bytes_read: Floats
    rows: Floats
    seconds: Floats
    found: tuple[LadderGeneration, ...]


def measure(
    small: LocalRung,
    large: LocalRung,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    on_answer: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Every setting, and the large model alone.

    Args:
        small: The lower rung.
        large: The upper one.
        prompts: With answers.
        settings: Points, see `settings_of`.
        on_answer: Called behind each of `len(prompts) * (1 + len(settings))` answers.
    """
    above = _answers(FidelityLadder([large], policy=Never()), prompts, on_answer)
    points = [_point(Setting(LARGE, Never()), above, above)]
    for setting in settings:
        ladder = FidelityLadder([small, large], policy=setting.policy, hysteresis=Hysteresis(stay=setting.stay))
        points.append(_point(setting, _answers(ladder, prompts, on_answer, setting), above))
    return points


def _answers(
    ladder: FidelityLadder, prompts: Sequence[Prompt], on_answer: Callable[[], None], setting: Setting | None = None
) -> _Runs:
    found, seconds = [], []
    unit: Unit = "token" if setting is None else setting.unit
    settings: dict[str, Any] = {"max_new_tokens": LONGEST_ANSWER}
    if setting is not None and unit == "answer":
        settings["warm_start"] = setting.warm_start
    for prompt in prompts:
        began = perf_counter()
        found.append(ladder.generate(prompt.content, unit, **settings))
        seconds.append(perf_counter() - began)
        on_answer()
    right = [each.text.strip() == prompt.answer for each, prompt in zip(found, prompts, strict=True)]
    return _Runs(
        right=np.array(right, dtype=np.float64),
        bytes_read=np.array([each.bytes_read for each in found], dtype=np.float64),
        rows=np.array([sum(cost.rows * cost.parameters for cost in each.costs) for each in found], dtype=np.float64),
        seconds=np.array(seconds),
        found=tuple(found),
    )


def _point(setting: Setting, runs: _Runs, above: _Runs) -> Point:
    tokens = sum(cost.tokens for each in runs.found for cost in each.costs)
    accuracy = ratio(runs.right, np.ones(len(runs.right)))
    cost, seconds = ratio(runs.bytes_read, above.bytes_read), ratio(runs.seconds, above.seconds)
    assert accuracy is not None and cost is not None and seconds is not None
    return Point(
        setting=setting,
        accuracy=accuracy,
        cost=cost,
        seconds=seconds,
        rows=float(runs.rows.sum() / above.rows.sum()),
        handed_up=sum(each.spent.large_tokens for each in runs.found) / tokens,
        catch_ups=sum(each.costs[-1].catch_ups for each in runs.found) / len(runs.found),
    )


def at_cost(points: Sequence[Point], cost: float) -> float | None:
    """Accuracy of a curve at a cost, between its neighbours; None outside of what was measured."""
    known = sorted((point.cost.value, point.accuracy.value) for point in points)
    if not known or not known[0][0] <= cost <= known[-1][0]:
        return None
    return float(np.interp(cost, [each for each, _ in known], [value for _, value in known]))


def cheapest(points: Sequence[Point], share: float, large: Point) -> Point | None:
    """The cheapest point with at least this share of the large model's accuracy."""
    enough = [point for point in points if point.accuracy.value >= share * large.accuracy.value]
    return min(enough, key=lambda point: point.cost.value, default=None)
