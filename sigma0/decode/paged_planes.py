"""Paged K/V of an engine: the planes of every layer, and the block tables of its sequences."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from sigma0.config import FULL_KV, KVConfig
from sigma0.decode.attention import CodedPlacement, Placement
from sigma0.decode.coded_planes import CodedLayer, Segments, check_stages, plane_codec
from sigma0.decode.lanes import Lanes
from sigma0.decode.planes import BlockShape, LayerPlanes, propagate_past_exits
from sigma0.decode.transfer import to_device


class PagedPlanes:
    """`sigma0.decode.runner.Storage` over blocks that sequences are given and lose.

    Args:
        shape: Of a block.
        blocks: How many.
        dtype: Of the K/V.
        device: Where they are.
        sequences: S, sequences at the same time.
        longest: Cache positions of the longest sequence; None: as many as there are blocks for.
        kv: How K/V are stored once all loops of their tokens have run.

    Attributes:
        planes: The planes of each layer.
        segments: Which segments are encoded; None where planes are stored as computed.
        last_planes: Last plane that tokens of each sequence write, counted from 0.
        table: Block table, int64 `[S, n]`.
        first: First flat position of each sequence whose blocks follow each other, else -1.
        rooms: Positions that the blocks of each sequence hold.
    """

    def __init__(
        self,
        shape: BlockShape,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        sequences: int = 1,
        longest: int | None = None,
        kv: KVConfig = FULL_KV,
    ) -> None:
        self.shape = shape
        self.blocks = blocks
        like = torch.empty((shape.kv_heads, 0, shape.head_dim), dtype=dtype, device=device)
        self.planes: list[LayerPlanes]
        self.segments: Segments | None = None
        if kv.is_coded:
            check_stages(kv, shape.stages)
            codec = plane_codec(kv, shape.planes)
            self.planes = [
                CodedLayer(like, codec, sequences, kv.segment, blocks, shape.size) for _ in range(shape.layers)
            ]
            self.segments = Segments(kv.segment, sequences)
        else:
            self.planes = [LayerPlanes(like, count, blocks, shape.size) for count in shape.counts]
        self.last_planes = [shape.planes - 1] * sequences
        self._errors: dict[int, Exception] = {}
        width = blocks if longest is None else -(-longest // shape.size)
        with torch.inference_mode(False):
            self.table = torch.zeros((sequences, width), dtype=torch.int64, device=device)
        self.first = [0] * sequences
        self.rooms = [0] * sequences

    def place(self, sequence: int, blocks: Sequence[int]) -> None:
        """Sets the block table of a sequence."""
        in_place = list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))
        self.first[sequence] = blocks[0] * self.shape.size if in_place else -1
        self.rooms[sequence] = len(blocks) * self.shape.size
        self.table[sequence, : len(blocks)] = to_device(np.array(blocks, dtype=np.int64), self.table.device)

    def release(self, sequence: int) -> None:
        """Forgets where the blocks of a sequence lie: others are read at once only where all are in place."""
        self.first[sequence] = self.rooms[sequence] = 0
        if self.segments is not None:
            self.segments.clear(sequence)

    def begin(self, sequence: int, coded: int, last_plane: int) -> None:
        """Notes what a sequence finds encoded, and the last plane that its tokens write."""
        self.last_planes[sequence] = last_plane
        if self.segments is not None:
            self.segments.coded[sequence] = coded

    def pop_errors(self) -> dict[int, Exception]:
        """What broke since the last call while segments were encoded, by sequence: numbers that are not finite."""
        errors, self._errors = self._errors, {}
        return errors

    def hold(self, lanes: Lanes, busy: Collection[int] = ()) -> None:
        """As `sigma0.decode.runner.Storage` has it."""
        if self.segments is not None:
            self.segments.hold(lanes, self._encode_segment, busy)

    def encode_to(self, sequence: int, length: int) -> None:
        """Encodes the whole segments of a sequence before a cache position, of which every loop has been run."""
        assert self.segments is not None
        self.segments.encode_to(self._encode_segment, sequence, length)

    def _encode_segment(self, sequence: int, start: int) -> None:
        assert self.segments is not None
        positions = torch.arange(start, start + self.segments.segment, device=self.table.device)
        size = self.shape.size
        coded_at = self.table[sequence, positions // size] * size + positions % size
        last = torch.full_like(positions, self.last_planes[sequence])
        under_way = positions % self.segments.segment + sequence * self.segments.segment
        for layer in self.planes:
            assert isinstance(layer, CodedLayer)
            if self.last_planes[sequence] < self.shape.planes - 1:
                # the anchor is a plane that something was written to
                layer.propagate_past_exit(under_way, last)
            try:
                layer.encode(sequence, start, coded_at)
            except ValueError as error:
                # ends this sequence alone
                self._errors[sequence] = error

    def placement(self, longest: int) -> Placement:
        """Where cache positions lie."""
        if self.segments is not None:
            segment, sequences = self.segments.segment, self.segments.sequences
            coded = CodedPlacement(self.shape.size, self.table)
            return Placement(segment, sequences * segment + 1, coded=coded)
        total = self.blocks * self.shape.size + 1
        return Placement(self.shape.size, total, self.table, self.first, self.rooms)

    def leave(self, sequences: Tensor, cache_positions: Tensor, planes: Tensor) -> None:
        """As `sigma0.decode.runner.Storage` has it."""
        flat = self.placement(0).flat(sequences, cache_positions)
        propagate_past_exits(self.planes[: self.shape.layers], flat, planes)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Fills blocks with zeros; coded ones are written before they are read, and hold no NaN."""
        for layer in self.planes if self.segments is None else ():
            layer.wipe(blocks)
