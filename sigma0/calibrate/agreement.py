"""From a stated quality budget to a threshold: `sigma0 calibrate`.

The unit is a prompt, and prompts are taken for independent draws from what the model will be asked. Its loss at a
threshold is the share of its new tokens whose argmax at the exit is not full depth's, read under teacher forcing
along full depth's own greedy continuation; agreement is 1 minus the mean loss. Which thresholds keep the promise is
decided by `sigma0.calibrate.ltt`; the prompts set apart for the check have no part in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sigma0.calibrate.bootstrap import Estimate, clustered_share, ratio, saved_share
from sigma0.calibrate.ltt import p_value, passing, units_needed
from sigma0.calibrate.teacher_forcing import ForcedText, GridReadings, read_grids
from sigma0.config import ExitConfig
from sigma0.models.hf_generate import DepthGenerationMixin

CHECK_SHARE = 0.2
_BATCH = 25
_SEED = 0


def _probabilities() -> tuple[float, ...]:
    """From nearly 1 down to 0.1, evenly in the logit: the patient ones first."""
    return tuple(float(f"{1 / (1 + np.exp(-logit)):.6g}") for logit in np.arange(11, -2.25, -0.1))


def _steps() -> tuple[float, ...]:
    """From 0.005 up to 4, beyond which no ratio of normed states goes; each 2.3 % above the one before."""
    return tuple(float(f"{eps:.4g}") for eps in np.geomspace(0.005, 4.0, 300))


# For each rule, settings from the most patient to the most eager: the order of the tests. A fine grid costs prompts
# nothing, since each test is made at the full level. `accel` holds on one loop, or it could hardly save any.
GRIDS: dict[str, tuple[ExitConfig, ...]] = {
    "qexit": tuple(ExitConfig(mode="qexit", q=q) for q in _probabilities()),
    "margin": tuple(ExitConfig(mode="margin", theta=theta) for theta in _probabilities()),
    "converge": tuple(ExitConfig(mode="converge", eps=eps) for eps in _steps()),
    "accel": tuple(ExitConfig(mode="accel", eps=eps, patience=1, accel_scale="states") for eps in _steps()),
    "accel-steps": tuple(
        ExitConfig(mode="accel", eps=eps, patience=1, accel_scale="steps") for eps in _steps() if eps <= 1.02
    ),
}
THRESHOLD: dict[str, str] = {"qexit": "q", "margin": "theta", "converge": "eps", "accel": "eps", "accel-steps": "eps"}


@dataclass(frozen=True)
class Tested:
    """One setting on the calibration prompts."""

    threshold: float  # Its q, theta or eps
    agreement: float  # 1 minus the mean loss
    p_value: float  # Of "the agreement is below the one asked for"
    mean_depth: float  # Mean exit depth of the new tokens
    passed: bool  # Whether it keeps the promise


@dataclass(frozen=True)
class Check:
    """The chosen setting on prompts that had no part in the choice."""

    prompts: int  # How many
    agreement: Estimate  # Mean over prompts of the share of new tokens with full depth's argmax
    same: Estimate  # Share of free runs equal to full depth's, token for token
    mean_depth: Estimate | None  # Mean exit depth of the tokens after each first; None if there are none
    passes_saved: Estimate | None  # Of free runs of one prompt at a time, over the tokens after each first
    rows_saved: Estimate | None  # The same in rows


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found."""

    mode: str  # The exit rule, one of `GRIDS`
    agreement: float  # The agreement asked for
    confidence: float  # With which it was to be kept
    prompts: int  # Calibration prompts
    # Prompts, those of the check included, that the promise takes with no error at all, and at half of the
    # allowed errors
    needed: tuple[int, int]
    tested: tuple[Tested, ...]  # Settings from the most patient on, down to the first that did not pass
    chosen: ExitConfig | None  # The most eager that passed, or None
    check: Check | None  # What it does on other prompts, or None


def calibrate(
    model: DepthGenerationMixin,
    prompts: Sequence[tuple[int, ...]],
    mode: str = "qexit",
    agreement: float = 0.99,
    confidence: float = 0.95,
    max_new_tokens: int = 64,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> Calibration:
    """Chooses the most eager threshold whose agreement with full depth is kept with the confidence asked for.

    Args:
        model: A looped model.
        prompts: Ids of at least 5 prompts; every fifth, after shuffling, is set apart for the check.
        mode: One of `GRIDS`: an exit rule with a threshold.
        agreement: Share of new tokens that must keep full depth's argmax, in (0, 1).
        confidence: In (0, 1).
        max_new_tokens: New tokens of each prompt at most.
        on_prompt: Told how many prompts are done; there are `len(prompts)`, the checked ones counted a second time.

    Raises:
        ValueError: For a mode without a threshold, too few prompts, two that are the same, or a share out of range.
    """
    return calibrate_rules(model, prompts, [mode], agreement, confidence, max_new_tokens, on_prompt)[0]


def calibrate_rules(
    model: DepthGenerationMixin,
    prompts: Sequence[tuple[int, ...]],
    modes: Sequence[str] = tuple(GRIDS),
    agreement: float = 0.99,
    confidence: float = 0.95,
    max_new_tokens: int = 64,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> list[Calibration]:
    """As `calibrate`, for several rules on the same prompts; with the confidence asked for, all keep their promise.

    Each of k rules is tested at a confidence of 1 - (1 - confidence) / k, so whichever of them is used afterwards, it
    may be picked by what was found here.

    Args:
        model: As in `calibrate`, as are the others.
        prompts: Their ids.
        modes: Some of `GRIDS`.
        agreement: To keep.
        confidence: Of all promises at once.
        max_new_tokens: Of each prompt.
        on_prompt: Told how many prompts are done; there are `prompts_done(len(prompts), len(modes))`.
    """
    for mode in modes:
        check_mode(mode)
    each_confidence = joint_confidence(confidence, len(modes))
    needed = prompts_needed(agreement, each_confidence)
    if len(prompts) < needed[0]:
        rules = "" if len(modes) == 1 else f" for each of {len(modes)} rules"
        raise ValueError(
            f"{len(prompts)} prompts cannot promise agreement >= {agreement:g} with confidence {confidence:g}{rules}: "
            f"it takes {needed[0]} without one error, {needed[1]} at half of the allowed errors (a fifth is set apart "
            "for the check); give more prompts, or ask for a lower agreement or confidence"
        )
    check_distinct(prompts)
    order = list(range(len(prompts)))
    Random(_SEED).shuffle(order)
    checked_prompts = held_out(len(prompts))
    apart, fitting = [prompts[k] for k in order[:checked_prompts]], [prompts[k] for k in order[checked_prompts:]]
    texts = continue_in_full(model, fitting, max_new_tokens, on_prompt)
    # One at a time, as the runs at the exits: in a narrow dtype a batch may differ in near ties.
    checked = [text for prompt in apart for text in continue_in_full(model, [prompt], max_new_tokens)]
    grids = {mode: [model.exit_rule(config) for config in GRIDS[mode]] for mode in modes}
    readings = read_grids(model, grids, texts)
    calibrations = []
    for place, mode in enumerate(modes):
        kept, tested = _tested(readings, len(texts), mode, 1 - agreement, each_confidence)
        chosen = GRIDS[mode][kept - 1] if kept else None
        done = len(fitting) + place * len(apart)
        check = None if chosen is None else _check(model, apart, checked, chosen, max_new_tokens, done, on_prompt)
        calibrations.append(Calibration(mode, agreement, confidence, len(fitting), needed, tested, chosen, check))
    return calibrations


def _tested(
    readings: GridReadings, texts: int, mode: str, risk: float, confidence: float
) -> tuple[int, tuple[Tested, ...]]:
    """How many settings of a rule's grid keep the risk, and these with the first that does not."""
    losses, depths = _losses(readings, mode)
    kept = passing(losses, risk, confidence)
    shown = losses[:, : kept + 1]
    return kept, tuple(
        Tested(
            threshold=getattr(config, THRESHOLD[mode]),
            agreement=1 - float(loss),
            p_value=p_value(float(loss), texts, risk),
            mean_depth=depth,
            passed=place < kept,
        )
        for place, (config, loss, depth) in enumerate(zip(GRIDS[mode], shown.mean(0), depths, strict=False))
    )


def joint_confidence(confidence: float, rules: int) -> float:
    """The confidence of each of some promises that all hold at once with the confidence asked for (Bonferroni)."""
    return 1 - (1 - confidence) / rules


def prompts_done(prompts: int, rules: int = 1) -> int:
    """How many prompts `calibrate_rules` counts: those of the check once more for each rule after the first."""
    return prompts + (rules - 1) * held_out(prompts)


def check_mode(mode: str) -> str:
    """A rule's name, if it has a threshold.

    Raises:
        ValueError: If it has none.
    """
    if mode in GRIDS:
        return mode
    raise ValueError(f"exit rule {mode!r} has no threshold to calibrate; one of {', '.join(GRIDS)}")


def held_out(prompts: int) -> int:
    """How many of so many prompts are set apart for the check."""
    return max(1, round(CHECK_SHARE * prompts))


def prompts_needed(agreement: float, confidence: float) -> tuple[int, int]:
    """Prompts that a promise takes with no error, and at half of the allowed errors, the check's fifth included.

    Raises:
        ValueError: For a share that is not between 0 and 1.
    """
    if not 0 < agreement < 1:
        raise ValueError(f"agreement {agreement!r} is not between 0 and 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence!r} is not between 0 and 1")
    risk = 1 - agreement
    return _with_check(units_needed(risk, confidence)), _with_check(units_needed(risk, confidence, 0.5))


def check_distinct(prompts: Sequence[tuple[int, ...]]) -> None:
    """Refuses a prompt given twice: copies carry no evidence of their own.

    Raises:
        ValueError: Naming the two, counted from 1.
    """
    seen: dict[tuple[int, ...], int] = {}
    for number, prompt in enumerate(prompts, start=1):
        if prompt in seen:
            raise ValueError(
                f"prompts {seen[prompt]} and {number} are the same; the promise takes prompts drawn independently, so "
                "leave copies out"
            )
        seen[prompt] = number


def _with_check(fitting: int) -> int:
    """The fewest prompts that leave so many once the check has got its share."""
    count = fitting
    while count - held_out(count) < fitting:
        count += 1
    return count


def continue_in_full(
    model: DepthGenerationMixin,
    prompts: Sequence[tuple[int, ...]],
    max_new_tokens: int,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> list[ForcedText]:
    """Continues prompts greedily at full depth, several at once (those of like length together)."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    texts: dict[int, ForcedText] = {}
    for start in range(0, len(order), _BATCH):
        group = order[start : start + _BATCH]
        for number, new in zip(group, _continue(model, [prompts[k] for k in group], max_new_tokens), strict=True):
            texts[number] = ForcedText((*prompts[number], *new), len(new))
        on_prompt(len(texts))
    return [texts[number] for number in range(len(prompts))]


def continue_alone(
    model: DepthGenerationMixin,
    prompt: tuple[int, ...],
    config: ExitConfig,
    max_new_tokens: int,
    past_the_end: bool = False,
) -> Any:
    """Continues one prompt greedily, alone in its batch.

    Args:
        model: A looped model.
        prompt: Its ids.
        config: When tokens stop.
        max_new_tokens: New tokens at most.
        past_the_end: Write that many whether the text ends or not.

    Returns:
        A `DepthGenerateOutput`.
    """
    no_end = {"eos_token_id": None} if past_the_end else {}
    ids = torch.tensor([prompt], device=model.device)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        exit_config=config,
        return_dict_in_generate=True,
        **no_end,
    )


def _continue(
    model: DepthGenerationMixin, prompts: Sequence[tuple[int, ...]], max_new_tokens: int
) -> list[tuple[int, ...]]:
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    outputs = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        exit_config=ExitConfig(mode="full"),
        return_dict_in_generate=True,
    )
    lengths = (outputs.exit_depths > 0).sum(-1).tolist()
    rows = outputs.sequences[:, longest:].tolist()
    return [tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def _losses(readings: GridReadings, grid: str) -> tuple[NDArray[np.float64], list[float]]:
    """Loss of each text at each setting of a grid `[texts, settings]`, and the mean depth of each setting."""
    new = np.bincount(readings.text)
    losses = np.empty((len(new), len(readings.exits[grid])))
    for place, exits in enumerate(readings.exits[grid]):
        wrong = ~readings.same_at(exits)
        losses[:, place] = np.bincount(readings.text, wrong, minlength=len(new)) / new
    return losses, [float(depth) for depth in readings.exits[grid].mean(1)]


def _check(
    model: DepthGenerationMixin,
    prompts: Sequence[tuple[int, ...]],
    texts: Sequence[ForcedText],
    config: ExitConfig,
    max_new_tokens: int,
    done: int,
    on_prompt: Callable[[int], None],
) -> Check:
    readings = read_grids(model, {"chosen": [model.exit_rule(config)]}, texts)
    agreed = 1 - _losses(readings, "chosen")[0][:, 0]
    same, depths, passes, rows, later = [], [], [], [], []
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=1):
        run = continue_alone(model, prompt, config, max_new_tokens)
        same.append(tuple(run.sequences[0].tolist()) == text.ids)
        depths.append(int(run.exit_depths[0, 1:].sum()))
        passes.append(run.loop_passes)
        rows.append(run.loop_rows)
        later.append(run.exit_depths.shape[1] - 1)
        on_prompt(done + number)
    ones = np.ones(len(prompts))
    full = model.num_loops * np.array(later)
    tokens = [text.new for text in texts]
    agreement, equal = clustered_share(agreed, ones, tokens), clustered_share(same, ones)
    assert agreement is not None and equal is not None
    return Check(
        prompts=len(prompts),
        agreement=agreement,
        same=equal,
        mean_depth=ratio(depths, later),
        passes_saved=saved_share(passes, full),
        rows_saved=saved_share(rows, full),
    )
