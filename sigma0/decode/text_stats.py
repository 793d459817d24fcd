"""Statistics of the newest tokens of many texts at once: of their loops, their logits and their ids.

No token depends on them. With a C++ compiler the ids of all texts are taken in one call
(`sigma0.kernels.collapse_rows`), else each in Python's own numbers.
"""

from collections.abc import Sequence
from typing import Generic

import numpy as np
import torch
from torch import Tensor

from sigma0.config import DEEPEST_ROWS
from sigma0.decode.deepest import Deepest, DeepestQueue, Where, deepest_reader
from sigma0.decode.lanes import Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import KEPT, STATISTICS, CollapseRule, ExitParams, Operations, TextMemory, certainty
from sigma0.decode.repetition import EntropyDrop, Repetition
from sigma0.decode.stats import Floats, PathReader, collapse_of
from sigma0.decode.transfer import Ints, to_device, to_host

# Tokens that are kept of a sequence, in tokens that are in flight.
_WINDOW = 4
_RULE = CollapseRule()


class CountedText:
    """What is kept of a text where nothing is compiled."""

    __slots__ = ("entropy_drop", "repetition")

    def __init__(self) -> None:
        self.repetition, self.entropy_drop = Repetition(), EntropyDrop()


Text = TextMemory | CountedText


class TextStats:
    """Takes new tokens in.

    Args:
        ops: Operations of a pass.
    """

    def __init__(self, ops: Operations) -> None:
        self._ops = ops

    def text(self) -> Text:
        """What is kept of a text, before its first token."""
        return CountedText() if self._ops.collapse_rows is None else TextMemory()

    def take(self, texts: Sequence[Text], token_ids: Sequence[int], logits: Tensor | None) -> list[list[float]]:
        """Takes a token of each of N texts in.

        Args:
            texts: Updated.
            token_ids: The new id of each.
            logits: That it was sampled from, `[N, V]`; None where the ids alone are looked at.

        Returns:
            For each of the numbers named in `sigma0.decode.ops.LOGIT_STATS`, and last for the proximity of the ids
            alone, which is not rounded to float32, those of all texts; entropy and margin are NaN without logits.
        """
        certain = None if logits is None else self._certain(logits)
        if self._ops.collapse_rows is not None:
            columns: list[list[float]] = self._ops.collapse_rows(texts, token_ids, certain, _RULE).tolist()
            return columns
        entropies, margins = [[float("nan")] * len(texts)] * 2 if certain is None else certain.tolist()
        lines = []
        for text, token_id, entropy, margin in zip(texts, token_ids, entropies, margins, strict=True):
            assert isinstance(text, CountedText)
            text.repetition.append(token_id)
            repeated = text.repetition.at(-1)
            statistics = collapse_of(entropy, margin, repeated, text.entropy_drop, _RULE)
            lines.append((*np.array(statistics, dtype=np.float32).tolist(), repeated.proximity(_RULE)))
        return [list(column) for column in zip(*lines, strict=True)]

    def _certain(self, logits: Tensor) -> Tensor:
        """Entropies and margins on the host, float32 `[2, N]`."""
        if self._ops.certainty_rows is not None:
            return self._ops.certainty_rows(logits)
        return torch.from_numpy(to_host(torch.stack(certainty(logits))))


class LoopNotes(Generic[Where]):
    """Notes on the loops of the tokens at the last cache positions of S sequences.

    The states after every loop are kept (`Lanes.paths`), and looked at once for many tokens. Deepest states wait until
    the head reads many of them at once (`sigma0.decode.deepest`), those of all sequences together.

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
        self.window = _WINDOW * lanes.depth
        reader = deepest_reader(model)
        self._deepest: DeepestQueue[Where] | None = None if reader is None else DeepestQueue(reader)
        lanes.remember_paths(self.window)
        if self._path_fates is not None:
            # compiled before the first token
            self.mildest_fates([], [], 1)

    def read(self, slots: Ints, positions: Ints, by_gate: bool) -> Floats:
        """Statistics of tokens, `[N, T, 8]`; undefined past the loops that they have run.

        Args:
            slots: Of each, `[N]`.
            positions: Its cache position, `[N]`.
            by_gate: Whether only their hazards are wanted; the others are undefined then.
        """
        lanes = self._lanes
        places = to_device(slots * self.window + positions % self.window, lanes.device)
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
        back = np.array(loops)[:, None] - 1 - np.arange(running + KEPT)
        states_at = to_device((np.array(places)[:, None] * lanes.depth + np.maximum(back, 0)).ravel(), lanes.device)
        assert lanes.paths is not None
        states = lanes.paths.flatten(0, 1).index_select(0, states_at).view(*back.shape, -1)
        return [min(last) for last in self._reader.last_fates(states, loops)]

    def add_deepest(
        self, tokens: Sequence[tuple[Where, int]], at: Sequence[tuple[int, int]], loops: Sequence[int]
    ) -> list[tuple[Where, Deepest]]:
        """Takes tokens that run no further, whose states the head is still to read.

        Args:
            tokens: What is given back with what is known of each, and its id.
            at: Its slot and cache position.
            loops: That it has finished.

        Returns:
            What is known now, of these and of earlier ones.
        """
        if self._deepest is None or not tokens:
            return []
        lanes, window = self._lanes, self.window
        assert lanes.paths is not None
        places = [(slot * window + position % window) * lanes.depth for slot, position in at]
        rows = to_device(np.array(places) + np.array(loops) - 1, lanes.device)
        states = lanes.paths.flatten(0, 1).index_select(0, rows)
        where, ids = zip(*tokens, strict=True)
        self._deepest.add(states, ids, where)
        return self.read_deepest() if len(self._deepest) >= DEEPEST_ROWS else []

    def read_deepest(self) -> list[tuple[Where, Deepest]]:
        """Lets the head read what waits for it."""
        if not self._deepest:
            return []
        where, numbers = self._deepest.take()
        return list(zip(where, map(Deepest.of, to_host(numbers).tolist()), strict=True))

    def reset(self) -> None:
        """Forgets what waits."""
        if self._deepest is not None:
            self._deepest.clear()
