"""The graph runner: a step is one launch of a CUDA graph, or of a compiled program in one.

A step has one shape for each bound on its rows, works on tensors that stay where they are, and is not looked at on the
host while it runs. So it is captured once for each bound, and launched from then on. A graph is captured while every
lane is idle: then a step writes to nobody's lane alone.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from sigma0.decode import kernel_step
from sigma0.decode.attention import PassRows, RowIndices
from sigma0.decode.compiled import model_tensors, programs_of, state_key, tensors_of
from sigma0.decode.graphs import Captured, StepGraph, StepGraphs
from sigma0.decode.lanes import STAGE
from sigma0.decode.ops import compiled_together
from sigma0.decode.runner import LateRunner, replaceable
from sigma0.decode.step import Choice, whole_step
from sigma0.decode.step_batch import Batch
from sigma0.decode.transfer import Landing

# Positions that a graph is captured for at least; more take another one for each power of two.
_SHORTEST = 1024


class GraphRunner(LateRunner):
    """Launches captured steps, which `graphs` keep; compiled before that, where `chosen` is "compile"."""

    def _open(self) -> None:
        super()._open()
        self._constants: list[Tensor] = []

    def bound_on(self, longest: int) -> int:
        """See `EagerRunner.bound_on`: a graph is captured for it."""
        return max(_SHORTEST, 1 << (longest - 1).bit_length())

    def batch(self, longest: int) -> Batch:
        """See `EagerRunner.batch`; tables of positions have room for the whole bound."""
        known = self._batch
        batch = super().batch(longest)
        if batch is not known:
            programs_of(self.model).keep_for(self.model.reserve_positions(batch.longest, self.lanes.hidden))
            self._constants = model_tensors(self.model)
            # a parameter may have been given other memory
            self._weights = tuple((id(tensor), _address(tensor)) for tensor in self._constants)
            self._kept().keep_over(batch.layers[0].flat_keys)
        return batch

    def _launch(self, longest: int, choice: Choice, count: int) -> tuple[Landing, Tensor]:
        batch = self.batch(longest)
        steps = self._kept().steps
        rules = self.settings.growth, self.settings.spiral
        key = (count, batch.program, batch.longest, choice.fixed, self.chosen, *rules, self._weights)
        step = steps.get(key)
        if step is None or not step.is_over(self._parts(batch, choice)):
            captured = self._captured(batch, choice, count, key)
            # what the first step of a kind makes room for is there now
            step = steps[key] = StepGraph(captured, self._parts(batch, choice), self._constants)
        step.captured.replay()
        lines, logits = step.captured.outputs
        return self._land(lines), logits

    def _kept(self) -> StepGraphs:
        assert self.graphs is not None, "a graph runner keeps graphs"
        return self.graphs

    def _parts(self, batch: Batch, choice: Choice) -> tuple[object, ...]:
        return (*choice.tensors, *replaceable(batch))

    def _captured(self, batch: Batch, choice: Choice, count: int, key: Hashable) -> Captured:
        stages = self.lanes.table[:, STAGE]
        before = stages.clone()
        stages.fill_(self.lanes.idle)

        def step() -> tuple[Tensor, ...]:
            if self.chosen.name == "compile":
                return self._compiled(batch, choice, count, key)
            return whole_step(batch, count, choice, suspends=self.chosen.late)

        graphs = self._kept()
        try:
            with self._announce(f"a step of {count} rows"):
                if not graphs.steps and self.lanes.device.type == "cuda" and batch.ops.project_rows is not None:
                    self._compile_kernels(batch, choice, count)
                return graphs.capture(step)
        finally:
            stages.copy_(before)

    def _compile_kernels(self, batch: Batch, choice: Choice, count: int) -> None:
        """Compiles what a pass launches side by side, where a first pass would compile one kernel after the other."""
        hidden = self.lanes.hidden[:count]
        none = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        rows = RowIndices(none, none, none, none)
        with compiled_together():
            # nobody's rows: they write no K/V
            view = PassRows(batch.layers, batch.placement, rows, batch.ops, batch.longest, none > 0)
            self.model.loop(hidden, view)
            if kernel_step.knows(batch, choice.takes_best):
                kernel_step.compile_kernels(batch, count, self.chosen.late)
            elif not self.model.stages[1]:
                self.model.read(hidden)

    def _compiled(self, batch: Batch, choice: Choice, count: int, key: Hashable) -> tuple[Tensor, ...]:
        """The step as a compiled program, which another run of the same shapes uses too."""
        state = tensors_of([batch.layers, self.lanes, self.settings, batch.placement, choice.tensors])
        whole, late = ("graph", key, state_key(state)), self.chosen.late

        def step(batch: Batch, choice: Choice) -> tuple[Tensor, Tensor]:
            return whole_step(batch, count, choice, suspends=late)

        lines, logits = programs_of(self.model).call(whole, step, batch, choice)
        return lines, logits


def _address(tensor: Tensor) -> int:
    # oneDNN's layout has none
    return 0 if tensor.is_mkldnn else tensor.data_ptr()
