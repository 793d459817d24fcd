"""What calls a step: its parts one after the other, or all of it as one call that is read late."""

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.compiled import CompiledLoop, Progress, StepGraphs, no_progress
from sigma0.decode.kv_store import Storage
from sigma0.decode.lanes import CACHE_POSITION, STAGE, Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.prefill import Batch, Prefill
from sigma0.decode.settings import Program, SequenceSettings
from sigma0.decode.step import (
    DECODING,
    EMITTED,
    FED,
    LINE_WIDTH,
    LIVE,
    SEQUENCES,
    LoopOutput,
    Sampler,
    commit,
    exits_of,
    run_loop,
    run_prefill,
    take_lines,
    whole_step,
)
from sigma0.decode.transfer import AsyncCopy, Ints, PassCounts, to_device, to_host

NOTHING: Ints = np.zeros((0, LINE_WIDTH), dtype=np.int64)
# The bound on positions grows in steps of so many.
_BOUND = 256


@dataclass(frozen=True)
class RunnerChoice:
    """What calls the step, and why."""

    name: Literal["eager", "compile", "cudagraph"]
    reason: str
    late: bool = False  # Whether the host reads what a step emits while the next one runs
    captured: bool = False  # Whether steps are launched as CUDA graphs


@dataclass(frozen=True)
class Step:
    """What the host has seen of a step."""

    lines: Ints  # What it has emitted and fed, in the columns of `sigma0.decode.step`, `[K, 9]`
    read: Tensor | None  # Logits that were read, `[K, V]`, or of more rows than there are lines; None for none
    decoding: int  # Rows of it that waited for their reading
    rows: Ints | None = None  # Which of them the lines are about; None for all
    table: Ints | None = None  # Lanes after the step, `[S T, 6]`; None where it was not wanted

    @property
    def logits(self) -> Tensor | None:
        """Logits of the lines, `[K, V]`; None where nothing was read, or it is not known."""
        if self.read is None or self.rows is None:
            return self.read
        return self.read.index_select(0, to_device(self.rows, self.read.device))


class EagerRunner:
    """Runs loops over the lanes of a cache or of an engine.

    Args:
        model: The looped model.
        lanes: Tokens in flight.
        settings: Of every sequence.
        storage: K/V.
        counts: What was computed, of the steps that were seen; updated.
        chosen: What was chosen, and why.
        progress: Called with what is about to be compiled or captured; the context lasts until it is.
        graphs: Steps that were captured over these tensors before; more are added. None for none.

    Attributes:
        lag: Steps that are under way while one is seen.
    """

    lag = 0

    def __init__(
        self,
        model: LoopedModel,
        lanes: Lanes,
        settings: SequenceSettings,
        storage: Storage,
        counts: PassCounts,
        chosen: RunnerChoice = RunnerChoice("eager", "what auto takes"),
        progress: Progress = no_progress,
        graphs: StepGraphs | None = None,
    ) -> None:
        self.model, self.lanes, self.settings, self.storage = model, lanes, settings, storage
        self.counts, self.chosen, self.graphs, self._progress = counts, chosen, graphs, progress
        coded = storage.placement(0).coded is not None
        self.ops = model.operations.over_coded_planes() if coded else model.operations
        self.program = Program()
        self._stages = lanes.stages()
        self._batch: Batch | None = None
        self._first_keys: Tensor | None = None
        self._open()

    def _open(self) -> None:
        """Makes what a kind of runner has of its own."""
        compiles = self.chosen.name == "compile" and not self.chosen.captured
        self._loop = CompiledLoop(self.model, self._progress, self._give_up) if compiles else None

    def _give_up(self, reason: str) -> None:
        self.chosen = RunnerChoice("eager", reason)

    def use(self, program: Program) -> None:
        """Runs this program from now on; tokens that decode keep what `qexit` knows of them.

        What differences were kept without it counts no more.
        """
        lanes, keeps = self.lanes, program.watch or self.ops.backend != "torch"
        if keeps and not lanes.watched:
            state, stage = lanes.watch(), lanes.table[:, STAGE]
            state.counts[:, 0] = torch.where(stage < lanes.depth, stage, 0)
            state.gate.copy_(lanes.gate)
        elif lanes.watched and not keeps:
            lanes.gate.copy_(lanes.gates())
        lanes.watched = keeps
        self.program, self._batch = program, None
        if program.criteria:
            kept = program.criteria & {"kl", "minp-kl"}
            lanes.remember_criteria(int(self.model.config.vocab_size) if kept else 0)
        if program.masked:
            lanes.remember_masks(int(self.model.config.vocab_size))

    def live(self) -> tuple[int, int, int]:
        """Lanes that are live, those of them that wait for their reading, and whose tokens run their first loop next.

        The last is 0 where there is no prelude that would run for them.
        """
        stages = self._stages if self.lanes.device.type == "cpu" else self.lanes.stages()
        live, decoding = np.count_nonzero(stages < self.lanes.idle), np.count_nonzero(stages < self.lanes.depth)
        return int(live), int(decoding), int(np.count_nonzero(stages == 0)) if self.model.stages[0] else 0

    def bound_on(self, longest: int) -> int:
        """Bound on the cache positions of some steps to come, plus one, given that of the next."""
        return -(-longest // _BOUND) * _BOUND

    def batch(self, longest: int) -> Batch:
        """What the next step works on; the same as long as a bound on the positions holds and planes stay in place."""
        planes = self.storage.planes
        known, first = self._batch, planes[0].flat_keys
        if known is None or longest > known.longest or first is not self._first_keys:
            bound = self.bound_on(longest)
            place = self.storage.placement(bound)
            bound = min(bound, max(place.room, longest))
            current = self.model, self.lanes, self.settings, self.program
            known = Batch(*current, planes, place, bound, self.ops, self._loop)
            self._batch, self._first_keys = known, first
        return known

    def step(self, longest: int, sampler: Sampler, beside: Prefill | None = None) -> Step | None:
        """Runs a loop of every row, then reads those that stop, samples, judges and feeds back.

        Args:
            longest: Bound on the cache positions of the step, plus one.
            sampler: How ids are chosen.
            beside: Prefill that runs a loop in the same pass.

        Returns:
            What was seen; None where there are no rows.
        """
        looped = self.loop(longest, beside)
        if looped is None:
            return None
        batch, rows = looped
        decoding, row_ids = rows.codes.shape[0], self.to_read(rows)
        if not row_ids.shape[0]:
            return Step(NOTHING, None, decoding)
        token_ids, stands, ends, logits = sampler.choose(batch, rows, row_ids)
        return Step(to_host(commit(batch, rows, row_ids, token_ids, stands, ends)), logits, decoding)

    def loop(self, longest: int, beside: Prefill | None = None) -> tuple[Batch, LoopOutput] | None:
        """Runs a loop of every live lane, and of the prefill beside them; None where there is neither."""
        beside = beside or None
        live, decoding, entering = self.live()
        if not live and beside is None:
            return None
        batch = self.batch(longest)
        looped = run_loop(batch, live, decoding, entering, beside)
        self.counts.prompt_rows += 0 if beside is None else len(beside)
        self.counts.passes += 1
        self.counts.rows += live
        if self.program.reads_logits:
            self.counts.head_rows += decoding
        if self.program.drops:
            self._leave(looped)
        return batch, looped

    def _leave(self, looped: LoopOutput) -> None:
        """Lets readers know which rows run no further."""
        stopped = np.flatnonzero(to_host(looped.codes))
        if len(stopped):
            row_ids = to_device(stopped, looped.loops.device)
            sequences = looped.sequences.index_select(0, row_ids)
            at = looped.table[:, CACHE_POSITION].index_select(0, row_ids)
            planes = exits_of(self.lanes, self.settings, looped)[1].index_select(0, row_ids)
            self.storage.leave(sequences, at, planes)

    def to_read(self, looped: LoopOutput) -> Tensor:
        """Rows that are read, int64 `[K]`: those that stop, and drafts that are checked."""
        reads = to_device(np.flatnonzero(to_host(looped.reads)), looped.loops.device)
        if not self.program.reads_logits or self.program.verify:
            self.counts.head_rows += reads.shape[0] - self._forced(looped, reads)
        return reads

    def _forced(self, looped: LoopOutput, row_ids: Tensor) -> int:
        """How many of some rows the head is not read of, since their grammars leave one id."""
        only = self.lanes.only
        if not self.program.masked or only is None or not looped.seen or self.model.stages[1]:
            return 0
        return int((to_host(only)[to_host(looped.lanes)[to_host(row_ids)]] >= 0).sum())


class LateRunner(EagerRunner):
    """Runs whole steps, and reads each one while the next runs, or at once where the host has to see it first.

    The host launches step k + 1 before it waits for step k, so a device always has work. It knows the rows of a step
    only up to a bound: those that were live after the last step it has read, and one entrant for each live sequence and
    step under way. Ends by ids and lengths are taken on the device; what the host alone decides comes a step late.

    Attributes:
        shows_lanes: Whether the table of lanes comes to the host with what a step emits, as `Step.table`.
    """

    def _open(self) -> None:
        super()._open()
        self.lag = int(self.chosen.late)
        self.shows_lanes = False
        self._under_way: deque[tuple[AsyncCopy, Tensor]] = deque()
        # lanes and sequences that were live after the last step that was read; None before the first
        self._seen: tuple[int, int] | None = None

    def expect(self, live: int, sequences: int) -> None:
        """Takes it from the host how many lanes are live before the next step, and of how many sequences."""
        self._seen = live, sequences

    def forget(self) -> None:
        """Drops what is under way: nobody reads it."""
        self._under_way.clear()
        self._seen = None

    def step(self, longest: int, sampler: Sampler, beside: Prefill | None = None) -> Step | None:
        """Launches a step, the first time `lag` more, and then reads the oldest that is under way.

        As `EagerRunner.step`, but that `longest` is of `lag` more positions than are known of, that prefill runs its
        loop before the lanes, and that where there is a lag, ids are chosen on the device and nothing runs beside.
        """
        assert not self.lag or (sampler.on_device and not beside), "what the host has to see runs without a lag"
        if not sampler.on_device:
            return super().step(longest, sampler, beside)
        if beside:
            self.counts.prompt_rows += len(beside)
            run_prefill(self.batch(longest), beside)
        while len(self._under_way) <= self.lag and (bound := self._bound()):
            self._under_way.append(self._launch(longest, sampler, bound))
        if self._under_way:
            return self._read()
        if not beside:
            return None
        self.counts.passes += 1
        return Step(NOTHING, None, 0)

    def _bound(self) -> int:
        """Rows of the coming step at most, in powers of two; 0 where there are none."""
        if self._seen is None:
            stages = self.lanes.stages().reshape(self.lanes.sequences, self.lanes.depth)
            live = stages < self.lanes.idle
            self._seen = int(live.sum()), int(live.any(axis=1).sum())
        live_lanes, sequences = self._seen
        if not live_lanes:
            return 0
        rows = live_lanes + sequences * len(self._under_way)
        return min(1 << (rows - 1).bit_length(), self.lanes.count)

    def _launch(self, longest: int, sampler: Sampler, count: int) -> tuple[AsyncCopy, Tensor]:
        """Lines on their way to the host, and the logits, which the next launch may change."""
        return self._start_copy(*whole_step(self.batch(longest), count, sampler, suspends=self.chosen.late))

    def _start_copy(self, lines: Tensor, logits: Tensor) -> tuple[AsyncCopy, Tensor]:
        """Sends what a step has emitted to the host, and the table as it is after the step."""
        if self.shows_lanes:
            lines = torch.cat([lines.flatten(), self.lanes.table[:-1].flatten()])
        return AsyncCopy(lines), logits

    def _read(self) -> Step:
        landing, logits = self._under_way.popleft()
        landed, table = landing.array(), None
        if self.shows_lanes:
            width = self.lanes.table.shape[1]
            after = landed.size - self.lanes.count * width
            landed, table = landed[:after].reshape(-1, LINE_WIDTH), landed[after:].reshape(-1, width)
        lines, counted = take_lines(landed, self.program, self.counts)
        # without a lag the host may change the lanes before the next step
        self._seen = (int(counted[LIVE]), int(counted[SEQUENCES])) if self.lag else None
        rows = np.flatnonzero(lines[:, EMITTED] | lines[:, FED])
        return Step(lines[rows], None if self.lag else logits, int(counted[DECODING]), rows, table)
