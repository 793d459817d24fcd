"""What only Python knows: logits processors and stopping criteria that a caller brings, called between two passes.

The step is cut behind its reading: the processors see the ids and the logits of the rows that were read, the criteria
the ids with what was sampled, and the rest of the step goes on with their answers.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from sigma0.decode.batch import Ints
from sigma0.decode.transfer import to_device

# What these return for a row depends on that row alone, so they may be called on any part of the batch.
ROW_WISE_PROCESSORS: tuple[type, ...] = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
    processors.ExponentialDecayLengthPenalty,
    processors.LogitNormalization,
    processors.InfNanRemoveLogitsProcessor,
)
ROW_WISE_CRITERIA: tuple[type, ...] = (
    criteria.MaxLengthCriteria,
    criteria.EosTokenCriteria,
    criteria.StopStringCriteria,
    criteria.MaxTimeCriteria,
)


class CheckedProcessors(LogitsProcessorList):  # type: ignore[misc]
    """Logits processors of which each has to leave something to choose from."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """As transformers' own.

        Raises:
            ValueError: Naming a processor that leaves a row only minus infinity, or NaN.
        """
        for item in self:
            # before the call, since some processors write in place
            had = scores.amax(-1) > -torch.inf
            scores = LogitsProcessorList([item])(input_ids, scores, **kwargs)
            if bool((had & ~(scores.amax(-1) > -torch.inf)).any()):
                name = getattr(item, "__name__", type(item).__name__)
                raise ValueError(
                    f"{name} leaves no token to choose: all scores of a row are minus infinity, or some are NaN"
                )
        return scores


def rows_are_independent(logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList) -> bool:
    """Whether every processor and criterion is known to treat each row by itself.

    A subclass counts as unknown, since it may do anything.
    """
    return all(type(item) in ROW_WISE_PROCESSORS for item in logits_processor) and all(
        type(item) in ROW_WISE_CRITERIA for item in stopping_criteria
    )


def process_rows(
    logits_processor: LogitsProcessorList, ids: Tensor, sequences: Ints, lengths: Ints, logits: Tensor
) -> Tensor:
    """Processed scores of some rows; processors see rows of one length at a time, as rectangular ids.

    Args:
        logits_processor: Prepared for the whole batch.
        ids: Of every sequence, `[B, >= longest]`.
        sequences: Batch index of each row, `[N]`.
        lengths: Ids that each row follows, `[N]`.
        logits: float32 `[N, V]`; not modified.
    """
    scores = torch.empty_like(logits)
    for length in np.unique(lengths).tolist():
        group = np.flatnonzero(lengths == length)
        rows = to_device(group, ids.device)
        own = ids[to_device(sequences[group], ids.device), :length]
        # on a copy, since some processors write in place and the raw logits may be kept
        scores[rows] = narrowed(logits_processor, sequences[group])(own, logits[rows].clone())
    return scores


def is_over(
    stopping_criteria: StoppingCriteriaList,
    ids: Tensor,
    sequences: Ints,
    lengths: Ints,
    scores: Sequence[Sequence[Tensor]] | None,
) -> Tensor:
    """Whether sequences end, bool `[N]` on the host; criteria, too, see rows of one length at a time.

    Args:
        stopping_criteria: Beside lengths and EOS ids.
        ids: Of every sequence, the new tokens included, `[B, >= longest]`.
        sequences: Batch index of each, `[N]`.
        lengths: Ids of each, `[N]`.
        scores: Kept scores of every sequence of the batch; None where none are kept.
    """
    over = np.zeros(len(sequences), dtype=np.bool_)
    for length in np.unique(lengths).tolist():
        group = np.flatnonzero(lengths == length)
        rows = sequences[group]
        kept = None
        if scores is not None:
            kept = tuple(torch.stack(step) for step in zip(*[scores[row] for row in rows.tolist()], strict=True))
        own = ids[to_device(rows, ids.device), :length]
        over[group] = stopping_criteria(own, kept).cpu().numpy()
    return torch.from_numpy(over)


def split_criteria(
    stopping_criteria: StoppingCriteriaList,
) -> tuple[StoppingCriteriaList, int | None, frozenset[int]]:
    """The criteria that must be called, the longest that a sequence may be, and the ids that end it."""
    rest, lengths, eos = StoppingCriteriaList(), [], set()
    for item in stopping_criteria:
        if type(item) is criteria.MaxLengthCriteria:
            lengths.append(int(item.max_length))
        elif type(item) is criteria.EosTokenCriteria:
            eos.update(item.eos_token_id.tolist())
        else:
            rest.append(item)
    return rest, min(lengths) if lengths else None, frozenset(eos)


def narrowed(logits_processor: LogitsProcessorList, sequences: Ints) -> CheckedProcessors:
    """The processors as they are for some rows of the batch.

    Args:
        logits_processor: Prepared for the whole batch.
        sequences: Batch indices of the rows, `[N]`.

    Returns:
        The same list, but for a repetition penalty that holds the left padding of each row, and for a caller's
        function, which gets the batch index of a single row.
    """
    fitting = CheckedProcessors()
    for item in logits_processor:
        padding = getattr(item, "prompt_ignore_length", None)
        if isinstance(padding, Tensor):
            item = copy(item)
            item.prompt_ignore_length = padding[torch.from_numpy(sequences).to(padding.device)]
        elif type(item) is processors.PrefixConstrainedLogitsProcessor and len(sequences) == 1:
            item = copy(item)
            item._prefix_allowed_tokens_fn = partial(_of_sequence, item._prefix_allowed_tokens_fn, int(sequences[0]))
        fitting.append(item)
    return fitting


def _of_sequence(allowed: Callable[[int, Tensor], list[int]], sequence: int, _row: int, ids: Tensor) -> list[int]:
    """A caller's function, called with the sequence's index in the whole batch."""
    return allowed(sequence, ids)
