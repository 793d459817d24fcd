"""Which ids are read: parameters as tensors, scores, draws, and which drafts stand; for library, server and ladder.

Scores are those of transformers' own processors, in transformers' order. A draw is Gumbel-max: the id with the largest
sum of score and noise. Random numbers have no state: each is a hash of (seed of the sequence, position of the token,
purpose, id), computed in integers on the device. So a sequence draws the same tokens alone, in any batch, after a
preemption and from any runner. No function reads a value of a tensor on the host, and every shape is known from those
of the arguments and from the `SamplingProgram`.

Under `verify` a draft x was drawn from q at an earlier loop, and a deeper one, at last loop T, reads p:

    greedy      the draft stands where it is the argmax of p, else that argmax takes its place
    sampling    it stands with probability min(1, p(x) / q(x)), else a token is drawn from max(p - q, 0), normalised
                (speculative sampling: arXiv 2211.17192, section 2.3)
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from sigma0.decode import sampling_params as columns
from sigma0.decode.lanes import CACHE_POSITION, DEPTH, DRAFT, POSITION, STAGE
from sigma0.decode.logits import BROKEN, flag_broken
from sigma0.decode.ops import combined, counter_words, gumbel, no_broadcast
from sigma0.decode.prefill import Batch
from sigma0.decode.sampling_params import NO_ID, SamplingProgram, SamplingSettings, SequenceSampling
from sigma0.decode.settings import PROMPT as FIRST_POSITION
from sigma0.decode.step import LoopOutput, Sampled, Sampler, read, sample_greedy
from sigma0.decode.transfer import to_host

# What a random number is for. A token is drawn once where it is read first; under `verify` each deeper loop t may test
# it, for which the purpose is 2 t - 1, and draw another in its place, for which it is 2 t.
OWN_DRAW = 0


def uniform(keys: Tensor, positions: Tensor, purpose: Tensor | int) -> Tensor:
    """Uniform draws in [0, 1), float32 `[K]`.

    Args:
        keys: `key_of` each sequence's seed, int64 `[K, 2]`.
        positions: Position of the token that each is for, int64 `[K]`.
        purpose: What each is for: int64 `[K]`, or one for all.
    """
    words = counter_words(keys, positions, purpose)  # [K, 2]
    return (combined(words[:, 0], words[:, 1]) >> 8).to(torch.float32) * 2.0**-24


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
        biased = settings.biased.index_select(0, sequences)  # [K, A]
        added = _with_spare(scores, torch.float32)
        added.scatter_(1, _in_range(biased, biased >= 0, scores), settings.biases.index_select(0, sequences))
        scores = scores + added[:, :-1]
    if program.output_penalties or program.repetition:
        assert ids is not None
        scores = _penalised(program, scores, numbers, table, ids.index_select(0, sequences), lengths)
    if program.bad_words:
        assert ids is not None
        scores = scores + _bad_words(settings, scores, sequences, ids, lengths)
    if program.min_length:
        ends = settings.eos.index_select(0, sequences)  # [K, E]
        ends = ends.masked_fill((lengths >= table[:, columns.MIN_LENGTH])[:, None], NO_ID)
        scores = scores.masked_fill(_among(ends, scores), -torch.inf)
    if program.temperature:
        scores = scores / _column(numbers, columns.TEMPERATURE)
    if program.top_k:
        scores = _top_k(scores, table[:, columns.TOP_K], min(program.top_k, scores.shape[1]))
    if program.top_p:
        scores = _top_p(scores, _column(numbers, columns.TOP_P_CUT))
    if program.min_p:
        probs = torch.softmax(scores, dim=-1)
        least = _column(numbers, columns.MIN_P) * probs.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probs < least, -torch.inf)
    return scores


def draw(
    settings: SamplingSettings,
    program: SamplingProgram,
    scores: Tensor,
    sequences: Tensor,
    positions: Tensor,
    purpose: Tensor | int = OWN_DRAW,
) -> Tensor:
    """Ids `[K]`: drawn from the softmax of the scores, or the likeliest where the sequence is greedy.

    Rows whose scores are not finite get some id.

    Args:
        settings: Of every sequence.
        program: What has to be computed.
        scores: Processed, float32 `[K, V]`.
        sequences: Sequence of each row, int64 `[K]`.
        positions: Position of the id that is drawn, left padding not counted, int64 `[K]`.
        purpose: What each draw is for: int64 `[K]`, or one for all.
    """
    if not program.draws:
        return scores.argmax(dim=-1)
    noise = gumbel(settings.keys.index_select(0, sequences), positions, purpose, scores.shape[1])
    return noise.mul_(_draws(settings, sequences)).add_(scores).argmax(dim=-1)


def distribution(settings: SamplingSettings, program: SamplingProgram, scores: Tensor, sequences: Tensor) -> Tensor:
    """What ids are sampled from, float32 `[K, V]`; of greedy sequences all of it lies on the likeliest id.

    So the rule of `verify` for distributions is the greedy rule too. Arguments as `draw` takes them.
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
        counted = written & (indices >= _column(table, columns.PROMPT))
        counts = _with_spare(scores, torch.float32)
        counts.scatter_add_(1, _in_range(ids, counted, scores), torch.ones_like(ids, dtype=torch.float32))
        counts = counts[:, :-1]
        frequency, presence = _column(numbers, columns.FREQUENCY), _column(numbers, columns.PRESENCE)
        scores = scores - frequency * counts - presence * (counts > 0)
    if program.repetition:
        occurs = _among(ids.masked_fill(~(written & (indices >= _column(table, columns.PADDING))), NO_ID), scores)
        penalty = _column(numbers, columns.REPETITION)
        scores = torch.where(occurs, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    return scores


def _bad_words(settings: SamplingSettings, scores: Tensor, sequences: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """-inf for each id that would complete a bad word, else 0, `[K, V]`."""
    words = settings.words.index_select(0, sequences)  # [K, W, P + 1]
    before = words.shape[2] - 1
    at = lengths[:, None] + torch.arange(-before, 0, device=ids.device)  # [K, P]
    last_ids = ids[sequences[:, None], at.clamp_min(0)]  # [K, P]
    wanted = words[:, :, :before]
    # what lies ahead of all ids is no id
    follows = (((wanted == last_ids[:, None]) & (at >= 0)[:, None]) | (wanted == NO_ID)).all(dim=-1)  # [K, W]
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
    return settings.table.index_select(0, sequences)[:, columns.DRAWS : columns.DRAWS + 1] > 0


def _column(values: Tensor, column: int) -> Tensor:
    """A column of a table, `[K, 1]`."""
    return values[:, column : column + 1]


def accept_drawn(drafts: Tensor, p: Tensor, q: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each draft stands, and what the others are drawn from.

    Args:
        drafts: int64 `[K]`.
        p: Distribution of the deeper loop, `[K, V]`.
        q: Distribution that each draft was drawn from, `[K, V]`.
        uniform: Draws in [0, 1), `[K]`.

    Returns:
        bool `[K]`, and `[K, V]`, not normalised.
    """
    stands = uniform * q.gather(1, drafts[:, None])[:, 0] < p.gather(1, drafts[:, None])[:, 0]
    rest = (p - q).clamp_min(0.0)
    # where p and q differ by rounding alone, nothing may be left
    return stands, torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def scripted(
    batch: Batch, looped: LoopOutput, row_ids: Tensor, token_ids: Tensor, stands: Tensor
) -> tuple[Tensor, Tensor]:
    """Judgements that are given beforehand, where the settings hold some, in place of the model's."""
    settled = batch.settings.settled
    if settled is None:
        return token_ids, stands
    table, sequences = looped.table.index_select(0, row_ids), looped.sequences.index_select(0, row_ids)
    first = batch.settings.table[:, FIRST_POSITION].index_select(0, sequences)
    right = settled[sequences, (table[:, CACHE_POSITION] - first) % settled.shape[1]]
    decodes = table[:, STAGE] < batch.lanes.depth
    stands = (table[:, DEPTH] >= right) | (looped.loops.index_select(0, row_ids) < right)
    return torch.where(decodes, token_ids, table[:, DRAFT]), stands


class DeviceSampler(Sampler):
    """Chooses ids on the device: the argmax, or a draw, of processed scores.

    Args:
        settings: Of every sequence.
        ids: Ids of every sequence so far, int64 `[S, C]`: a tensor, to which what is sampled is written (one column
            more than the longest sequence has, for what belongs to nobody), or Python that says them.
        shift: From cache positions to ids.
        broadcast: As `Operations` has it.

    Attributes:
        scores: None, as `raw_logits`: nothing is kept of what ids are chosen from.
        program: What sampling has to compute.
        hooks: Processors that run on the host after the others, by sequence.
        errors: What broke in them, by sequence.
    """

    scores = raw_logits = None

    def __init__(
        self,
        settings: SamplingSettings,
        ids: Tensor | Callable[[], Tensor],
        shift: int = 0,
        broadcast: Callable[[Tensor], Tensor] = no_broadcast,
    ) -> None:
        self._settings, self._ids, self._shift, self._broadcast = settings, ids, shift, broadcast
        self.hooks: dict[int, LogitsProcessor] = {}
        self.errors: dict[int, Exception] = {}
        self._look()

    def _look(self) -> None:
        """Notes what has changed with the settings and hooks."""
        ids = (self._ids,) if isinstance(self._ids, Tensor) else ()
        self.program, self.tensors = self._settings.program(), (*self._settings.tensors, *ids)
        self.fixed = self.program, self._shift
        self.on_device = not self.hooks and (bool(ids) or not self.program.reads_ids)
        self.is_greedy = self.program.is_greedy and not self.hooks

    def set(
        self, sequence: int, sampling: SequenceSampling, ids: Sequence[int], hook: LogitsProcessor | None = None
    ) -> None:
        """Sets how the ids of a sequence are sampled, its ids so far, and a processor that runs on the host."""
        assert isinstance(self._ids, Tensor)
        self._settings.set(sequence, sampling)
        self._ids[sequence, : len(ids)] = torch.tensor(ids, device=self._ids.device)
        if hook is not None:
            self.hooks[sequence] = hook
        self._look()

    def clear(self, sequence: int) -> None:
        """Forgets a sequence."""
        self._settings.clear(sequence)
        self.hooks.pop(sequence, None)
        self.errors.pop(sequence, None)
        self._look()

    def first(self, logits: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """The ids `[B]` after the prompts of all sequences, `BROKEN` where logits `[B, V]` are not finite.

        Given the position of each, int64 `[B]`, and the ids of each prompt. What criteria say of them comes with them,
        bool `[B]`; None of none.
        """
        sequences = torch.arange(len(logits), device=positions.device)
        scores = self._processed(logits, sequences, torch.full_like(positions, length))
        return self.draw_first(scores, positions, logits), None

    def draw_first(self, scores: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        """As `first`, of processed scores `[B, V]`."""
        sequences = torch.arange(len(scores), device=positions.device)
        token_ids = draw(self._settings, self.program, scores, sequences, positions)
        return self._broadcast(flag_broken(token_ids, logits))

    def choose(self, batch: Batch, looped: LoopOutput, row_ids: Tensor) -> Sampled:
        """See `sigma0.decode.step.Sampler.choose`."""
        logits = read(batch, looped, row_ids)
        if self.is_greedy:
            stands = token_ids = sample_greedy(batch, logits)
            if batch.program.verify:
                stands = looped.table[:, DRAFT].index_select(0, row_ids) == token_ids
        else:
            sequences = looped.sequences.index_select(0, row_ids)
            lengths = looped.table[:, CACHE_POSITION].index_select(0, row_ids) + (1 + self._shift)
            scores = self._processed(logits, sequences, lengths)
            for sequence, hook in self.hooks.items():
                scores = self._call(sequence, hook, scores, sequences, lengths)
            token_ids, stands = self.draw(batch, looped, row_ids, scores)
            token_ids = flag_broken(token_ids, logits)
            for sequence in self.errors:
                token_ids = token_ids.masked_fill(sequences == sequence, BROKEN)
            token_ids = self._broadcast(token_ids)
            if isinstance(self._ids, Tensor):
                # rows of nobody's lane are written where nothing is read
                owned = looped.lanes.index_select(0, row_ids) < batch.lanes.count
                self._ids[sequences, torch.where(owned, lengths, self._ids.shape[1] - 1)] = token_ids
        if batch.program.forced:
            token_ids, stands = scripted(batch, looped, row_ids, token_ids, stands)
        return token_ids, stands, None, logits

    def draw(self, batch: Batch, looped: LoopOutput, row_ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """An id of each row by processed scores, float32 `[K, V]`, and whether it is the draft from before.

        Where sequences that draw and greedy ones share a pass, the rule for distributions is the greedy rule too: all
        of p and q lies on one id.
        """
        current = self._settings, self.program
        table, sequences = looped.table.index_select(0, row_ids), looped.sequences.index_select(0, row_ids)
        drafts, positions = table[:, DRAFT], table[:, POSITION] + 1
        broadcast = batch.ops.broadcast
        if not (batch.program.verify and self.program.draws):
            token_ids = broadcast(draw(*current, scores, sequences, positions))
            return token_ids, drafts == token_ids
        lanes, loops = looped.lanes.index_select(0, row_ids), looped.loops.index_select(0, row_ids)
        drafted = table[:, STAGE] >= batch.lanes.depth
        kept, p = batch.lanes.remember_probs(scores.shape[1]), distribution(*current, scores, sequences)
        test = uniform(self._settings.keys.index_select(0, sequences), positions, 2 * loops - 1)
        stands, rest = accept_drawn(drafts.clamp_min(0), p, kept.index_select(0, lanes), test)
        # what each draft follows now: a new one p, and one that stood the test follows p after it, too
        kept.index_copy_(0, lanes, p)
        sources = torch.where(drafted[:, None], rest.log(), scores)
        purposes = torch.where(drafted, 2 * loops, OWN_DRAW)
        drawn = draw(*current, sources, sequences, positions, purposes)
        stands = broadcast(stands & drafted)
        return broadcast(torch.where(stands, drafts, drawn)), stands

    def _processed(self, logits: Tensor, sequences: Tensor, lengths: Tensor) -> Tensor:
        ids = self._ids if isinstance(self._ids, Tensor) else self._ids() if self.program.reads_ids else None
        return process(self._settings, self.program, logits, sequences, ids, lengths)

    def _call(self, sequence: int, hook: LogitsProcessor, scores: Tensor, sequences: Tensor, lengths: Tensor) -> Tensor:
        """The scores, those of one sequence processed on the host; what breaks there is noted, and ends it alone."""
        assert isinstance(self._ids, Tensor)
        scores = scores.clone()
        for row in np.flatnonzero(to_host(sequences) == sequence).tolist():
            try:
                ids = self._ids[sequence : sequence + 1, : int(lengths[row])]
                scores[row] = hook(ids, scores[row : row + 1])[0]
            except Exception as error:
                self.errors[sequence] = error
        return scores
