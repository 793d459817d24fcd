"""The planes of a `DepthCache`, and one (layer, loop) of them as transformers sees it."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from sigma0.config import FULL_KV, KVConfig
from sigma0.decode.coded_planes import CodedLayer, Segments, check_stages, plane_codec
from sigma0.decode.lanes import Lanes
from sigma0.decode.planes import LayerPlanes, extra_planes


class PlaneStore:
    """The planes of all layers and how far they are filled; what a cache and its layers share.

    Args:
        num_layers: L.
        total_loops: T.
        capacity: Cache positions known to be needed in the end; 0 where unknown.
        stages: Layers of prelude, with one plane each, and of coda, with two.
        kv: How planes are stored.

    Attributes:
        planes: The planes of each layer: those that loop, then prelude, then coda.
        length: Cache positions in use.
        depth: Loops that prompts run (T, or k under `fixed`); None while the store is empty.
        segments: Which segments are encoded; None where planes are stored as computed, or the store is empty.
    """

    def __init__(
        self,
        num_layers: int,
        total_loops: int,
        capacity: int,
        stages: tuple[int, int] = (0, 0),
        kv: KVConfig = FULL_KV,
    ) -> None:
        check_stages(kv, stages)
        self.num_layers, self.total_loops, self.stages = num_layers, total_loops, stages
        self.capacity = capacity
        # None: as many planes as loops
        self.counts: list[int | None] = [*[None] * num_layers, *extra_planes(stages)]
        self.planes: list[LayerPlanes | None] = [None] * len(self.counts)
        self.length = 0
        self.depth: int | None = None
        self.kv = kv
        self.segments: Segments | None = None

    def clear(self) -> None:
        """Releases the memory and resets the depth."""
        self.planes[:] = [None] * len(self.planes)
        self.segments = None
        self.length, self.depth = 0, None

    def reserve_layer(self, layer: int, like: Tensor, cache_positions: int) -> LayerPlanes:
        """The planes of one layer, made or grown to hold `cache_positions` if needed.

        Args:
            layer: Which.
            like: Keys to be written, `[B, H_kv, S, d]`.
            cache_positions: Cache positions needed now.
        """
        planes = self.planes[layer]
        if planes is None:
            size = max(cache_positions, self.capacity)
            count = self.counts[layer] or self.depth or self.total_loops
            if self.kv.is_coded:
                codec = plane_codec(self.kv, count)
                planes = CodedLayer(like, codec, like.shape[0], self.kv.segment, like.shape[0], size)
                self.segments = self.segments or Segments(self.kv.segment, like.shape[0])
            else:
                planes = LayerPlanes(like, count, like.shape[0], size)
            self.planes[layer] = planes
        elif planes.room < cache_positions:
            planes.grow(self.capacity if cache_positions <= self.capacity else max(cache_positions, 2 * planes.room))
        return planes

    def encode(self, length: int) -> None:
        """Encodes the segments before a cache position, of which all sequences have run every loop."""
        if self.segments is not None:
            self.segments.encode_all(self._encode_segment, length)

    def _encode_segment(self, sequence: int, start: int) -> None:
        assert self.segments is not None
        for planes in self.planes:
            if isinstance(planes, CodedLayer):
                planes.encode(sequence, start, sequence * planes.room + start)

    def hold(self, lanes: Lanes) -> None:
        """Holds tokens that begin a segment until the one before it is encoded."""
        if self.segments is not None:
            self.segments.hold(lanes, self._encode_segment)


class Plane(CacheLayerMixin):  # type: ignore[misc]
    """One (layer, loop) of a `DepthCache`, as transformers sees it.

    All planes of a cache share one length, which a forward commits once its last loop is written.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, store: PlaneStore, layer: int, loop: int) -> None:
        self._store = store
        self._layer = layer
        self._loop = loop

    @property
    def is_initialized(self) -> bool:
        """Whether anything was written."""
        return self._store.planes[self._layer] is not None

    @property
    def keys(self) -> Tensor | None:
        """Committed keys `[B, H_kv, length, d]`."""
        planes = self._store.planes[self._layer]
        return None if planes is None else planes.read_span(self._loop, self._store.length)[0]

    @property
    def values(self) -> Tensor | None:
        """Committed values `[B, H_kv, length, d]`."""
        planes = self._store.planes[self._layer]
        return None if planes is None else planes.read_span(self._loop, self._store.length)[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the planes of this layer, shaped for `key_states` `[B, H_kv, S, d]`."""
        self._store.reserve_layer(self._layer, key_states, key_states.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes `[B, H_kv, S, d]` after the committed cache positions; returns all cache positions of the plane.

        The planes hold no gradients. Where the new states need some, the result is a copy through which they flow.
        """
        start, stop = self._store.length, self._store.length + key_states.shape[2]
        planes = self._store.reserve_layer(self._layer, key_states, stop)
        planes.write_span(self._loop, start, key_states, value_states)
        keys, values = planes.read_span(self._loop, stop)
        if key_states.requires_grad or value_states.requires_grad:
            past_keys, past_values = (tensor[:, :, :start] for tensor in (keys, values))
            return torch.cat([past_keys, key_states], dim=2), torch.cat([past_values, value_states], dim=2)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Cache positions that `query_length` new tokens see, and the first of them."""
        return self._store.length + query_length, 0

    def get_seq_length(self) -> int:
        """Committed cache positions."""
        return self._store.length

    def get_max_length(self) -> int:
        """-1: planes grow."""
        return -1
