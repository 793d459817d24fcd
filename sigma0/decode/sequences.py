"""A sequence as a batch knows it: what it asks, and what is in flight of it while it has no slot."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from transformers import LogitsProcessor

from sigma0.decode.grammar.compiled import CompiledGrammar
from sigma0.decode.lanes import CACHE_POSITION, DEPTH, STAGE, Lanes
from sigma0.decode.sampling_params import SequenceSampling
from sigma0.decode.settings import SequenceExit
from sigma0.decode.transfer import Ints


@dataclass(frozen=True)
class Asked:
    """What a sequence asks of a batch.

    Attributes:
        key: Number of the sequence for whoever asks, which nothing here looks at.
        exit: When its tokens stop; `prompt` is the length of its prompt, and `prompt_in_lanes` holds.
        limit: New tokens at most.
        eos: Ids that end it.
        sampling: How its ids are sampled.
        hook: A logits processor that runs on the host after the others; None for none.
        grammar: What its new ids follow; None for nothing.
        forces: Whether ids that are the only ones allowed are fed without a reading.
        reads_prompt: Whether the head reads its prompt.
    """

    key: int
    exit: SequenceExit
    limit: int
    eos: Sequence[int]
    sampling: SequenceSampling
    hook: LogitsProcessor | None = None
    grammar: CompiledGrammar | None = None
    forces: bool = False
    reads_prompt: bool = False

    @property
    def prompt(self) -> int:
        """Ids of its prompt."""
        return self.exit.prompt

    @property
    def last_loop(self) -> int:
        """Loop after which its tokens leave, but under `drop`."""
        rule = self.exit.rule
        return rule.total_loops if self.exit.verify else rule.last_loop


@dataclass(frozen=True)
class Suspended:
    """What was in flight of a sequence when it lost its slot.

    Attributes:
        table: Lines of its lanes, `[T, 6]`.
        hidden: States, `[T, D]`.
        gate: What `qexit` keeps of each, `[T, 2]`.
        watched: Differences, their Gram matrix and counts, each `[T, ...]`; None where they were not kept.
        criteria: What criteria keep of its token that decodes, `[...]` each; empty where they keep nothing.
        probs: Distributions of drafts, `[T, V]`; None where there were none.
        paths: States after every loop of its last positions, `[window, T, D]`; None where they are not kept.
        loops: Loops that the token at each cache position in flight had finished, at least one of them.
        read_at: Loop that each was read at; 0 where it was not.
        depths: Loop at which each of its new tokens was read.
        work: Passes with a row of a new token, and its rows in them.
    """

    table: Tensor
    hidden: Tensor
    gate: Tensor
    watched: tuple[Tensor, ...] | None
    criteria: tuple[Tensor, ...]
    probs: Tensor | None
    paths: Tensor | None
    loops: dict[int, int]
    read_at: dict[int, int]
    depths: Sequence[int] = ()
    work: tuple[int, int] = (0, 0)

    @property
    def end(self) -> int:
        """Leading cache positions that are to be recomputed: without one that was held ahead of its first loop."""
        return max(self.loops) + 1

    @classmethod
    def of(cls, lanes: Lanes, sequence: int) -> "Suspended | None":
        """Copies the lanes of a sequence; None where all are idle."""
        own = slice(sequence * lanes.depth, (sequence + 1) * lanes.depth)
        table = lanes.table[own].clone()
        lines: Ints = table.cpu().numpy()
        live = lines[np.flatnonzero(lines[:, STAGE] < lanes.idle)]
        if not len(live):
            return None
        state = lanes.exit_state if lanes.watched else None
        kept = () if state is None else (state.differences, state.gram, state.counts)
        window = slice(sequence * lanes.window, (sequence + 1) * lanes.window)
        positions = live[:, CACHE_POSITION].tolist()
        return cls(
            table,
            lanes.hidden[own].clone(),
            lanes.gates()[own].clone(),
            tuple(part[own].clone() for part in kept) or None,
            () if lanes.criteria is None else tuple(part[sequence].clone() for part in lanes.criteria.tensors()),
            None if lanes.probs is None else lanes.probs[own].clone(),
            None if lanes.paths is None else lanes.paths[window].clone(),
            dict(zip(positions, (live[:, STAGE] % lanes.depth).tolist(), strict=True)),
            dict(zip(positions, live[:, DEPTH].tolist(), strict=True)),
        )

    def restore(self, lanes: Lanes, sequence: int) -> None:
        """Puts the tokens back in flight, into the lanes of any sequence."""
        own = slice(sequence * lanes.depth, (sequence + 1) * lanes.depth)
        lanes.table[own], lanes.hidden[own], lanes.gate[own] = self.table, self.hidden, self.gate
        state = lanes.exit_state
        if state is not None:
            state.gate[own], state.counts[own] = self.gate, 0
            state.counts[own, 0] = (self.table[:, STAGE] % lanes.depth).int()
            if self.watched is not None:
                state.differences[own], state.gram[own], state.counts[own] = self.watched
        if lanes.criteria is not None:
            for part, saved in zip(lanes.criteria.tensors(), self.criteria, strict=False):
                # room for distributions may have been made since
                part[(sequence, slice(len(saved))) if saved.dim() else sequence] = saved
        if self.probs is not None and lanes.probs is not None:
            lanes.probs[own] = self.probs
        if self.paths is not None and lanes.paths is not None:
            lanes.paths[sequence * lanes.window : (sequence + 1) * lanes.window] = self.paths

    def loops_of(self, asked: Asked, positions: Ints) -> tuple[Ints, Ints]:
        """Loops that each cache position is to run beside the lanes, and the loop whose reading a coda's K/V are of.

        Of those that have run none, or are not read yet, 0 and some loop.
        """
        targets, reads = all_of(asked.last_loop, positions), all_of(asked.last_loop, positions)
        drops, verifies, redrafts = asked.exit.drop, asked.exit.verify, asked.exit.rule.config.redraft
        for row, position in enumerate(positions.tolist()):
            index = position - asked.prompt + 1
            if 0 <= index < len(self.depths) and not verifies:
                reads[row] = self.depths[index]
                if drops and index:
                    # a token that has left its lane has none of the loops behind its exit
                    targets[row] = self.depths[index]
            if position in self.loops:
                targets[row] = self.loops[position]
                if verifies:
                    reads[row] = targets[row] if redrafts else self.read_at[position]
        return targets, reads


def all_of(value: int, like: Ints) -> Ints:
    """One value for each of some positions, `[N]`."""
    return np.full(len(like), value, dtype=np.int64)
