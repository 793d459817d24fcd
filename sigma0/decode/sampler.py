"""From logits to ids, on the device, each row by its own sequence's settings.

The scores are those of transformers' own processors, in transformers' order, and a random draw is Gumbel-max: the id
with the largest sum of score and noise. No function here reads a value of a tensor on the host, and every shape is
known from those of the arguments and from the `SamplingProgram`.
"""

import torch
from torch import Tensor

from sigma0.decode.ops import gumbel
from sigma0.decode.random_numbers import uniform
from sigma0.decode.sampling_settings import (
    DRAWS,
    FREQUENCY,
    MIN_LENGTH,
    MIN_P,
    NO_ID,
    PADDING,
    PRESENCE,
    PROMPT,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P_CUT,
    SamplingProgram,
    SamplingSettings,
)


def process(
    settings: SamplingSettings,
    program: SamplingProgram,
    logits: Tensor,
    sequences: Tensor,
    ids: Tensor | None,
    lengths: Tensor,
) -> Tensor:
    """Scores that ids are sampled from.

    Args:
        settings: Of every sequence.
        program: What has to be computed, of `settings.program()`.
        logits: `[K, V]`, unchanged.
        sequences: Sequence of each row, int64 `[K]`.
        ids: Ids of every sequence, prompt, left padding and drafts included, int64 `[>= S, C]`; may be None where the
            program does not read them.
        lengths: How many of them come before the id that is sampled from the row, int64 `[K]`.

    Returns:
        float32 `[K, V]`; the logits themselves where nothing changes them.
    """
    scores = logits.float()
    numbers = settings.numbers.index_select(0, sequences)  # [K, 6]
    table = settings.table.index_select(0, sequences)  # [K, 5]
    if program.bias:
        scores = scores + _biases(settings, scores, sequences)
    if program.output_penalties or program.repetition:
        assert ids is not None
        scores = _penalised(program, scores, numbers, table, ids.index_select(0, sequences), lengths)
    if program.bad_words:
        assert ids is not None
        scores = scores + _bad_words(settings, scores, sequences, ids, lengths)
    if program.min_length:
        ends = settings.eos.index_select(0, sequences)  # [K, E]
        ends = ends.masked_fill((lengths >= table[:, MIN_LENGTH])[:, None], NO_ID)
        scores = scores.masked_fill(_among(ends, scores), -torch.inf)
    if program.temperature:
        scores = scores / _column(numbers, TEMPERATURE)
    if program.top_k:
        scores = _top_k(scores, table[:, TOP_K], min(program.top_k, scores.shape[1]))
    if program.top_p:
        scores = _top_p(scores, _column(numbers, TOP_P_CUT))
    if program.min_p:
        probs = torch.softmax(scores, dim=-1)
        least = _column(numbers, MIN_P) * probs.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probs < least, -torch.inf)
    return scores


def draw(
    settings: SamplingSettings,
    program: SamplingProgram,
    scores: Tensor,
    sequences: Tensor,
    positions: Tensor,
    purpose: Tensor | int,
) -> Tensor:
    """Ids `[K]`: drawn from the softmax of the scores, or the likeliest where the sequence is greedy.

    Rows whose scores are not finite get some id.

    Args:
        settings: Of every sequence.
        program: What has to be computed.
        scores: Processed, float32 `[K, V]`.
        sequences: Sequence of each row, int64 `[K]`.
        positions: Position of the id that is drawn, left padding not counted, int64 `[K]`.
        purpose: What each draw is for (`decode.random_numbers`): int64 `[K]`, or one for all.
    """
    if not program.draws:
        return scores.argmax(dim=-1)
    noise = gumbel(settings.keys.index_select(0, sequences), positions, purpose, scores.shape[1])
    return noise.mul_(_draws(settings, sequences)).add_(scores).argmax(dim=-1)


def draw_uniform(settings: SamplingSettings, sequences: Tensor, positions: Tensor, purpose: Tensor | int) -> Tensor:
    """Uniform draws in [0, 1), float32 `[K]`; arguments as `draw` takes them."""
    return uniform(settings.keys.index_select(0, sequences), positions, purpose)


def distribution(settings: SamplingSettings, program: SamplingProgram, scores: Tensor, sequences: Tensor) -> Tensor:
    """What ids are sampled from, float32 `[K, V]`; of greedy sequences all of it lies on the likeliest id.

    So the rule of `verify` for distributions is the greedy rule too.

    Args:
        settings: Of every sequence.
        program: What has to be computed.
        scores: Processed, float32 `[K, V]`.
        sequences: Sequence of each row, int64 `[K]`.
    """
    ids = torch.arange(scores.shape[1], device=scores.device)
    likeliest = (ids == scores.argmax(dim=-1, keepdim=True)).float()
    if not program.draws:
        return likeliest
    return torch.where(_draws(settings, sequences), torch.softmax(scores, dim=-1), likeliest)


def _penalised(
    program: SamplingProgram, scores: Tensor, numbers: Tensor, table: Tensor, ids: Tensor, lengths: Tensor
) -> Tensor:
    """Presence and frequency penalties over the output, then the repetition penalty over all ids `[K, C]`."""
    indices = torch.arange(ids.shape[1], device=ids.device)  # [C]
    written = indices < lengths[:, None]  # [K, C]
    if program.output_penalties:
        counted = written & (indices >= _column(table, PROMPT))
        counts = _with_spare(scores, torch.float32)
        counts.scatter_add_(1, _in_range(ids, counted, scores), torch.ones_like(ids, dtype=torch.float32))
        counts = counts[:, :-1]
        scores = scores - _column(numbers, FREQUENCY) * counts - _column(numbers, PRESENCE) * (counts > 0)
    if program.repetition:
        occurs = _among(ids.masked_fill(~(written & (indices >= _column(table, PADDING))), NO_ID), scores)
        penalty = _column(numbers, REPETITION)
        scores = torch.where(occurs, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    return scores


def _biases(settings: SamplingSettings, scores: Tensor, sequences: Tensor) -> Tensor:
    """What is added to each logit, float32 `[K, V]`."""
    ids = settings.biased.index_select(0, sequences)  # [K, A]
    added = _with_spare(scores, torch.float32)
    added.scatter_(1, _in_range(ids, ids >= 0, scores), settings.biases.index_select(0, sequences))
    return added[:, :-1]


def _bad_words(settings: SamplingSettings, scores: Tensor, sequences: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """-inf for each id that would complete a bad word, else 0, `[K, V]`."""
    words = settings.words.index_select(0, sequences)  # [K, W, P + 1]
    needed = settings.word_lengths.index_select(0, sequences)  # [K, W]
    before = words.shape[2] - 1
    at = lengths[:, None] + torch.arange(-before, 0, device=ids.device)  # [K, P]
    last_ids = ids[sequences[:, None], at.clamp_min(0)]  # [K, P]
    wanted = words[:, :, :before]
    follows = ((wanted == last_ids[:, None]) | (wanted == NO_ID)).all(dim=-1) & (needed <= lengths[:, None])  # [K, W]
    banned = _among(words[:, :, -1].masked_fill(~follows, NO_ID), scores)
    return torch.zeros_like(scores).masked_fill(banned, -torch.inf)


def _top_k(scores: Tensor, top_k: Tensor, most: int) -> Tensor:
    best = scores.topk(most, dim=-1).values  # [K, most]
    least = best.gather(1, (top_k - 1).clamp(0, most - 1)[:, None])
    least = least.masked_fill((top_k == 0)[:, None], -torch.inf)
    return scores.masked_fill(scores < least, -torch.inf)


def _top_p(scores: Tensor, cut: Tensor) -> Tensor:
    # the sort that transformers calls, which decides which of several equal scores goes; it takes each row by itself
    ascending, order = scores.sort(dim=-1)
    goes = ascending.softmax(dim=-1).cumsum(dim=-1) <= cut
    # the likeliest id stays
    goes = torch.cat([goes[:, :-1], torch.zeros_like(goes[:, -1:])], dim=1)
    return scores.masked_fill(torch.zeros_like(goes).scatter(1, order, goes), -torch.inf)


def _among(ids: Tensor, scores: Tensor) -> Tensor:
    """Which ids of the vocabulary occur in each row of ids `[K, N]`, bool `[K, V]`."""
    occurs = _with_spare(scores, torch.bool)
    occurs.scatter_(1, _in_range(ids, ids >= 0, scores), True)
    return occurs[:, :-1]


def _with_spare(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros `[K, V + 1]`: what must not count is written to the last column."""
    return torch.zeros((scores.shape[0], scores.shape[1] + 1), dtype=dtype, device=scores.device)


def _in_range(ids: Tensor, counts: Tensor, scores: Tensor) -> Tensor:
    """The ids that count, and V for the others and for those that the head lacks."""
    vocabulary = scores.shape[1]
    return ids.masked_fill(~counts, vocabulary).clamp(0, vocabulary)


def _draws(settings: SamplingSettings, sequences: Tensor) -> Tensor:
    """Whether each row's sequence draws, bool `[K, 1]`."""
    return settings.table.index_select(0, sequences)[:, DRAWS : DRAWS + 1] > 0


def _column(values: Tensor, column: int) -> Tensor:
    """A column of a table, `[K, 1]`."""
    return values[:, column : column + 1]
