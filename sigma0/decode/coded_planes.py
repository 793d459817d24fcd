"""Coded planes: K/V in few bits by segments of cache positions, and the segment under way as it is computed.

A token reads its own segment in the model's dtype and all earlier ones decoded (`kernels/coded_attention.py`), so its
K/V are a function of the ids before it alone. For that a token may begin a segment only when every token of the segment
before it has run all loops: until then it is *held*, idle in its lane. That costs at most T - 1 passes a segment.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sigma0.config import KVConfig
from sigma0.decode.lanes import CACHE_POSITION, STAGE, TABLE_WIDTH, Lanes
from sigma0.decode.ops import CodedPlanes, PlaneCodec
from sigma0.decode.planes import LayerPlanes
from sigma0.decode.transfer import Ints, to_device, to_host

# Encodes a segment: sequence, and its first cache position.
EncodeSegment = Callable[[int, int], None]


def plane_codec(kv: KVConfig, planes: int) -> PlaneCodec:
    """How so many planes are stored; the last one anchors the others under `residual`."""
    return PlaneCodec(kv.bits_of(planes), planes - 1 if kv.codec == "residual" else None, kv.group)


def check_stages(kv: KVConfig, stages: tuple[int, int]) -> None:
    """Refuses a codec for models with a prelude or a coda.

    Raises:
        ValueError: Naming the codec.
    """
    if kv.is_coded and stages != (0, 0):
        raise ValueError(
            f"kv={kv.codec!r} is for models whose K/V are of loops alone, and this one has {stages[0]} layers of "
            f"prelude and {stages[1]} of coda: leave kv out"
        )


class CodedLayer(LayerPlanes):
    """Keys and values of one layer: the segment under way of each sequence, and earlier ones in few bits.

    Args:
        like: As `LayerPlanes` takes it.
        codec: How complete segments are stored.
        sequences: S; the planes as computed hold one block of `segment` positions for each.
        segment: G.
        blocks: Number of blocks of coded positions.
        size: Cache positions of such a block.

    Attributes:
        coded: Keys and values in few bits, `blocks * size` positions each.
    """

    def __init__(self, like: Tensor, codec: PlaneCodec, sequences: int, segment: int, blocks: int, size: int) -> None:
        super().__init__(like, len(codec.bits), sequences, segment)
        self.codec, self._blocks, self._size = codec, blocks, size
        self.coded = self._new_coded(blocks * size)

    @property
    def room(self) -> int:
        """Cache positions that a block of coded positions holds."""
        return self._size

    @property
    def position_bytes(self) -> int:
        """Bytes that one coded cache position of all blocks takes, keys and values."""
        _, _, heads, width = self.flat_keys.shape
        return 2 * self._blocks * heads * self.codec.head_bytes(width)

    @property
    def bytes_allocated(self) -> int:
        """Bytes that are reserved: coded ones, and the segments under way."""
        return self.position_bytes * self._size + super().position_bytes * self.size

    def bytes_of(self, length: int) -> int:
        """Bytes that the first `length` cache positions take, those of the segment under way as computed."""
        under_way = length % self.size
        return self.position_bytes * (length - under_way) + super().position_bytes * under_way

    def encode(self, sequence: int, start: int, coded_at: int | Tensor) -> None:
        """Encodes the segment under way of a sequence.

        Args:
            sequence: Which.
            start: Its first cache position.
            coded_at: Where that lies among coded positions; of scattered ones, int64 `[segment]`.

        Raises:
            ValueError: If K/V are infinite or NaN.
        """
        assert start % self.size == 0
        own = slice(sequence * self.size, (sequence + 1) * self.size)
        if isinstance(coded_at, int):
            coded_at = torch.arange(coded_at, coded_at + self.size, device=self.flat_keys.device)
        for coded, planes in zip(self.coded, (self.flat_keys, self.flat_values), strict=True):
            coded.write(coded_at, list(planes[:, own]))

    def grow(self, size: int) -> None:
        """Makes every block of coded positions larger and keeps what is there."""
        size = -(-size // self.size) * self.size
        sources = torch.arange(self._blocks * self._size, device=self.flat_keys.device)
        targets = sources // self._size * size + sources % self._size
        self._move(self._blocks, size, targets, sources)

    def select(self, blocks: Tensor) -> None:
        """Keeps these sequences, `[N]`, in this order."""
        index = blocks.to(self.flat_keys.device)
        super().select(index)
        offsets = torch.arange(self._size, device=index.device)
        sources = (index[:, None] * self._size + offsets).flatten()
        self._move(len(index), self._size, torch.arange(len(sources), device=index.device), sources)

    def write_span(self, plane: int, start: int, keys: Tensor, values: Tensor) -> None:
        """As `LayerPlanes` has it, within one segment.

        Raises:
            ValueError: If the positions are of several segments.
        """
        if start // self.size != (start + keys.shape[2] - 1) // self.size:
            raise ValueError(
                f"{keys.shape[2]} tokens from cache position {start} on are of several segments of {self.size}: call "
                "the model with its head, without a 4-D mask, hidden states or attentions, or raise kv_config.segment"
            )
        super().write_span(plane, start % self.size, keys, values)

    def read_span(self, plane: int, stop: int) -> tuple[Tensor, Tensor]:
        """As `LayerPlanes` has it, earlier segments decoded."""
        if not stop:
            return super().read_span(plane, 0)
        begin = (stop - 1) // self.size * self.size
        sequences = torch.arange(self.blocks, device=self.flat_keys.device)
        at = (sequences[:, None] * self._size + torch.arange(begin, device=sequences.device)).flatten()
        spans = []
        for coded, own in zip(self.coded, super().read_span(plane, stop - begin), strict=True):
            early = coded.read(plane, at).to(own.dtype).view(self.blocks, begin, *self.flat_keys.shape[2:])
            spans.append(torch.cat([early.transpose(1, 2), own], dim=2))
        return spans[0], spans[1]

    def _new_coded(self, positions: int) -> tuple[CodedPlanes, CodedPlanes]:
        _, _, heads, width = self.flat_keys.shape
        made = [CodedPlanes(self.codec, positions, heads, width, self.flat_keys.device) for _ in range(2)]
        return made[0], made[1]

    def _move(self, blocks: int, size: int, targets: Tensor, sources: Tensor) -> None:
        known, self._blocks, self._size = self.coded, blocks, size
        self.coded = self._new_coded(blocks * size)
        for new, old in zip(self.coded, known, strict=True):
            new.copy_from(old, targets, sources)


@dataclass
class Segments:
    """How far the K/V of sequences are encoded.

    Attributes:
        segment: G, cache positions that are encoded together.
        sequences: S.
        coded: Leading cache positions of each sequence that are encoded, `[S]`.
    """

    segment: int
    sequences: int
    coded: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.coded = np.zeros(self.sequences, dtype=np.int64)

    def encode_to(self, encode: EncodeSegment, sequence: int, length: int) -> None:
        """Encodes the whole segments of a sequence before a cache position."""
        while self.coded[sequence] + self.segment <= length:
            encode(sequence, int(self.coded[sequence]))
            self.coded[sequence] += self.segment

    def encode_all(self, encode: EncodeSegment, length: int) -> None:
        """As `encode_to`, of every sequence."""
        for sequence in range(self.sequences):
            self.encode_to(encode, sequence, length)

    def shorten(self, known: int, length: int) -> None:
        """Forgets cache positions from a length on.

        Args:
            known: Cache positions so far.
            length: Those that stay.

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

    def clear(self, sequence: int) -> None:
        """Forgets a sequence."""
        self.coded[sequence] = 0

    def select(self, sequences: Tensor) -> "Segments":
        """Those of some sequences, `[N]`."""
        chosen = Segments(self.segment, len(sequences))
        chosen.coded = self.coded[to_host(sequences)]
        return chosen

    def hold(self, lanes: Lanes, encode: EncodeSegment, busy: Collection[int] = ()) -> None:
        """Takes tokens that begin a segment out of the passes, and puts back those for which all is encoded.

        Args:
            lanes: Tokens in flight.
            encode: Encodes a segment.
            busy: Sequences of which tokens beside the lanes are under way.

        Raises:
            ValueError: If K/V are infinite or NaN.
        """
        table = to_host(lanes.table[:-1]).reshape(lanes.sequences, lanes.depth, TABLE_WIDTH)
        stage, positions = table[..., STAGE], table[..., CACHE_POSITION]
        held = lanes.held
        begins = ((stage == 0) & (positions % self.segment == 0)) | (stage == held)
        for sequence, lane in np.argwhere(begins).tolist():
            others = (stage[sequence] < lanes.idle) & (positions[sequence] < positions[sequence, lane])
            waits = bool(others.any()) or sequence in busy
            if not waits:
                self.encode_to(encode, sequence, int(positions[sequence, lane]))
            wanted = held if waits else 0
            if stage[sequence, lane] != wanted:
                at = to_device(np.array([sequence * lanes.depth + lane]), lanes.device)
                lanes.table[:, STAGE].index_fill_(0, at, wanted)
