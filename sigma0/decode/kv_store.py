"""Storage of K/V: planes in blocks, and how far the K/V of sequences are encoded.

A token may begin a segment of coded planes only when every token of the segment before it has run all loops: until then
it is *held*, idle in its lane. That costs at most T - 1 passes a segment.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sigma0.config import FULL_KV, KVConfig
from sigma0.decode.attention import Placement
from sigma0.decode.lanes import CACHE_POSITION, STAGE, TABLE_WIDTH, Lanes
from sigma0.decode.model import KVShape
from sigma0.decode.ops import KVQuantizer
from sigma0.decode.planes import CodedLayer, LayerPlanes, extra_planes, kv_quantizers, propagate_past_exits
from sigma0.decode.transfer import Ints, to_device, to_host


@dataclass(frozen=True)
class BlockShape:
    """What a block of a model takes."""

    layers: int
    planes: int  # T
    kv_heads: int
    head_dim: int
    size: int  # Cache positions
    stages: tuple[int, int] = (0, 0)  # Layers of a prelude, with one plane each, and of a coda, with two

    @classmethod
    def of(cls, model: KVShape, size: int) -> "BlockShape":
        """Of a model's configuration."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(model.num_block_layers, model.num_loops, config.num_key_value_heads, head_dim, size, model.stages)

    @property
    def counts(self) -> list[int]:
        """Planes of each layer."""
        return [*[self.planes] * self.layers, *extra_planes(self.stages)]

    def codecs(self, kv: KVConfig) -> list[KVQuantizer]:
        """How each layer's planes are stored in few bits."""
        return kv_quantizers(kv, self.layers, self.planes, self.stages)

    def number_bits(self, kv: KVConfig) -> float:
        """Bits of a number in few bits, its share of a scale included: the mean over all planes."""
        codecs = self.codecs(kv)
        return sum(codec.number_bits * len(codec.bits) for codec in codecs) / sum(self.counts)

    def bytes_with(self, dtype: torch.dtype, codecs: Sequence[KVQuantizer] = ()) -> int:
        """Bytes of a block's keys and values over all layers and planes, of a dtype or, where given, in codes."""
        if codecs:
            return 2 * self.kv_heads * sum(codec.head_bytes(self.head_dim) for codec in codecs) * self.size
        return 2 * sum(self.counts) * self.kv_heads * self.head_dim * self.size * dtype.itemsize

    def count_in(
        self, kv_bytes: int, dtype: torch.dtype, codecs: Sequence[KVQuantizer] = (), tail_positions: int = 0
    ) -> int:
        """Blocks that so many bytes hold, as `bytes_with` has them, beside cache positions that are kept as computed.

        Raises:
            ValueError: If that is none.
        """
        block_bytes = self.bytes_with(dtype, codecs)
        tail_bytes = self.bytes_with(dtype) * tail_positions // self.size
        if kv_bytes < block_bytes + tail_bytes:
            beside = f", and the segments under way take {tail_bytes} bytes" if tail_bytes else ""
            raise ValueError(f"{kv_bytes} bytes of K/V hold no block: one takes {block_bytes} bytes{beside}")
        return (kv_bytes - tail_bytes) // block_bytes


@dataclass
class Segments:
    """How far the K/V of sequences are encoded."""

    segment: int  # G, cache positions that are encoded together
    coded: Ints  # Leading cache positions of each sequence that are encoded, `[S]`

    def shorten(self, known: int, length: int) -> None:
        """Forgets cache positions from a length on, of so many that are known.

        Raises:
            ValueError: If a part of a segment would stay that is known in few bits alone.
        """
        kept = length // self.segment * self.segment
        if length > kept and known > kept + self.segment:
            raise ValueError(
                f"K/V in few bits can be cut to {kept} tokens, where a segment of {self.segment} begins, and not to "
                f"{length}: crop further, or start a new cache"
            )
        self.coded = np.minimum(self.coded, kept)

    def select(self, sequences: Tensor) -> "Segments":
        """Those of some sequences, `[N]`."""
        return Segments(self.segment, self.coded[to_host(sequences)])


class Storage(ABC):
    """K/V of all sequences, as a runner sees them."""

    segments: Segments | None  # Which segments are encoded; None where planes are stored as computed
    planes: list[LayerPlanes]  # The planes of each layer: those that loop, then prelude, then coda
    looping: int  # L, layers that loop

    @abstractmethod
    def placement(self, longest: int) -> Placement:
        """Where cache positions lie, for rows that read `longest` of them at most."""

    @abstractmethod
    def _encode_segment(self, sequence: int, start: int) -> None:
        """Encodes a segment of a sequence from its first cache position on."""

    def leave(self, sequences: Tensor, cache_positions: Tensor, planes: Tensor) -> None:
        """Copies K/V of tokens that run no further from their last plane to the deeper ones, all int64 `[N]`."""
        flat = self.placement(0).flat(sequences, cache_positions)
        propagate_past_exits(self.planes[: self.looping], flat, planes)

    def encode_to(self, sequence: int, length: int) -> None:
        """Encodes the whole segments of a sequence before a cache position, of which every loop has been run."""
        segments = self.segments
        assert segments is not None
        while segments.coded[sequence] + segments.segment <= length:
            self._encode_segment(sequence, int(segments.coded[sequence]))
            segments.coded[sequence] += segments.segment

    def block_lanes(self, lanes: Lanes, busy: Collection[int] = ()) -> None:
        """Between steps takes tokens that begin a segment out of the passes, and puts those back that need not wait.

        Of `busy` sequences tokens beside the lanes are under way.

        Raises:
            ValueError: If K/V are infinite or NaN.
        """
        assert self.segments is not None
        table = to_host(lanes.table[:-1]).reshape(lanes.sequences, lanes.depth, TABLE_WIDTH)
        stage, positions = table[..., STAGE], table[..., CACHE_POSITION]
        blocked = lanes.blocked
        begins = ((stage == 0) & (positions % self.segments.segment == 0)) | (stage == blocked)
        for sequence, lane in np.argwhere(begins).tolist():
            others = (stage[sequence] < lanes.idle) & (positions[sequence] < positions[sequence, lane])
            waits = bool(others.any()) or sequence in busy
            if not waits:
                self.encode_to(sequence, int(positions[sequence, lane]))
            wanted = blocked if waits else 0
            if stage[sequence, lane] != wanted:
                at = to_device(np.array([sequence * lanes.depth + lane]), lanes.device)
                lanes.table[:, STAGE].index_fill_(0, at, wanted)


class PagedPlanes(Storage):
    """K/V of an engine, in blocks that sequences are given and lose.

    Args:
        shape: Of a block.
        blocks: How many.
        dtype: Of the K/V.
        device: Where they are.
        sequences: S, sequences at the same time.
        longest: Cache positions of the longest sequence; None: as many as there are blocks for.
        kv: How K/V are stored once all loops of their tokens have run.

    Attributes:
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
        self.shape, self.blocks, self.looping = shape, blocks, shape.layers
        like = torch.empty((shape.kv_heads, 0, shape.head_dim), dtype=dtype, device=device)
        self.segments = None
        if kv.is_coded:
            size = sequences, kv.segment, blocks, shape.size
            self.planes = [CodedLayer(like, codec, *size) for codec in shape.codecs(kv)]
            self.segments = Segments(kv.segment, np.zeros(sequences, dtype=np.int64))
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
            self.segments.coded[sequence] = 0

    def begin(self, sequence: int, coded: int, last_plane: int) -> None:
        """Notes what a sequence finds encoded, and the last plane that its tokens write."""
        self.last_planes[sequence] = last_plane
        if self.segments is not None:
            self.segments.coded[sequence] = coded

    def pop_errors(self) -> dict[int, Exception]:
        """What broke since the last call while segments were encoded, by sequence: numbers that are not finite."""
        errors, self._errors = self._errors, {}
        return errors

    def _encode_segment(self, sequence: int, start: int) -> None:
        assert self.segments is not None
        positions = torch.arange(start, start + self.segments.segment, device=self.table.device)
        size = self.shape.size
        coded_at = self.table[sequence, positions // size] * size + positions % size
        last = torch.full_like(positions, self.last_planes[sequence])
        under_way = positions % self.segments.segment + sequence * self.segments.segment
        for place, layer in enumerate(self.planes):
            assert isinstance(layer, CodedLayer)
            if self.last_planes[sequence] < self.shape.planes - 1 and place < self.looping:
                # the anchor is a plane that something was written to
                layer.propagate_past_exit(under_way, last)
            try:
                layer.encode(sequence, start, coded_at)
            except ValueError as error:
                # ends this sequence alone
                self._errors[sequence] = error

    def placement(self, longest: int) -> Placement:
        """See `Storage`."""
        if self.segments is not None:
            segment, sequences = self.segments.segment, len(self.segments.coded)
            return Placement(segment, sequences * segment + 1, self.table, coded=self.shape.size)
        total = self.blocks * self.shape.size + 1
        return Placement(self.shape.size, total, self.table, self.first, self.rooms)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Fills blocks with zeros; coded ones are written before they are read, and hold no NaN."""
        for layer in self.planes if self.segments is None else ():
            layer.wipe(blocks)
