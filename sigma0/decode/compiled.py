"""The compiling runner: a step is one compiled program, or two with the host's look at the decisions between them.

Where the exit rule reads the head in every pass, the whole step is one program. Otherwise parts 1 to 3 are one and
parts 4 to 8 another, so that the head is read of the rows that stop and of no others. A program takes one row, or any
number of rows from two on.
"""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.attention import Placement
from sigma0.decode.prefill import Prefill
from sigma0.decode.programs import (
    BoundProgram,
    compile_program,
    model_tensors,
    programs_of,
    state_key,
    tensors_of,
    weights_of,
)
from sigma0.decode.runner import EagerRunner, RunnerChoice, Step, replaceable
from sigma0.decode.settings import Program
from sigma0.decode.step import (
    EMITTED,
    FRESH,
    Choice,
    Looped,
    run_loop,
    run_prefill,
    settle,
    take_lines,
    whole_step,
)
from sigma0.decode.step_batch import Batch
from sigma0.decode.transfer import Ints
from sigma0.errors import first_line

# Positions that a program is compiled for at least; more take another one for each power of two.
_SHORTEST = 1024
# Which program: its part of a step, and whether each of its arguments is of more than one row.
Name = tuple[str, tuple[bool, ...]]
# Columns of a row between the two programs: its lane, its line of the table, sequence, loops finished, decision, and
# whether it is to be read.
_LANE, _TABLE, _SEQUENCE, _LOOPS, _CODE, _READ = 0, slice(1, 7), 7, 8, 9, 10


class CompiledRunner(EagerRunner):
    """Runs compiled steps; what is chosen by Python is read, sampled and fed back eagerly."""

    def _open(self) -> None:
        self._programs = programs_of(self.model)
        self._weights = weights_of(self.model)
        self._bound: dict[Name, BoundProgram] = {}
        self._choice: tuple[object, ...] = ()
        self._stamp: tuple[object, ...] = ()
        self._held: tuple[object, ...] = ()
        # of the last loop; None where it was eager
        self._lines: Ints | None = None
        self._most = 0
        with torch.inference_mode(False):
            self._no_starts = torch.zeros(self.lanes.sequences, dtype=torch.int64)
            numbers = torch.arange(self.lanes.count)
        # two of each, since a program that is traced with the same tensor twice takes the two for one
        self._first = [(numbers[:count], numbers[:count]) for count in range(self.lanes.count + 1)]

    def use(self, program: Program) -> None:
        """See `EagerRunner.use`."""
        super().use(program)
        self._stamp = ()

    def step(self, longest: int, choice: Choice, beside: Prefill | None = None) -> Step | None:
        """See `EagerRunner.step`; as one program where the head is read in every pass anyway."""
        wanted = self.program
        # K/V of what leaves are copied by the host, between two programs
        in_one = wanted.reads_logits and not wanted.drops and self._can_settle(choice)
        live, waiting = self.live()
        if not in_one or not live or self.chosen.name == "eager":
            return super().step(longest, choice, beside)
        batch = self._current(longest)
        if beside:
            self._run_prefill(batch, beside)
        self._bind_choice(choice)
        given = self._counted(live, waiting)
        enters = self.entering() > 0
        name = _name("step, entering" if enters else "step", given)
        program = self._bound.get(name)
        results = self._compile_step(name, batch, choice, given, enters) if program is None else program(*given)
        if results is None:
            return super().step(longest, choice)
        lines, _ = take_lines(results[0].numpy(), self.program, self.counts)
        rows = np.flatnonzero(lines[:, EMITTED] | lines[:, FRESH])
        return Step(lines[rows], results[1], waiting, rows)

    def loop(self, longest: int, beside: Prefill | None = None) -> tuple[Batch, Looped] | None:
        """See `EagerRunner.loop`; prefill, which is of another shape every time, runs eagerly before the lanes."""
        self._lines = None
        live, waiting = self.live()
        if not live or self.chosen.name == "eager":
            return super().loop(longest, beside)
        batch = self._current(longest)
        if beside:
            self._run_prefill(batch, beside)
        given = self._counted(live, waiting)
        enters = self.entering() > 0
        name = _name("loop, entering" if enters else "loop", given)
        program = self._bound.get(name)
        results = self._compile_loop(name, batch, given, enters) if program is None else program(*given)
        if results is None:
            return super().loop(longest)
        lines, *parts = results
        # rows behind those that decode have no decision, as in the eager step
        parts[5] = parts[5][:waiting]
        self._lines = lines.numpy()
        reads = lines[:, _READ] > 0
        rows, table, sequences, loops, hidden, codes, *read = parts
        looped = Looped(rows, table, sequences, loops, hidden, codes, reads, read[0] if read else None)
        self._count_loop(looped, live, waiting)
        return batch, looped

    def _run_prefill(self, batch: Batch, beside: Prefill) -> None:
        self.counts.prompt_rows += len(beside)
        run_prefill(batch, beside)

    def settle(self, batch: Batch, looped: Looped, which: Tensor, choice: Choice) -> tuple[Ints, Tensor]:
        """See `EagerRunner.settle`."""
        if self._lines is None or not self._can_settle(choice):
            return super().settle(batch, looped, which, choice)
        self._bind_choice(choice)
        rows = which.numpy()
        given = [torch.from_numpy(self._lines[rows])]
        if looped.logits is not None and not self.program.verify:
            given.append(looped.logits.index_select(0, which))
        name = _name("settle", given)
        program = self._bound.get(name)
        results = self._compile_settle(name, batch, choice, given) if program is None else program(*given)
        if results is None:
            return super().settle(batch, looped, which, choice)
        return results[0].numpy(), results[1]

    def _can_settle(self, choice: Choice) -> bool:
        """Whether ids are chosen in a program: the first draft that is drawn makes room for distributions first."""
        return choice.on_device and not (self.program.verify and choice.draws and self.lanes.probs is None)

    def _bind_choice(self, choice: Choice) -> None:
        """Programs that choose are bound anew where the choice is another."""
        stamp = (choice.fixed, *map(id, choice.tensors))
        if stamp != self._choice:
            self._choice = stamp
            self._bound = {name: program for name, program in self._bound.items() if name[0].startswith("loop")}

    def _counted(self, live: int, waiting: int) -> list[Tensor]:
        """The numbers of the live rows, and of those that may have to be read: one, or some number from two on."""
        bound = 1 if self.lanes.sequences == 1 or live == 1 else max(2, waiting)
        return [self._first[live][0], self._first[bound][1]]

    def _current(self, longest: int) -> Batch:
        """What the next step works on; programs are bound anew where some tensor was replaced."""
        batch = self.batch(longest)
        held = replaceable(batch)
        stamp = tuple(map(id, held))
        if longest > self._most or stamp != self._stamp:
            # kept, so that no other tensor can come to have the id of one of them
            self._held, self._stamp = held, stamp
            self._bound = {}
            self._most = max(_SHORTEST, 1 << (longest - 1).bit_length())
            self._programs.keep_for(self.model.reserve_positions(self._most, self.lanes.hidden))
        return batch

    def _compile_step(
        self, name: Name, batch: Batch, choice: Choice, given: list[Tensor], enters: bool
    ) -> list[Tensor] | None:
        fixed = self._fixed(batch)

        def step(live: Tensor, waiting: Tensor) -> list[Tensor]:
            return list(whole_step(fixed, len(live), choice, len(waiting), entering=len(waiting) if enters else 0))

        return self._ready(name, step, given, batch, choice, "a step")

    def _compile_loop(self, name: Name, batch: Batch, given: list[Tensor], enters: bool) -> list[Tensor] | None:
        fixed = self._fixed(batch)

        def loop(live: Tensor, waiting: Tensor) -> list[Tensor]:
            looped = run_loop(fixed, len(live), len(waiting), bounded=True, entering=len(waiting) if enters else 0)
            codes, reads = torch.zeros_like(looped.loops), torch.zeros_like(looped.loops)
            codes[: len(waiting)] = looped.codes
            reads[: len(looped.reads)] = looped.reads
            columns = [part[:, None] for part in (looped.sequences, looped.loops, codes, reads)]
            lines = torch.cat([looped.lanes[:, None], looped.table, *columns], dim=1)
            parts = [looped.lanes, looped.table, looped.sequences, looped.loops, looped.hidden, codes]
            return [lines, *parts, *([] if looped.logits is None else [looped.logits])]

        return self._ready(name, loop, given, batch, None, "a loop")

    def _compile_settle(self, name: Name, batch: Batch, choice: Choice, given: list[Tensor]) -> list[Tensor] | None:
        fixed = self._fixed(batch)

        def end(lines: Tensor, *read: Tensor) -> list[Tensor]:
            lanes, table = lines[:, _LANE], lines[:, _TABLE]
            hidden = fixed.lanes.hidden.index_select(0, lanes)
            logits = read[0] if read else None
            codes = lines[:, _CODE]
            looped = Looped(lanes, table, lines[:, _SEQUENCE], lines[:, _LOOPS], hidden, codes, codes > 0, logits)
            which = torch.arange(len(lines))
            token_ids, stands, ends, logits = choice.choose(fixed, looped, which)
            return [settle(fixed, looped, which, token_ids, stands, ends), logits]

        return self._ready(name, end, given, batch, choice, "the reading of rows")

    def _ready(
        self,
        name: Name,
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
        planes = tensors_of(batch.layers)
        parts = [self.lanes, self.settings, batch.placement, None if choice is None else choice.tensors]
        state = [*planes, *tensors_of(parts), self._no_starts]
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
        )
        known = self._programs.programs.get(key)
        results = None
        if known is None:
            some = "one row" if len(given[0]) == 1 else "some rows"
            try:
                with self._announce(f"{what}, {some}"):
                    known, results = compile_program(function, given, state, planes, model_tensors(self.model))
            except Exception as error:  # whatever dynamo, inductor or a compiler may raise
                self.chosen = RunnerChoice("eager", f"{what} could not be compiled: {first_line(_cause(error))}")
                warnings.warn(self.chosen.reason, stacklevel=2)
                return None
            self._programs.programs[key] = known
        bound = self._bound[name] = known.bind(state)
        return bound(*given) if results is None else results

    def _fixed(self, batch: Batch) -> Batch:
        """The batch that a program is made from: with a bound on positions that lasts, and with starts in any case."""
        place = batch.placement
        starts = self._no_starts if place.starts is None else place.starts
        place = Placement(place.size, place.total, place.blocks, starts=starts)
        return Batch(
            batch.model, batch.lanes, batch.settings, batch.program, batch.layers, place, self._most, batch.ops
        )


def _name(part: str, given: Sequence[Tensor]) -> Name:
    return part, tuple(len(argument) > 1 for argument in given)


def _cause(error: Exception) -> BaseException:
    """What a backend raised, which dynamo wraps."""
    cause: BaseException = getattr(error, "inner_exception", error)
    return cause
