"""Lanes: the state of every token in flight, in tensors whose shapes never change.

A token runs T loops, one a pass, and at most one token of a sequence enters in a pass. So a sequence has at most one
token at each loop and T in flight. Each of S sequences gets T lanes: the token at cache position c lives in lane c mod
T, in place, until it has finished loop T; by then the token at c + T, which needs the lane next, can enter.

A lane's *stage* is one number: l while its token is decoding and has finished l loops, T + l once the token has been
read and its deeper planes are filled, 2 T where the lane is idle. Sorting lanes by stage puts those that decode first
and those that are idle last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.exits import Criteria
from sigma0.decode.ops import ExitState
from sigma0.decode.transfer import Ints, to_device, to_host

# Columns of the table of lanes.
STAGE, CACHE_POSITION, POSITION, DRAFT, DEPTH, FLAGS, TABLE_WIDTH = range(7)
NO_DRAFT = -1
# Bits of FLAGS: why the token was read at its depth; or that it was not, since a grammar left one id.
MET_FLAG, DIVERGED_FLAG, FORCED_FLAG = 1, 2, 4
# Columns of a lane's gate.
SURVIVAL, CUMULATIVE = range(2)
# A suspended lane keeps its stage, this many T higher.
_SUSPENDED = 4


@dataclass(frozen=True)
class LaneRows:
    """The tokens in flight, all `[R]`, on the host, deepest first; but their states `[R, W]` are on the device.

    `loops` are finished, and `positions` are for rotary embeddings.
    """

    hidden: Tensor
    sequences: Ints
    cache_positions: Ints
    positions: Ints
    loops: Ints
    lanes: Ints

    def __len__(self) -> int:
        return len(self.loops)


class Lanes:
    """The lanes of all sequences.

    The last row of every tensor belongs to nobody: what must not change anything is written there.

    Args:
        sequences: S.
        depth: T, loops that a token runs.
        like: What is in flight `[R, W]`, for width, dtype and device.
        width: D, numbers of it that are the state; None for all.

    Attributes:
        width: D.
        table: STAGE, CACHE_POSITION, POSITION, DRAFT (the id read from the token, or `NO_DRAFT`), DEPTH (the loop it
            was read at) and FLAGS, int64 `[S T + 1, 6]`.
        next: The lane of the token after each, int64 `[S T + 1]`.
        kept: What a line of the table is multiplied with for the token after, int64 `[6]`.
        offset: What is added then, int64 `[6]`.
        hidden: State after the last finished loop, and what else is in flight, `[S T + 1, W]`.
        gate: What `qexit` keeps of a token: chance that it has gone on so far and its complement, float32
            `[S T + 1, 2]`.
        fresh: A line of `gate` before the first loop, `[2]`.
        exit_state: What rules over differences keep, of S T + 1 slots; None until `watch`.
        criteria: What criteria keep of the token of each sequence that decodes; None until `remember_criteria`.
        probs: Distribution that a draft was drawn from, float32 `[S T + 1, V]`; None until `remember_probs`.
        paths: States after every loop of the tokens at the last `window` cache positions, position c at c mod window,
            `[S window + 1, T, D]`; None until `remember_paths`.
        masks: Ids that may follow the token, a bit each, int32 `[S T + 1, ceil(V / 32)]`; None until `remember_masks`.
        only: The one of them that is fed without a reading, or -1, int64 `[S T + 1]`; as `masks`.
        window: Cache positions whose paths are kept.
        watched: Whether the last program kept differences.
    """

    def __init__(self, sequences: int, depth: int, like: Tensor, width: int | None = None) -> None:
        self.sequences = sequences
        self.depth = depth
        self.width = like.shape[1] if width is None else width
        self.count = sequences * depth
        device, rows = like.device, self.count + 1
        # never inference tensors: what was begun under torch.inference_mode may go on outside of it
        with torch.inference_mode(False), torch.no_grad():
            lanes = torch.arange(self.count, device=device)
            table = torch.zeros((rows, TABLE_WIDTH), dtype=torch.int64, device=device)
            table[:, STAGE] = self.idle
            table[:, DRAFT] = NO_DRAFT
            self.table = table
            # of the token after one: positions are one further, and nothing else is kept
            self.kept = torch.tensor([0, 1, 1, 0, 0, 0], device=device)
            self.offset = torch.tensor([0, 1, 1, NO_DRAFT, 0, 0], device=device)
            self.next = torch.full((rows,), self.count, device=device)
            self.next[:-1] = lanes // depth * depth + (lanes + 1) % depth
            self.hidden = torch.zeros((rows, like.shape[1]), dtype=like.dtype, device=device)
            self.gate = torch.zeros((rows, 2), dtype=torch.float32, device=device)
            self.gate[:, SURVIVAL] = 1.0
            self.fresh = self.gate[-1].clone()
        self.exit_state: ExitState | None = None
        self.criteria: Criteria | None = None
        self.probs: Tensor | None = None
        self.masks: Tensor | None = None
        self.only: Tensor | None = None
        self.watched = False
        self.paths: Tensor | None = None
        self.window = 0

    @property
    def idle(self) -> int:
        """Stage of a lane without a token."""
        return 2 * self.depth

    @property
    def blocked(self) -> int:
        """Stage of a lane whose token waits before its first loop."""
        return 4 * self.idle

    @property
    def device(self) -> torch.device:
        """Where the lanes are."""
        return self.hidden.device

    def watch(self) -> ExitState:
        """The state of rules over differences; tokens in flight begin anew where it was not kept."""
        if self.exit_state is not None and not self.watched:
            self.exit_state.counts.zero_()
        if self.exit_state is None:
            with torch.inference_mode(False):
                self.exit_state = ExitState.empty(self.count + 1, self.width, self.hidden.dtype, self.device)
        return self.exit_state

    def remember_criteria(self, vocabulary: int) -> None:
        """Makes room for what criteria keep of the token of each sequence that decodes."""
        known = self.criteria
        if known is None or known.log_probs.shape[1] < vocabulary:
            self.criteria = Criteria(self.sequences, vocabulary, self.device)
            if known is not None:
                self.criteria.numbers.copy_(known.numbers)
                self.criteria.best.copy_(known.best)

    def remember_probs(self, vocabulary: int) -> Tensor:
        """The distributions of drafts."""
        if self.probs is None:
            with torch.inference_mode(False):
                self.probs = torch.zeros((self.count + 1, vocabulary), dtype=torch.float32, device=self.device)
        return self.probs

    def remember_masks(self, vocabulary: int) -> None:
        """Makes room for masks, which allow everything."""
        if self.masks is None or self.only is None:
            with torch.inference_mode(False):
                shape = (self.count + 1, -(-vocabulary // 32))
                self.masks = torch.full(shape, -1, dtype=torch.int32, device=self.device)
                self.only = torch.full(shape[:1], NO_DRAFT, dtype=torch.int64, device=self.device)

    def remember_paths(self, window: int) -> None:
        """Keeps the states after every loop of the tokens at the last `window` cache positions, at least 2 T."""
        window = max(window, 2 * self.depth)
        if self.paths is None or self.window < window:
            with torch.inference_mode(False):
                shape = (self.sequences * window + 1, self.depth, self.width)
                self.paths, self.window = torch.zeros(shape, dtype=self.hidden.dtype, device=self.device), window

    def path_index(self, sequences: Tensor, cache_positions: Tensor) -> Tensor:
        """Where `paths` keeps tokens, `[N]`."""
        return sequences * self.window + cache_positions % self.window

    def stages(self) -> Ints:
        """Stages on the host, `[S T]`; on a CPU the very memory of the table."""
        return to_host(self.table[:-1, STAGE])

    def lane_of(self, sequences: Tensor, cache_positions: Tensor) -> Tensor:
        """The lanes of tokens, `[N]`."""
        return sequences * self.depth + cache_positions % self.depth

    def enter(
        self, lanes: Tensor, hidden: Tensor, cache_positions: Tensor, positions: Tensor, stage: int | Tensor = 0
    ) -> None:
        """Puts tokens, `[N]` each, into idle lanes before their first loop, which starts from `hidden` `[N, W]`.

        Their stage is 0 if they are to be read, T if they only fill their planes.
        """
        entries = self.table.index_select(0, lanes)
        entries[:, STAGE] = stage
        entries[:, CACHE_POSITION] = cache_positions
        entries[:, POSITION] = positions
        entries[:, DRAFT] = NO_DRAFT
        entries[:, FLAGS] = 0
        self.table.index_copy_(0, lanes, entries)
        self.hidden.index_copy_(0, lanes, hidden)
        self.forget(lanes)

    def forget(self, lanes: Tensor) -> None:
        """Resets what exit rules keep of the tokens before."""
        self.gate.index_copy_(0, lanes, self.fresh.expand(lanes.shape[0], 2))
        if self.exit_state is not None:
            self.exit_state.counts.index_fill_(0, lanes, 0)

    def gates(self) -> Tensor:
        """What `qexit` keeps of every token, wherever it is kept now, `[S T + 1, 2]`."""
        if not self.watched or self.exit_state is None:
            return self.gate
        # a lane that has not run holds what an earlier token left there
        fresh = self.exit_state.counts[:, :1] == 0
        return torch.where(fresh, self.gate.new_tensor([1.0, 0.0]), self.exit_state.gate)

    def rows(self) -> LaneRows | None:
        """The tokens in flight, suspended ones included; None if there are none."""
        table = to_host(self.table[:-1])
        stage = np.where(table[:, STAGE] >= _SUSPENDED * self.depth, table[:, STAGE] % self.idle, table[:, STAGE])
        live = np.flatnonzero(stage < self.idle)
        if not len(live):
            return None
        loops = stage % self.depth
        live = live[np.argsort(-loops[live], kind="stable")]
        hidden = self.hidden.index_select(0, to_device(live, self.device))
        places = table[live, CACHE_POSITION], table[live, POSITION]
        return LaneRows(hidden, live // self.depth, *places, loops[live], live)

    def suspend(self, sequences: Sequence[int]) -> None:
        """Takes the tokens of ended sequences out of the passes until `resume`."""
        stages = self.table[:-1, STAGE].view(self.sequences, self.depth)
        for sequence in sequences:
            current = stages[sequence]
            current += torch.where(current < self.idle, _SUSPENDED * self.depth, 0)

    def suspend_where(self, over: Tensor) -> None:
        """As `suspend`, of the sequences that a tensor tells, bool `[S]`."""
        stages = self.table[:-1, STAGE].view(self.sequences, self.depth)
        stages += torch.where(over[:, None] & (stages < self.idle), _SUSPENDED * self.depth, 0)

    def resume(self) -> None:
        """Puts suspended tokens back."""
        stages = self.table[:, STAGE]
        suspended = (stages >= _SUSPENDED * self.depth) & (stages < self.blocked)
        stages -= torch.where(suspended, _SUSPENDED * self.depth, 0)

    def stop_decoding(self) -> None:
        """Tokens that wait for their reading only fill their planes from now on."""
        stages = self.table[:, STAGE]
        stages += torch.where(stages < self.depth, self.depth, 0)

    def drop(self, keep_below: Tensor) -> None:
        """Drops the tokens of each sequence from a cache position on, int64 `[S]`."""
        table = self.table[:-1].view(self.sequences, self.depth, TABLE_WIDTH)
        gone = table[..., CACHE_POSITION] >= keep_below[:, None]
        table[..., STAGE].masked_fill_(gone, self.idle)

    def clear(self, sequence: int) -> None:
        """Drops all tokens of one sequence."""
        self.table[sequence * self.depth : (sequence + 1) * self.depth, STAGE] = self.idle
