"""Lossless depth: tokens are proposed at their exits and checked at loop T (`after_exit="verify"`).

A proposed token is fed back at once and runs on to loop T beside its followers. What the head reads there decides:

    greedy      the token stands if it is the argmax at loop T, else that argmax takes its place
    sampling    with q its distribution at the exit and p that at loop T, it stands with probability
                min(1, p(x) / q(x)), else a token is drawn from max(p - q, 0), normalised
                (speculative sampling: arXiv 2211.17192, section 2.3)

On a replacement the followers are dropped: their rows leave the frontier and their columns are written again, nothing
is copied. Tokens reach loop T in their order, since a follower is at least one loop behind. A token that reaches T
without having stopped is read there alone. Only checked tokens are told to the caller. A proposal that would end the
text opens no follower.

What verification showed is the evidence for a token's reason:

    confirmed    a draft whose rule was met, or what a deeper loop proposed in its place, that loop T agreed to: the
                 rule's own reason (`threshold_met`, `confident`, ...) at the loop it was read at
    overruled    read at T, where nothing is left to check it, after its rule was met too soon: `max_depth`
    never drafted  read at T: the rule's reason if it was met there by itself, else `max_depth`
    the first    read at T from the prompt's states, whatever they say; the rule's reason if it would have been met at
                 any loop of that position, else `max_depth`, also where the inner break would have stopped it

With `redraft` the same judgement is passed at every loop on the way, so that a deeper loop that thinks otherwise
proposes anew at once and the mistake does not run on to T. Greedy, the next token is then entered once the argmax has
settled. Sampling, a token that follows q before the judgement follows p behind it; so along the chain of loops it
follows each loop's distribution in turn, and at T full depth's. (arXiv 2609.17184 keeps the first draft's branch beside
a second one; dropping it costs no branch and, in `sigma0.bench.lossless.drafts`, a little fewer passes.)
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from sigma0.decode.finite import check_chosen, check_logits, flag_broken
from sigma0.decode.state_guard import StateGuard
from sigma0.decode.step import Exits, Readings
from sigma0.decode.token_loop import Emission, TokenLoop, narrowed
from sigma0.decode.transfer import to_device, to_host


@dataclass(frozen=True)
class Proposal:
    """A token that was read early.

    Attributes:
        token_id: The token.
        depth: Loop it was read at.
        met: Whether the rule had been met at the exit; a redraft keeps what its token's first draft had.
        diverged: Whether the loop had diverged there; likewise.
        ends: Whether the text ends with it, if it stands.
        chances: Its distribution q, float32 `[V]`, where tokens are drawn; None where they are chosen greedily.
    """

    token_id: int
    depth: int
    met: bool
    diverged: bool
    ends: bool
    chances: Tensor | None


@dataclass(frozen=True)
class Row:
    """What the head says of one token.

    Attributes:
        logits: `[V]`.
        likeliest: Their argmax, where that alone decides; None where processors, scores or chance have a part.
    """

    logits: Tensor
    likeliest: int | None


class VerifiedLoop(TokenLoop):
    """Generates what full depth would, out of proposals at the exits.

    Every sequence goes to processors and criteria alone, once for a proposal and once at loop T (with `redraft` at each
    loop between them too).

    Attributes:
        accepted: Of each checked token of each sequence, whether a proposal stood; True for a token that was read at
            loop T in the first place.
        tail_passes: Passes after the last token had stopped, which only check.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        batch = len(self.lengths)
        self._pending: list[deque[Proposal]] = [deque() for _ in range(batch)]
        self.accepted: list[list[bool]] = [[] for _ in range(batch)]
        self.tail_passes = 0
        self._redraft = self.wave.rule.config.redraft
        self._guard = StateGuard([*self.processors, *self.criteria])
        kept = self.scores is not None or self.raw_logits is not None
        self._plain = self.generators is None and not self.processors and not kept
        self._told: list[tuple[Emission, Tensor]] = []

    def run(self, first: Exits) -> Iterator[tuple[Emission, ...]]:
        """Yields the checked tokens of each pass in which any appeared.

        Args:
            first: The exits of the last prompt token of every sequence, read at loop T.
        """
        try:
            yield self._settle(first)
            while self.wave.cache.frontier is not None:
                emissions = self._step()
                if emissions:
                    yield emissions
        finally:
            for sequence in range(len(self._pending)):
                self._forget_untold(sequence)
            self.wave.cache.trim(int(self.columns.max()))
            self._note_skipped()

    @torch.no_grad()
    def _settle(self, first: Exits) -> tuple[Emission, ...]:
        return self._observed(self.begin(first))

    @torch.no_grad()
    def _step(self) -> tuple[Emission, ...]:
        self.tail_passes = 0 if self.wave.has_leaders else self.tail_passes + 1
        return self._observed(self.take(*self.wave.advance_and_read(self._redraft)))

    @torch.no_grad()
    def begin(self, first: Exits) -> list[tuple[Emission, Tensor]]:
        """The tokens behind the prompts, each with the logits `[V]` that it was read from.

        Args:
            first: The exits of the last prompt token of every sequence, read at loop T; `met` where their rule would
                have been met by itself.
        """
        rows = self._rows(first.logits)
        for sequence, row, met in zip(first.sequences.tolist(), rows, first.met.tolist(), strict=True):
            self._tell(sequence, row, self.wave.rule.total_loops, met)
        return self._take_told()

    @torch.no_grad()
    def take(self, exits: Exits | None, readings: Readings | None) -> list[tuple[Emission, Tensor]]:
        """Judges what one pass read; the tokens that it settles, each with the logits `[V]` that it was read from.

        Args:
            exits: Tokens that stopped.
            readings: Proposals that were read again, each sequence's in their order.
        """
        heads = [part.logits for part in (readings, exits) if part is not None]
        rows = self._rows(torch.cat(heads) if len(heads) > 1 else heads[0]) if heads else []
        checked = 0 if readings is None else len(readings.sequences)
        dropped = set() if readings is None else self._judge_all(readings, rows[:checked])
        if exits is not None:
            self._take_exits(exits, rows[checked:], dropped)
        return self._take_told()

    def _rows(self, logits: Tensor) -> list[Row]:
        """The rows of logits `[N, V]`; greedy, their ids come to the host in one read."""
        if not self._plain:
            check_logits(logits)
            return [Row(row, None) for row in logits]
        likeliest = to_host(self.wave.ops.agree(flag_broken(logits.argmax(-1), logits))).tolist()
        check_chosen(likeliest)
        return [Row(row, token_id) for row, token_id in zip(logits, likeliest, strict=True)]

    def _judge_all(self, readings: Readings, rows: list[Row]) -> set[int]:
        """Judges proposals; returns the sequences whose followers were dropped."""
        dropped: set[int] = set()
        told = zip(readings.sequences.tolist(), readings.columns.tolist(), readings.loops.tolist(), rows, strict=True)
        for sequence, column, depth, row in told:
            if sequence in dropped:
                continue
            place = column + 1 + self._shift
            at_the_end = depth == self.wave.rule.total_loops
            goes_on = self._check(sequence, place, row) if at_the_end else self._reconsider(sequence, place, row, depth)
            if not goes_on:
                dropped.add(sequence)
        return dropped

    def _take_exits(self, exits: Exits, rows: list[Row], dropped: set[int]) -> None:
        """Tokens that stopped, but for followers that were dropped: told at loop T, else proposed."""
        flags = zip(exits.met.tolist(), exits.diverged.tolist(), strict=True)
        told = zip(exits.sequences.tolist(), exits.depths.tolist(), flags, rows, strict=True)
        for sequence, depth, (met, diverged), row in told:
            if sequence in dropped:
                continue
            if depth == self.wave.rule.total_loops:
                self._tell(sequence, row, depth, met)
            else:
                self._propose(sequence, row, depth, met, diverged)

    def _take_told(self) -> list[tuple[Emission, Tensor]]:
        """The tokens that were told since, one of a sequence at most."""
        told, self._told = self._told, []
        return told

    def _observed(self, told: list[tuple[Emission, Tensor]]) -> tuple[Emission, ...]:
        """The tokens of one pass; the record is told of them."""
        if told and self.record is not None:
            sequences = np.array([emission.sequence for emission, _ in told])
            places = np.array([len(self.accepted[sequence]) - 1 for sequence in sequences])
            chosen = to_device(np.array([emission.token_id for emission, _ in told]), self.device)
            logits = torch.stack([logits for _, logits in told])
            self.observe(sequences, places, logits, chosen)
            self.note(sequences, logits)
        return tuple(emission for emission, _ in told)

    def _tell(self, sequence: int, row: Row, depth: int, met: bool) -> None:
        """A token read at loop T, where nothing is left to check."""
        place = int(self.lengths[sequence])
        token_id, _ = self._draw(sequence, row, self._scores(sequence, place, row, keep=True))
        self._write(sequence, place, token_id)
        self.repetition[sequence].append(token_id)
        self._conclude(sequence, token_id, depth, met, True, row)

    def _propose(self, sequence: int, row: Row, depth: int, met: bool, diverged: bool) -> None:
        """A token read early: written down, and fed back unless it would end the text."""
        place = int(self.lengths[sequence])
        token_id, chances = self._draw(sequence, row, self._scores(sequence, place, row))
        self._open(sequence, place, Proposal(token_id, depth, met, diverged, False, chances))

    def _open(self, sequence: int, place: int, proposal: Proposal) -> None:
        self._write(sequence, place, proposal.token_id)
        ends = self._ends(sequence, place + 1, proposal.token_id)
        self._pending[sequence].append(replace(proposal, ends=ends))
        if not ends:
            self.enter([Emission(sequence, proposal.token_id, proposal.depth, proposal.met, last=False)])

    def _reconsider(self, sequence: int, place: int, row: Row, depth: int) -> bool:
        """Judges a proposal by what the head says at a loop between its own and T.

        Returns:
            Whether what follows it goes on; if not, another token has been proposed.
        """
        pending = self._pending[sequence]
        number = place - self._prompt - len(self.accepted[sequence])
        proposal = pending[number]
        scores = self._scores(sequence, place, row)
        token_id, stood = self._judge(sequence, place, depth, proposal, row, scores)
        chances = None if scores is None or proposal.chances is None else torch.softmax(scores, dim=-1)
        if stood:
            pending[number] = replace(proposal, chances=chances)
            return True
        while len(pending) > number:
            pending.pop()
        self._rewind(sequence, place)
        self._open(sequence, place, Proposal(token_id, depth, proposal.met, proposal.diverged, False, chances))
        return False

    def _check(self, sequence: int, place: int, row: Row) -> bool:
        """Judges the oldest proposal of a sequence by what the head says at loop T, and tells the token.

        Returns:
            Whether what follows the proposal goes on.
        """
        proposal = self._pending[sequence].popleft()
        assert place == self._prompt + len(self.accepted[sequence])
        scores = self._scores(sequence, place, row, keep=True)
        token_id, stood = self._judge(sequence, place, self.wave.rule.total_loops, proposal, row, scores)
        self.repetition[sequence].append(token_id)
        stands = stood and self._ends(sequence, place + 1, token_id) == proposal.ends
        # behind a collapse nothing follows, though followers were fed
        if stands and (proposal.ends or not self.collapses(sequence)):
            self.accepted[sequence].append(True)
            emission = Emission(sequence, token_id, proposal.depth, proposal.met, proposal.ends, proposal.diverged)
            self._told.append((emission, row.logits))
            return True
        self._pending[sequence].clear()
        self._rewind(sequence, place)
        self._write(sequence, place, token_id)
        depth = proposal.depth if stood else self.wave.rule.total_loops
        self._conclude(sequence, token_id, depth, stood and proposal.met, stood, row, stood and proposal.diverged)
        return False

    def _judge(
        self, sequence: int, place: int, depth: int, proposal: Proposal, row: Row, scores: Tensor | None
    ) -> tuple[int, bool]:
        """The token that a loop writes, given its scores `[V]`, and whether it is the proposed one.

        Args:
            sequence: Batch index.
            place: Index of the token among the ids; a replayed run judges by it.
            depth: The loop; likewise.
            proposal: What was proposed at an earlier loop.
            row: What the head says at `depth`.
            scores: Processed scores there, `[V]`; None where `row` knows its likeliest id.
        """
        if scores is None or self.generators is None or proposal.chances is None:
            token_id, _ = self._draw(sequence, row, scores)
            return token_id, token_id == proposal.token_id
        generator = self.generators[sequence]
        full, early = torch.softmax(scores, dim=-1), proposal.chances
        draw = torch.rand((), generator=generator, device=scores.device)
        if bool(self.wave.ops.agree(draw * early[proposal.token_id] < full[proposal.token_id])):
            return proposal.token_id, True
        rest = (full - early).clamp_min(0.0)
        # Where p and q differ by rounding alone, nothing may be left.
        drawn = torch.multinomial(rest if bool(rest.sum() > 0) else full, 1, generator=generator)
        return int(self.wave.ops.agree(drawn)), False

    def _conclude(
        self, sequence: int, token_id: int, depth: int, met: bool, stood: bool, row: Row, diverged: bool = False
    ) -> None:
        """Tells a token behind which nothing has been proposed, and feeds it back unless the text ends."""
        self.accepted[sequence].append(stood)
        ends = self._ends(sequence, int(self.lengths[sequence]), token_id) or self.collapses(sequence)
        emission = Emission(sequence, token_id, depth, met, ends, diverged)
        self._told.append((emission, row.logits))
        if not emission.last:
            self.enter([emission])

    def _rewind(self, sequence: int, place: int) -> None:
        """Forgets the ids from index `place` on, and the rows that were fed them."""
        self.ids[sequence, place:] = self.pad
        self.lengths[sequence] = place
        if self.record is not None:
            self.record.forget(sequence, place - self._prompt + 1)
        self._drop_from(sequence, place - self._shift)

    def _drop_from(self, sequence: int, column: int) -> None:
        self.wave.drop_from(sequence, column)
        self.positions[sequence] -= self.columns[sequence] - column
        self.columns[sequence] = column

    def _forget_untold(self, sequence: int) -> None:
        """Where a run is closed before its end: as if no token had been proposed, and the last told one not fed yet."""
        told = self._prompt + len(self.accepted[sequence])
        if self.columns[sequence] >= told - self._shift:
            self._pending[sequence].clear()
            self._rewind(sequence, told)
            self._drop_from(sequence, told - 1 - self._shift)

    def _write(self, sequence: int, place: int, token_id: int) -> None:
        self._make_room(place + 1)
        self.ids[sequence, place] = token_id
        self.lengths[sequence] = place + 1

    def _draw(self, sequence: int, row: Row, scores: Tensor | None) -> tuple[int, Tensor | None]:
        """A token, and the distribution `[V]` it was drawn from where it was drawn."""
        if scores is None:
            assert row.likeliest is not None
            return row.likeliest, None
        if self.generators is None:
            return int(self.wave.ops.agree(scores.argmax())), None
        chances = torch.softmax(scores, dim=-1)
        drawn = torch.multinomial(chances, 1, generator=self.generators[sequence])
        return int(self.wave.ops.agree(drawn)), chances

    def _scores(self, sequence: int, length: int, row: Row, keep: bool = False) -> Tensor | None:
        """Processed float32 scores `[V]` behind `length` ids of a sequence; None where the argmax alone decides."""
        if row.likeliest is not None:
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
                # as a list of its own, since the list is what makes a tensor of any answer
                asked = StoppingCriteriaList([item])(self.ids[[sequence], :length], kept)
            over |= bool(self.wave.ops.agree(asked)[0])
        return over
