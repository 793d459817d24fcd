"""Accuracy against cost of a ladder from one looped model to a larger one, beside what it has to beat.

Rows become a table of both models alone and one setting of each curve, and a picture of all curves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from sigma0.bench.core.conditions import Figure
from sigma0.bench.core.ledger import runs_of
from sigma0.bench.core.output import BenchTable, drawing, percent, with_interval
from sigma0.bench.core.rows import AnyRow, LadderRow
from sigma0.calibrate.bootstrap import ratio, share
from sigma0.calibrate.prompts import Prompt
from sigma0.ladder import (
    AnyOf,
    Entropy,
    FidelityLadder,
    Hysteresis,
    LocalRung,
    Margin,
    Never,
    Random,
    Saturation,
    ShutDoor,
    Trigger,
)
from sigma0.ladder.trail import Unit
from sigma0.ladder.triggers import trigger_to_dict
from sigma0.signals.verdict import DoorPolicy

SMALL, LARGE, LOT = "small only", "large only", "whole questions by lot"
LOTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ENTROPIES = (0.02, 0.1, 0.3, 0.5, 0.7, 1.0)
MEAN_ENTROPIES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Setting:
    """A point of the picture: fields of `LadderRow`; chance is seeded anew with the number of each prompt."""

    family: str
    policy: Trigger
    stay: int = 0
    unit: Unit = "token"
    warm_start: bool = False


def token_settings(doors: DoorPolicy) -> list[Setting]:
    """Points of models with one tokenizer: tokens go up, and whole answers beside them; `doors` of the lower model."""
    result = [Setting(SMALL, Never())]
    result += [Setting("random", Random(rate)) for rate in (0.01, 0.03, 0.1, 0.3)]
    result += [Setting("entropy", Entropy(above)) for above in ENTROPIES]
    result += [Setting("saturation or entropy", AnyOf((Saturation(), Entropy(above)))) for above in ENTROPIES]
    result += [Setting("margin", Margin(below)) for below in (0.1, 0.3, 0.6, 0.9)]
    result += [Setting(f"entropy, stay {stay}", Entropy(0.5), stay) for stay in (1, 3)]
    for warm_start, family in ((False, "whole answers"), (True, "whole answers, warm start")):
        result += [Setting(family, Margin(below), unit="answer", warm_start=warm_start) for below in (0.1, 0.6, 0.9)]
    # what sigma0.generate does with a ladder when SIGMA0_LADDER=1
    result.append(Setting("whole answers by verdict", ShutDoor(doors), unit="answer"))
    return result


def answer_settings(doors: DoorPolicy) -> list[Setting]:
    """Points of models with different tokenizers: only whole answers can go up."""
    result = [Setting(SMALL, Never(), unit="answer")]
    result += [Setting("random", Random(rate), unit="answer") for rate in (0.25, 0.5, 0.75)]
    result += [Setting("entropy", Entropy(above), unit="answer") for above in MEAN_ENTROPIES]
    policies = [AnyOf((Saturation(), Entropy(above))) for above in MEAN_ENTROPIES]
    result += [Setting("saturation or entropy", policy, unit="answer") for policy in policies]
    result.append(Setting("verdict", ShutDoor(doors), unit="answer"))
    result.append(Setting("verdict, warm start", ShutDoor(doors), unit="answer", warm_start=True))
    return result


def measure(
    small: LocalRung,
    large: LocalRung,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    max_new_tokens: int,
    shared: Mapping[str, Any],
    on_answer: Callable[[], None] = lambda: None,
) -> list[LadderRow]:
    """Rows of the large model alone, then of every setting, then of whole questions by lot.

    Each prompt goes through all settings before the next one does, so that what slows the machine slows all of them. A
    question that goes to one of the models by lot is what a router has to beat that runs one; it stands in the mean
    over all lots. Without known answers that one is right which the large model alone gives. All rows have what is
    `shared`; `on_answer` is called after each of `len(prompts) * (1 + len(settings))` answers.
    """
    if len({prompt.answer is None for prompt in prompts}) > 1:
        raise ValueError("some prompts have an answer and some have none: give it to all of them, or to none")
    plan = [(Setting(LARGE, Never()), [large]), *((setting, [small, large]) for setting in settings)]
    # of each answer: right, bytes read, rows times parameters, seconds, tokens, those of the larger model, catch-ups
    counts = np.zeros((len(plan), 7, len(prompts)))
    for number, prompt in enumerate(prompts):
        expected = prompt.answer
        for (setting, rungs), row in zip(plan, counts, strict=True):
            policy = replace(setting.policy, seed=number) if isinstance(setting.policy, Random) else setting.policy
            ladder = FidelityLadder(rungs, policy=policy, hysteresis=Hysteresis(stay=setting.stay))
            warm = {"warm_start": setting.warm_start} if setting.unit == "answer" else {}
            began = perf_counter()
            result = ladder.generate(prompt.content, setting.unit, max_new_tokens=max_new_tokens, **warm)
            seconds = perf_counter() - began
            expected = result.text if expected is None else expected
            row[:, number] = (
                result.text.strip() == expected.strip(),
                result.bytes_read,
                sum(cost.rows * cost.parameters for cost in result.costs),
                seconds,
                sum(cost.tokens for cost in result.costs),
                result.spent.large_tokens,
                result.costs[-1].catch_ups,
            )
            on_answer()
    above = counts[0]
    rows = [_row(setting, item, above, shared) for (setting, _), item in zip(plan, counts, strict=True)]
    below = next((item for (setting, _), item in zip(plan, counts, strict=True) if setting.family == SMALL), None)
    if below is None:
        return rows
    # by lot, what the larger model alone writes was handed up
    handed = np.stack([*above[:5], above[4], above[6]])
    lots = [((1 - rate) * below + rate * handed, Setting(LOT, Random(rate), unit="answer")) for rate in LOTS]
    return rows + [_row(setting, mixed, above, shared) for mixed, setting in lots]


def _row(
    setting: Setting, counts: npt.NDArray[np.float64], above: npt.NDArray[np.float64], shared: Mapping[str, Any]
) -> LadderRow:
    """A row out of the counts of each answer, `[7, prompts]`, and those of the large model alone."""
    right, bytes_read, rows, seconds, tokens, large_tokens, catch_ups = counts
    return LadderRow(
        **shared,
        **{**vars(setting), "policy": trigger_to_dict(setting.policy)},
        accuracy=Figure.known(share(float(right.sum()), len(right))),
        cost=Figure.known(ratio(bytes_read, above[1])),
        seconds=Figure.known(ratio(seconds, above[3])),
        row_cost=float(rows.sum() / above[2].sum()),
        handed_up=float(large_tokens.sum() / tokens.sum()),
        catch_ups=float(catch_ups.mean()),
    )


def at_cost(rows: Sequence[LadderRow], cost: float) -> float | None:
    """Accuracy of a curve at a cost, between its neighbours; None outside of what was measured."""
    known = sorted((row.cost.value, row.accuracy.value) for row in rows)
    if not known or not known[0][0] <= cost <= known[-1][0]:
        return None
    return float(np.interp(cost, [item for item, _ in known], [value for _, value in known]))


SHARE = 0.95


def ladder_runs(rows: Sequence[AnyRow]) -> dict[str, list[LadderRow]]:
    """The rows of each run, by the time that it began."""
    return runs_of(rows, LadderRow, lambda row: row.time)


def ladder_table(rows: Sequence[LadderRow]) -> str:
    """Both models alone, then of each curve the cheapest setting with 95 % of the larger model's accuracy.

    A curve that reaches it nowhere shows its most accurate setting. A sentence before the table says on which questions
    the settings were chosen.
    """
    choosing = next((row for row in rows if row.part == "choice"), None)
    output = "these very questions" if choosing is None else f"{choosing.n} questions of their own ({choosing.prompts})"
    return f"Settings are chosen on {output}.\n\n{BenchTable.of(COLUMNS, shown(rows)).markdown()}"


def shown(rows: Sequence[LadderRow]) -> list[LadderRow]:
    """The rows that `ladder_table` tells: reported on one set of questions, chosen on the other where there is one."""
    reported = [row for row in rows if row.part == "report"]
    choosing = [row for row in rows if row.part == "choice"] or reported
    alone = {row.family: row for row in reported if row.family in (SMALL, LARGE)}
    large = next(row for row in choosing if row.family == LARGE)
    chosen = [
        best_of([row for row in choosing if row.family == family], SHARE * large.accuracy.value)
        for family in dict.fromkeys(row.family for row in choosing if row.family not in alone)
    ]
    settings = {_setting(row): row for row in reported}
    return [alone[SMALL], alone[LARGE], *(settings[_setting(row)] for row in chosen)]


def best_of(curve: Sequence[LadderRow], enough: float) -> LadderRow:
    """The cheapest row of a curve that is right often enough, or its most accurate one where none is."""
    kept = [row for row in curve if row.accuracy.value >= enough]
    return min(kept, key=lambda row: row.cost.value) if kept else max(curve, key=lambda row: row.accuracy.value)


def _setting(row: LadderRow) -> str:
    """What two rows of a run share that differ in their questions alone."""
    return row.model_copy(update={"part": "report"}).key


def setting_name(family: str, policy: dict[str, object]) -> str:
    """A setting in a few words: its curve, and the numbers of its trigger."""
    triggers = policy.get("triggers", [policy])
    assert isinstance(triggers, list | tuple)
    values = [f"{key} {item[key]:g}" for item in triggers for key in ("above", "below", "rate") if key in item]
    return f"{family} ({', '.join(values)})" if values else family


COLUMNS: Mapping[str, Callable[[LadderRow], str]] = {
    "setting": lambda row: setting_name(row.family, row.policy),
    "right, 95 % interval": lambda row: with_interval(row.accuracy),
    "cost": lambda row: percent(row.cost),
    "time": lambda row: percent(row.seconds),
    "tokens of the larger": lambda row: f"{100 * row.handed_up:.1f} %",
    "catch-ups an answer": lambda row: f"{row.catch_ups:.2f}",
}


def draw_ladder(rows: Sequence[LadderRow], file: Path, title: str) -> None:
    """One line for each curve, the two models alone as stars."""
    with drawing([file], (9, 5)) as figure:
        axes = figure.subplots()
        alone = [row for row in rows if row.family in (SMALL, LARGE)]
        curves = dict.fromkeys(row.family for row in rows if row not in alone)
        for place, name in enumerate(curves):
            curve = sorted((row for row in rows if row.family == name), key=lambda row: row.cost.value)
            costs, rights = [100 * row.cost.value for row in curve], [100 * row.accuracy.value for row in curve]
            axes.plot(costs, rights, marker="os^Dv<>PX*"[place], markersize=4, color=f"C{place}", label=name)
        for row in alone:
            axes.plot(100 * row.cost.value, 100 * row.accuracy.value, "*", markersize=14, color="black")
            axes.annotate(row.family, (100 * row.cost.value, 100 * row.accuracy.value), (6, -12),
                          textcoords="offset points")  # fmt: skip
        above = next(row for row in alone if row.family == LARGE)
        axes.axhline(95 * above.accuracy.value, color="grey", linewidth=0.8, linestyle="--")
        axes.set(xlabel="cost, % of the larger model alone (passes x block bytes, prompts included)", ylabel="right, %",
                 title=title)  # fmt: skip
        figure.legend(loc="outside right upper", fontsize="small")
