"""The compiling runner: parts 1 to 3 of a step are one compiled program, parts 4 to 8 another, for each row bucket.

The host looks at the decisions in between, which costs nothing on a CPU, so that the head is not read when nothing
stops. Rows are padded to buckets of 1, 2, 4, 8, ... with lanes that are idle.
"""

import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from sigma0.decode.attention import Placement
from sigma0.decode.batch import Ints, PassCounts
from sigma0.decode.lanes import Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.prefill import Prefill
from sigma0.decode.programs import BoundProgram, ModelPrograms, compile_program, model_tensors, state_key, tensors_of
from sigma0.decode.runner import Choice, EagerRunner, RunnerChoice, Storage
from sigma0.decode.settings import REDRAFT, VERIFY, Program, SequenceSettings
from sigma0.decode.step import Batch, Looped, run_loop, settle, settle_verified
from sigma0.errors import first_line

# Positions that a program is compiled for at least; more take another one for each power of two.
_SHORTEST = 1024
# Columns of a row between the two programs: its lane, its line of the table, sequence, loops finished, decision.
_LANE, _TABLE, _SEQUENCE, _LOOPS, _CODE, _WIDTH = 0, slice(1, 7), 7, 8, 9, 10

Announce = Callable[[str], AbstractContextManager[object]]


def silently(what: str) -> AbstractContextManager[object]:
    """Announces nothing."""
    return nullcontext()


class CompiledRunner(EagerRunner):
    """Runs compiled steps; what is chosen by Python is read, sampled and fed back eagerly.

    Args:
        model: The looped model.
        lanes: Tokens in flight.
        settings: Of every sequence.
        storage: K/V, where block s is all of sequence s.
        counts: What was computed; updated.
        chosen: What was chosen, and why.
        announce: Called with what is about to be compiled; the context lasts until it is.
    """

    def __init__(
        self,
        model: LoopedModel,
        lanes: Lanes,
        settings: SequenceSettings,
        storage: Storage,
        counts: PassCounts,
        chosen: RunnerChoice = RunnerChoice("compile", "asked for"),  # noqa: B008  it is frozen
        announce: Announce = silently,
    ) -> None:
        super().__init__(model, lanes, settings, storage, counts, chosen)
        self._announce = announce
        self._programs = _programs_of(model)
        self._weights = tuple(map(id, model.parameters())) if isinstance(model, nn.Module) else ()
        self._bound: dict[Hashable, BoundProgram] = {}
        self._choice: tuple[object, ...] = ()
        self._stamp: tuple[object, ...] = ()
        # of the last loop; None where it was eager
        self._lines: Ints | None = None
        self._most = 0
        self._no_starts = torch.zeros(lanes.sequences, dtype=torch.int64)

    def use(self, program: Program) -> None:
        """See `EagerRunner.use`."""
        super().use(program)
        self._stamp = ()

    def loop(self, longest: int, beside: Prefill | None = None) -> tuple[Batch, Looped] | None:
        """See `EagerRunner.loop`; a pass with prefill is eager, since it has its own shape every time."""
        self._lines = None
        if beside or self.chosen.name == "eager":
            return super().loop(longest, beside)
        stages = self._stages
        live = int(np.count_nonzero(stages < self.lanes.idle))
        if not live:
            return None
        batch = self._current(longest)
        waiting = int(np.count_nonzero(stages < self.lanes.depth))
        count = min(_bucket(live), self.lanes.count)
        decoding = min(count, self.lanes.sequences)
        program = self._bound.get(count)
        results = self._compile_loop(batch, count, decoding) if program is None else program()
        if results is None:
            return super().loop(longest)
        lines, *parts = results
        # rows behind those that decode have no decision, as in the eager step
        parts[5] = parts[5][:waiting]
        self._lines = lines.numpy()
        looped = Looped(*parts, *[None] * (9 - len(parts)))
        self._count_loop(looped, live, waiting)
        return batch, looped

    def to_read(self, looped: Looped) -> Tensor:
        """See `EagerRunner.to_read`."""
        lines = self._lines
        if lines is None:
            return super().to_read(looped)
        reads = lines[:, _CODE] != 0
        if self.program.verify:
            own = self.settings.table.numpy()[lines[:, _SEQUENCE]]
            at_this_loop = (own[:, REDRAFT] > 0) | (lines[:, _LOOPS] == self.lanes.depth)
            trails = (lines[:, 1] >= self.lanes.depth) & (lines[:, _LANE] < self.lanes.count)
            reads |= trails & at_this_loop & (own[:, VERIFY] > 0)
        which = np.flatnonzero(reads)
        if not self.program.margin or self.program.verify:
            self.counts.head_rows += len(which)
        return torch.from_numpy(which)

    def settle(self, batch: Batch, looped: Looped, which: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """See `EagerRunner.settle`."""
        # the first draft that is drawn makes room for the distributions of drafts
        unready = self.program.verify and choice.draws and self.lanes.probs is None
        if self._lines is None or not choice.on_device or unready:
            return super().settle(batch, looped, which, choice)
        stamp = (choice.fixed, *map(id, choice.tensors))
        if stamp != self._choice:
            self._choice = stamp
            self._bound = {key: program for key, program in self._bound.items() if isinstance(key, int)}
        read, rows = len(which), _bucket(len(which))
        lines = np.zeros((rows, _WIDTH), dtype=np.int64)
        lines[:read] = self._lines[which.numpy()]
        lines[read:, _LANE] = self.lanes.count
        given = [torch.from_numpy(lines)]
        if looped.logits is not None and not self.program.verify:
            index = np.zeros(rows, dtype=np.int64)
            index[:read] = which
            given.append(looped.logits.index_select(0, torch.from_numpy(index)))
        program = self._bound.get(("settle", rows))
        results = self._compile_settle(batch, choice, given) if program is None else program(*given)
        if results is None:
            return super().settle(batch, looped, which, choice)
        emitted, logits = results
        return emitted[:read], logits[:read]

    def _current(self, longest: int) -> Batch:
        """What the next step works on; programs are bound anew where some tensor was replaced."""
        batch = self.batch(longest)
        place, settings, lanes = batch.placement, self.settings, self.lanes
        stamp = (
            batch.layers[0].flat_keys,
            place.starts,
            place.blocks,
            settings.eos,
            settings.exits,
            settings.settled,
            lanes.exit_state,
            lanes.probs,
            lanes.paths,
        )
        fits = longest <= self._most and len(stamp) == len(self._stamp)
        if not fits or any(new is not old for new, old in zip(stamp, self._stamp, strict=True)):
            self._stamp = stamp
            self._bound = {}
            self._most = max(_SHORTEST, _bucket(longest))
            self.model.reserve_positions(self._most, lanes.hidden)
        return batch

    def _compile_loop(self, batch: Batch, count: int, decoding: int) -> list[Tensor] | None:
        fixed = batch = self._fixed(batch)

        def loop() -> list[Tensor]:
            looped = run_loop(_over_planes(fixed), count, decoding, padded=True)
            codes = torch.zeros_like(looped.loops)
            codes[:decoding] = looped.codes
            columns = [part[:, None] for part in (looped.sequences, looped.loops, codes)]
            lines = torch.cat([looped.lanes[:, None], looped.table, *columns], dim=1)
            parts = [looped.lanes, looped.table, looped.sequences, looped.loops, looped.hidden, codes]
            return [lines, *parts, *([] if looped.logits is None else [looped.logits])]

        return self._ready(count, loop, [], batch, None, f"a loop of {count} rows")

    def _compile_settle(self, batch: Batch, choice: Choice, given: list[Tensor]) -> list[Tensor] | None:
        fixed = batch = self._fixed(batch)
        rows = len(given[0])

        def end(lines: Tensor, *read: Tensor) -> list[Tensor]:
            lanes, table = lines[:, _LANE], lines[:, _TABLE]
            hidden = fixed.lanes.hidden.index_select(0, lanes)
            logits = read[0] if read else None
            looped = Looped(
                lanes, table, lines[:, _SEQUENCE], lines[:, _LOOPS], hidden, lines[:, _CODE], logits, None, None
            )
            which = torch.arange(rows)
            live = lanes < fixed.lanes.count
            token_ids, stands, ends, logits = choice.choose(fixed, looped, which)
            if fixed.program.verify:
                emitted = settle_verified(fixed, looped, which, token_ids, stands, ends, live)
            else:
                emitted = settle(fixed, looped, which, token_ids, ends, live)
            return [emitted, logits]

        return self._ready(("settle", rows), end, given, batch, choice, f"the reading of {rows} rows")

    def _ready(
        self,
        name: Hashable,
        function: Callable[..., list[Tensor]],
        given: list[Tensor],
        batch: Batch,
        choice: Choice | None,
        what: str,
    ) -> list[Tensor] | None:
        """Runs a program that is not bound yet, and binds it: one of another runner, or a new one.

        Returns:
            What it returns; None where it cannot be compiled, from where on every step is eager.
        """
        planes = [tensor for layer in batch.layers for tensor in tensors_of(layer)]
        parts = [self.lanes, self.settings, batch.placement, None if choice is None else choice.tensors]
        state = planes + tensors_of(parts)
        key = (
            name,
            self.program,
            None if choice is None else choice.fixed,
            self._most,
            self.settings.growth,
            self.settings.spiral,
            self._weights,
            torch.get_num_threads(),
            state_key(state, planes),
            tuple(tensor.shape for tensor in given),
        )
        known = self._programs.programs.get(key)
        results = None
        if known is None:
            try:
                with self._announce(what):
                    known, results = compile_program(function, given, state, planes, model_tensors(self.model))
            except Exception as error:  # whatever dynamo, inductor or a compiler may raise
                self.chosen = RunnerChoice("eager", f"{what} could not be compiled: {first_line(_cause(error))}")
                warnings.warn(self.chosen.reason, stacklevel=2)
                return None
            self._programs.programs[key] = known
        bound = self._bound[name] = known.bind(state, planes[0].shape[1])
        return bound(*given) if results is None else results

    def _fixed(self, batch: Batch) -> Batch:
        """The batch that a program is made from: with a bound on positions that lasts, and with starts in any case."""
        place = batch.placement
        place = Placement(place.size, place.total, place.blocks, starts=self._starts_of(place))
        return Batch(
            batch.model, batch.lanes, batch.settings, batch.program, batch.layers, place, self._most, batch.ops
        )

    def _starts_of(self, place: Placement) -> Tensor:
        return self._no_starts if place.starts is None else place.starts


def _over_planes(batch: Batch) -> Batch:
    """The batch with sizes that are read from the planes, which need not be those that a program was compiled with."""
    layer = batch.layers[0]
    total = layer.flat_keys.shape[1]
    place, size = batch.placement, (total - 1) // layer.blocks
    placement = Placement(size, total, place.blocks, starts=place.starts)
    return Batch(
        batch.model, batch.lanes, batch.settings, batch.program, batch.layers, placement, batch.longest, batch.ops
    )


def _bucket(rows: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (rows - 1).bit_length()


def _programs_of(model: LoopedModel) -> ModelPrograms:
    kept: ModelPrograms | None = vars(model).get("_compiled_programs")
    if kept is None:
        kept = vars(model)["_compiled_programs"] = ModelPrograms()
    return kept


def _cause(error: Exception) -> BaseException:
    """What a backend raised, which dynamo wraps."""
    cause: BaseException = getattr(error, "inner_exception", error)
    return cause
