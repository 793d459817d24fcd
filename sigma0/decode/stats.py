"""Statistics of new tokens: of every loop, and of the logits and ids.

No token depends on them. A pass only keeps the states of its tokens (`Lanes.paths`) and the logits of those that are
final; all are worked out at once, on access or when enough has accumulated. The deepest states of tokens that run no
further wait likewise until the head reads many of them at once (`sigma0.decode.deepest`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sigma0.decode.deepest import DEEPEST, DeepestReader, DeepestRecord
from sigma0.decode.exits import ExitRule
from sigma0.decode.lanes import Lanes
from sigma0.decode.ops import (
    KEPT,
    LOGIT_STATS,
    STATISTICS,
    CollapseRule,
    CollapseState,
    ExitParams,
    Operations,
    certainty,
    fate_of_row,
    observe_paths,
)
from sigma0.decode.repetition import EntropyDrop, Repeated, Repetition
from sigma0.decode.transfer import Ints, to_device, to_host

# Rows of logits, and tokens of a sequence, that are kept before they are worked out.
_LOGITS, _WINDOW = 64, 64
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PathReader:
    """Computes the statistics of loop states.

    Attributes:
        gate: Gate logits `[N]` of normed states `[N, D]`.
        rule: Limits of the fates.
    """

    gate: Callable[[Tensor], Tensor]
    rule: ExitParams

    @torch.no_grad()
    def read(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics float32 `[N, T, 8]` and fates `[N, T]` of states `[N, T, D]`."""
        gates = self.gate(states.flatten(0, 1)).view(states.shape[:2])
        return observe_paths(states, gates, self.rule)

    @torch.no_grad()
    def hazards(self, states: Tensor) -> Tensor:
        """The last of these statistics alone, float32 `[N, T]`."""
        return torch.sigmoid(self.gate(states.flatten(0, 1)).float()).view(states.shape[:2])

    @torch.no_grad()
    def last_fates(self, states: Tensor, loops: Sequence[int]) -> list[list[int]]:
        """Fates of the last n loops of a few paths, the newest first, without anything else that `read` works out.

        Args:
            states: The last K + n states of each path, newest first; for those that do not exist, its first
                `[N, K + n, D]`.
            loops: Finished by each path, `[N]`.
        """
        differences = (states[:, :-1] - states[:, 1:]).float()  # [N, K + n - 1, D]
        grams = torch.bmm(differences, differences.transpose(1, 2)).tolist()
        norms = torch.linalg.vector_norm(states.float(), dim=-1).tolist()
        rule, noise, last = self.rule, 4 * torch.finfo(states.dtype).eps, range(states.shape[1] - KEPT)
        return [
            [fate_of_row(gram, back, loop - 1 - back, norm[back], noise, rule.growth, rule.spiral) for back in last]
            for gram, norm, loop in zip(grams, norms, loops, strict=True)
        ]


class RunRecord:
    """Statistics of new tokens; token i of a sequence is sampled from the position before it.

    Args:
        batch: B.
        new: Capacity in new tokens; grows as needed.
        total_loops: T.
        device: Of the results.
        reader: Reads the head after the last loops of tokens; None leaves `deepest` unknown.

    Attributes:
        first_position: Cache position that the first new token is sampled from.
        of_deepest: What that reader said so far; None without it. With it the lanes have to keep paths.
        pending_logits: Logits `[B, V]` of tokens that transformers' own loop is about to sample; None elsewhere.
    """

    def __init__(
        self, batch: int, new: int, total_loops: int, device: torch.device, reader: DeepestReader | None = None
    ) -> None:
        self.first_position = 0
        self.of_deepest = None if reader is None else DeepestRecord(reader, batch)
        self.pending_logits: Tensor | None = None
        # never inference tensors: what was begun under torch.inference_mode may go on outside of it
        with torch.inference_mode(False):
            self._loops, self._fates, self._logit_stats = _blank(batch, new, total_loops, device)
        # tokens in flight when paths were last looked at, with the loops that each had run, `[3, N]`
        self._in_flight: Ints = np.zeros((3, 0), dtype=np.int64)
        self._lanes: Lanes | None = None
        self._reader: PathReader | None = None
        self._last_loop = total_loops
        # loops that each token will have run at the end, and the first one that is not over yet
        self._ran: Ints = np.full((batch, new), total_loops, dtype=np.int64)
        self._open: Ints = np.ones(batch, dtype=np.int64)
        self._known = np.zeros(batch, dtype=np.int64)
        self._is_stale = self.drops_rows = False
        self._prompt: Tensor | None = None
        self._noted_logits: list[tuple[Tensor, Ints, Ints, Sequence[Repetition]]] = []
        self._logit_rows = 0
        self._drops = [EntropyDrop() for _ in range(batch)]

    @classmethod
    def empty(
        cls, batch: int, new: int, total_loops: int, device: torch.device, reader: DeepestReader | None = None
    ) -> "RunRecord":
        """Without any token; grows beyond `new` tokens as needed."""
        return cls(batch, new, total_loops, device, reader)

    @cached_property
    def collapse(self) -> CollapseState:
        """What a kernel that computes the statistics of logits keeps between tokens."""
        with torch.inference_mode(False):
            return CollapseState.empty(len(self._drops), self.device)

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self._loops.device

    @property
    def loops(self) -> Tensor:
        """change, bend, gain, turning, radius, angle, residual and hazard after each loop, float32 `[B, new, T, 8]`.

        NaN where no loop was run.
        """
        self._flush_loops()
        return self._loops

    @property
    def fates(self) -> Tensor:
        """Index into `sigma0.decode.ops.FATES`, int8 `[B, new, T]`; 0 where there is none."""
        self._flush_loops()
        return self._fates

    @property
    def logit_stats(self) -> Tensor:
        """entropy, margin, drop, periodicity, lag, echo, distinct and proximity, float32 `[B, new, 8]`.

        NaN where there is no token.
        """
        self._flush_logits()
        return self._logit_stats

    @property
    def deepest(self) -> Tensor:
        """The numbers named in `sigma0.decode.deepest.DEEPEST` after the last loop that `loops` tells of, so far.

        float32 `[B, new, 4]`; NaN where there is no token, and without a reader.
        """
        self._flush_loops()
        batch, new, _ = self._fates.shape
        if self.of_deepest is None:
            return torch.full((batch, new, len(DEEPEST)), torch.nan, device=self.device)
        if self._lanes is not None and self._in_flight.size:
            # they are read once more when they have run further
            self._add_deepest(self._lanes, self._in_flight)
            self._in_flight = self._in_flight[:, :0]
        return self.of_deepest.table(new, self.device)

    def follow(self, lanes: Lanes, gate: Callable[[Tensor], Tensor], rule: ExitRule, drop: bool) -> None:
        """Takes the statistics of the tokens in these lanes from now on.

        Args:
            lanes: Of all sequences.
            gate: Gate logits `[N]` of normed states `[N, D]`.
            rule: The exit rule, for the limits of the fates.
            drop: Whether tokens run no loop after their exits.
        """
        self.drops_rows = drop
        self._lanes, self._reader, self._last_loop = lanes, PathReader(gate, rule.params(watch=True)), lanes.depth
        self._ran[:] = lanes.depth
        lanes.remember_paths(max(_WINDOW, 4 * lanes.depth))

    def follows(self, lanes: Lanes) -> bool:
        """Whether it takes the statistics of these lanes already."""
        return self._lanes is lanes

    def note_read(self, sequences: Ints, cache_position: int, depths: Ints) -> None:
        """Notes that the tokens behind a cache position have been read.

        Args:
            sequences: Batch indices, `[N]`.
            cache_position: The position that they were read from.
            depths: Loop at which, `[N]`; under `drop` the last that is run.
        """
        index = cache_position - self.first_position
        self._reserve(index + 1)
        self._known[sequences] = index + 1
        if self.drops_rows:
            self.note_depths(sequences, np.full(len(sequences), index), depths)

    def note_prompt(self, states: Tensor, cache_position: int, reader: PathReader) -> None:
        """Notes the states `[T', B, D]` of the last prompt position."""
        self.first_position, self._prompt, self._reader = cache_position, states.detach(), reader

    def after_pass(self) -> None:
        """Notes that rows have run a loop; works it out before its place is taken by a newer token."""
        self._is_stale = True
        assert self._lanes is not None
        # drafts may be as many tokens ahead of what is final as there are lanes
        if int((self._known - self._open).max()) + self._lanes.depth + 2 >= self._lanes.window:
            self._flush_loops()

    def note_depths(self, sequences: Ints, indices: Ints, depths: Ints) -> None:
        """Notes the loop at which tokens were read: under `drop` the last that is run.

        Args:
            sequences: Batch index, int64 `[N]`.
            indices: Index of each among the new tokens of its sequence, from 0, int64 `[N]`.
            depths: From 1, `[N]`.
        """
        self._reserve(int(indices.max()) + 1)
        self._ran[sequences, indices] = depths

    def note_tokens(
        self,
        logits: Tensor,
        sequences: Ints,
        indices: Ints,
        token_ids: Ints,
        repetitions: Sequence[Repetition],
        ops: Operations,
    ) -> None:
        """Notes the logits of final tokens, at most one of a sequence.

        Args:
            logits: `[N, V]`.
            sequences: Batch index of each, int64 `[N]`.
            indices: Index of each among the new tokens of its sequence, from 0, int64 `[N]`.
            token_ids: `[N]`.
            repetitions: Repetition among the new ids of every sequence of the batch, these included.
            ops: Operations of a pass.
        """
        self._known[sequences] = indices + 1
        self._is_stale = True
        if self.of_deepest is not None:
            self.of_deepest.note_ids(sequences, token_ids)
        if ops.backend == "triton":
            at = to_device(np.stack([sequences, indices, token_ids]), self.device)
            stats = ops.collapse(logits.detach().to(self.device), at[2], self.collapse, at[0], CollapseRule())
            self.put_logit_stats(stats.statistics, at[0], at[1], int(indices.max()))
            return
        self._noted_logits.append((logits, sequences, indices, repetitions))
        self._logit_rows += len(sequences)
        if self._logit_rows >= max(_LOGITS, len(self._drops)):
            self._flush_logits()

    def put_logit_stats(self, statistics: Tensor, sequences: Tensor, indices: Tensor, last: int) -> None:
        """Records the statistics of the logits of some tokens.

        Args:
            statistics: float32 `[N, 8]`.
            sequences: Batch index of each, int64 `[N]`.
            indices: Index of each among the new tokens of its sequence, from 0, int64 `[N]`.
            last: The largest index.
        """
        self._reserve(last + 1)
        self._logit_stats[sequences, indices] = statistics.to(self.device)
        self._known[to_host(sequences)] = to_host(indices) + 1

    @torch.no_grad()
    def _flush_loops(self) -> None:
        """Works out the loops of all tokens that have run one since they were last looked at."""
        if self._prompt is not None:
            assert self._reader is not None
            statistics, fates = self._reader.read(self._prompt.transpose(0, 1))  # [B, T', 8], [B, T']
            loops, self._prompt = statistics.shape[1], None
            self._loops[:, 0, :loops], self._fates[:, 0, :loops] = statistics, fates.to(torch.int8)
        lanes = self._lanes
        if lanes is None or not self._is_stale:
            return
        self._is_stale = False
        if self._reader is not None and lanes.paths is not None:
            self._flush_paths(lanes)
        # behind the end of a sequence nothing is told, though drafts have run there
        for sequence, known in enumerate(self._known.tolist()):
            self._loops[sequence, known:] = torch.nan
            self._fates[sequence, known:] = 0

    def _flush_paths(self, lanes: Lanes) -> None:
        """Works out the states that the lanes have kept, token by token from the first that is not over."""
        rows = lanes.rows()
        ran = self._ran.copy()
        newest = self._known - 1  # index of the newest token
        oldest_open = newest + 1
        if rows is not None:
            indices = rows.cache_positions - self.first_position
            own = (indices >= 1) & (indices <= newest[rows.sequences])
            sequences, indices, loops = rows.sequences[own], indices[own], rows.loops[own]
            ran[sequences, indices] = loops
            np.minimum.at(oldest_open, sequences, indices)
        counts = np.maximum(newest + 1 - self._open, 0)
        if counts.sum():
            sequences = np.repeat(np.arange(len(counts)), counts)
            indices = np.concatenate([np.arange(first, first + n) for first, n in zip(self._open, counts, strict=True)])
            tokens = np.stack([sequences, indices, ran[sequences, indices]])
            self._work_out(lanes, *tokens)
            if self.of_deepest is not None:
                is_over = indices < oldest_open[sequences]
                self._add_deepest(lanes, tokens[:, is_over])
                self._in_flight = tokens[:, ~is_over]
        self._open = np.maximum(self._open, oldest_open)

    def _add_deepest(self, lanes: Lanes, tokens: Ints) -> None:
        """Hands the states over that tokens have after their loops: batch index, index and loops of each, `[3, N]`."""
        assert self.of_deepest is not None and lanes.paths is not None
        sequences, indices, ran = to_device(tokens, lanes.device)
        places = lanes.path_index(sequences, indices + self.first_position)
        self.of_deepest.add(lanes.paths[places, ran - 1], tokens[0], tokens[1])

    def _work_out(self, lanes: Lanes, sequences: Ints, indices: Ints, ran: Ints) -> None:
        assert self._reader is not None and lanes.paths is not None
        at = to_device(np.stack([sequences, indices, ran]), lanes.device)
        states = lanes.paths.index_select(0, lanes.path_index(at[0], at[1] + self.first_position))  # [N, T', D]
        statistics, fates = (part.to(self.device) for part in self._reader.read(states))
        loops = states.shape[1]
        unrun = (torch.arange(loops, device=lanes.device) >= at[2][:, None]).to(self.device)
        at = at.to(self.device)
        self._loops[at[0], at[1], :loops] = statistics.masked_fill(unrun[..., None], torch.nan)
        self._fates[at[0], at[1], :loops] = fates.masked_fill(unrun, 0).to(torch.int8)

    @torch.no_grad()
    def _flush_logits(self) -> None:
        """Computes the statistics of all noted logits."""
        noted, self._noted_logits, self._logit_rows = self._noted_logits, [], 0
        if not noted:
            return
        sequences, indices = (np.concatenate([note[part] for note in noted]) for part in (1, 2))
        repetitions = noted[-1][3]
        repeated = [repetitions[sequence].at(index) for sequence, index in zip(sequences, indices, strict=True)]
        drops = [self._drops[sequence] for sequence in sequences]
        numbers = compute_logit_stats(torch.cat([note[0] for note in noted]), repeated, drops)
        statistics = torch.from_numpy(numbers)
        self._reserve(int(indices.max()) + 1)
        at = to_device(np.stack([sequences, indices]), self.device)
        self._logit_stats[at[0], at[1]] = statistics.to(self.device)

    def _reserve(self, new: int) -> None:
        batch, room, total_loops = self._fates.shape
        if new > room:
            more = max(new, 2 * room) - room
            with torch.inference_mode(False):
                fresh = _blank(batch, more, total_loops, self._fates.device)
                old = (self._loops, self._fates, self._logit_stats)
                self._loops, self._fates, self._logit_stats = (
                    torch.cat(pair, dim=1) for pair in zip(old, fresh, strict=True)
                )
            self._ran = np.pad(self._ran, ((0, 0), (0, more)), constant_values=self._last_loop)


def compute_logit_stats(logits: Tensor, repeated: Sequence[Repeated], drops: Sequence[EntropyDrop]) -> Floats:
    """Statistics of logits as `Operations.collapse` has them, float32 `[N, 8]`, with repetition counted on the host.

    Args:
        logits: `[N, V]`, those of a sequence in order.
        repeated: Repetition of the sequence after each token.
        drops: Entropy statistics of the sequence of each token; updated.
    """
    rule = CollapseRule()
    entropies, margins = (part.tolist() for part in certainty(logits))
    rows = zip(entropies, margins, repeated, drops, strict=True)
    return np.array([collapse_of(*row, rule) for row in rows], dtype=np.float32)


def collapse_of(
    entropy: float, margin: float, repeated: Repeated, fold: EntropyDrop, rule: CollapseRule
) -> tuple[float, ...]:
    """The numbers named in `LOGIT_STATS` of one token.

    Args:
        entropy: Of its logits.
        margin: Of its logits.
        repeated: Repetition of the sequence after it.
        fold: Entropy statistics of the sequence; updated.
        rule: Parts of the proximity.
    """
    drop = fold.take(entropy)
    proximity = repeated.proximity(rule, drop, margin if math.isfinite(margin) else 0.0)
    return entropy, margin, drop, repeated.periodicity, repeated.lag, repeated.echo, repeated.distinct, proximity


def _blank(batch: int, new: int, total_loops: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.full((batch, new, total_loops, len(STATISTICS)), torch.nan, dtype=torch.float32, device=device),
        torch.zeros((batch, new, total_loops), dtype=torch.int8, device=device),
        torch.full((batch, new, len(LOGIT_STATS)), torch.nan, dtype=torch.float32, device=device),
    )
