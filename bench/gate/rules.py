"""The exit rules side by side: each at the cheapest threshold that keeps a stated agreement with full depth.

The threshold is chosen on answers of the calibration split and judged on those of another one. Prompts have no part in
it: they run at full depth whatever the rule.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from transformers import PreTrainedTokenizerFast

from sigma0.bench.gate.forced import Tokens, agreement, forced_texts, read_forced
from sigma0.bench.pocket.free import FreeRuns, free_runs
from sigma0.bench.pocket.items import check_split
from sigma0.bench.pocket.world import draw
from sigma0.calibrate.agreement import GRIDS
from sigma0.calibrate.bootstrap import Estimate
from sigma0.calibrate.teacher_forcing import GridReadings, read_grids
from sigma0.config import ExitConfig
from sigma0.models import OuroForCausalLM


@dataclass(frozen=True)
class RuleRow:
    """One rule at the threshold chosen for it.

    Attributes:
        rule: Its settings.
        agreement: Share of all teacher-forced tokens, prompts included, with full depth's argmax at the exit.
        agreement_on_answers: The same over answer tokens.
        depth: Mean exit depth of the answer tokens.
        free: Real adaptive runs beside full depth.
    """

    rule: dict[str, object]
    agreement: Estimate
    agreement_on_answers: Estimate
    depth: float
    free: FreeRuns


def compare_rules(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    n: int,
    split: str,
    seed: int,
    target: float = 0.98,
    on_rule: Callable[[int], None] = lambda done: None,
) -> dict[str, RuleRow | None]:
    """Choose a threshold for each rule on n calibration stories, and measure it on n of another split.

    Args:
        model: A looped model.
        tokenizer: Its tokenizer.
        n: Questions in each.
        split: Where it is measured: "train" or "test".
        seed: Seed of the stories.
        target: The least agreement on answer tokens.
        on_rule: Told how many of the rules are done.

    Returns:
        A row for each rule of `GRIDS`; None where none of its thresholds reaches the target.

    Raises:
        ValueError: On the calibration split, or a target outside (0, 1].
    """
    check_measured_split(split)
    if not 0 < target <= 1:
        raise ValueError(f"target {target!r} is not in (0, 1]")
    tuning = [draw("calibration", seed, k, questions=1).items[0] for k in range(n)]
    grids = {mode: [model.exit_rule(config) for config in grid] for mode, grid in GRIDS.items()}
    readings = read_grids(model, grids, forced_texts(tokenizer, tuning))
    chosen = {}
    for mode, grid in GRIDS.items():
        place = _cheapest(readings, mode, target)
        if place is not None:
            chosen[mode] = grid[place]
    items = [draw(split, seed, k, questions=1).items[0] for k in range(n)]
    held_out = read_forced(model, tokenizer, {mode: model.exit_rule(rule) for mode, rule in chosen.items()}, items)
    rows: dict[str, RuleRow | None] = {}
    for done, mode in enumerate(GRIDS, start=1):
        rows[mode] = None
        if mode in chosen:
            free = free_runs(model, tokenizer, n, split, seed, chosen[mode])
            rows[mode] = _row(held_out, mode, chosen[mode], free)
        on_rule(done)
    return rows


def check_measured_split(split: str) -> None:
    """Raise ValueError for a split that figures may not be reported on."""
    if check_split(split) == "calibration":
        raise ValueError("split 'calibration' chooses the thresholds; measure on 'test' or 'train'")


def _cheapest(readings: GridReadings, mode: str, target: float) -> int | None:
    """The place of the cheapest setting of a grid that keeps the target, None without one."""
    exits = readings.exits[mode]
    good = [place for place, depths in enumerate(exits) if readings.same_at(depths).mean() >= target]
    return min(good, key=lambda place: float(exits[place].mean()), default=None)


def _row(tokens: Tokens, name: str, config: ExitConfig, free: FreeRuns) -> RuleRow:
    answers = tokens.where(tokens.is_answer)
    return RuleRow(
        asdict(config), agreement(tokens, name), agreement(answers, name), float(answers.exits[name].mean()), free
    )
