"""DepthCache: K/V planes by (layer, loop), and the lanes of tokens that have not reached full depth."""

from typing import Any
from weakref import proxy

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from sigma0.config import CODA_PLANES, FULL_KV, KVConfig
from sigma0.decode.attention import Placement
from sigma0.decode.compiled import StepGraphs
from sigma0.decode.kv_store import Segments, Storage
from sigma0.decode.lanes import LaneRows, Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.planes import FINAL, READ, CodedLayer, LayerPlanes, extra_planes, kv_quantizers
from sigma0.decode.sampling_params import SamplingSettings
from sigma0.decode.settings import SequenceSettings
from sigma0.decode.stats import RunRecord
from sigma0.decode.transfer import Bools, PassCounts, PendingTokens, to_host


class Plane(CacheLayerMixin):  # type: ignore[misc]
    """One (layer, loop) of a `DepthCache`, as transformers sees it.

    All planes of a cache share one length, which a forward commits once its last loop is written.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, cache: "DepthCache", layer: int, loop: int) -> None:
        # a cache goes with its last reference, and not when the garbage is collected
        self._cache = proxy(cache)
        self._layer = layer
        self._loop = loop

    @property
    def is_initialized(self) -> bool:
        """Whether anything was written."""
        return self._cache.by_layer[self._layer] is not None

    @property
    def keys(self) -> Tensor | None:
        """Committed keys `[B, H_kv, length, d]`."""
        return self._committed()[0]

    @property
    def values(self) -> Tensor | None:
        """Committed values `[B, H_kv, length, d]`."""
        return self._committed()[1]

    def _committed(self) -> tuple[Tensor | None, Tensor | None]:
        planes = self._cache.by_layer[self._layer]
        return (None, None) if planes is None else planes.read_span(self._loop, self._cache.length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the planes of this layer, shaped for `key_states` `[B, H_kv, S, d]`."""
        self._cache.reserve_layer(self._layer, key_states, key_states.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes `[B, H_kv, S, d]` after the committed cache positions; returns all cache positions of the plane.

        The planes hold no gradients. Where the new states need some, the result is a copy through which they flow.
        """
        start, stop = self._cache.length, self._cache.length + key_states.shape[2]
        planes = self._cache.reserve_layer(self._layer, key_states, stop)
        planes.write_span(self._loop, start, key_states, value_states)
        keys, values = planes.read_span(self._loop, stop)
        if key_states.requires_grad or value_states.requires_grad:
            past_keys, past_values = (tensor[:, :, :start] for tensor in (keys, values))
            return torch.cat([past_keys, key_states], dim=2), torch.cat([past_values, value_states], dim=2)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Cache positions that `query_length` new tokens see, and the first of them."""
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        """Committed cache positions."""
        return int(self._cache.length)

    def get_max_length(self) -> int:
        """-1: planes grow."""
        return -1


class DepthCache(Cache, Storage):  # type: ignore[misc]
    """K/V planes of a looped model: plane t of a layer holds what that layer wrote at loop t.

    transformers sees `T * L` layers, index `t * L + i` for loop t (from 0) and layer i; after them those of a prelude,
    one each, and of a coda, two each.

    Args:
        num_layers: L, layers in the shared block.
        total_loops: T, loops at full depth.
        capacity: Cache positions known to be needed in the end; 0 where unknown.
        stages: Layers of prelude and coda.
        kv: How K/V are stored once all loops of their tokens have run.

    Attributes:
        by_layer: The planes of each layer, None before it was written: those that loop, then prelude, then coda.
        planes: Those that were written.
        length: Cache positions in use, in-flight batch included.
        depth: Loops that prompts run in this cache (T, or k under `fixed`); None while it is empty.
        lanes: Tokens in flight; None before the first.
        settings: When sequences stop and end; None before the first run, as are the next two.
        sampling: How their ids are sampled.
        graphs: Captured steps.
        pending: Tokens with a cache position that no loop has run, since their sequence had ended; None if none.
        ended: Sequences that have ended though a lockstep loop still feeds them, bool `[B]`; None if unknown.
        counts: What was computed through this cache.
        trace: Depth, met and diverged `[B]` of each forward's last position, while a list; None otherwise.
        record: Statistics of a prompt, or of tokens that transformers' own loop feeds; None for none.
        lacks_final: Whether the coda of some token was read at its exit alone, so that `verify` cannot go on here.
        final_in_read: Whether codas were read at loop T under another rule than `verify`: what the plane of full depth
            lacks of them is in the other one.
        start_masks: While a prompt runs, which ids may follow it, int32 `[B, ceil(V / 32)]`; None for all.
        prefilling: True while `generate` prefills, so that a prompt of one token is not taken for decoding.
    """

    def __init__(
        self,
        num_layers: int,
        total_loops: int,
        capacity: int = 0,
        stages: tuple[int, int] = (0, 0),
        kv: KVConfig = FULL_KV,
    ) -> None:
        self.num_layers = self.looping = num_layers
        self.total_loops, self.stages = total_loops, stages
        self.capacity, self.kv = capacity, kv
        # None: as many planes as loops
        self._counts: list[int | None] = [*[None] * num_layers, *extra_planes(stages)]
        super().__init__(layers=self._own_layers())
        self.reset()

    def _own_layers(self) -> list[Plane]:
        loops = [Plane(self, layer, loop) for loop in range(self.total_loops) for layer in range(self.num_layers)]
        return loops + [Plane(self, layer, plane) for layer, n in enumerate(self._counts) for plane in range(n or 0)]

    def __getstate__(self) -> dict[str, Any]:
        """All but the layers, which know whose they are."""
        return {name: part for name, part in self.__dict__.items() if name != "layers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.layers = self._own_layers()

    def reset(self) -> None:
        """Forgets everything; the memory is released."""
        self.by_layer: list[LayerPlanes | None] = [None] * len(self._counts)
        self.planes = []
        self.segments: Segments | None = None
        self.length = 0
        self.depth: int | None = None
        self.lanes: Lanes | None = None
        self.settings: SequenceSettings | None = None
        self.sampling: SamplingSettings | None = None
        self.graphs: StepGraphs | None = None
        self.pending: PendingTokens | None = None
        self.ended: Bools | None = None
        self.counts = PassCounts()
        self.trace: list[tuple[Tensor, Tensor, Tensor]] | None = None
        self.record: RunRecord | None = None
        self.lacks_final = self.final_in_read = False
        self.start_masks: Tensor | None = None
        self.prefilling = False
        self._seen: Tensor | None = None
        self._starts: Tensor | None = None
        self._has_holes = False

    @property
    def batch(self) -> int:
        """Sequences; 0 while the cache is empty."""
        planes = self.by_layer[0]
        return 0 if planes is None else planes.blocks

    @property
    def in_flight(self) -> LaneRows | None:
        """Tokens whose deeper loops are still to run; None where there are none."""
        return None if self.lanes is None else self.lanes.rows()

    @property
    def bytes_in_use(self) -> int:
        """Bytes of K/V that hold tokens: layers * planes * 2 * B * H_kv * d * bytes of a number, for each position."""
        coded = 0 if self.segments is None else int(self.segments.coded.min())
        return sum(planes.bytes_of(self.length, coded) for planes in self.planes)

    @property
    def bytes_allocated(self) -> int:
        """Bytes of K/V that are reserved, room for coming tokens included."""
        return sum(planes.bytes_allocated for planes in self.planes)

    @property
    def segment(self) -> int | None:
        """Cache positions that are encoded together, and read as computed before; None where all are."""
        return self.kv.segment if self.kv.is_coded else None

    def encode(self, length: int) -> None:
        """Encodes whole segments before a cache position, of which every loop has been run."""
        for sequence in range(self.batch if self.segments is not None else 0):
            self.encode_to(sequence, length)

    def _encode_segment(self, sequence: int, start: int) -> None:
        if self.final_in_read:
            # of the segments under way, while they are there as computed
            self._copy_codas()
        for planes in self.planes:
            if isinstance(planes, CodedLayer):
                planes.encode(sequence, start, sequence * planes.room + start)

    def reserve_layer(self, layer: int, like: Tensor, cache_positions: int) -> LayerPlanes:
        """The planes of one layer, made for keys like `[B, H_kv, S, d]`, or grown to hold `cache_positions`."""
        planes = self.by_layer[layer]
        if planes is None:
            size = max(cache_positions, self.capacity)
            count = self._counts[layer] or self.depth or self.total_loops
            if self.kv.is_coded:
                looping = self.depth or self.total_loops
                codec = kv_quantizers(self.kv, self.num_layers, looping, self.stages)[layer]
                planes = CodedLayer(like, codec, like.shape[0], self.kv.segment, like.shape[0], size)
                self.segments = self.segments or Segments(self.kv.segment, np.zeros(like.shape[0], dtype=np.int64))
            else:
                planes = LayerPlanes(like, count, like.shape[0], size)
            self.by_layer[layer] = planes
            self.planes = [known for known in self.by_layer if known is not None]
        elif planes.room < cache_positions:
            planes.grow(self.capacity if cache_positions <= self.capacity else max(cache_positions, 2 * planes.room))
        return planes

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
        self.depth = depth

    def note_coda(self, at_full_depth: bool) -> None:
        """Notes that codas are read under another rule than `verify`, in plane READ alone.

        Args:
            at_full_depth: All of them at loop T.
        """
        self.lacks_final = self.lacks_final or not at_full_depth
        self.final_in_read = not self.lacks_final

    def fill_final(self) -> None:
        """Copies the coda's K/V that were read at loop T to the plane of full depth, if it lacks them."""
        if self.final_in_read:
            self.final_in_read = False
            self._copy_codas()

    @torch.no_grad()
    def _copy_codas(self) -> None:
        for planes, count in zip(self.by_layer, self._counts, strict=True):
            if planes is not None and count == CODA_PLANES:
                for by_layer in (planes.keys, planes.values):
                    by_layer[FINAL, :, :, : self.length] = by_layer[READ, :, :, : self.length]

    def reserve(self, capacity: int) -> None:
        """States how many cache positions will be needed, so that the next growth is exact."""
        self.capacity = max(self.capacity, capacity)

    @torch.no_grad()
    def reserve_lanes(self, model: LoopedModel) -> Lanes:
        """The lanes of all sequences, made anew if the model was moved or cast since."""
        assert self.depth is not None
        like, lanes = model.enter(*torch.zeros((2, 1), dtype=torch.int64, device=model.device)), self.lanes
        if lanes is None or (lanes.hidden.dtype, lanes.device) != (like.dtype, like.device):
            self.lanes = lanes = Lanes(self.batch, self.depth, like, model.state_width)
            self.settings = self.sampling = self.graphs = None
        return lanes

    def reserve_settings(self) -> tuple[SequenceSettings, SamplingSettings]:
        """When all sequences stop, and how their ids are sampled; none of them is set."""
        lanes = self.lanes
        assert lanes is not None, "there are no lanes"
        self.settings = self.settings or SequenceSettings(lanes.sequences, lanes.depth, lanes.device)
        self.sampling = self.sampling or SamplingSettings(lanes.sequences, lanes.device)
        self.settings.reset()
        self.sampling.reset()
        return self.settings, self.sampling

    def reserve_positions(self, cache_positions: int) -> None:
        """Makes room for so many cache positions in every layer."""
        for layer, planes in enumerate(self.by_layer):
            if planes is not None and planes.room < cache_positions:
                self.reserve_layer(layer, planes.keys[0], cache_positions)

    def placement(self, longest: int) -> Placement:
        """Where the cache positions lie, for rows that read `longest` of them at most."""
        planes = self.planes[0]
        total = planes.blocks * planes.size + 1
        coded = planes.room if self.segment else None
        # starts say all where no pad lies after one
        seen = self.seen(longest) if self._has_holes else None
        return Placement(planes.size, total, starts=self._starts, seen=seen, coded=coded)

    def extend(self, cache_positions: int) -> None:
        """Counts cache positions up to `cache_positions` as in use."""
        self.length = max(self.length, cache_positions)

    def trim(self, cache_positions: int) -> None:
        """Shortens the cache to `cache_positions`: later tokens were rejected, and none of them is in flight."""
        in_flight = self.in_flight
        assert in_flight is None or int(in_flight.cache_positions.max()) < cache_positions
        self._shorten(min(self.length, cache_positions))

    def _shorten(self, length: int) -> None:
        """Drops what is known of cache positions from a length on."""
        if self.segments is not None:
            self.segments.shorten(self.length, length)
        self.length = length
        if self._seen is not None:
            self._seen = self._seen[:, :length]
            self._find_starts()

    def add_pending(self, tokens: "PendingTokens") -> None:
        """Remembers tokens that have a cache position and are not run."""
        self.pending = tokens if self.pending is None else self.pending.concatenate(tokens)
        self.extend(int(tokens.cache_positions.max()) + 1)

    def join_mask(self, attention_mask: Tensor | None, batch: int, new: int) -> Tensor | None:
        """The 2-D mask over all cache positions once `new` more are there, kept for the rows of later passes.

        Args:
            attention_mask: `[B, length + new]` of 0 and 1, or None: positions so far as kept, new ones seen.
            batch: B.
            new: Cache positions about to be written.

        Returns:
            bool `[B, length + new]`, or None where nothing is masked.

        Raises:
            ValueError: If the mask has another shape; transformers would pad it in silence.
        """
        total = self.length + new
        if attention_mask is None:
            return self.seen(total)
        if tuple(attention_mask.shape) != (batch, total):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, but {self.length} cached and {new} new "
                f"tokens of {batch} sequences need {(batch, total)}"
            )
        # a copy: the caller's may change later, or be laid out differently
        seen = attention_mask.to(torch.bool, copy=True).contiguous()
        self._seen = None if bool(seen.all()) else seen
        self._find_starts()
        return self._seen

    def _find_starts(self) -> None:
        self._starts, self._has_holes = None, False
        if self._seen is not None:
            first = self._seen.int().argmax(dim=1)
            cache_positions = torch.arange(self._seen.shape[1], device=first.device)
            self._starts = first
            self._has_holes = bool(to_host(((cache_positions >= first[:, None]) != self._seen).any()))

    def seen(self, length: int) -> Tensor | None:
        """Which of the first `length` cache positions are no pads, bool `[B, length]`; None where all are seen."""
        if self._seen is None:
            return None
        if self._seen.shape[1] < length:
            grown = self._seen.new_ones((self._seen.shape[0], length))
            grown[:, : self._seen.shape[1]] = self._seen
            self._seen = grown
        # functions in C++ see memory only
        return self._seen[:, :length].contiguous()

    def commit(self, new: int) -> None:
        """Counts `new` cache positions as written, once every loop of them is."""
        self.length += new
        # the last one may be read at another loop, which leaves other K/V of a coda
        self.encode(self.length - 1 if self.stages[1] else self.length)

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last cache positions of every plane, and the in-flight batch's tokens among them.

        Args:
            tokens_to_remove: How many, 0 or negative as transformers writes it.

        Raises:
            ValueError: If positive (the retired absolute form), more than the cache holds, or into what is known in few
                bits alone.
        """
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(f"crop takes minus the tokens to remove, -{self.length} to 0, got {tokens_to_remove}")
        if self.length == -tokens_to_remove:
            self.reset()
            return
        self._shorten(self.length + tokens_to_remove)
        if self.lanes is not None:
            self.lanes.drop(torch.full((self.batch,), self.length, device=self.lanes.device))
        if self.pending is not None:
            kept = np.flatnonzero(self.pending.cache_positions < self.length)
            self.pending = self.pending.select(kept) if len(kept) else None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the batch, `beam_idx` int64 `[B]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times in place."""
        if self.batch:
            self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices` `[N]`."""
        if self.in_flight is not None or self.pending is not None:
            raise ValueError(
                "sequences cannot be reordered while tokens wait for their deeper loops: call the model on the next "
                "tokens first, or decode with ExitConfig(mode='full')"
            )
        for planes in self.planes:
            planes.select(indices)
        if self.segments is not None:
            self.segments = self.segments.select(indices)
        self.lanes = self.settings = self.sampling = self.graphs = None
        if self._seen is not None:
            self._seen = self._seen.index_select(0, indices.to(self._seen.device))
            self._find_starts()
