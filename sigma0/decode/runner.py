"""The eager runner: calls the parts of a step one after the other."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.attention import Placement
from sigma0.decode.batch import Ints, PassCounts
from sigma0.decode.lanes import CACHE_POSITION, STAGE, Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.planes import LayerPlanes
from sigma0.decode.prefill import Prefill
from sigma0.decode.settings import LAST, LEAVES, REDRAFT, VERIFY, Program, SequenceSettings
from sigma0.decode.step import Batch, Looped, run_loop
from sigma0.decode.transfer import to_device, to_host


class Storage(Protocol):
    """K/V of all sequences."""

    @property
    def planes(self) -> Sequence[LayerPlanes]:
        """The planes of each layer."""

    def placement(self, longest: int) -> Placement:
        """Where cache positions lie, for rows that read `longest` of them at most."""


class EagerRunner:
    """Runs loops over the lanes of a cache or of an engine.

    Args:
        model: The looped model.
        lanes: Tokens in flight.
        settings: Of every sequence.
        storage: K/V.
        counts: What was computed; updated.
    """

    def __init__(
        self, model: LoopedModel, lanes: Lanes, settings: SequenceSettings, storage: Storage, counts: PassCounts
    ) -> None:
        self.model = model
        self.lanes = lanes
        self.settings = settings
        self.storage = storage
        self.counts = counts
        self.ops = model.operations
        self.program = Program()
        self._stages = lanes.stages()

    def use(self, program: Program) -> None:
        """Runs this program from now on; tokens in flight keep what it needs to know of them.

        Differences that were not kept so far are missing: only tokens of a rule that does not read them may decode.
        """
        before, self.program = self.program, program
        if program.watch == before.watch or self.ops.backend == "triton":
            # a kernel keeps everything in one state, watched or not
            return
        lanes, state = self.lanes, self.lanes.watch()
        if program.watch:
            state.counts.zero_()
            state.counts[:, 0] = lanes.table[:, STAGE] % lanes.depth
            state.gate.copy_(lanes.gate)
        else:
            lanes.gate.copy_(state.gate)

    @property
    def decoding(self) -> int:
        """Tokens that wait for their reading."""
        return int((self._stages < self.lanes.depth).sum())

    def batch(self, longest: int) -> Batch:
        """What the next step works on."""
        return Batch(
            self.model,
            self.lanes,
            self.settings,
            self.program,
            self.storage.planes,
            self.storage.placement(longest),
            longest,
            self.ops,
        )

    def loop(self, longest: int, beside: Prefill | None = None) -> tuple[Batch, Looped] | None:
        """Runs a loop of every live lane, and of the prefill beside them; None where there is neither."""
        stages = self._stages if self.lanes.device.type == "cpu" else self.lanes.stages()
        live = int(np.count_nonzero(stages < self.lanes.idle))
        if not beside:
            beside = None
        if not live and beside is None:
            return None
        decoding = int(np.count_nonzero(stages < self.lanes.depth))
        batch = self.batch(longest)
        looped = run_loop(batch, live, decoding, beside)
        self.counts.passes += 1
        self.counts.prompt_rows += 0 if beside is None else len(beside)
        self.counts.rows += live
        if self.program.margin:
            self.counts.head_rows += decoding
        return batch, looped

    def to_read(self, looped: Looped) -> Tensor:
        """Rows that are read, int64 `[K]`: those that stop, and drafts that are checked."""
        codes = to_host(looped.codes)
        which: Ints = np.flatnonzero(codes)
        if self.program.verify and len(looped.loops) > len(codes):
            checked = np.arange(len(codes), len(looped.loops))
            own = self.settings.table.cpu().numpy()[to_host(looped.sequences[len(codes) :])]
            loops = to_host(looped.loops[len(codes) :])
            at_this_loop = (own[:, REDRAFT] > 0) | (loops == self.lanes.depth)
            which = np.concatenate([which, checked[(own[:, VERIFY] > 0) & at_this_loop]])
        if not self.program.margin or self.program.verify:
            self.counts.head_rows += len(which)
        return to_device(which, looped.loops.device)
