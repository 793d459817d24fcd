"""What a step works on, prefill beside the lanes, and the prelude and coda of the rows of both.

Positions of prompts, and positions that are recomputed, run in the passes of others. A chunk enters at loop 1 and runs
a loop in every pass, one chunk of a sequence at least as deep as the one after it. No decision is taken about its
rows: each leaves after a loop that is known beforehand.

Prelude and coda are layers that run once for a token, over K/V planes of their own. A prelude runs in the pass of a
token's first loop. A coda runs whenever a token is read, and its K/V stay as that reading left them, so that later
tokens see each token as it was read: in plane READ. Under `verify` what is emitted is read at loop T over plane FINAL,
which only such readings and prompts write; the K/V of drafts never come into it. Plane READ takes over what FINAL says,
so that drafts see the best that is known of the tokens before them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sigma0.decode import settings as columns
from sigma0.decode.attention import PassRows, Placement, RowIndices
from sigma0.decode.lanes import Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import Operations, copy_plane
from sigma0.decode.planes import FINAL, READ, LayerPlanes
from sigma0.decode.settings import NO_LIMIT, Program, SequenceSettings
from sigma0.decode.transfer import Bools, Ints, to_device


class Loop(Protocol):
    """What runs the block in place of the model."""

    def __call__(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """See `LoopedModel.loop`."""

    def norm(self, raw: Tensor) -> Tensor:
        """See `LoopedModel.norm`."""


@dataclass(frozen=True)
class Batch:
    """What a step works on."""

    model: LoopedModel
    lanes: Lanes
    settings: SequenceSettings
    program: Program  # What a pass has to compute
    layers: Sequence[LayerPlanes]  # Planes of every layer
    placement: Placement  # Where cache positions lie
    longest: int  # Bound on the cache positions of a pass, plus one
    ops: Operations
    loop: Loop | None = None  # What runs the block in place of the model's own `loop`; None for that

    def norm(self, raw: Tensor) -> Tensor:
        """The norm after a loop, `[R, D]`."""
        return self.model.norm(raw) if self.loop is None else self.loop.norm(raw)


@dataclass(frozen=True)
class Chunk:
    """Positions of one sequence at the same loop."""

    sequence: int
    positions: Ints  # Cache positions, which are positions for rotary embeddings too, ascending, `[N]`
    targets: Ints  # Loop after which each leaves, `[N]`
    loops: int  # Loops finished
    hidden: Tensor  # What is in flight of them, `[N, W]`
    reads: Ints  # Loop whose reading a coda's K/V are of, `[N]`
    final: int  # Cache positions from it on were read at exits, also where those were loop T

    def select(self, rows: Ints) -> "Chunk":
        """Some of its rows."""
        hidden = self.hidden.index_select(0, to_device(rows, self.hidden.device))
        positions, targets, reads = (part[rows] for part in (self.positions, self.targets, self.reads))
        return replace(self, positions=positions, targets=targets, hidden=hidden, reads=reads)

    def columns(self) -> Ints:
        """Its rows as `RowIndices` has them, `[4, N]`, at the plane of the loop that they run next."""
        sequences, planes = np.full_like(self.positions, self.sequence), np.full_like(self.positions, self.loops)
        return np.stack([sequences, self.positions, self.positions, planes])

    def rows(self, device: torch.device) -> RowIndices:
        """The same on a device."""
        return RowIndices(*to_device(self.columns(), device))


class Prefill:
    """Chunks under way.

    Attributes:
        chunks: In the order in which they entered.
        waiting: Rows at the loop of their reading that wait until a coda has read all positions before them.
    """

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.waiting: list[Chunk] = []

    def __len__(self) -> int:
        return sum(len(chunk.positions) for chunk in self.chunks) if self.chunks else 0

    def enter(self, chunk: Chunk) -> None:
        """Adds a chunk, before loop 1 or a prelude; rows whose target is 0 do not run."""
        self.chunks += _parted([chunk], [chunk.targets > 0])[0]

    def has(self, sequence: int) -> bool:
        """Whether positions of a sequence are under way."""
        return any(chunk.sequence == sequence for chunk in self.chunks)

    def remove(self, sequence: int) -> None:
        """Drops the chunks of a sequence."""
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence != sequence]
        self.waiting = [chunk for chunk in self.waiting if chunk.sequence != sequence]

    def take_read(self) -> list[Chunk]:
        """Takes rows that a coda reads now, by sequence in ascending order: none before it is unread."""
        self.waiting += _parted(self.chunks, [chunk.reads == chunk.loops for chunk in self.chunks])[0]
        unread: dict[int, int] = {}
        for chunk in self.chunks:
            # what leaves before it is read does not count
            left = chunk.positions[(chunk.reads > chunk.loops) & (chunk.reads <= chunk.targets)]
            if len(left):
                unread[chunk.sequence] = min(unread.get(chunk.sequence, NO_LIMIT), int(left.min()))
        ready = [chunk.positions < unread.get(chunk.sequence, NO_LIMIT) for chunk in self.waiting]
        taken, self.waiting = _parted(self.waiting, ready)
        return [
            _joined([part for part in taken if part.sequence == current])
            for current in {part.sequence: 0 for part in taken}
        ]

    def behind(self, lanes: RowIndices) -> RowIndices:
        """Rows of lanes `[R]`, then those of all chunks."""
        rows = to_device(np.concatenate([chunk.columns() for chunk in self.chunks], axis=1), lanes.loops.device)
        return RowIndices(*(torch.cat(pair) for pair in zip(vars(lanes).values(), rows, strict=True)))

    def loop(self, model: LoopedModel, view: PassRows, hidden: Tensor) -> Tensor:
        """One loop of the lanes, whose states `[R, W]` are given and come back before the norm, and of all chunks.

        `view` is of both, as `behind` puts them; R may be 0.
        """
        raw = model.loop(torch.cat([hidden, *(chunk.hidden for chunk in self.chunks)]), view)
        normed = model.norm(raw[len(hidden) :])
        parts = torch.split(normed, [len(chunk.positions) for chunk in self.chunks])
        self.chunks = [
            replace(chunk, hidden=part, loops=chunk.loops + 1) for chunk, part in zip(self.chunks, parts, strict=True)
        ]
        return raw[: len(hidden)]

    def leave(self) -> list[Chunk]:
        """Takes out the rows that have reached their targets."""
        gone, self.chunks = _parted(self.chunks, [chunk.targets <= chunk.loops for chunk in self.chunks])
        return gone


def _parted(chunks: list[Chunk], masks: list[Bools]) -> tuple[list[Chunk], list[Chunk]]:
    """The rows of chunks that are among some of them, and the others."""
    parts: tuple[list[Chunk], list[Chunk]] = [], []
    for chunk, among in zip(chunks, masks, strict=True):
        for part, rows in zip(parts, (among, ~among), strict=True):
            if rows.all():
                part.append(chunk)
            elif rows.any():
                part.append(chunk.select(np.flatnonzero(rows)))
    return parts


def _joined(chunks: list[Chunk]) -> Chunk:
    """Rows of one sequence as one chunk, ascending."""
    if len(chunks) == 1:
        return chunks[0]
    positions, targets, reads = (
        np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("positions", "targets", "reads")
    )
    hidden = torch.cat([chunk.hidden for chunk in chunks])
    whole = replace(chunks[0], positions=positions, targets=targets, reads=reads, hidden=hidden)
    return whole.select(np.argsort(positions))


def run_prelude(batch: Batch, hidden: Tensor, rows: RowIndices, count: int, live: Tensor | None) -> Tensor:
    """States of a pass `[R, W]` whose first `count` rows may be tokens that run their first loop.

    `live` says which of those are, bool `[count]`; None where all are.
    """
    first, current = hidden[:count], rows.each(lambda column: column[:count])
    indices = replace(current, loops=torch.zeros_like(current.loops))
    view = PassRows(batch.layers, batch.placement, indices, batch.ops, batch.longest, live)
    entered = batch.model.prelude(first, view)
    if live is not None:
        entered = torch.where(live[:, None], entered, first)
    return entered if count == len(hidden) else torch.cat([entered, hidden[count:]])


def prefill_prelude(batch: Batch, beside: Prefill) -> None:
    """Runs the prelude of chunks that are about to run their first loop; before that of lanes, which read its K/V."""
    for place, chunk in enumerate(beside.chunks):
        if chunk.loops == 0:
            view = PassRows(batch.layers, batch.placement, chunk.rows(batch.lanes.device), batch.ops, batch.longest)
            beside.chunks[place] = replace(chunk, hidden=batch.model.prelude(chunk.hidden, view))


def prefill_coda(batch: Batch, beside: Prefill) -> None:
    """Leaves the coda's K/V of positions that have run the loop at which they are read, none before one ahead of it.

    Where exits differ, a position may be at its loop before those that it sees are at theirs: it waits for them, and
    rows that are read together see each other. What was read at an exit sees plane READ, even if that was loop T.
    """
    model, layers, place, longest = batch.model, batch.layers, batch.placement, batch.longest
    for read in beside.take_read():
        at_end = (read.reads == batch.lanes.depth) & (read.positions < read.final)
        final, early = _parted([read], [at_end])
        for current in final:
            write_coda(model, layers, place, current.hidden, current.rows(batch.lanes.device), longest)
        for current in early:
            at_exit = replace(current, loops=READ).rows(batch.lanes.device)
            model.read(current.hidden, PassRows(layers, place, at_exit, batch.ops, longest))


def read_rows(batch: Batch, hidden: Tensor, rows: RowIndices, live: Tensor) -> Tensor:
    """Logits `[K, V]` of rows `[K, W]` through a coda, given loops finished and which of them count, bool `[K]`."""
    planes = torch.zeros_like(rows.loops)
    if batch.program.verify:
        checked = batch.settings.table[:, columns.VERIFY].index_select(0, rows.sequences) > 0
        planes = ((rows.loops >= batch.lanes.depth) & checked).long() * FINAL
    view = PassRows(batch.layers, batch.placement, replace(rows, loops=planes), batch.ops, batch.longest, live)
    logits = batch.model.read(hidden, view)
    if batch.program.verify:
        place = batch.placement
        # nobody's position lies last
        at = place.flat(rows.sequences, rows.cache_positions)
        at = torch.where((planes == FINAL) & live, at, place.total - 1)
        publish(batch.model, batch.layers, at)
    return logits


def write_coda(
    model: LoopedModel, layers: Sequence[LayerPlanes], place: Placement, hidden: Tensor, rows: RowIndices, longest: int
) -> None:
    """Leaves the coda's K/V of rows `[K, W]` at loop T in both planes, as a prefill does; nobody wants their logits."""
    indices = replace(rows, loops=torch.full_like(rows.loops, FINAL))
    model.read(hidden, PassRows(layers, place, indices, model.operations, longest))
    publish(model, layers, place.flat(rows.sequences, rows.cache_positions))


def publish(model: LoopedModel, layers: Sequence[LayerPlanes], positions: Tensor) -> None:
    """Copies the coda's K/V of flat positions `[N]` from plane FINAL to plane READ."""
    for layer in layers[len(layers) - model.stages[1] :]:
        copy_plane(layer.flat_keys, layer.flat_values, positions, FINAL, READ)
