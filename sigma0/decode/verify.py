"""Lossless depth: draft tokens from the exits, verified at loop T (`after_exit="verify"`).

A draft token is fed back at once and runs on to loop T beside the tokens after it. The logits at loop T decide:

    greedy      the draft is accepted if it is the argmax at loop T, else that argmax reindices it
    sampling    with q its distribution at the exit and p that at loop T, it is accepted with probability
                min(1, p(x) / q(x)), else a token is drawn from max(p - q, 0), normalised
                (speculative sampling: arXiv 2211.17192, section 2.3)

On a rejection the tokens after the draft are dropped: their rows leave the in-flight batch, and their cache positions
are written again. Tokens reach loop T in order, since each is at least one loop behind the one before it. A token that
reaches T without an exit is sampled there alone. Only verified tokens are emitted. After a draft that would end the
sequence no token is fed.

A token's reason follows from its verification:

    confirmed    a draft whose rule was met, or a re-draft of a deeper loop, that loop T accepts: the rule's own reason
                 (`threshold_met`, `confident`, ...) at the loop of the draft
    overruled    sampled at T, where nothing is left to verify it, after its rule was met too soon: `max_depth`
    never drafted  sampled at T: the rule's reason if it was met there by itself, else `max_depth`
    the first    sampled at T from the prompt's states, unconditionally; the rule's reason if it would have been met at
                 any loop of that position, else `max_depth`, also where the inner break would have stopped it

With `redraft` the same test runs at every loop on the way: a deeper loop that rejects a draft reindices it at once, so
that the mistake does not run on to T. Greedy, the next token is then entered once the argmax is stable. Sampling, a
token that follows q before the test follows p after it; so along the chain of loops it follows each loop's distribution
in turn, and at T full depth's. (arXiv 2609.17184 keeps the first draft's branch beside a second one; dropping it costs
no branch and, in `sigma0.bench.lossless.drafts`, a little fewer passes.)
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from sigma0.decode.finite import check_logits, check_sampled, flag_broken
from sigma0.decode.state_guard import StateGuard
from sigma0.decode.step import Exits, TrailingLogits
from sigma0.decode.token_loop import Emission, TokenLoop, narrowed
from sigma0.decode.transfer import to_device, to_host


@dataclass(frozen=True)
class DraftToken:
    """A token sampled at its exit, or at a later loop before T.

    Attributes:
        token_id: The token.
        depth: Loop at which it was sampled.
        met: Whether the rule was met at the exit; a re-draft keeps the value of the first draft.
        diverged: Whether the loop diverged at the exit; a re-draft keeps the value of the first draft.
        ends: Whether the sequence ends with it, if it is accepted.
        probs: The distribution q it was drawn from, float32 `[V]`; None for greedy sampling.
    """

    token_id: int
    depth: int
    met: bool
    diverged: bool
    ends: bool
    probs: Tensor | None


@dataclass(frozen=True)
class Row:
    """Logits of one token.

    Attributes:
        logits: `[V]`.
        argmax: Their argmax, where sampling is that and nothing else; None with processors, kept scores or draws.
    """

    logits: Tensor
    argmax: int | None


class VerifiedLoop(TokenLoop):
    """Generates the tokens of full depth from drafts at the exits.

    Processors and criteria are called for one sequence at a time, once for a draft and once at loop T (with `redraft`
    at each loop between them too).

    Attributes:
        accepted: For each emitted token of each sequence, whether its draft was accepted; True for a token that was
            sampled at loop T without a draft.
        tail_passes: Passes after the last exit, which only verify.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        batch = len(self.lengths)
        self._drafts: list[deque[DraftToken]] = [deque() for _ in range(batch)]
        self.accepted: list[list[bool]] = [[] for _ in range(batch)]
        self.tail_passes = 0
        self._redraft = self.wave.rule.config.redraft
        self._guard = StateGuard([*self.processors, *self.criteria])
        kept = self.scores is not None or self.raw_logits is not None
        self._plain = self.generators is None and not self.processors and not kept
        self._emitted: list[tuple[Emission, Tensor]] = []

    def run(self, first: Exits) -> Iterator[tuple[Emission, ...]]:
        """Yields the verified tokens of each pass that has any.

        Args:
            first: The exits of the last prompt token of every sequence, read at loop T.
        """
        try:
            yield self._begin(first)
            while self.wave.cache.in_flight is not None:
                emissions = self._step()
                if emissions:
                    yield emissions
        finally:
            for sequence in range(len(self._drafts)):
                self._drop_unchecked(sequence)
            self.wave.cache.trim(int(self.cache_positions.max()))
            self._note_pending()

    @torch.no_grad()
    def _begin(self, first: Exits) -> tuple[Emission, ...]:
        return self._recorded(self.begin(first))

    @torch.no_grad()
    def _step(self) -> tuple[Emission, ...]:
        self.tail_passes = 0 if self.wave.has_decoding else self.tail_passes + 1
        return self._recorded(self.take(*self.wave.advance_with_trailing(self._redraft)))

    @torch.no_grad()
    def begin(self, first: Exits) -> list[tuple[Emission, Tensor]]:
        """The first token of every sequence, each with the logits `[V]` it was sampled from.

        Args:
            first: The exits of the last prompt token of every sequence, read at loop T; `met` where their rule would
                have been met by itself.
        """
        rows = self._rows(first.logits)
        for sequence, row, met in zip(first.sequences.tolist(), rows, first.met.tolist(), strict=True):
            self._emit_at_full_depth(sequence, row, self.wave.rule.total_loops, met)
        return self._take_emitted()

    @torch.no_grad()
    def take(self, exits: Exits | None, trailing: TrailingLogits | None) -> list[tuple[Emission, Tensor]]:
        """Verifies the drafts of one pass; the tokens that are final, each with the logits `[V]` it was sampled from.

        Args:
            exits: Tokens that exit in the pass.
            trailing: Logits of drafts at a later loop, those of a sequence in order.
        """
        heads = [part.logits for part in (trailing, exits) if part is not None]
        rows = self._rows(torch.cat(heads) if len(heads) > 1 else heads[0]) if heads else []
        checked = 0 if trailing is None else len(trailing.sequences)
        dropped = set() if trailing is None else self._verify_all(trailing, rows[:checked])
        if exits is not None:
            self._draft_exits(exits, rows[checked:], dropped)
        return self._take_emitted()

    def _rows(self, logits: Tensor) -> list[Row]:
        """The rows of logits `[N, V]`; for greedy sampling all ids come to the host in one copy."""
        if not self._plain:
            check_logits(logits)
            return [Row(row, None) for row in logits]
        argmax = to_host(self.wave.ops.broadcast(flag_broken(logits.argmax(-1), logits))).tolist()
        check_sampled(argmax)
        return [Row(row, token_id) for row, token_id in zip(logits, argmax, strict=True)]

    def _verify_all(self, trailing: TrailingLogits, rows: list[Row]) -> set[int]:
        """Verifies drafts; returns the sequences whose later tokens were dropped."""
        dropped: set[int] = set()
        drafts = zip(
            trailing.sequences.tolist(), trailing.cache_positions.tolist(), trailing.loops.tolist(), rows, strict=True
        )
        for sequence, cache_position, depth, row in drafts:
            if sequence in dropped:
                continue
            index = cache_position + 1 + self._shift
            at_the_end = depth == self.wave.rule.total_loops
            is_accepted = (
                self._check(sequence, index, row) if at_the_end else self._recheck(sequence, index, row, depth)
            )
            if not is_accepted:
                dropped.add(sequence)
        return dropped

    def _draft_exits(self, exits: Exits, rows: list[Row], dropped: set[int]) -> None:
        """Exits, but for those of dropped tokens: emitted at loop T, else drafted."""
        flags = zip(exits.met.tolist(), exits.diverged.tolist(), strict=True)
        tokens = zip(exits.sequences.tolist(), exits.depths.tolist(), flags, rows, strict=True)
        for sequence, depth, (met, diverged), row in tokens:
            if sequence in dropped:
                continue
            if depth == self.wave.rule.total_loops:
                self._emit_at_full_depth(sequence, row, depth, met)
            else:
                self._draft(sequence, row, depth, met, diverged)

    def _take_emitted(self) -> list[tuple[Emission, Tensor]]:
        """The tokens emitted since the last call, one of a sequence at most."""
        emitted, self._emitted = self._emitted, []
        return emitted

    def _recorded(self, emitted: list[tuple[Emission, Tensor]]) -> tuple[Emission, ...]:
        """The tokens of one pass, once the record has their statistics."""
        if emitted and self.record is not None:
            sequences = np.array([emission.sequence for emission, _ in emitted])
            indices = np.array([len(self.accepted[sequence]) - 1 for sequence in sequences])
            token_ids = to_device(np.array([emission.token_id for emission, _ in emitted]), self.device)
            logits = torch.stack([logits for _, logits in emitted])
            self.observe(sequences, indices, logits, token_ids)
            self.note(sequences, logits)
        return tuple(emission for emission, _ in emitted)

    def _emit_at_full_depth(self, sequence: int, row: Row, depth: int, met: bool) -> None:
        """A token sampled at loop T, where nothing is left to verify."""
        index = int(self.lengths[sequence])
        token_id, _ = self._draw(sequence, row, self._scores(sequence, index, row, keep=True))
        self._write(sequence, index, token_id)
        self.repetition[sequence].append(token_id)
        self._emit_without_draft(sequence, token_id, depth, met, True, row)

    def _draft(self, sequence: int, row: Row, depth: int, met: bool, diverged: bool) -> None:
        """A draft token: stored, and fed back unless it would end the sequence."""
        index = int(self.lengths[sequence])
        token_id, probs = self._draw(sequence, row, self._scores(sequence, index, row))
        self._open(sequence, index, DraftToken(token_id, depth, met, diverged, False, probs))

    def _open(self, sequence: int, index: int, draft: DraftToken) -> None:
        self._write(sequence, index, draft.token_id)
        ends = self._ends(sequence, index + 1, draft.token_id)
        self._drafts[sequence].append(replace(draft, ends=ends))
        if not ends:
            self.enter([Emission(sequence, draft.token_id, draft.depth, draft.met, last=False)])

    def _recheck(self, sequence: int, index: int, row: Row, depth: int) -> bool:
        """Tests a draft against the logits at a loop between its own and T.

        Returns:
            Whether it is accepted, so far; if not, another token has been drafted.
        """
        pending = self._drafts[sequence]
        number = index - self._prompt - len(self.accepted[sequence])
        draft = pending[number]
        scores = self._scores(sequence, index, row)
        token_id, accepted = self._judge(sequence, index, depth, draft, row, scores)
        probs = None if scores is None or draft.probs is None else torch.softmax(scores, dim=-1)
        if accepted:
            pending[number] = replace(draft, probs=probs)
            return True
        while len(pending) > number:
            pending.pop()
        self._rewind(sequence, index)
        self._open(sequence, index, DraftToken(token_id, depth, draft.met, draft.diverged, False, probs))
        return False

    def _check(self, sequence: int, index: int, row: Row) -> bool:
        """Verifies the oldest draft of a sequence against the logits at loop T, and emits the token.

        Returns:
            Whether the tokens after the draft remain in flight.
        """
        draft = self._drafts[sequence].popleft()
        assert index == self._prompt + len(self.accepted[sequence])
        scores = self._scores(sequence, index, row, keep=True)
        token_id, accepted = self._judge(sequence, index, self.wave.rule.total_loops, draft, row, scores)
        self.repetition[sequence].append(token_id)
        is_kept = accepted and self._ends(sequence, index + 1, token_id) == draft.ends
        # after a collapse the sequence ends, though later tokens were fed
        if is_kept and (draft.ends or not self.collapses(sequence)):
            self.accepted[sequence].append(True)
            emission = Emission(sequence, token_id, draft.depth, draft.met, draft.ends, draft.diverged)
            self._emitted.append((emission, row.logits))
            return True
        self._drafts[sequence].clear()
        self._rewind(sequence, index)
        self._write(sequence, index, token_id)
        depth = draft.depth if accepted else self.wave.rule.total_loops
        self._emit_without_draft(
            sequence, token_id, depth, accepted and draft.met, accepted, row, accepted and draft.diverged
        )
        return False

    def _judge(
        self, sequence: int, index: int, depth: int, draft: DraftToken, row: Row, scores: Tensor | None
    ) -> tuple[int, bool]:
        """The token that a loop samples, and whether it is the draft.

        Args:
            sequence: Batch index.
            index: Index of the token among the ids; unused here, read by a replayed run.
            depth: The loop; unused here, read by a replayed run.
            draft: Draft of an earlier loop.
            row: Logits at `depth`.
            scores: Processed scores there, `[V]`; None where `row` knows its likeliest id.
        """
        if scores is None or self.generators is None or draft.probs is None:
            token_id, _ = self._draw(sequence, row, scores)
            return token_id, token_id == draft.token_id
        generator = self.generators[sequence]
        full, early = torch.softmax(scores, dim=-1), draft.probs
        draw = torch.rand((), generator=generator, device=scores.device)
        if bool(self.wave.ops.broadcast(draw * early[draft.token_id] < full[draft.token_id])):
            return draft.token_id, True
        remainder = (full - early).clamp_min(0.0)
        # Where p and q differ by rounding alone, nothing may be left.
        drawn = torch.multinomial(remainder if bool(remainder.sum() > 0) else full, 1, generator=generator)
        return int(self.wave.ops.broadcast(drawn)), False

    def _emit_without_draft(
        self, sequence: int, token_id: int, depth: int, met: bool, accepted: bool, row: Row, diverged: bool = False
    ) -> None:
        """Emits a token after which nothing has been drafted, and feeds it back unless the sequence ends."""
        self.accepted[sequence].append(accepted)
        ends = self._ends(sequence, int(self.lengths[sequence]), token_id) or self.collapses(sequence)
        emission = Emission(sequence, token_id, depth, met, ends, diverged)
        self._emitted.append((emission, row.logits))
        if not emission.last:
            self.enter([emission])

    def _rewind(self, sequence: int, index: int) -> None:
        """Drops the ids from `index` on, and their rows."""
        self.ids[sequence, index:] = self.pad
        self.lengths[sequence] = index
        if self.record is not None:
            self.record.forget(sequence, index - self._prompt + 1)
        self._drop_from(sequence, index - self._shift)

    def _drop_from(self, sequence: int, cache_position: int) -> None:
        self.wave.drop_from(sequence, cache_position)
        self.positions[sequence] -= self.cache_positions[sequence] - cache_position
        self.cache_positions[sequence] = cache_position

    def _drop_unchecked(self, sequence: int) -> None:
        """For a run that is closed before its end: drops all drafts; the last emitted token is not fed yet."""
        final = self._prompt + len(self.accepted[sequence])
        if self.cache_positions[sequence] >= final - self._shift:
            self._drafts[sequence].clear()
            self._rewind(sequence, final)
            self._drop_from(sequence, final - 1 - self._shift)

    def _write(self, sequence: int, index: int, token_id: int) -> None:
        self._make_room(index + 1)
        self.ids[sequence, index] = token_id
        self.lengths[sequence] = index + 1

    def _draw(self, sequence: int, row: Row, scores: Tensor | None) -> tuple[int, Tensor | None]:
        """A token, and the distribution `[V]` it was drawn from where it was drawn."""
        if scores is None:
            assert row.argmax is not None
            return row.argmax, None
        if self.generators is None:
            return int(self.wave.ops.broadcast(scores.argmax())), None
        probs = torch.softmax(scores, dim=-1)
        drawn = torch.multinomial(probs, 1, generator=self.generators[sequence])
        return int(self.wave.ops.broadcast(drawn)), probs

    def _scores(self, sequence: int, length: int, row: Row, keep: bool = False) -> Tensor | None:
        """Processed float32 scores `[V]` after `length` ids of a sequence; None where the argmax alone decides."""
        if row.argmax is not None:
            return None
        raw = row.logits.to(torch.float32, copy=True).to(self.device)
        scores = raw[None]
        for item in narrowed(self.processors, np.array([sequence])):
            with self._guard.watching(item):
                scores = item(self.ids[[sequence], :length], scores.clone())
        if keep:
            for kept, values in ((self.raw_logits, raw), (self.scores, scores[0])):
                if kept is not None:
                    kept[sequence].append(values)
        return scores[0]

    def _ends(self, sequence: int, length: int, token_id: int) -> bool:
        """Whether the first `length` ids of a sequence, of which `token_id` is the last, are a whole text."""
        over = token_id in self.eos or (self.max_length is not None and length >= self.max_length)
        kept = None if self.scores is None else tuple(row[None] for row in self.scores[sequence])
        for item in self.criteria:
            with self._guard.watching(item):
                # in a list, since the list turns any return value into a tensor
                done = StoppingCriteriaList([item])(self.ids[[sequence], :length], kept)
            over |= bool(self.wave.ops.broadcast(done)[0])
        return over
