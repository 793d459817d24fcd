"""The output of `generate`, made from a finished token loop or from transformers' own loop."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from sigma0.config import ExitMode
from sigma0.decode.exits import exit_reason
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.ops import Operations
from sigma0.decode.stats import RunRecord
from sigma0.decode.token_loop import Emission, TokenLoop
from sigma0.decode.transfer import to_device, to_host
from sigma0.models.cache_name import CACHE_NAME, named_cache
from sigma0.models.outputs import DepthGenerateOutput


class EndRecorder(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that record the length at which each sequence ended.

    Args:
        stopping_criteria: The criteria to evaluate.
        cache: Its `ended` is set, so that the pads fed to ended sequences cost no loops. The new tokens are added to
            its record, if there is one.
        ops: Agree on decisions where several processes take part.
    """

    def __init__(self, stopping_criteria: StoppingCriteriaList, cache: DepthCache, ops: Operations) -> None:
        super().__init__(stopping_criteria)
        self._cache = cache
        self._ops = ops
        self._lengths: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which sequences `[B, S]` have ended, bool `[B]`."""
        # in place, since transformers' loop continues with these very ids
        input_ids[:, -1] = self._ops.broadcast(input_ids[:, -1])
        self._record_tokens(input_ids[:, -1])
        done: Tensor = self._ops.broadcast(super().__call__(input_ids, scores, **kwargs))
        unknown = torch.zeros_like(done, dtype=torch.int64)
        lengths = unknown if self._lengths is None else self._lengths
        self._lengths = torch.where(done & (lengths == 0), input_ids.shape[1], lengths)
        self._cache.ended = (self._lengths > 0).cpu().numpy()
        return done

    def _record_tokens(self, sampled: Tensor) -> None:
        """Adds the tokens `[B]` just sampled to the record, those of ended sequences left out."""
        record = self._cache.record
        if record is None or record.pending_logits is None:
            return
        ended = self._cache.ended
        rows = np.arange(len(sampled)) if ended is None else np.flatnonzero(~ended)
        alive = to_device(rows, sampled.device)
        record.note_tokens(record.pending_logits[alive], rows.tolist(), to_host(sampled[alive]).tolist())
        record.pending_logits = None

    def lengths(self, sequences: Tensor) -> Tensor:
        """Length of each sequence `[B]`, with its end token and without pads."""
        assert self._lengths is not None
        return torch.where(self._lengths == 0, sequences.shape[1], self._lengths)


def wave_output(loop: TokenLoop, emitted: list[list[Emission]], mode: ExitMode) -> DepthGenerateOutput:
    """The rectangular form of a finished token loop.

    Args:
        loop: The token loop.
        emitted: The new tokens of each sequence.
        mode: The exit rule, for the reasons.
    """
    sequences = loop.sequences
    new = max(len(emissions) for emissions in emitted)
    depths = torch.zeros((len(emitted), new), dtype=torch.int64, device=sequences.device)
    for row, emissions in zip(depths, emitted, strict=True):
        row[: len(emissions)] = torch.tensor([emission.depth for emission in emissions])
    verified: dict[str, Any] = {}
    if loop.verifies:
        accepted = torch.zeros_like(depths, dtype=torch.bool)
        for flags, accepted_of_row in zip(accepted, loop.accepted, strict=True):
            flags[: len(accepted_of_row)] = torch.tensor(accepted_of_row)
        verified = {"accepted": accepted, "tail_passes": loop.tail_passes}
    return DepthGenerateOutput(
        sequences=sequences,
        scores=_stacked(loop.sampler.scores),
        logits=_stacked(loop.sampler.raw_logits),
        **named_cache(loop.cache),
        runner=loop.runner.chosen,
        exit_depths=depths,
        exit_reasons=[
            [exit_reason(mode, item.met, item.diverged, item.forced) for item in emissions] for emissions in emitted
        ],
        **_statistics(loop.record, new),
        **_counts(loop.cache),
        **verified,
    )


def lockstep_output(
    outputs: Any,
    trace: list[tuple[Tensor, Tensor, Tensor]],
    recorder: EndRecorder,
    mode: ExitMode,
    record: RunRecord | None,
) -> DepthGenerateOutput:
    """Adds depths to the output of transformers' own loop.

    Args:
        outputs: A `GenerateDecoderOnlyOutput`.
        trace: Depth, met and diverged `[B]` of each step.
        recorder: Lengths at which the sequences ended.
        mode: The exit rule, for the reasons.
        record: Statistics of the new tokens, with `output_statistics=True`.
    """
    new, cache = len(trace), outputs[CACHE_NAME]
    ends = recorder.lengths(outputs.sequences) - (outputs.sequences.shape[1] - new)  # [B]
    alive = torch.arange(new, device=ends.device) < ends[:, None]  # [B, new]
    depths, met, diverged = (torch.stack(list(rows), dim=1) for rows in zip(*trace, strict=True))
    return DepthGenerateOutput(
        sequences=outputs.sequences,
        scores=outputs.scores,
        logits=outputs.logits,
        **named_cache(cache),
        exit_depths=depths * alive,
        exit_reasons=[
            [exit_reason(mode, *flags) for flags in zip(row[:end], broken[:end], strict=True)]
            for row, broken, end in zip(met.tolist(), diverged.tolist(), ends.tolist(), strict=True)
        ],
        **_statistics(record, new),
        **_counts(cache),
    )


def _statistics(record: RunRecord | None, new: int) -> dict[str, Any]:
    """Statistics of the first `new` tokens, named as in `DepthGenerateOutput`."""
    if record is None:
        return {}
    return {
        "loop_statistics": record.loops[:, :new],
        "loop_fates": record.fates[:, :new],
        "readings": record.logit_stats[:, :new],
        "deepest_readings": record.deepest[:, :new],
    }


def _counts(cache: DepthCache) -> dict[str, Any]:
    """The counts of a cache, named as in `DepthGenerateOutput`."""
    counts = cache.counts
    return {
        "loop_passes": counts.passes,
        "loop_rows": counts.rows,
        "prompt_rows": counts.prompt_rows,
        "head_rows": counts.head_rows,
    }


def _stacked(rows: list[list[Tensor]] | None) -> tuple[Tensor, ...] | None:
    """Per-sequence scores as one `[B, V]` for each step, zeros where a sequence had ended."""
    if rows is None:
        return None
    blank = torch.zeros_like(rows[0][0])
    steps = max(len(row) for row in rows)
    return tuple(torch.stack([row[step] if step < len(row) else blank for row in rows]) for step in range(steps))
