"""Masks of the tokens in flight: which ids may follow each, kept with its lane.

A mask depends on the ids before it alone, so it holds as long as its token stays in its lane, at every loop that reads
it. Where a draft falls its followers are dropped, and the matcher takes back their ids before the new one is fed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sigma0.config import ExitConfig
from sigma0.decode.exits import ExitRule
from sigma0.decode.grammar.closing import Bits
from sigma0.decode.grammar.compiled import CompiledGrammar, Grammars, Matcher
from sigma0.decode.lanes import Lanes
from sigma0.decode.logits import BROKEN
from sigma0.decode.model import LoopedModel
from sigma0.decode.step import ENDS, FED, FED_POSITION, SEQUENCE, TOKEN
from sigma0.decode.transfer import to_device

_ANY = -1
# A lane's mask: which lane, its bits, and the only id that they allow or `_ANY`.
_Mask = tuple[int, Bits, int]


@dataclass(frozen=True)
class _Sequence:
    """A sequence with a grammar.

    Attributes:
        matcher: Where it stands.
        first: Cache position of its first new token.
        forces: Whether ids that are the only ones allowed are fed without a reading.
        limit: Its new tokens at most; None for any number.
    """

    matcher: Matcher
    first: int
    forces: bool
    limit: int | None

    def mask(self) -> Bits:
        """What may follow."""
        return self.matcher.mask(self.limit)


class GrammarRows:
    """The sequences that have a grammar, and the masks of their lanes.

    Args:
        lanes: Tokens in flight, whose masks are written.
        vocabulary: V of the head.
    """

    def __init__(self, lanes: Lanes, vocabulary: int) -> None:
        self._lanes, self._vocabulary = lanes, vocabulary
        self._sequences: dict[int, _Sequence] = {}

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def set(self, sequence: int, grammar: CompiledGrammar, first: int, forces: bool, limit: int | None) -> None:
        """Gives a sequence a grammar.

        Args:
            sequence: Which.
            grammar: That its new ids follow.
            first: Cache position of the first of them.
            forces: Whether an id that is the only one allowed is fed without a reading. Only where the deeper loops of
                its position run all the same, and nothing else is read with it: not under `drop` or `fixed`, and not
                with a coda.
            limit: New tokens of the sequence at most; None for any number.
        """
        self._lanes.remember_masks(self._vocabulary)
        self._sequences[sequence] = _Sequence(grammar.matcher(), first, forces, limit)
        self._reset(sequence)

    def clear(self, sequence: int) -> None:
        """Forgets a sequence, from which on everything may follow."""
        if self._sequences.pop(sequence, None) is not None:
            self._reset(sequence)

    def start(self, sequence: int) -> None:
        """Masks the lane of the last prompt token, which is always read."""
        current = self._sequences.get(sequence)
        if current is not None:
            lane = self._lane(sequence, current.first - 1)
            self._write([(lane, current.mask(), _ANY)])

    def advance(self, lines: Iterable[Sequence[int]]) -> dict[int, Exception]:
        """Takes the ids that a step has fed, and masks their lanes.

        Args:
            lines: What it has emitted and fed, in the columns of `sigma0.decode.step`.

        Returns:
            Why sequences cannot go on, by sequence.
        """
        errors: dict[int, Exception] = {}
        masks: list[_Mask] = []
        for line in lines:
            sequence, token_id, fed_at = line[SEQUENCE], line[TOKEN], line[FED_POSITION]
            current = self._sequences.get(sequence)
            if current is None or not line[FED] or token_id == BROKEN:
                continue
            try:
                current.matcher.back_to(fed_at - current.first)
                if line[ENDS]:
                    current.matcher.check(token_id)
                else:
                    current.matcher.take(token_id)
                    masks.append(self._mask(sequence, current, fed_at))
            except Exception as error:  # whatever it is, it belongs to this sequence
                errors[sequence] = error
        self._write(masks)
        return errors

    def restore(self, sequence: int, token_ids: Sequence[int], positions: Iterable[int]) -> None:
        """Masks the lanes of tokens that are put back in flight.

        Args:
            sequence: Which.
            token_ids: All new ids that were fed.
            positions: Cache positions that are in flight.
        """
        current = self._sequences.get(sequence)
        if current is None:
            return
        wanted, masks = set(positions), list[_Mask]()
        current.matcher.back_to(0)
        first = current.mask()
        if current.first - 1 in wanted:
            masks.append((self._lane(sequence, current.first - 1), first, _ANY))
        for position, token_id in enumerate(token_ids, start=current.first):
            current.matcher.take(token_id)
            # as they were fed, since near a limit a mask depends on those before it
            made = self._mask(sequence, current, position)
            if position in wanted:
                masks.append(made)
        self._write(masks)

    def _mask(self, sequence: int, current: _Sequence, position: int) -> _Mask:
        bits = current.mask()
        return self._lane(sequence, position), bits, only_id(bits) if current.forces else _ANY

    def _lane(self, sequence: int, position: int) -> int:
        return sequence * self._lanes.depth + position % self._lanes.depth

    def _reset(self, sequence: int) -> None:
        lanes = self._lanes
        assert lanes.masks is not None and lanes.only is not None
        current = slice(sequence * lanes.depth, (sequence + 1) * lanes.depth)
        lanes.masks[current], lanes.only[current] = -1, _ANY

    def _write(self, masks: Sequence[_Mask]) -> None:
        if not masks:
            return
        lanes = self._lanes
        assert lanes.masks is not None and lanes.only is not None
        lane_ids, bits, only = zip(*masks, strict=True)
        where = to_device(np.array(lane_ids, dtype=np.int64), lanes.device)
        lanes.masks.index_copy_(0, where, to_device(np.stack(bits), lanes.device))
        lanes.only.index_copy_(0, where, to_device(np.array(only, dtype=np.int64), lanes.device))


def may_force(model: LoopedModel, rule: ExitRule, config: ExitConfig) -> bool:
    """Whether ids that are the only ones allowed may be fed without a reading, which then changes no other id.

    The deeper loops of their positions have to run all the same: not under `drop`, and not where a rule ends loops
    before T. A coda leaves K/V of what it reads, and so has to read.
    """
    verifies = config.after_exit == "verify"
    whole = verifies or rule.last_loop == rule.total_loops
    return config.after_exit != "drop" and whole and not model.stages[1]


def only_id(bits: Bits) -> int:
    """The id that a mask allows, where it allows no other; else -1."""
    (words,) = np.nonzero(bits)
    if len(words) != 1:
        return _ANY
    word = int(bits[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else _ANY


def start_masks(grammars: Grammars, vocabulary: int, device: torch.device) -> Tensor:
    """Which ids may be the first new ones of each sequence, int32 `[B, ceil(V / 32)]`."""
    anything: Bits = np.full(-(-vocabulary // 32), -1, dtype=np.int32)
    return to_device(
        np.stack([anything if item is None else item.matcher().mask(grammars.limit) for item in grammars.per_sequence]),
        device,
    )
