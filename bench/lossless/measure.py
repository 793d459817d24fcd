"""What `verify` costs: passes in real runs beside full depth, and what other ways to propose would have cost.

The latter are counted from recorded argmax traces without a decoder.

Under `verify` a token stops at its exit e and proposes a_e, the argmax there; if a_e is not a_T, its followers are
dropped and the next token enters after loop T. A *fallback* (arXiv 2609.17184) would open a second branch at the first
deeper loop t whose argmax is not a_e, with a_t: where a_t is a_T, the next token enters after loop t instead. So the
passes from a token to the next are

    verify            e  if a_e = a_T, else T
    with a fallback   e  if a_e = a_T;  t  if a_t = a_T;  else T
    with redrafts     the first loop from e on at which the argmax is a_T and stays it

(a branch that is right in between and wrong at T costs rows, no passes), and the last token is checked up to T in all.
A *redraft* needs no second branch: whenever a deeper loop changes its mind, the followers are dropped and its argmax is
fed.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigma0.calibrate.agreement import continue_alone
from sigma0.calibrate.bootstrap import clustered_share, ratio
from sigma0.calibrate.teacher_forcing import LoopRun
from sigma0.config import ExitConfig

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Simulated:
    """Passes of one rule over all texts, tokens after each first."""

    passes: int  # Under `verify`
    with_fallback: int  # With a second proposal
    with_redraft: int  # With a new proposal whenever the argmax changes
    full: int  # At full depth
    wrong: float  # Share of the proposals, tokens that stop before T, that are withdrawn
    rescued: float  # Share of these whose second proposal is right


def simulate(traces: Sequence[Ints], exits: Sequence[Ints]) -> Simulated:
    """Counts passes.

    Of each text's new tokens after its first, traces are the argmax at loop 1 to T, `[T, n]`, and exits the loop at
    which the rule stops each of them, `[n]`.
    """
    # under verify, with a fallback, with redrafts
    passes = np.zeros(3, dtype=np.int64)
    full = wrong = rescued = proposed = 0
    for trace, exit_loops in zip(traces, exits, strict=True):
        total, count = trace.shape
        for place in range(count):
            depth = int(exit_loops[place])
            costs = step(trace[:, place], depth)
            # The last token opens no follower; it is checked up to T.
            passes += total if place == count - 1 else costs
            full += total
            proposed += depth < total
            wrong += costs[0] == total and depth < total
            rescued += costs[1] < costs[0]
    verified, with_fallback, with_redraft = passes.tolist()
    return Simulated(verified, with_fallback, with_redraft, full, wrong / max(proposed, 1), rescued / max(wrong, 1))


def step(path: Ints, depth: int) -> tuple[int, int, int]:
    """Passes to the next token, by the argmax at loop 1 to T, `[T]`: under `verify`, with a fallback, with redrafts."""
    total = len(path)
    other = np.flatnonzero(path != path[-1])
    redrafted = max(depth, int(other[-1]) + 2 if len(other) else 1)
    if path[depth - 1] == path[-1]:
        return depth, depth, redrafted
    changed = int(np.flatnonzero(path[depth:] != path[depth - 1])[0]) + depth + 1
    return total, changed if path[changed - 1] == path[-1] else total, redrafted


def full_texts(model: Any, prompts: Sequence[tuple[int, ...]], new: int) -> list[Tensor]:
    """Full depth's own text after each prompt, prompt included, `new` tokens whether it ends or not; each `[1, S]`."""
    full = ExitConfig(mode="full")
    return [continue_alone(model, prompt, full, new, past_the_end=True).sequences for prompt in prompts]


@torch.no_grad()
def record(
    model: Any, prompts: Sequence[tuple[int, ...]], texts: Sequence[Tensor], config: ExitConfig
) -> tuple[list[Ints], list[Ints]]:
    """What each loop reads along texts that `full_texts` gave, and where an exit rule stops.

    Returns:
        For each text, over its new tokens but the last, which are fed back: the argmax at loop 1 to T, `[T, new - 1]`,
        and the loop at which the rule stops, `[new - 1]`.
    """
    rule = model.exit_rule(config)
    traces, exits = [], []
    for prompt, text in zip(prompts, texts, strict=True):
        run = LoopRun.of(model, text)
        marks = torch.zeros_like(text, dtype=torch.bool)
        marks[:, len(prompt) : -1] = True
        run = run.select(marks)  # new - 1 tokens
        traces.append(model.head(run.readable).argmax(-1).cpu().numpy())
        exits.append(run.exits(rule, map(model.head, run.readable)))
    return traces, exits


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
