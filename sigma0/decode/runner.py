"""The eager runner: calls the parts of a step one after the other."""

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.attention import Placement
from sigma0.decode.host_rows import hand_over
from sigma0.decode.lanes import CACHE_POSITION, STAGE, Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import LaneBooks, no_broadcast
from sigma0.decode.planes import LayerPlanes
from sigma0.decode.prefill import Prefill
from sigma0.decode.settings import LEAVES, PROMPT, REDRAFT, VERIFY, Program, SequenceSettings
from sigma0.decode.step import (
    LINE_WIDTH,
    Looped,
    run_loop,
    settle,
    settle_best_in_books,
    settle_in_books,
    settle_verified,
)
from sigma0.decode.step_batch import Batch
from sigma0.decode.transfer import Bools, Ints, PassCounts, to_device, to_host

_NOTHING: Ints = np.zeros((0, LINE_WIDTH), dtype=np.int64)
# The bound on positions grows in steps of so many.
_BOUND = 256
Announce = Callable[[str], AbstractContextManager[object]]


def silently(what: str) -> AbstractContextManager[object]:
    """Announces nothing."""
    return nullcontext()


class Storage(Protocol):
    """K/V of all sequences."""

    @property
    def planes(self) -> Sequence[LayerPlanes]:
        """The planes of each layer."""

    def placement(self, longest: int) -> Placement:
        """Where cache positions lie, for rows that read `longest` of them at most."""

    def note_exits(self, sequences: Tensor, cache_positions: Tensor, planes: Tensor, copy: bool) -> None:
        """Lets readers at loop t take plane min(t, exit) of tokens that run no further, all `[N]`."""

    def hold(self, lanes: Lanes, busy: Collection[int] = ()) -> None:
        """Takes tokens out of the passes that may not run yet, and puts them back once they may.

        Args:
            lanes: Tokens in flight.
            busy: Sequences of which tokens beside the lanes are under way.
        """


# Ids, which drafts stand, which sequences end, and logits, as `Choice.choose` returns them.
Chosen = tuple[Tensor, Tensor, Tensor | None, Tensor]


class Choice(Protocol):
    """Chooses ids for the rows of a step.

    Attributes:
        on_device: Whether nothing but tensors takes part.
        takes_best: Whether the likeliest id of each row is taken, and nothing is looked at but logits.
        draws: Whether ids are drawn.
        fixed: What a compiled choice takes for constant.
        tensors: Those that it reads and writes.
    """

    @property
    def on_device(self) -> bool:
        """See above."""

    @property
    def takes_best(self) -> bool:
        """See above."""

    @property
    def draws(self) -> bool:
        """See above."""

    @property
    def fixed(self) -> Hashable:
        """See above."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """See above."""

    def choose(self, batch: Batch, looped: Looped, which: Tensor) -> Chosen:
        """What is read from rows.

        Args:
            batch: Model, lanes and settings.
            looped: The rows of a pass.
            which: Those that are read, int64 `[K]`.

        Returns:
            Ids int64 `[K]`; which drafts stand, bool `[K]`; which sequences end by criteria, bool `[K]`, None where the
            settings alone say it; and the logits `[K, V]`.
        """


@dataclass(frozen=True)
class RunnerChoice:
    """What calls the step.

    Attributes:
        name: "eager", "compile" or "cudagraph".
        reason: Why.
        late: Whether the host reads what a step emits while the next one runs.
        captured: Whether steps are launched as CUDA graphs.
    """

    name: Literal["eager", "compile", "cudagraph"]
    reason: str
    late: bool = False
    captured: bool = False


@dataclass(frozen=True)
class Step:
    """What the host has seen of a step.

    Attributes:
        lines: What it has emitted and fed, in the columns of `sigma0.decode.step`, `[K, 9]`.
        decoding: Rows of it that waited for their reading.
        looped: The rows; None where the whole step was one call.
        read: Logits that were read, `[K, V]`, or of more rows than there are lines; None for none.
        rows: Which of them the lines are about; None for all.
        table: Lanes behind the step, `[S T, 6]`; None where it was not wanted.
    """

    lines: Ints
    decoding: int
    looped: Looped | None = None
    read: Tensor | None = None
    rows: Ints | None = None
    table: Ints | None = None

    @property
    def logits(self) -> Tensor | None:
        """Logits of the lines, `[K, V]`; None where nothing was read, or it is not known."""
        if self.read is None or self.rows is None:
            return self.read
        return self.read.index_select(0, to_device(self.rows, self.read.device))


def replaceable(batch: Batch) -> tuple[object, ...]:
    """What a run may replace by other tensors, while all others stay where they are."""
    place, settings, lanes = batch.placement, batch.settings, batch.lanes
    return (
        batch.layers[0].flat_keys,
        lanes.table,
        settings.table,
        place.starts,
        place.blocks,
        settings.eos,
        settings.exits,
        settings.settled,
        lanes.exit_state,
        None if lanes.criteria is None else lanes.criteria.best,
        lanes.probs,
        lanes.paths,
        lanes.masks,
        place.exits,
    )


class EagerRunner:
    """Runs loops over the lanes of a cache or of an engine.

    Args:
        model: The looped model.
        lanes: Tokens in flight.
        settings: Of every sequence.
        storage: K/V.
        counts: What was computed; updated.
        chosen: What was chosen, and why.

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
    ) -> None:
        self.model = model
        self.lanes = lanes
        self.settings = settings
        self.storage = storage
        self.counts = counts
        self.chosen = chosen
        coded = storage.placement(0).coded is not None
        self.ops = model.operations.over_coded_planes() if coded else model.operations
        self.holds = coded
        self.program = Program()
        self._stages = lanes.stages()
        self._batch: Batch | None = None
        self._first_keys: Tensor | None = None
        self._books: LaneBooks | None = None

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
        if program.drops and not self.ops.copies_exits:
            # so that there is something to note exits in
            none = torch.zeros(0, dtype=torch.int64, device=lanes.device)
            self.storage.note_exits(none, none, none, False)

    def live(self) -> tuple[int, int]:
        """Lanes that are live, and those of them that wait for their reading."""
        stages = self._stages if self.lanes.device.type == "cpu" else self.lanes.stages()
        return int(np.count_nonzero(stages < self.lanes.idle)), int(np.count_nonzero(stages < self.lanes.depth))

    def entering(self) -> int:
        """Lanes whose tokens run their first loop next; 0 where there is no prelude that would run for them."""
        if not self.model.stages[0]:
            return 0
        stages = self._stages if self.lanes.device.type == "cpu" else self.lanes.stages()
        return int(np.count_nonzero(stages == 0))

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
            known = Batch(
                self.model, self.lanes, self.settings, self.program, planes, place, bound, self.ops, self._handed_over()
            )
            self._batch, self._first_keys = known, first
        return known

    def _handed_over(self) -> LaneBooks | None:
        """The books of the lanes as they are now; None where torch keeps them, as it does where tokens are masked."""
        if not self.ops.host_rows or self.program.masked:
            return None
        self._books = hand_over(self._books, self.lanes, self.settings, self.program, self.model)
        return self._books

    def step(self, longest: int, choice: Choice, beside: Prefill | None = None) -> Step | None:
        """Runs a loop of every row, then reads those that stop, samples, judges and feeds back.

        Args:
            longest: Bound on the cache positions of the step, plus one.
            choice: How ids are chosen.
            beside: Prefill that runs a loop in the same pass.

        Returns:
            What was seen; None where there are no rows.
        """
        looped = self.loop(longest, beside)
        if looped is None:
            return None
        batch, rows = looped
        decoding, which = rows.codes.shape[0], self.to_read(rows)
        if not which.shape[0]:
            return Step(_NOTHING, decoding, rows)
        lines, logits, told = self.settle(batch, rows, which, choice)
        return Step(lines, decoding, rows, logits, told)

    def hold(self, busy: Collection[int] = ()) -> None:
        """Between steps: `Storage.hold`, where K/V are encoded."""
        if self.holds:
            self.storage.hold(self.lanes, busy)

    def loop(self, longest: int, beside: Prefill | None = None) -> tuple[Batch, Looped] | None:
        """Runs a loop of every live lane, and of the prefill beside them; None where there is neither."""
        if not beside:
            beside = None
        books = self._handed_over()
        live, decoding = self.live() if books is None else (books.start(), books.decoding)
        if not live and beside is None:
            return None
        batch = self.batch(longest)
        looped = run_loop(batch, live, decoding, beside, entering=self.entering())
        self.counts.prompt_rows += 0 if beside is None else len(beside)
        self._count_loop(looped, live, decoding)
        return batch, looped

    def _count_loop(self, looped: Looped, live: int, decoding: int) -> None:
        """Counts a loop of so many live rows, and lets readers know which of them run no further."""
        self.counts.passes += 1
        self.counts.rows += live
        if self.program.reads_logits:
            self.counts.head_rows += decoding
        if self.program.drops:
            self._note_exits(looped)

    def _note_exits(self, looped: Looped) -> None:
        stopped = np.flatnonzero(to_host(looped.codes))
        if len(stopped):
            which = to_device(stopped, looped.loops.device)
            sequences, table = looped.sequences.index_select(0, which), looped.table.index_select(0, which)
            own = self.settings.table.index_select(0, sequences)
            leaves = (own[:, LEAVES] > 0) & (table[:, CACHE_POSITION] >= own[:, PROMPT])
            planes = torch.where(leaves, looped.loops.index_select(0, which), self.lanes.depth) - 1
            copies = self.ops.copies_exits
            self.storage.note_exits(sequences, table[:, CACHE_POSITION], planes, copies)
            self._batch = None

    def to_read(self, looped: Looped) -> Tensor:
        """Rows that are read, int64 `[K]`: those that stop, and drafts that are checked."""
        reads = looped.reads
        if reads is None:
            codes, loops = to_host(looped.codes), to_host(looped.loops)
            stops: Bools = np.zeros(len(loops), dtype=np.bool_)
            stops[: len(codes)] = codes != 0
            if self.program.verify:
                own = to_host(self.settings.table)[to_host(looped.sequences)]
                checked = (own[:, VERIFY] > 0) & ((own[:, REDRAFT] > 0) | (loops == self.lanes.depth))
                checked[: len(codes)] = False
                stops |= checked
            reads = to_device(np.flatnonzero(stops), looped.loops.device)
        if not self.program.reads_logits or self.program.verify:
            self.counts.head_rows += reads.shape[0] - self._forced(looped, reads)
        return reads

    def _forced(self, looped: Looped, which: Tensor) -> int:
        """How many of some rows the head is not read of, since their grammars leave one id."""
        only = self.lanes.only
        if not self.program.masked or only is None or not looped.seen or self.model.stages[1]:
            return 0
        return int((to_host(only)[to_host(looped.lanes)[to_host(which)]] >= 0).sum())

    def settle(self, batch: Batch, looped: Looped, which: Tensor, choice: Choice) -> tuple[Ints, Tensor, Ints | None]:
        """Reads rows, samples, judges and feeds back.

        Args:
            batch: What the loop worked on.
            looped: The rows.
            which: Those of `to_read`, at least one.
            choice: How ids are chosen.

        Returns:
            What the step emits, `[K, 9]`, logits `[N, V]`, and which of these the lines are about; None for all.
        """
        in_books = looped.reads is not None
        if in_books and choice.takes_best and not batch.program.forced and batch.ops.broadcast is no_broadcast:
            lines, rows, logits = settle_best_in_books(batch, looped)
            return lines, logits, None if len(rows) == len(logits) else rows
        token_ids, stands, ends, logits = choice.choose(batch, looped, which)
        if in_books:
            lines, rows = settle_in_books(batch, which, token_ids, stands, ends)
            return lines, logits, None if len(rows) == len(logits) else rows
        if not batch.program.verify:
            return to_host(settle(batch, looped, which, token_ids, ends)), logits, None
        return to_host(settle_verified(batch, looped, which, token_ids, stands, ends)), logits, None
