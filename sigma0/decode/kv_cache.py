"""DepthCache: K/V planes by (layer, loop), and the frontier of tokens that have not reached full depth."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sigma0.decode.batch import Bools, Frontier, PassCounts, SkippedTokens
from sigma0.decode.slots import SlotPool
from sigma0.decode.stats import RunRecord


class LayerPlanes:
    """Keys and values of one layer for every loop, preallocated.

    Attributes:
        keys: `[planes, B, H_kv, C, d]`, zero where nothing was written; None before the first write.
        values: As `keys`.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def capacity(self) -> int:
        """C, columns that there is room for."""
        return 0 if self.keys is None else self.keys.shape[3]

    @property
    def column_bytes(self) -> int:
        """Bytes that one column takes in both tensors."""
        if self.keys is None or self.values is None:
            return 0
        return (self.keys.nbytes + self.values.nbytes) // self.keys.shape[3]

    def reserve(self, like: Tensor, planes: int, columns: int, exact: int) -> None:
        """Makes room for `columns` columns and keeps what is there.

        Args:
            like: Keys to be written, `[B, H_kv, S, d]`.
            planes: Loops to keep planes for.
            columns: Columns needed now.
            exact: Columns known to be needed in the end; 0 where unknown. Beyond it the capacity doubles.
        """
        if self.keys is None or self.values is None:
            batch, heads, _, head_dim = like.shape
            shape = (planes, batch, heads, max(columns, exact), head_dim)
            self.keys, self.values = _zeros(like, shape), _zeros(like, shape)
        elif self.keys.shape[3] < columns:
            capacity = exact if columns <= exact else max(columns, 2 * self.keys.shape[3])
            self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replaces both tensors by `function` of them."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = function(self.keys), function(self.values)


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    # zeros, not empty: a masked NaN would still poison the weighted sum. Never an inference tensor: a cache may be
    # continued outside of torch.inference_mode
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _grown(planes: Tensor, capacity: int) -> Tensor:
    larger = _zeros(planes, (*planes.shape[:3], capacity, planes.shape[4]))
    larger[:, :, :, : planes.shape[3]] = planes
    return larger


class PlaneStore:
    """The planes of all layers and how far they are filled; what a cache and its layers share.

    Args:
        num_layers: L.
        total_loops: T.
        capacity: Columns known to be needed in the end; 0 where unknown.

    Attributes:
        planes: The planes of each layer.
        length: Columns in use.
        depth: Loops that prompts run (T, or k under `fixed`); None while the store is empty.
    """

    def __init__(self, num_layers: int, total_loops: int, capacity: int) -> None:
        self.total_loops = total_loops
        self.capacity = capacity
        self.planes = [LayerPlanes() for _ in range(num_layers)]
        self.length = 0
        self.depth: int | None = None

    def clear(self) -> None:
        """Releases the memory and forgets the depth."""
        self.planes[:] = [LayerPlanes() for _ in self.planes]
        self.length, self.depth = 0, None

    def reserve_layer(self, layer: int, like: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer `[planes, B, H_kv, C, d]`, shaped for `like`, with room for `columns`."""
        planes = self.planes[layer]
        planes.reserve(like, self.depth or self.total_loops, columns, self.capacity)
        assert planes.keys is not None and planes.values is not None
        return planes.keys, planes.values


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
        return self._store.planes[self._layer].keys is not None

    @property
    def keys(self) -> Tensor | None:
        """Committed keys `[B, H_kv, length, d]`."""
        keys = self._store.planes[self._layer].keys
        return None if keys is None else keys[self._loop, :, :, : self._store.length]

    @property
    def values(self) -> Tensor | None:
        """Committed values `[B, H_kv, length, d]`."""
        values = self._store.planes[self._layer].values
        return None if values is None else values[self._loop, :, :, : self._store.length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the planes of this layer, shaped for `key_states` `[B, H_kv, S, d]`."""
        self._store.reserve_layer(self._layer, key_states, key_states.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes `[B, H_kv, S, d]` behind the committed columns; returns all columns of the plane.

        The planes hold no gradients. Where the new states need some, the result is a copy through which they flow.
        """
        start, stop = self._store.length, self._store.length + key_states.shape[2]
        keys, values = self._store.reserve_layer(self._layer, key_states, stop)
        keys[self._loop, :, :, start:stop] = key_states.detach()
        values[self._loop, :, :, start:stop] = value_states.detach()
        if key_states.requires_grad or value_states.requires_grad:
            past_keys, past_values = (tensor[self._loop, :, :, :start] for tensor in (keys, values))
            return torch.cat([past_keys, key_states], dim=2), torch.cat([past_values, value_states], dim=2)
        return keys[self._loop, :, :, :stop], values[self._loop, :, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that `query_length` new tokens see, and the first of them."""
        return self._store.length + query_length, 0

    def get_seq_length(self) -> int:
        """Committed columns."""
        return self._store.length

    def get_max_length(self) -> int:
        """-1: planes grow."""
        return -1


class DepthCache(Cache):  # type: ignore[misc]
    """K/V planes of a looped model: plane t of a layer holds what that layer wrote at loop t.

    transformers sees `T * L` layers, index `t * L + i` for loop t (from 0) and layer i.

    Args:
        num_layers: L, layers in the shared block.
        total_loops: T, loops at full depth.
        capacity: Columns known to be needed; 0 where unknown.

    Attributes:
        store: The planes, their length and depth.
        frontier: Tokens whose deeper loops are still to run; None where there are none.
        skipped: Tokens that have a column and were never run, since their sequence had ended; None if none.
        ended: Sequences that a lockstep loop goes on feeding though they have ended, bool `[B]`; None if unknown.
        counts: What was computed through this cache.
        trace: Depth, met and diverged `[B]` of each forward's last position, while a list; None otherwise.
        exits: Last plane of each token that stopped for good, int32 `[B, >= length]`, T - 1 elsewhere; None where every
            plane is written (`sigma0.decode.dropped`).
        slots: Trajectories of the frontier's rows.
        record: Where the statistics go of a prompt, or of a token that a foreign loop feeds; None where nobody asks.
        reading_prompt: True while `generate` reads a prompt, so that a prompt of one token is not taken for decoding.
    """

    def __init__(self, num_layers: int, total_loops: int, capacity: int = 0) -> None:
        self.store = PlaneStore(num_layers, total_loops, capacity)
        layers = [Plane(self.store, layer, loop) for loop in range(total_loops) for layer in range(num_layers)]
        super().__init__(layers=layers)
        self._forget()

    def _forget(self) -> None:
        self.frontier: Frontier | None = None
        self.skipped: SkippedTokens | None = None
        self.ended: Bools | None = None
        self.counts = PassCounts()
        self.trace: list[tuple[Tensor, Tensor, Tensor]] | None = None
        self.exits: Tensor | None = None
        self.slots = SlotPool()
        self.record: RunRecord | None = None
        self.reading_prompt = False
        self._seen: Tensor | None = None
        self._starts: Tensor | None = None
        self._has_holes = False

    @property
    def batch(self) -> int:
        """Sequences; 0 while the cache is empty."""
        keys = self.planes[0].keys
        return 0 if keys is None else keys.shape[1]

    @property
    def planes(self) -> list[LayerPlanes]:
        """The planes of each layer."""
        return self.store.planes

    @property
    def length(self) -> int:
        """Columns in use, frontier included."""
        return self.store.length

    @property
    def depth(self) -> int | None:
        """Loops that prompts run in this cache (T, or k under `fixed`); None while it is empty."""
        return self.store.depth

    @property
    def bytes_in_use(self) -> int:
        """Bytes of K/V that hold tokens: layers * planes * 2 * B * H_kv * d * bytes of a number, for each column."""
        return sum(planes.column_bytes for planes in self.planes) * self.length

    @property
    def bytes_allocated(self) -> int:
        """Bytes of K/V that are reserved, room for coming tokens included."""
        return sum(planes.column_bytes * planes.capacity for planes in self.planes)

    def open(self, depth: int, batch: int) -> None:
        """Readies the cache for a forward, or says why it does not fit.

        Args:
            depth: Loops that prompts run: T, or k where the exit rule is `fixed` at k.
            batch: Sequences in the forward.

        Raises:
            ValueError: If the cache holds planes of another depth or of another number of sequences.
        """
        if self.length:
            if self.depth not in (None, depth):
                raise ValueError(
                    f"this cache was filled {self.depth} loops deep and cannot be continued {depth} loops deep; "
                    "start a new DepthCache or keep the exit rule"
                )
            if self.batch not in (0, batch):
                raise ValueError(f"this cache holds {self.batch} sequences and cannot be continued with {batch}")
        self.store.depth = depth

    def reserve(self, capacity: int) -> None:
        """States how many columns will be needed, so that the next growth is exact."""
        self.store.capacity = max(self.store.capacity, capacity)

    def reserve_layer(self, layer: int, like: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer `[planes, B, H_kv, C, d]`, with room for `columns`."""
        return self.store.reserve_layer(layer, like, columns)

    def extend(self, columns: int) -> None:
        """Counts columns up to `columns` as in use."""
        self.store.length = max(self.store.length, columns)

    def trim(self, columns: int) -> None:
        """Counts no column from `columns` on as in use: tokens there were taken back, and none waits."""
        assert self.frontier is None or int(self.frontier.columns.max()) < columns
        self.store.length = min(self.store.length, columns)
        self._forget_columns()

    def _forget_columns(self) -> None:
        """Nothing is known any more of columns behind the length."""
        if self._seen is not None:
            self._seen = self._seen[:, : self.length]
            self._find_starts()
        if self.exits is not None:
            assert self.depth is not None
            self.exits[:, self.length :] = self.depth - 1

    def skip(self, tokens: "SkippedTokens") -> None:
        """Remembers tokens that have a column and are not run."""
        self.skipped = tokens if self.skipped is None else self.skipped.concatenate(tokens)
        self.extend(int(tokens.columns.max()) + 1)

    def join_mask(self, attention_mask: Tensor | None, batch: int, new: int) -> Tensor | None:
        """The 2-D mask over all columns once `new` more are there, remembered for the rows of later passes.

        Args:
            attention_mask: `[B, length + new]` of 0 and 1, or None: the columns so far as remembered, new ones seen.
            batch: B.
            new: Columns about to be written.

        Returns:
            bool `[B, length + new]`, or None where nothing is masked.

        Raises:
            ValueError: If the mask has another shape; transformers would pad it in silence.
        """
        total = self.length + new
        if attention_mask is not None:
            if tuple(attention_mask.shape) != (batch, total):
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}, but {self.length} cached and {new} new "
                    f"tokens of {batch} sequences need {(batch, total)}"
                )
            # a copy of its own: the caller's may be changed later, or lie in memory another way
            seen = attention_mask.to(torch.bool, copy=True).contiguous()
            self._seen = None if bool(seen.all()) else seen
            self._find_starts()
        elif self._seen is not None:
            grown = self._seen.new_ones((batch, total))
            grown[:, : self._seen.shape[1]] = self._seen
            self._seen = grown
        return self._seen

    def _find_starts(self) -> None:
        self._starts, self._has_holes = None, False
        if self._seen is not None:
            first = self._seen.int().argmax(dim=1)
            columns = torch.arange(self._seen.shape[1], device=first.device)
            self._starts = first
            self._has_holes = bool(((columns >= first[:, None]) != self._seen).any())

    def reserve_exits(self, columns: int) -> None:
        """Makes room in `exits`, where there are any, for `columns` columns; new ones have every plane."""
        if self.exits is not None and self.exits.shape[1] < columns:
            assert self.depth is not None
            more = max(columns, 2 * self.exits.shape[1]) - self.exits.shape[1]
            with torch.inference_mode(False):
                blank = torch.full((len(self.exits), more), self.depth - 1, dtype=torch.int32, device=self.exits.device)
                self.exits = torch.cat([self.exits, blank], dim=1)

    def padding(self, length: int) -> tuple[Tensor | None, Tensor | None]:
        """First seen column of each sequence, int64 `[B]`; and, where pads lie behind it, `seen(length)`."""
        return self._starts, self.seen(length) if self._has_holes else None

    def seen(self, length: int) -> Tensor | None:
        """Which of the first `length` columns are no pads, bool `[B, length]`; None where all are seen."""
        if self._seen is None:
            return None
        if self._seen.shape[1] < length:
            grown = self._seen.new_ones((self._seen.shape[0], length))
            grown[:, : self._seen.shape[1]] = self._seen
            self._seen = grown
        return self._seen[:, :length]

    def commit(self, new: int) -> None:
        """Counts `new` columns as written, once every loop of them is."""
        self.store.length += new

    def reset(self) -> None:
        """Forgets everything; the memory is released."""
        self.store.clear()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last columns of every plane, and the frontier's tokens among them.

        Args:
            tokens_to_remove: How many, 0 or negative as transformers writes it.

        Raises:
            ValueError: If positive (the retired absolute form), or more than the cache holds.
        """
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(f"crop takes minus the tokens to remove, -{self.length} to 0, got {tokens_to_remove}")
        self.store.length += tokens_to_remove
        if not self.length:
            self.reset()
            return
        self._forget_columns()
        if self.frontier is not None:
            kept = np.flatnonzero(self.frontier.columns < self.length)
            self.frontier = self.frontier.select(kept) if len(kept) else None
        if self.skipped is not None:
            kept = np.flatnonzero(self.skipped.columns < self.length)
            self.skipped = self.skipped.select(kept) if len(kept) else None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the batch, `beam_idx` int64 `[B]`."""
        self._select_batch(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices` `[N]`."""
        self._select_batch(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times in place."""
        keys = self.planes[0].keys
        if keys is not None:
            self._select_batch(torch.arange(self.batch, device=keys.device).repeat_interleave(repeats))

    def _select_batch(self, indices: Tensor) -> None:
        if self.frontier is not None or self.skipped is not None:
            raise ValueError(
                "sequences cannot be reordered while tokens wait for their deeper loops: call the model on the next "
                "tokens first, or decode with ExitConfig(mode='full')"
            )
        for planes in self.planes:
            planes.map(lambda tensor: tensor.index_select(1, indices.to(tensor.device)))
        if self._seen is not None:
            self._seen = self._seen.index_select(0, indices.to(self._seen.device))
            self._find_starts()
        if self.exits is not None:
            self.exits = self.exits.index_select(0, indices.to(self.exits.device))
