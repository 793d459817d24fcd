"""Accuracy against cost of a ladder from one looped model to a larger one, beside what it has to beat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from sigma0.calibrate.bootstrap import Estimate, ratio, share
from sigma0.calibrate.prompts import Prompt
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
    ShutDoor,
    Trigger,
)
from sigma0.ladder.trail import Unit
from sigma0.signals.verdict import DoorPolicy

Floats = npt.NDArray[np.float64]
SMALL, LARGE, LOT = "small only", "large only", "whole questions by lot"
LOTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ENTROPIES = (0.02, 0.1, 0.3, 0.5, 0.7, 1.0)
MEAN_ENTROPIES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Setting:
    """A point of the picture.

    Attributes:
        family: The curve that it lies on.
        policy: What goes up; chance is seeded anew with the number of each prompt.
        stay: Further tokens that the larger model writes.
        unit: What goes up.
        warm_start: Whether the larger model is given what the small one wrote.
    """

    family: str
    policy: Trigger
    stay: int = 0
    unit: Unit = "token"
    warm_start: bool = False


def token_settings(doors: DoorPolicy) -> list[Setting]:
    """Points of models with one tokenizer: tokens go up, and whole answers beside them.

    Args:
        doors: What the converge door of the lower model asks for.
    """
    found = [Setting(SMALL, Never())]
    found += [Setting("random", Random(rate)) for rate in (0.01, 0.03, 0.1, 0.3)]
    found += [Setting("entropy", Entropy(above)) for above in ENTROPIES]
    found += [Setting("saturation or entropy", AnyOf((Saturation(), Entropy(above)))) for above in ENTROPIES]
    found += [Setting("margin", Margin(below)) for below in (0.1, 0.3, 0.6, 0.9)]
    found += [Setting(f"entropy, stay {stay}", Entropy(0.5), stay) for stay in (1, 3)]
    for warm_start, family in ((False, "whole answers"), (True, "whole answers, warm start")):
        found += [Setting(family, Margin(below), unit="answer", warm_start=warm_start) for below in (0.1, 0.6, 0.9)]
    # what sigma0.generate does with a ladder when SIGMA0_LADDER=1
    found.append(Setting("whole answers by verdict", ShutDoor(doors), unit="answer"))
    return found


def answer_settings(doors: DoorPolicy) -> list[Setting]:
    """Points of models with different tokenizers: only whole answers can go up.

    Args:
        doors: What the converge door of the lower model asks for.
    """
    found = [Setting(SMALL, Never(), unit="answer")]
    found += [Setting("random", Random(rate), unit="answer") for rate in (0.25, 0.5, 0.75)]
    found += [Setting("entropy", Entropy(above), unit="answer") for above in MEAN_ENTROPIES]
    policies = [AnyOf((Saturation(), Entropy(above))) for above in MEAN_ENTROPIES]
    found += [Setting("saturation or entropy", policy, unit="answer") for policy in policies]
    found.append(Setting("verdict", ShutDoor(doors), unit="answer"))
    found.append(Setting("verdict, warm start", ShutDoor(doors), unit="answer", warm_start=True))
    return found


@dataclass(frozen=True)
class Point:
    """What came of one setting.

    Attributes:
        setting: Which.
        accuracy: Share of right answers, or of those that the large model alone gives too where none are known.
        cost: Bytes of weights that passes read (both models, prompts included) over those of the large model alone.
        seconds: Wall-clock over that of the large model alone, both in this run, prompt by prompt.
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
    max_new_tokens: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Point]:
    """The large model alone, then every setting, then whole questions by lot.

    Each prompt goes through all settings before the next one does, so that what slows the machine slows all of them.

    Args:
        small: The lower rung.
        large: The upper one.
        prompts: All with answers, or none: then that answer is right which the large model alone gives.
        settings: Points, see `token_settings` and `answer_settings`.
        max_new_tokens: Of every answer.
        on_answer: Called behind each of `len(prompts) * (1 + len(settings))` answers.

    Raises:
        ValueError: If some prompts have answers and some have none.
    """
    if len({prompt.answer is None for prompt in prompts}) > 1:
        raise ValueError("some prompts have an answer and some have none: give it to all of them, or to none")
    alone = Setting(LARGE, Never())
    plan = [(alone, [large]), *((setting, [small, large]) for setting in settings)]
    answers: list[list[tuple[LadderGeneration, float]]] = [[] for _ in plan]
    for number, prompt in enumerate(prompts):
        for (setting, rungs), found in zip(plan, answers, strict=True):
            policy = replace(setting.policy, seed=number) if isinstance(setting.policy, Random) else setting.policy
            ladder = FidelityLadder(rungs, policy=policy, hysteresis=Hysteresis(stay=setting.stay))
            found.append(_answer(ladder, setting, prompt, max_new_tokens))
            on_answer()
    expected = [
        above.text if prompt.answer is None else prompt.answer
        for prompt, (above, _) in zip(prompts, answers[0], strict=True)
    ]
    runs = [_runs(found, expected) for found in answers]
    points = [_point(setting, each, runs[0]) for (setting, _), each in zip(plan, runs, strict=True)]
    below = next((each for (setting, _), each in zip(plan, runs, strict=True) if setting.family == SMALL), None)
    return points if below is None else points + [by_lot(below, runs[0], rate) for rate in LOTS]


def by_lot(below: "_Runs", above: "_Runs", rate: float) -> Point:
    """Each question to one of the models by lot, in the mean over all lots: what a router has to beat that runs one.

    Args:
        below: The small model alone.
        above: The large model alone.
        rate: Probability of the large one.
    """

    def mixed(name: str) -> Floats:
        low, high = getattr(below, name), getattr(above, name)
        mean: Floats = (1 - rate) * low + rate * high
        return mean

    tokens = [sum(cost.tokens for run in each.found for cost in run.costs) for each in (below, above)]
    cost, seconds = ratio(mixed("bytes_read"), above.bytes_read), ratio(mixed("seconds"), above.seconds)
    assert cost is not None and seconds is not None
    return Point(
        setting=Setting(LOT, Random(rate), unit="answer"),
        accuracy=share(float(mixed("right").sum()), len(above.right)),
        cost=cost,
        seconds=seconds,
        rows=float(mixed("rows").sum() / above.rows.sum()),
        handed_up=rate * tokens[1] / ((1 - rate) * tokens[0] + rate * tokens[1]),
        catch_ups=0.0,
    )


def _answer(
    ladder: FidelityLadder, setting: Setting, prompt: Prompt, max_new_tokens: int
) -> tuple[LadderGeneration, float]:
    settings: dict[str, Any] = {"warm_start": setting.warm_start} if setting.unit == "answer" else {}
    began = perf_counter()
    found = ladder.generate(prompt.content, setting.unit, max_new_tokens=max_new_tokens, **settings)
    return found, perf_counter() - began


def _runs(answers: Sequence[tuple[LadderGeneration, float]], expected: Sequence[str]) -> _Runs:
    found = tuple(each for each, _ in answers)
    right = [each.text.strip() == answer.strip() for each, answer in zip(found, expected, strict=True)]
    return _Runs(
        right=np.array(right, dtype=np.float64),
        bytes_read=np.array([each.bytes_read for each in found], dtype=np.float64),
        rows=np.array([sum(cost.rows * cost.parameters for cost in each.costs) for each in found], dtype=np.float64),
        seconds=np.array([seconds for _, seconds in answers]),
        found=found,
    )


def _point(setting: Setting, runs: _Runs, above: _Runs) -> Point:
    tokens = sum(cost.tokens for each in runs.found for cost in each.costs)
    accuracy = share(float(runs.right.sum()), len(runs.right))
    cost, seconds = ratio(runs.bytes_read, above.bytes_read), ratio(runs.seconds, above.seconds)
    assert cost is not None and seconds is not None
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
