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
class SequenceParams:
    """What a sequence asks of a batch."""

    key: int  # Number of the sequence for whoever asks, which nothing here looks at
    exit: SequenceExit  # When its tokens stop; `prompt` is the length of its prompt, and `prompt_in_lanes` holds
    limit: int  # New tokens at most
    eos: Sequence[int]  # Ids that end it
    sampling: SequenceSampling  # How its ids are sampled
    hook: LogitsProcessor | None = None  # A logits processor that runs on the host after the others; None for none
    grammar: CompiledGrammar | None = None  # What its new ids follow; None for nothing
    forces: bool = False  # Whether ids that are the only ones allowed are fed without a reading
    reads_prompt: bool = False  # Whether the head reads its prompt

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
    """What was in flight of a sequence when it lost its slot."""

    lanes: dict[str, Tensor]  # Copies of what its lanes hold, by name, `[T, ...]` each, and of what is kept beside them
    gate: Tensor  # What `qexit` keeps of each lane, `[T, 2]`
    loops: dict[int, int]  # Loops that the token at each cache position in flight had finished, at least one of them
    read_at: dict[int, int]  # Loop that each was read at; 0 where it was not
    depths: Sequence[int] = ()  # Loop at which each of its new tokens was read
    work: tuple[int, int] = (0, 0)  # Passes with a row of a new token, and its rows in them

    @property
    def end(self) -> int:
        """Leading cache positions that are to be recomputed: without one that was held ahead of its first loop."""
        return max(self.loops) + 1

    @classmethod
    def of(cls, lanes: Lanes, sequence: int) -> "Suspended | None":
        """Copies the lanes of a sequence; None where all are idle."""
        current = slice(sequence * lanes.depth, (sequence + 1) * lanes.depth)
        lines: Ints = lanes.table[current].cpu().numpy()
        live = lines[np.flatnonzero(lines[:, STAGE] < lanes.idle)]
        if not len(live):
            return None
        positions = live[:, CACHE_POSITION].tolist()
        return cls(
            {name: view.clone() for name, view in _lane_state(lanes, sequence, lanes.watched).items()},
            lanes.gates()[current].clone(),
            dict(zip(positions, (live[:, STAGE] % lanes.depth).tolist(), strict=True)),
            dict(zip(positions, live[:, DEPTH].tolist(), strict=True)),
        )

    def restore(self, lanes: Lanes, sequence: int) -> None:
        """Puts the tokens back in flight, into the lanes of any sequence."""
        current = slice(sequence * lanes.depth, (sequence + 1) * lanes.depth)
        lanes.gate[current], state = self.gate, lanes.exit_state
        if state is not None:
            state.gate[current], state.counts[current] = self.gate, 0
            state.counts[current, 0] = (self.lanes["table"][:, STAGE] % lanes.depth).int()
        for name, view in _lane_state(lanes, sequence, watched=True).items():
            saved = self.lanes.get(name)
            if saved is not None:
                # room for distributions may have been made since
                (view[: len(saved)] if saved.dim() else view).copy_(saved)

    def loops_of(self, params: SequenceParams, positions: Ints) -> tuple[Ints, Ints]:
        """Loops that each cache position is to run beside the lanes, and the loop whose reading a coda's K/V are of.

        Of those that have run none, or are not read yet, 0 and some loop.
        """
        targets, reads = all_of(params.last_loop, positions), all_of(params.last_loop, positions)
        drops, verifies, redrafts = params.exit.drop, params.exit.verify, params.exit.rule.config.redraft
        for row, position in enumerate(positions.tolist()):
            index = position - params.prompt + 1
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


def _lane_state(lanes: Lanes, sequence: int, watched: bool) -> dict[str, Tensor]:
    """What lanes hold of a sequence, but for what `qexit` keeps: views, by name."""
    current = slice(sequence * lanes.depth, (sequence + 1) * lanes.depth)
    window = slice(sequence * lanes.window, (sequence + 1) * lanes.window)
    views = {"table": lanes.table[current], "hidden": lanes.hidden[current]}
    state = lanes.exit_state if watched else None
    if state is not None:
        views |= {
            "differences": state.differences[current],
            "gram": state.gram[current],
            "counts": state.counts[current],
        }
    if lanes.criteria is not None:
        views |= {f"criterion {number}": part[sequence] for number, part in enumerate(lanes.criteria.tensors())}
    for name, values, rows in (("probs", lanes.probs, current), ("paths", lanes.paths, window)):
        if values is not None:
            views[name] = values[rows]
    return views
