"""What `verify` costs: passes in real runs beside full depth, and what other ways to propose would have cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from sigma0.bench.lossless.drafts import Simulated, record, simulate
from sigma0.calibrate.agreement import continue_alone
from sigma0.calibrate.bootstrap import Estimate, clustered_share, ratio
from sigma0.config import ExitConfig


@dataclass(frozen=True)
class VerifiedCost:
    """One exit rule under `verify`, over the tokens after each first.

    Attributes:
        exit_config: The setting.
        passes: Passes over full depth's, the tail's checks included.
        passes_without_tail: The same without the passes in which no token was on its way to its exit.
        rows: Rows over full depth's.
        head_rows: Rows that the head read over full depth's.
        accepted: Share of the tokens that were proposed and stood, or were read at loop T in the first place.
        identical: Share of the texts that are full depth's, token for token.
        simulated: Passes counted from argmax traces.
    """

    exit_config: dict[str, Any]
    passes: Estimate
    passes_without_tail: Estimate
    rows: Estimate
    head_rows: Estimate
    accepted: Estimate
    identical: float
    simulated: Simulated


@dataclass(frozen=True)
class LosslessReport:
    """All rules on the same prompts.

    Attributes:
        model: Its name.
        prompts: How many.
        new_tokens: New tokens of each, past any end of text.
        total_loops: T.
        dtype: Of the weights.
        costs: One for each rule.
    """

    model: str
    prompts: int
    new_tokens: int
    total_loops: int
    dtype: str
    costs: tuple[VerifiedCost, ...]


def measure_lossless(
    model: Any,
    name: str,
    prompts: Sequence[tuple[int, ...]],
    configs: Sequence[ExitConfig],
    new_tokens: int,
    on_run: Callable[[int], None] = lambda done: None,
) -> LosslessReport:
    """Runs every rule under `verify` on every prompt.

    Args:
        model: A looped model.
        name: What it was loaded as.
        prompts: Ids of the prompts.
        configs: Exit rules; `redraft` is taken from them, `after_exit` is not.
        new_tokens: New tokens of each prompt, at least 2; an end of text does not end it.
        on_run: Told how many runs are done, of `(len(configs) + 1) * len(prompts)`.

    Raises:
        ValueError: For fewer than 2 new tokens.
    """
    if new_tokens < 2:
        raise ValueError(f"{new_tokens} new tokens: at least 2, since the first comes with the prompt")
    done = 0
    full = []
    for prompt in prompts:
        full.append(continue_alone(model, prompt, ExitConfig(mode="full"), new_tokens, past_the_end=True))
        on_run(done := done + 1)
    costs = []
    for config in configs:
        verified, runs = replace(config, after_exit="verify"), []
        for prompt in prompts:
            runs.append(continue_alone(model, prompt, verified, new_tokens, past_the_end=True))
            on_run(done := done + 1)
        texts = [run.sequences for run in full]
        simulated = simulate(*record(model, prompts, texts, config))
        costs.append(_cost(config, runs, full, simulated))
    dtype = str(model.dtype).removeprefix("torch.")
    return LosslessReport(name, len(prompts), new_tokens, model.num_loops, dtype, tuple(costs))


def _cost(config: ExitConfig, runs: Sequence[Any], full: Sequence[Any], simulated: Simulated) -> VerifiedCost:
    whole = [run.loop_passes for run in full]
    passes, tails = np.array([run.loop_passes for run in runs]), np.array([run.tail_passes for run in runs])
    stood = [int(run.accepted[0, 1:].sum()) for run in runs]
    later = [run.accepted.shape[1] - 1 for run in runs]
    same = [torch.equal(mine.sequences, theirs.sequences) for mine, theirs in zip(runs, full, strict=True)]
    return VerifiedCost(
        exit_config=replace(config, after_exit="verify").to_dict(),
        passes=_ratio(passes, whole),
        passes_without_tail=_ratio(passes - tails, whole),
        rows=_ratio([run.loop_rows for run in runs], [run.loop_rows for run in full]),
        head_rows=_ratio([run.head_rows for run in runs], [run.head_rows for run in full]),
        accepted=_known(clustered_share(stood, later)),
        identical=float(np.mean(same)),
        simulated=simulated,
    )


def _ratio(numerators: ArrayLike, denominators: ArrayLike) -> Estimate:
    return _known(ratio(numerators, denominators))


def _known(figure: Estimate | None) -> Estimate:
    assert figure is not None, "every run has tokens after its first"
    return figure
