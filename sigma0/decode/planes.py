"""K/V planes of every layer in blocks: plane t holds all that was written at loop t.

A layer's keys are one tensor `[planes, positions + 1, H_kv, d]`, its values another. A sequence's cache position c lies
at `block_table[sequence, c // block_size] * block_size + c % block_size`. The last position is nobody's: rows that only
fill up a bucket write there. A plain cache is the case of one block for each sequence.

Coded planes hold K/V in few bits by segments of cache positions, and the segment under way as it is computed. A token
reads its own segment in the model's dtype and all earlier ones decoded (`kernels/coded_attention.py`), so its K/V are a
function of the ids before it alone.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sigma0.config import CODA_PLANES, KVConfig
from sigma0.decode.ops import CodedPlanes, KVQuantizer, copy_past_exits, runs_triton

# Of the planes of a coda's layer.
READ, FINAL = 0, 1


def extra_planes(stages: tuple[int, int]) -> list[int]:
    """Planes of the layers of a prelude and of a coda."""
    prelude, coda = stages
    return [1] * prelude + [CODA_PLANES] * coda


class LayerPlanes:
    """Keys and values of one layer for every loop.

    Args:
        like: Keys to be written, `[..., H_kv, S, d]`, for heads, width, dtype and device.
        planes: Loops to keep planes for.
        blocks: Number of blocks.
        size: Cache positions of a block.

    Attributes:
        flat_keys: `[planes, blocks * size + 1, H_kv, d]`, zero where nothing was written.
        flat_values: As `flat_keys`.
    """

    def __init__(self, like: Tensor, planes: int, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        shape = (planes, blocks * size + 1, like.shape[-3], like.shape[-1])
        self.flat_keys, self.flat_values = _zeros(like, shape), _zeros(like, shape)

    @property
    def keys(self) -> Tensor:
        """Keys by block, `[planes, blocks, H_kv, size, d]`, a view."""
        return self._by_block(self.flat_keys)

    @property
    def values(self) -> Tensor:
        """Values by block, as `keys`."""
        return self._by_block(self.flat_values)

    @property
    def room(self) -> int:
        """Cache positions that a block holds."""
        return self.size

    @property
    def position_bytes(self) -> int:
        """Bytes that one cache position of all blocks takes, keys and values."""
        planes, _, heads, width = self.flat_keys.shape
        return 2 * planes * self.blocks * heads * width * self.flat_keys.element_size()

    @property
    def bytes_allocated(self) -> int:
        """Bytes that are reserved for cache positions."""
        return self.position_bytes * self.size

    def bytes_of(self, length: int, coded: int) -> int:
        """Bytes that the first `length` cache positions of all blocks take, of which so many are in few bits."""
        return self.position_bytes * length

    def write_span(self, plane: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Writes K/V `[blocks, H_kv, N, d]` of every block from a cache position on."""
        stop = start + keys.shape[2]
        self.keys[plane, :, :, start:stop] = keys.detach()
        self.values[plane, :, :, start:stop] = values.detach()

    def read_span(self, plane: int, stop: int) -> tuple[Tensor, Tensor]:
        """K/V of a plane before a cache position, `[blocks, H_kv, stop, d]` each."""
        return self.keys[plane, :, :, :stop], self.values[plane, :, :, :stop]

    def grow(self, size: int) -> None:
        """Makes every block larger and keeps what is there."""
        grown = LayerPlanes(self.keys, len(self.flat_keys), self.blocks, size)
        grown.keys[:, :, :, : self.size] = self.keys
        grown.values[:, :, :, : self.size] = self.values
        self.flat_keys, self.flat_values, self.size = grown.flat_keys, grown.flat_values, size

    def select(self, blocks: Tensor) -> None:
        """Keeps these blocks, `[N]`, in this order."""
        index = blocks.to(self.flat_keys.device)
        selected = LayerPlanes(self.keys, len(self.flat_keys), len(index), self.size)
        selected.keys.copy_(self.keys.index_select(1, index))
        selected.values.copy_(self.values.index_select(1, index))
        self.flat_keys, self.flat_values, self.blocks = selected.flat_keys, selected.flat_values, len(index)

    def write(self, flat_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes the K/V `[R, H_kv, d]` of rows to plane * (positions + 1) + position, int64 `[R]`."""
        for planes, new in ((self.flat_keys, keys), (self.flat_values, values)):
            planes.view(-1, *planes.shape[2:]).index_copy_(0, flat_rows, new)

    def propagate_past_exit(self, positions: Tensor, planes: Tensor) -> None:
        """Copies the K/V of flat positions from the last plane of each, counted from 0, to all deeper ones (`drop`).

        Both are int64 `[N]`.
        """
        positions, planes = (index.to(self.flat_keys.device) for index in (positions, planes))
        targets = torch.arange(1, len(self.flat_keys), device=planes.device)[:, None]  # [T - 1, 1]
        sources = torch.minimum(targets, planes)  # a plane up to the last is copied to itself
        for tensor in (self.flat_keys, self.flat_values):
            tensor[targets, positions] = tensor[sources, positions]

    def wipe(self, blocks: Sequence[int]) -> None:
        """Fills blocks with zeros."""
        size, begin = self.size, 0
        for count, block in enumerate(blocks, start=1):
            # blocks that follow each other at once
            if count == len(blocks) or blocks[count] != block + 1:
                for flat in (self.flat_keys, self.flat_values):
                    flat[:, blocks[begin] * size : (block + 1) * size].zero_()
                begin = count

    def _by_block(self, flat: Tensor) -> Tensor:
        by_block = flat[:, :-1].view(len(flat), self.blocks, self.size, *flat.shape[2:])
        return by_block.transpose(2, 3)


def kv_quantizer(kv: KVConfig, planes: int) -> KVQuantizer:
    """How so many planes of a layer that loops are stored; the last one anchors the others under `residual`."""
    return KVQuantizer(kv.bits_of(planes), planes - 1 if kv.codec == "residual" else None, kv.group)


def kv_quantizers(kv: KVConfig, layers: int, planes: int, stages: tuple[int, int]) -> list[KVQuantizer]:
    """How each layer's planes are stored: of those that loop, of a prelude and of a coda.

    Of prelude and coda, which every token reads whatever its depth, each plane is stored like the last loop's.
    """
    others = [KVQuantizer(kv.bits_of(1) * count, None, kv.group) for count in extra_planes(stages)]
    return [*[kv_quantizer(kv, planes)] * layers, *others]


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

    def __init__(self, like: Tensor, codec: KVQuantizer, sequences: int, segment: int, blocks: int, size: int) -> None:
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

    def bytes_of(self, length: int, coded: int) -> int:
        """As `LayerPlanes` has it."""
        return self.position_bytes * coded + super().position_bytes * (length - coded)

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
        current = slice(sequence * self.size, (sequence + 1) * self.size)
        if isinstance(coded_at, int):
            coded_at = torch.arange(coded_at, coded_at + self.size, device=self.flat_keys.device)
        for coded, planes in zip(self.coded, (self.flat_keys, self.flat_values), strict=True):
            coded.write(coded_at, list(planes[:, current]))

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
        for coded, current in zip(self.coded, super().read_span(plane, stop - begin), strict=True):
            early = coded.read(plane, at).to(current.dtype).view(self.blocks, begin, *self.flat_keys.shape[2:])
            spans.append(torch.cat([early.transpose(1, 2), current], dim=2))
        return spans[0], spans[1]

    def _new_coded(self, positions: int) -> tuple[CodedPlanes, CodedPlanes]:
        _, _, heads, width = self.flat_keys.shape
        made = self.codec, positions, heads, width, self.flat_keys.device
        return CodedPlanes(*made), CodedPlanes(*made)

    def _move(self, blocks: int, size: int, targets: Tensor, sources: Tensor) -> None:
        known, self._blocks, self._size = self.coded, blocks, size
        self.coded = self._new_coded(blocks * size)
        for new, old in zip(self.coded, known, strict=True):
            new.copy_from(old, targets, sources)


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    # zeros, not empty: a masked NaN would still poison the weighted sum. Never an inference tensor: a cache may be
    # continued outside of torch.inference_mode
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


# Where the K/V of layers lie, int64 `[L, 2]`, as long as the first of them is there: captured steps read it.
_ADDRESSES: WeakKeyDictionary[LayerPlanes, tuple[tuple[int, ...], Tensor]] = WeakKeyDictionary()


def propagate_past_exits(layers: Sequence[LayerPlanes], positions: Tensor, planes: Tensor) -> None:
    """`LayerPlanes.propagate_past_exit` of all layers: in one launch on a GPU, where all lie on one."""
    first, device = layers[0], layers[0].flat_keys.device
    apart = any(layer.flat_keys.device != device for layer in layers)
    if apart or torch.compiler.is_compiling() or not runs_triton(device):
        for layer in layers:
            layer.propagate_past_exit(positions, planes)
        return
    where = tuple(part.data_ptr() for layer in layers for part in (layer.flat_keys, layer.flat_values))
    if first not in _ADDRESSES or _ADDRESSES[first][0] != where:
        _ADDRESSES[first] = where, torch.tensor(where, dtype=torch.int64, device=device).view(-1, 2)
    copy_past_exits(_ADDRESSES[first][1], first.flat_keys, positions.to(device), planes.to(device))
