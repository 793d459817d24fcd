"""What `verify` costs: passes in real runs beside full depth, and what other ways to propose would have cost."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from sigma0.bench.lossless.drafts import record, simulate
from sigma0.calibrate.agreement import continue_alone
from sigma0.calibrate.bootstrap import clustered_share, ratio
from sigma0.config import ExitConfig


def measure_lossless(
    model: Any,
    name: str,
    prompts: Sequence[tuple[int, ...]],
    configs: Sequence[ExitConfig],
    new_tokens: int,
    on_run: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Runs every rule under `verify` on every prompt; `on_run` is told of `(len(configs) + 1) * len(prompts)` runs.

    `redraft` is taken from the rules, `after_exit` is not, and an end of text does not end it.

    Returns:
        The conditions, and `costs`, one for each rule over the tokens after each first, estimates with intervals: the
        `passes` over full depth's, the tail's checks included, and without the passes in which no token was on its way
        to its exit; the `rows`, and those that the head read, over full depth's; the share of the tokens `accepted`,
        which were proposed and stood, or were read at loop T in the first place. Beside them the share of the texts
        that are `identical` to full depth's, and the passes `simulated` from argmax traces.
    """
    if new_tokens < 2:
        raise ValueError(f"{new_tokens} new tokens: at least 2, since the first comes with the prompt")
    done = 0

    def run_all(config: ExitConfig) -> list[Any]:
        nonlocal done
        runs = []
        for prompt in prompts:
            runs.append(continue_alone(model, prompt, config, new_tokens, past_the_end=True))
            on_run(done := done + 1)
        return runs

    full = run_all(ExitConfig(mode="full"))
    texts = [run.sequences for run in full]
    costs = []
    for config in configs:
        verified = replace(config, after_exit="verify")
        runs = run_all(verified)
        costs.append(
            {
                "exit_config": verified.to_dict(),
                **_costs(runs, full),
                "simulated": asdict(simulate(*record(model, prompts, texts, config))),
            }
        )
    return {
        "model": name,
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "total_loops": model.num_loops,
        "dtype": str(model.dtype).removeprefix("torch."),
        "costs": costs,
    }


def _costs(runs: Sequence[Any], full: Sequence[Any]) -> dict[str, Any]:
    passes, tails, rows, heads = (
        np.array([getattr(run, name) for run in runs])
        for name in ("loop_passes", "tail_passes", "loop_rows", "head_rows")
    )
    whole = [run.loop_passes for run in full]
    stood = [int(run.accepted[0, 1:].sum()) for run in runs]
    later = [run.accepted.shape[1] - 1 for run in runs]
    estimates = {
        "passes": ratio(passes, whole),
        "passes_without_tail": ratio(passes - tails, whole),
        "rows": ratio(rows, [run.loop_rows for run in full]),
        "head_rows": ratio(heads, [run.head_rows for run in full]),
        "accepted": clustered_share(stood, later),
    }
    same = [torch.equal(mine.sequences, theirs.sequences) for mine, theirs in zip(runs, full, strict=True)]
    # every run has tokens after its first
    known = {name: asdict(estimate) for name, estimate in estimates.items() if estimate is not None}
    return {**known, "identical": float(np.mean(same))}
