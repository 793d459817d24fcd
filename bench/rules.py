"""The exit rules side by side: each at the cheapest threshold that keeps a stated agreement with full depth."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from sigma0.bench.forced import Tokens, agreement, read_forced
from sigma0.bench.pocket.free import FreeRuns, free_runs
from sigma0.bench.pocket.items import check_split
from sigma0.bench.pocket.world import draw
from sigma0.estimates import Estimate
from sigma0.models import OuroForCausalLM
from sigma0.settings import ExitConfig

# Thresholds tried for each rule.
_HIGH = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999, 0.99999)
_LOW = (0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
GRID: dict[str, tuple[ExitConfig, ...]] = {
    "qexit": tuple(ExitConfig(mode="qexit", q=q) for q in _HIGH),
    "margin": tuple(ExitConfig(mode="margin", theta=theta) for theta in _HIGH),
    "converge": tuple(ExitConfig(mode="converge", eps=eps) for eps in _LOW),
    "accel": tuple(ExitConfig(mode="accel", eps=eps, patience=1) for eps in _LOW),
}


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
        target: The least agreement, on all tokens and on answer tokens.
        on_rule: Told how many of the rules are done.

    Returns:
        A row for each mode; None where no threshold on the grid reaches the target.

    Raises:
        ValueError: On the calibration split, or a target outside (0, 1].
    """
    check_measured_split(split)
    if not 0 < target <= 1:
        raise ValueError(f"target {target!r} is not in (0, 1]")
    configs = {f"{mode} {place}": config for mode, grid in GRID.items() for place, config in enumerate(grid)}
    rules = {name: model.exit_rule(config) for name, config in configs.items()}
    tuning = read_forced(
        model, tokenizer, rules, [draw("calibration", seed, k, questions=1).items[0] for k in range(n)]
    )
    held_out = read_forced(model, tokenizer, rules, [draw(split, seed, k, questions=1).items[0] for k in range(n)])
    rows: dict[str, RuleRow | None] = {}
    for done, mode in enumerate(GRID, start=1):
        name = _cheapest(tuning, [name for name in rules if name.startswith(f"{mode} ")], target)
        rows[mode] = None
        if name is not None:
            free = free_runs(model, tokenizer, n, split, seed, configs[name])
            rows[mode] = _row(held_out, name, configs[name], free)
        on_rule(done)
    return rows


def check_measured_split(split: str) -> None:
    """Raise ValueError for a split that figures may not be reported on."""
    if check_split(split) == "calibration":
        raise ValueError("split 'calibration' chooses the thresholds; measure on 'test' or 'train'")


def _cheapest(tokens: Tokens, names: list[str], target: float) -> str | None:
    answers = tokens.is_answer
    good = [name for name in names if min(tokens.same[name].mean(), tokens.same[name][answers].mean()) >= target]
    return min(good, key=lambda name: float(np.mean(tokens.exits[name][answers])), default=None)


def _row(tokens: Tokens, name: str, config: ExitConfig, free: FreeRuns) -> RuleRow:
    answers = tokens.where(tokens.is_answer)
    return RuleRow(
        asdict(config), agreement(tokens, name), agreement(answers, name), float(answers.exits[name].mean()), free
    )
