"""Statistics of tokens: of every loop, of logits and ids, and what the head says after their last loops.

No token depends on them. A pass only keeps the states of its tokens (`Lanes.paths`), which are looked at for many
tokens at once: of all tokens of a batch by `RunRecord`, of the last ones of a server by `LoopStatsRecorder`.

With h the state after the deepest loop that a token has run, p = softmax(head(h)) and i the token that was chosen at
its exit:

    surprise  - log p_i
    entropy   - sum p log p
    margin    p of the top-1 - p of the top-2
    agrees    1 if i is the argmax of p, else 0

p is the model's own: no temperature, penalty, bias or grammar has touched it. Under `finish` those loops run anyway, so
all this costs is the head, once for each token. The last tokens of an answer have run no further than its end, the very
last no further than its exit. The first one is read from the prompt's last position: at loop T, but for a server's
answer of fewer passes, since the server samples it before that position has run on to T.

A state with a coda cannot be read afterwards, since the coda's K/V of its position are those of the exit; nor can one
whose head is spread over processes, of which only some may ask. There is no reader then, and nothing is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from sigma0.config import DEEPEST_ROWS
from sigma0.decode.exits import ExitRule
from sigma0.decode.lanes import Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import LOGIT_STATS, STATISTICS, ExitParams, Operations, certainty, no_broadcast, observe_paths
from sigma0.decode.repetition import TextStats
from sigma0.decode.transfer import Ints, to_device, to_host

DEEPEST = ("surprise", "entropy", "margin", "agrees")
# Tokens of a sequence whose states are kept: of a record at least, and of notes for each token in flight.
_WINDOW, _IN_FLIGHT = 64, 4
Floats = npt.NDArray[np.float32]
Where = TypeVar("Where")
# The numbers named in `DEEPEST`, float32 `[N, 4]`, of states `[N, D]` and ids `[N]`.
DeepestReader = Callable[[Tensor, Tensor], Tensor]
Numbers = Sequence[tuple[Where, list[float]]]


@dataclass(frozen=True)
class PathReader:
    """Computes the statistics of loop states by a gate, which takes normed states `[N, D]`, and the limits of fates."""

    gate: Callable[[Tensor], Tensor]
    rule: ExitParams

    @torch.no_grad()
    def read(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics float32 `[N, T, 8]` and fates `[N, T]` of states `[N, T, D]`."""
        gates = self.gate(states.flatten(0, 1)).view(states.shape[:2])
        return observe_paths(states, gates, self.rule)


class Deepest(NamedTuple):
    """The numbers named in `DEEPEST` of one token; None where they are not known."""

    surprise: float | None = None
    entropy: float | None = None
    margin: float | None = None
    agrees: bool | None = None

    @classmethod
    def of(cls, row: Sequence[float]) -> "Deepest":
        """Out of a row of numbers, all of them NaN where they are not known."""
        surprise, entropy, margin, agrees = row
        return cls() if entropy != entropy else cls(surprise, entropy, margin, bool(agrees))


def deepest_of(
    logits: Tensor, token_ids: Tensor, certain: Callable[[Tensor], tuple[Tensor, Tensor] | Tensor] = certainty
) -> Tensor:
    """The numbers named in `DEEPEST`, float32 `[N, 4]`; NaN of logits that are not finite.

    Args:
        logits: `[N, V]`.
        token_ids: The token chosen at each exit, int64 `[N]`.
        certain: Entropies and margins `[N]` of logits.
    """
    logits = logits.float()
    surprise = torch.nn.functional.cross_entropy(logits, token_ids, reduction="none")
    entropy, margin = certain(logits)
    numbers = torch.stack([surprise, entropy, margin, (logits.argmax(dim=-1) == token_ids).float()], dim=-1)
    return numbers.masked_fill(~numbers.isfinite().all(dim=-1, keepdim=True), torch.nan)


def deepest_reader(model: LoopedModel) -> DeepestReader | None:
    """Reads states of a model after their last loops; None where that cannot be done afterwards."""
    if model.stages[1] or model.operations.broadcast is not no_broadcast:
        return None
    certain = model.operations.certainty_rows or certainty

    def read(states: Tensor, token_ids: Tensor) -> Tensor:
        return deepest_of(model.read(states), token_ids, certain)

    return read


class DeepestQueue(Generic[Where]):
    """States of tokens that run no further, until the head reads many of them at once."""

    def __init__(self, reader: DeepestReader) -> None:
        self._reader = reader
        self.clear()

    def clear(self) -> None:
        """Forgets all that wait."""
        self._states: list[Tensor] = []
        self._token_ids: list[int] = []
        self._where: list[Where] = []

    def add(self, states: Tensor, token_ids: Sequence[int], where: Sequence[Where]) -> Numbers[Where]:
        """Adds N tokens, whose states `[N, D]` nobody writes to any more; `take`, where many wait by now, else nothing.

        `where` is given back with the numbers of each.
        """
        self._states.append(states)
        self._token_ids += token_ids
        self._where += where
        return self.take() if len(self._where) >= DEEPEST_ROWS else ()

    @torch.no_grad()
    def take(self) -> Numbers[Where]:
        """Reads all that wait: those that were added, each with the numbers named in `DEEPEST`."""
        states, token_ids, where = self._states, self._token_ids, self._where
        if not where:
            return ()
        self.clear()
        rows, ids = torch.cat(states), to_device(np.array(token_ids), states[0].device)
        parts = zip(torch.split(rows, DEEPEST_ROWS), torch.split(ids, DEEPEST_ROWS), strict=True)
        numbers = torch.cat([self._reader(*part) for part in parts])
        return list(zip(where, to_host(numbers).tolist(), strict=True))


class LoopStatsRecorder(Generic[Where]):
    """Notes on the loops of the tokens at the last cache positions of S sequences.

    Deepest states wait until the head reads many of them at once, those of all sequences together.

    Args:
        model: The looped model.
        lanes: Tokens in flight.
        rule: Limits of the fates.

    Attributes:
        window: Cache positions that are kept.
    """

    def __init__(self, model: LoopedModel, lanes: Lanes, rule: ExitParams) -> None:
        self._lanes, self._rule = lanes, rule
        self._reader = PathReader(model.gate, rule)
        self._path_fates = model.operations.path_fates
        self.window = _IN_FLIGHT * lanes.depth
        reader = deepest_reader(model)
        self._deepest: DeepestQueue[Where] | None = None if reader is None else DeepestQueue(reader)
        lanes.remember_paths(self.window)

    def read(self, slots: Ints, positions: Ints, by_gate: bool) -> Floats:
        """Statistics `[N, T, 8]` of tokens, by slots and cache positions `[N]`; undefined past their last loops.

        Where only their hazards are wanted (`by_gate`), the others are undefined.
        """
        lanes = self._lanes
        assert lanes.paths is not None
        paths = lanes.paths.index_select(0, lanes.path_index(*to_device(np.stack([slots, positions]), lanes.device)))
        if not by_gate:
            return to_host(self._reader.read(paths)[0])
        with torch.no_grad():
            hazards = torch.sigmoid(self._reader.gate(paths.flatten(0, 1)).float()).view(*paths.shape[:2], 1)
        return to_host(hazards.expand(-1, -1, len(STATISTICS)))

    def mildest_fates(self, at: Sequence[tuple[int, int]], loops: Sequence[int], running: int) -> list[int]:
        """The mildest fate of the last `running` loops of tokens, an index into `FATES`.

        Given slot and cache position of each, and the loops that it has finished, more than `running`.
        """
        lanes, paths = self._lanes, self._lanes.paths
        assert paths is not None
        places = lanes.path_index(*to_device(np.array(at).T.copy(), lanes.device))
        if self._path_fates is not None:
            fates: list[int] = self._path_fates(paths, places, torch.tensor(loops), running, self._rule).tolist()
            return fates
        output = to_host(self._reader.read(paths.index_select(0, places))[1])
        return [int(current[n - running : n].min()) for current, n in zip(output, loops, strict=True)]

    def add_deepest(
        self, tokens: Sequence[tuple[Where, int]], at: Sequence[tuple[int, int]], loops: Sequence[int]
    ) -> list[tuple[Where, Deepest]]:
        """Takes tokens that run no further, whose states the head is still to read; what is known now of all so far.

        Args:
            tokens: What is given back with what is known of each, and its id.
            at: Its slot and cache position.
            loops: That it has finished.
        """
        if self._deepest is None or not tokens:
            return []
        lanes, paths = self._lanes, self._lanes.paths
        assert paths is not None
        slots, positions, ran = to_device(np.array([*zip(*at, strict=True), loops]), lanes.device)
        where, ids = zip(*tokens, strict=True)
        return _told(self._deepest.add(paths[lanes.path_index(slots, positions), ran - 1], ids, where))

    def read_deepest(self) -> list[tuple[Where, Deepest]]:
        """Lets the head read what waits for it."""
        return [] if self._deepest is None else _told(self._deepest.take())

    def reset(self) -> None:
        """Forgets what waits."""
        if self._deepest is not None:
            self._deepest.clear()


def _told(rows: Numbers[Where]) -> list[tuple[Where, Deepest]]:
    return [(where, Deepest.of(numbers)) for where, numbers in rows]


class RunRecord:
    """Statistics of new tokens; token i of a sequence is sampled from the position before it.

    Args:
        batch: B.
        new: Capacity in new tokens; grows as needed.
        total_loops: T.
        device: Of the results.
        ops: Operations of a pass.
        reader: Reads the head after the last loops of tokens; None leaves `deepest` unknown.

    Attributes:
        first_position: Cache position that the first new token is sampled from.
        pending_logits: Logits `[B, V]` of tokens that transformers' own loop is about to sample; None elsewhere.
    """

    def __init__(
        self,
        batch: int,
        new: int,
        total_loops: int,
        device: torch.device,
        ops: Operations,
        reader: DeepestReader | None = None,
    ) -> None:
        self.device, self.first_position = device, 0
        self.pending_logits: Tensor | None = None
        # never inference tensors: what was begun under torch.inference_mode may go on outside of it
        with torch.inference_mode(False):
            self._loops = torch.full((batch, new, total_loops, len(STATISTICS)), torch.nan, device=device)
            self._fates = torch.zeros((batch, new, total_loops), dtype=torch.int8, device=device)
        self._text_stats = TextStats(ops)
        self._texts = [self._text_stats.text() for _ in range(batch)]
        self._numbers: list[list[Sequence[float]]] = [[] for _ in range(batch)]
        # by batch index and index of the token; what was read last counts
        self._queue: DeepestQueue[tuple[int, int]] | None = None if reader is None else DeepestQueue(reader)
        self._read: dict[tuple[int, int], list[float]] = {}
        self._ids: list[list[int]] = [[] for _ in range(batch)]
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
        self._last_of_prompt: Tensor | None = None

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
        output = np.full((*self._fates.shape[:2], len(LOGIT_STATS)), np.nan, dtype=np.float32)
        for row, numbers in enumerate(self._numbers):
            output[row, : len(numbers)] = np.array(numbers).reshape(-1, len(LOGIT_STATS))
        return torch.from_numpy(output).to(self.device)

    @property
    def deepest(self) -> Tensor:
        """The numbers named in `DEEPEST` after the last loop that `loops` tells of, so far.

        float32 `[B, new, 4]`; NaN where there is no token, and without a reader.
        """
        self._flush_loops()
        batch, new, _ = self._fates.shape
        output = np.full((batch, new, len(DEEPEST)), np.nan, dtype=np.float32)
        if self._queue is None:
            return torch.from_numpy(output).to(self.device)
        if self._lanes is not None:
            # they are read once more when they have run further
            self._add_deepest(self._lanes, self._in_flight)
            self._in_flight = self._in_flight[:, :0]
        if self._last_of_prompt is not None and all(self._ids):
            where, ids = [(row, 0) for row in range(batch)], [ids[0] for ids in self._ids]
            self._read.update(self._queue.add(self._last_of_prompt, ids, where))
            self._last_of_prompt = None
        self._read.update(self._queue.take())
        for (row, column), numbers in self._read.items():
            output[row, column] = numbers
        return torch.from_numpy(output).to(self.device)

    def follow(self, lanes: Lanes, gate: Callable[[Tensor], Tensor], rule: ExitRule, drop: bool) -> None:
        """Takes the statistics of the tokens in these lanes from now on, by a gate and by the rule's limits of fates.

        `drop` says whether tokens run no loop after their exits.
        """
        self.drops_rows = drop
        if self._lanes is lanes:
            return
        self._lanes, self._reader, self._last_loop = lanes, PathReader(gate, rule.params(watch=True)), lanes.depth
        self._ran[:] = lanes.depth
        lanes.remember_paths(max(_WINDOW, 4 * lanes.depth))

    def note_read(self, sequences: Ints, cache_position: int, depths: Ints) -> None:
        """Notes that the tokens after a cache position have been read in `sequences` `[N]` at `depths` `[N]`."""
        index = cache_position - self.first_position
        self._reserve(index + 1)
        self._known[sequences] = index + 1
        if self.drops_rows:
            self._ran[sequences, index] = depths

    def note_prompt(self, states: Tensor, cache_position: int, reader: PathReader) -> None:
        """Notes the states `[T', B, D]` of the last prompt position."""
        self.first_position, self._prompt, self._reader = cache_position, states.detach(), reader
        self._last_of_prompt = states[-1].detach().clone()

    def after_pass(self) -> None:
        """Notes that rows have run a loop; works it out before its place is taken by a newer token."""
        self._is_stale = True
        assert self._lanes is not None
        # drafts may be as many tokens ahead of what is final as there are lanes
        if int((self._known - self._open).max()) + self._lanes.depth + 2 >= self._lanes.window:
            self._flush_loops()

    def note_tokens(
        self, logits: Tensor, sequences: list[int], token_ids: Sequence[int], depths: Sequence[int] | None = None
    ) -> Sequence[float]:
        """Notes the next final token of N different sequences; their proximity to collapse, of the ids alone.

        It was sampled from logits `[N, V]`, and read at `depths`, under `drop` the last that it runs; None where
        `note_read` has told it.
        """
        self._is_stale, texts = True, [self._texts[sequence] for sequence in sequences]
        *columns, proximities = self._text_stats.take(texts, token_ids, logits)
        for sequence, token_id, numbers in zip(sequences, token_ids, zip(*columns, strict=True), strict=True):
            self._numbers[sequence].append(numbers)
            self._ids[sequence].append(token_id)
            self._known[sequence] = len(self._ids[sequence])
        self._reserve(int(self._known.max()))
        if self.drops_rows and depths is not None:
            self._ran[sequences, self._known[sequences] - 1] = depths
        return proximities

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
        # after the end of a sequence nothing is told, though drafts have run there
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
            current = (indices >= 1) & (indices <= newest[rows.sequences])
            sequences, indices, loops = rows.sequences[current], indices[current], rows.loops[current]
            ran[sequences, indices] = loops
            np.minimum.at(oldest_open, sequences, indices)
        counts = np.maximum(newest + 1 - self._open, 0)
        if counts.sum():
            sequences = np.repeat(np.arange(len(counts)), counts)
            indices = np.concatenate([np.arange(first, first + n) for first, n in zip(self._open, counts, strict=True)])
            tokens = np.stack([sequences, indices, ran[sequences, indices]])
            self._work_out(lanes, *tokens)
            if self._queue is not None:
                is_over = indices < oldest_open[sequences]
                self._add_deepest(lanes, tokens[:, is_over])
                self._in_flight = tokens[:, ~is_over]
        self._open = np.maximum(self._open, oldest_open)

    def _add_deepest(self, lanes: Lanes, tokens: Ints) -> None:
        """Hands the states over that tokens have after their loops: batch index, index and loops of each, `[3, N]`."""
        assert self._queue is not None and lanes.paths is not None
        at = to_device(tokens, lanes.device)
        states = lanes.paths[lanes.path_index(at[0], at[1] + self.first_position), at[2] - 1]
        where = list(zip(tokens[0].tolist(), tokens[1].tolist(), strict=True))
        ids = [self._ids[sequence][index] for sequence, index in where]
        self._read.update(self._queue.add(states, ids, where))

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

    def _reserve(self, new: int) -> None:
        room = self._fates.shape[1]
        if new > room:
            more = max(new, 2 * room) - room
            with torch.inference_mode(False):
                self._loops = pad(self._loops, (0, 0, 0, 0, 0, more), value=torch.nan)
                self._fates = pad(self._fates, (0, 0, 0, more))
            self._ran = np.pad(self._ran, ((0, 0), (0, more)), constant_values=self._last_loop)
