"""The threshold that decodes fastest under `verify`: `sigma0 calibrate --objective latency`.

Under `verify` every threshold writes full depth's text, so only time is at stake. An eager one proposes early and is
withdrawn often, a patient one waits; passes for each token, checks of the tail included, are counted in real runs of
one prompt at a time, since they depend on what follows a proposal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from sigma0.calibrate.agreement import CHECK_SHARE, GRIDS, THRESHOLD, check_mode, continue_alone
from sigma0.calibrate.bootstrap import Estimate, clustered_share, ratio, saved_share
from sigma0.config import ExitConfig
from sigma0.models.hf_generate import DepthGenerationMixin

# Neighbours on the grid hardly differ in passes, and every setting is really run.
_STRIDES = {"qexit": 10, "margin": 10, "converge": 24, "accel": 24, "accel-steps": 24}
_SEED = 0


@dataclass(frozen=True)
class VerifiedRuns:
    """Prompts continued under `verify`, one at a time, over the tokens after each first."""

    threshold: float  # Its q, theta or eps
    passes_per_token: Estimate  # Passes for each token, those that only check the tail included
    tail_passes_per_token: Estimate  # How many of them came after the last token had stopped
    accepted: Estimate  # Share of the tokens that were proposed and stood, or were read at loop T in the first place
    passes_saved: Estimate  # 1 - passes / (T tokens)


@dataclass(frozen=True)
class LatencyCalibration:
    """What `calibrate_latency` found."""

    mode: str  # The exit rule
    prompts: int  # Prompts the choice was made on
    tested: tuple[VerifiedRuns, ...]  # Settings from the most patient on
    chosen: ExitConfig  # The one with the fewest passes for each token
    check: VerifiedRuns  # The same setting on prompts that had no part in the choice
    checked_prompts: int  # How many these are


def coarse_grid(mode: str) -> tuple[ExitConfig, ...]:
    """The settings of a rule that are tried, the most patient first."""
    return GRIDS[mode][:: _STRIDES[mode]]


def calibrate_latency(
    model: DepthGenerationMixin,
    prompts: Sequence[tuple[int, ...]],
    mode: str = "qexit",
    max_new_tokens: int = 64,
    on_run: Callable[[int], None] = lambda done: None,
) -> LatencyCalibration:
    """Chooses the threshold with the fewest passes for each token.

    Args:
        model: A looped model.
        prompts: Ids of at least 5 prompts; every fifth, after shuffling, is set apart for the check.
        mode: An exit rule with a threshold.
        max_new_tokens: New tokens of each prompt at most, at least 2.
        on_run: Told how many runs are done; there are `latency_runs(len(prompts), mode)`.

    Raises:
        ValueError: For a mode without a threshold, too few prompts, or texts of a single token.
    """
    check_mode(mode)
    if len(prompts) < 5:
        raise ValueError(f"{len(prompts)} prompts: at least 5")
    if max_new_tokens < 2:
        raise ValueError(f"{max_new_tokens!r} new tokens: at least 2, since the first is always read at full depth")
    order = list(range(len(prompts)))
    Random(_SEED).shuffle(order)
    held_out = max(1, round(CHECK_SHARE * len(prompts)))
    apart, fitting = [prompts[k] for k in order[:held_out]], [prompts[k] for k in order[held_out:]]
    configs = [replace(config, after_exit="verify") for config in coarse_grid(mode)]
    tested = []
    for place, config in enumerate(configs):
        tested.append(_run(model, fitting, config, max_new_tokens, _behind(place * len(fitting), on_run)))
    best = min(range(len(configs)), key=lambda place: tested[place].passes_per_token.value)
    check = _run(model, apart, configs[best], max_new_tokens, _behind(len(configs) * len(fitting), on_run))
    return LatencyCalibration(mode, len(fitting), tuple(tested), configs[best], check, len(apart))


def latency_runs(prompts: int, mode: str) -> int:
    """How many runs `calibrate_latency` takes."""
    held_out = max(1, round(CHECK_SHARE * prompts))
    return len(coarse_grid(mode)) * (prompts - held_out) + held_out


def _behind(done: int, on_run: Callable[[int], None]) -> Callable[[int], None]:
    """Reports progress, counted on from what is done already."""
    return lambda more: on_run(done + more)


def _run(
    model: DepthGenerationMixin,
    prompts: Sequence[tuple[int, ...]],
    config: ExitConfig,
    max_new_tokens: int,
    on_run: Callable[[int], None],
) -> VerifiedRuns:
    passes, tails, stood, later = [], [], [], []
    for number, prompt in enumerate(prompts, start=1):
        run = continue_alone(model, prompt, config, max_new_tokens)
        passes.append(run.loop_passes)
        tails.append(run.tail_passes)
        stood.append(int(run.accepted[0, 1:].sum()))
        later.append(run.exit_depths.shape[1] - 1)
        on_run(number)
    if not any(later):
        raise ValueError("every text ends with its first token: there is nothing to save")
    most = model.num_loops * np.array(later)
    figures = ratio(passes, later), ratio(tails, later), clustered_share(stood, later), saved_share(passes, most)
    per_token, tail, accepted, saved = (figure for figure in figures if figure is not None)
    return VerifiedRuns(getattr(config, THRESHOLD[config.mode]), per_token, tail, accepted, saved)
