"""What the loops of the last tokens of every request were like, for statistics.

In plain torch the states after every loop are kept (`Lanes.paths`), and looked at once for many tokens. A kernel that
computes statistics at the end of a loop has them already: they are kept as they are. Deepest states wait until the head
reads many of them at once (`sigma0.decode.deepest`), those of all requests together.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sigma0.config import ExitConfig
from sigma0.decode.deepest import Deepest, DeepestQueue, deepest_reader
from sigma0.decode.lanes import CACHE_POSITION, Lanes
from sigma0.decode.ops import KEPT, STATISTICS
from sigma0.decode.sizes import DEEPEST_ROWS
from sigma0.decode.stats import Floats, PathReader
from sigma0.decode.step import Looped
from sigma0.decode.transfer import Ints, to_device, to_host
from sigma0.serve.engine.messages import ServedModel
from sigma0.serve.engine.request import RequestState

# Tokens that are kept of a request, in tokens that are in flight.
_WINDOW = 4
# A new token: its request and its index among the outputs.
Token = tuple[RequestState, int]


class LoopNotes:
    """Notes on the tokens at the last cache positions of S requests.

    Args:
        model: The looped model.
        lanes: Tokens in flight.
        whole: Whether a step is one call, of whose loops the host sees nothing: then states are kept in any case.

    Attributes:
        window: Cache positions that are kept.
        from_kernel: Whether a kernel computes statistics with every loop.
        keeps_states: Whether the lanes keep the states after every loop.
    """

    def __init__(self, model: ServedModel, lanes: Lanes, whole: bool) -> None:
        self._lanes = lanes
        # what diverges is the same under every rule
        self._rule = model.exit_rule(ExitConfig(mode="full")).params(watch=True)
        self._reader = PathReader(model.gate, self._rule)
        self._path_fates = model.operations.path_fates
        self.window = _WINDOW * lanes.depth
        self.from_kernel = model.operations.backend == "triton" and not whole
        if self.from_kernel:
            shape = (lanes.sequences * self.window, lanes.depth, len(STATISTICS) + 1)
            with torch.inference_mode(False):
                # the last number is the fate
                self._kept = torch.zeros(shape, dtype=torch.float32, device=lanes.device)
        reader = deepest_reader(model)
        self._deepest: DeepestQueue[Token] | None = None if reader is None else DeepestQueue(reader)
        self.keeps_states = reader is not None or not self.from_kernel
        if self.keeps_states:
            lanes.remember_paths(self.window)
        if self._path_fates is not None:
            # compiled before the first request
            self.mildest_fates([], [], 1)

    def note(self, looped: Looped) -> None:
        """Keeps what a kernel has said of the rows of a pass."""
        if not self.from_kernel:
            return
        assert looped.statistics is not None and looped.fates is not None
        at = looped.sequences * self.window + looped.table[:, CACHE_POSITION] % self.window
        self._kept[at, looped.loops - 1] = torch.cat([looped.statistics, looped.fates.float()[:, None]], dim=1)

    def read(self, slots: Ints, positions: Ints, by_gate: bool) -> Floats:
        """Statistics of tokens, `[N, T, 8]`; undefined past the loops that they have run.

        Args:
            slots: Of each, `[N]`.
            positions: Its cache position, `[N]`.
            by_gate: Whether only their hazards are wanted; the others are undefined then.
        """
        lanes = self._lanes
        places = to_device(slots * self.window + positions % self.window, lanes.device)
        if self.from_kernel:
            return to_host(self._kept.index_select(0, places)[:, :, :-1])
        assert lanes.paths is not None
        paths = lanes.paths.index_select(0, places)
        if not by_gate:
            return to_host(self._reader.read(paths)[0])
        return to_host(self._reader.hazards(paths)[:, :, None].expand(-1, -1, len(STATISTICS)))

    def mildest_fates(self, at: Sequence[tuple[int, int]], loops: Sequence[int], running: int) -> list[int]:
        """The mildest fate of the last `running` loops of tokens, an index into `FATES`.

        Args:
            at: Slot and cache position of each.
            loops: That it has finished, more than `running`.
            running: Loops that are looked at.
        """
        lanes, window = self._lanes, self.window
        places = [slot * window + position % window for slot, position in at]
        fates: list[int]
        if self._path_fates is not None:
            assert lanes.paths is not None
            rows, ran = (torch.tensor(each, dtype=torch.int64) for each in (places, loops))
            fates = self._path_fates(lanes.paths, rows, ran, running, self._rule).tolist()
            return fates
        back = np.array(loops)[:, None] - 1 - np.arange(running if self.from_kernel else running + KEPT)
        states_at = to_device((np.array(places)[:, None] * lanes.depth + np.maximum(back, 0)).ravel(), lanes.device)
        if self.from_kernel:
            kept = self._kept.flatten(0, 1)[:, -1].index_select(0, states_at)
            fates = to_host(kept.long()).reshape(back.shape).min(axis=1).tolist()
            return fates
        assert lanes.paths is not None
        states = lanes.paths.flatten(0, 1).index_select(0, states_at).view(*back.shape, -1)
        return [min(last) for last in self._reader.last_fates(states, loops)]

    def add_deepest(self, tokens: Sequence[Token], at: Sequence[tuple[int, int]], loops: Sequence[int]) -> None:
        """Takes tokens that run no further, whose states the head is still to read.

        Args:
            tokens: Request and output index of each.
            at: Its slot and cache position.
            loops: That it has finished.
        """
        if self._deepest is None or not tokens:
            return
        lanes, window = self._lanes, self.window
        assert lanes.paths is not None
        places = [(slot * window + position % window) * lanes.depth for slot, position in at]
        rows = to_device(np.array(places) + np.array(loops) - 1, lanes.device)
        states = lanes.paths.flatten(0, 1).index_select(0, rows)
        self._deepest.add(states, [state.id_of(index) for state, index in tokens], tokens)
        if len(self._deepest) >= DEEPEST_ROWS:
            self.read_deepest()

    def read_deepest(self) -> None:
        """Lets the head read what waits for it, and tells the requests."""
        if not self._deepest:
            return
        tokens, numbers = self._deepest.take()
        for (state, index), row in zip(tokens, to_host(numbers).tolist(), strict=True):
            state.deepest[index] = Deepest.of(row)

    def reset(self) -> None:
        """Forgets what waits."""
        if self._deepest is not None:
            self._deepest.clear()

    def save(self, slot: int) -> Tensor | None:
        """A copy of what a kernel has said of a request; states are saved with its lanes."""
        return self._kept[slot * self.window : (slot + 1) * self.window].clone() if self.from_kernel else None

    def restore(self, slot: int, saved: Tensor | None) -> None:
        """Puts it back."""
        if saved is not None:
            self._kept[slot * self.window : (slot + 1) * self.window] = saved
