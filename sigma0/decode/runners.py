"""What calls a step beside the eager runner, which of them does, and why.

`NativeRunner`, on a CPU where the functions in C++ were built: a step is one call or two, with the output head between
them. All that it does `EagerRunner` does in torch, in some hundred operations over a few numbers each; what these
functions do not know (criteria, grammars, preludes and codas) it leaves to that one.

`GraphRunner`, on CUDA: a step is one launch of a graph. A step has one shape for each bound on its rows, works on
tensors that stay where they are, and is not looked at on the host while it runs. So it is captured once for each bound,
and launched from then on. A graph is captured while every lane is idle: then a step writes to nobody's lane alone.
"""

from collections.abc import Callable, Hashable, Mapping
from operator import is_
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sigma0.cpp_compiler import compiler
from sigma0.decode import kernel_step
from sigma0.decode.attention import PassRows, RowIndices
from sigma0.decode.compiled import (
    Capture,
    Captured,
    CudaCapture,
    Progress,
    StepGraph,
    StepGraphs,
    model_tensors,
    no_progress,
    programs_of,
    state_key,
    tensors_of,
)
from sigma0.decode.kv_store import Storage
from sigma0.decode.lanes import STAGE, Lanes
from sigma0.decode.logits import BROKEN
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import (
    Block,
    CpuStepState,
    LaneTables,
    RowPlaces,
    StepResult,
    compiled_together,
    no_broadcast,
)
from sigma0.decode.prefill import Batch, Prefill
from sigma0.decode.runner import NOTHING, EagerRunner, LateRunner, RunnerChoice, Step
from sigma0.decode.settings import Program, SequenceSettings
from sigma0.decode.step import LoopOutput, Sampler, run_block, whole_step
from sigma0.decode.transfer import AsyncCopy, Ints, PassCounts, to_host

# Positions that a graph is captured for at least; more take another one for each power of two.
_SHORTEST = 1024
RunnerName = Literal["auto", "eager", "compile", "cudagraph"]
RUNNERS: tuple[RunnerName, ...] = get_args(RunnerName)
# Devices that would be waited for if the host looked at the decisions of a pass before it went on.
ASYNC_DEVICES = frozenset({"cuda"})
# What captures steps, by type of device.
CAPTURES: Mapping[str, Callable[[torch.device], Capture]] = {"cuda": CudaCapture}


def choose_runner(wanted: str, model: LoopedModel, python: str | None = None, waits: str | None = None) -> RunnerChoice:
    """The runner for a model.

    Args:
        wanted: One of `RUNNERS`.
        model: On its device, with its hooks.
        python: Why the host takes part in a step; None where it does not.
        waits: Why the host has to see each step before the next one; None where it need not.

    Raises:
        ValueError: For an unknown name.
    """
    if wanted not in RUNNERS:
        raise ValueError(f"no such runner: {wanted!r}; there are {', '.join(RUNNERS)}")
    reason = "what auto takes" if wanted == "auto" else "asked for"
    if python is None and model.device.type == "cuda" and model.operations.depth_attention is None:
        python = "attention in plain torch reads positions on the host"
    if wanted != "eager" and model.device.type in CAPTURES:
        why_not = python or _why_not_whole(model)
        if why_not is None:
            name: Literal["compile", "cudagraph"] = "compile" if wanted == "compile" else "cudagraph"
            return RunnerChoice(name, reason, late=waits is None, captured=True)
        reason = why_not
    elif wanted in ("compile", "cudagraph"):
        why_not = _why_not_compiled(model) if wanted == "compile" else f"no CUDA graphs on {model.device.type}"
        if why_not is None:
            return RunnerChoice("compile", reason)
        reason = why_not
    if model.device.type not in ASYNC_DEVICES:
        return RunnerChoice("eager", reason)
    sees = python or waits
    if sees is None or sees == reason:
        return RunnerChoice("eager", reason, late=sees is None)
    return RunnerChoice("eager", f"{reason}; {sees}")


def _why_not_whole(model: LoopedModel) -> str | None:
    """Why a model's step cannot be one launch; None where it can."""
    if model.operations.broadcast is not no_broadcast:
        return "a step in one piece is for models on one process, this one is spread over several"
    if isinstance(model, nn.Module):
        if len({parameter.device for parameter in model.parameters()}) > 1:
            return "a step in one piece is for models on one device, this one is spread over several"
        modules = list(model.modules())
        if any(
            current._forward_hooks or current._forward_pre_hooks or getattr(current, "_hf_hook", None)
            for current in modules
        ):
            return "modules of the model have hooks, which only Python can call"
    return None


def _why_not_compiled(model: LoopedModel) -> str | None:
    """Why a model's step cannot be compiled; None where it can."""
    if model.device.type != "cpu":
        return f"compile is for models on a CPU or on CUDA, this one is on {model.device.type}"
    why_not = _why_not_whole(model)
    if why_not is None and not compiler():
        return "no C++ compiler was found (set CXX, or install g++)"
    return why_not


def open_runner(
    chosen: RunnerChoice,
    model: LoopedModel,
    lanes: Lanes,
    settings: SequenceSettings,
    storage: Storage,
    counts: PassCounts,
    progress: Progress = no_progress,
    graphs: StepGraphs | None = None,
) -> EagerRunner:
    """The runner that was chosen; arguments as `EagerRunner` takes them."""
    place = storage.placement(0)
    if place.coded is not None and (chosen.name != "eager" or chosen.late):
        chosen = RunnerChoice("eager", "K/V in few bits are encoded between steps")
    if chosen.name == "compile" and not chosen.captured and model.operations.run_block is not None:
        with torch.no_grad():
            if model.plain_block(1, lanes.hidden) is not None:
                chosen = RunnerChoice("eager", "the layers run in C++ as they are, in one call")
    if place.seen is not None and model.operations.attend_rows is None and (chosen.late or chosen.captured):
        chosen = RunnerChoice("eager", f"{chosen.reason}; pads do not all come first")
    if chosen.captured:
        graphs = StepGraphs(CAPTURES[model.device.type](model.device)) if graphs is None else graphs
        kind: type[EagerRunner] = GraphRunner
    elif chosen.late:
        kind = LateRunner
    else:
        native = model.operations.host_rows and model.operations.broadcast is no_broadcast
        kind = NativeRunner if native else EagerRunner
    return kind(model, lanes, settings, storage, counts, chosen, progress, graphs)


class NativeRunner(EagerRunner):
    """Runs steps in C++; arguments as `EagerRunner` takes them."""

    def use(self, program: Program) -> None:
        """See `EagerRunner.use`; weights are looked at now, and whenever planes have moved, and in no pass between."""
        super().use(program)
        self._cpu: CpuStepState | None = None
        self._over: Batch | None = None
        self._held: tuple[object, ...] = ()
        # every pass reads the head of tokens that decode, and of drafts with them
        self._whole = program.verify and program.redrafts
        self._knows = self.model.stages == (0, 0) and not (program.criteria or program.masked)

    def step(self, longest: int, sampler: Sampler, beside: Prefill | None = None) -> Step | None:
        """See `EagerRunner.step`."""
        if not self._knows:
            return super().step(longest, sampler, beside)
        batch, settings, lanes = self.batch(longest), self.settings, self.lanes
        if batch is not self._over or not all(map(is_, self._held, (settings.eos, settings.exits, lanes.paths))):
            self._bind_buffers(batch)
        cpu = self._cpu
        assert cpu is not None
        took = not beside and cpu.has_block
        if took and cpu.has_head and sampler.is_greedy and not self.program.forced:
            settled = cpu.step(BROKEN)
            if settled is not None:
                return self._told(batch, cpu, settled)
        elif took and cpu.loop():
            return self._settled(batch, cpu, cpu.rows(cpu.count).states, sampler) if cpu.count else None
        live = cpu.count if took else cpu.start()
        return self._settled(batch, cpu, self._looped(batch, cpu, beside), sampler) if live or beside else None

    def _told(self, batch: Batch, cpu: CpuStepState, settled: StepResult) -> Step | None:
        """A step that has run to its end."""
        if not cpu.count:
            return None
        self._count(cpu)
        self._embed(batch, settled)
        lines = settled.lines
        return Step(lines, cpu.logits(settled.kept) if len(lines) else None, cpu.decoding)

    def _count(self, cpu: CpuStepState) -> None:
        program, counts = self.program, self.counts
        counts.passes += 1
        counts.rows += cpu.count
        if program.margin:
            counts.head_rows += cpu.decoding
        if not program.margin or program.verify:
            counts.head_rows += cpu.read_rows

    def _looped(self, batch: Batch, cpu: CpuStepState, beside: Prefill | None) -> Tensor:
        """States `[R, W]` of the rows that were taken, after a loop in torch of them and of the prefill beside them."""
        rows = cpu.rows(cpu.count)
        at = RowIndices(rows.sequences, rows.cache_positions, rows.positions, rows.planes)
        if beside:
            self.counts.prompt_rows += len(beside)
        _, raw = run_block(batch, rows.previous, at, beside or None)
        if cpu.norms:
            return cpu.end(raw)
        states = batch.norm(raw)
        asks = batch.program.gate and not cpu.gates
        return cpu.end(states, batch.model.gate(states[: cpu.decoding]).float().contiguous() if asks else None)

    def _settled(self, batch: Batch, cpu: CpuStepState, states: Tensor, sampler: Sampler) -> Step:
        """What follows from a loop."""
        program, decoding, logits = batch.program, cpu.decoding, None
        if program.margin:
            logits = batch.model.read(states if self._whole else states[:decoding]).float()
            cpu.lead(logits)
        self._count(cpu)
        if program.drops and not cpu.has_block:
            self._leave(self._rows_of(cpu, states, logits))
        reads = cpu.reads
        if not len(reads):
            return Step(NOTHING, None, decoding)
        if sampler.is_greedy and not program.forced:
            of_all = logits is not None and (self._whole or not program.verify)
            if logits is None or not of_all:
                some = states if len(reads) == len(states) else states.index_select(0, reads)
                logits = batch.model.read(some).float()
            settled = cpu.commit_greedy(logits, of_all, BROKEN)
        else:
            looped = self._rows_of(cpu, states, logits)
            token_ids, stands, ends, logits = sampler.choose(batch, looped, reads)
            settled, of_all = cpu.commit(reads, token_ids, stands, ends), False
        self._embed(batch, settled)
        kept: Ints = settled.kept
        if of_all:
            kept = to_host(reads)[kept]
        return Step(settled.lines, logits, decoding, None if len(kept) == len(logits) else kept)

    def _embed(self, batch: Batch, settled: StepResult) -> None:
        """Embeds what the step has only noted."""
        if settled.fed is not None:
            lanes, token_ids, positions = settled.fed
            batch.lanes.hidden.index_copy_(0, lanes, batch.model.enter(token_ids, positions))

    def _rows_of(self, cpu: CpuStepState, states: Tensor, logits: Tensor | None) -> LoopOutput:
        current = cpu.rows(cpu.count)
        reads = torch.zeros(len(states), dtype=torch.bool).index_fill_(0, cpu.reads, True)
        return LoopOutput(
            current.lanes,
            current.lines,
            current.sequences,
            current.loops,
            states,
            cpu.codes,
            reads,
            logits,
            seen=True,
        )

    def _bind_buffers(self, batch: Batch) -> None:
        """Takes all memory and weights as they are now."""
        lanes, settings, model, program = self.lanes, self.settings, self.model, batch.program
        self._over, self._held = batch, (settings.eos, settings.exits, lanes.paths)
        state = lanes.exit_state
        counts = None if state is None else state.counts
        kept = (state.differences, state.gram) if state is not None and lanes.watched else ()
        gate = state.gate if state is not None and lanes.watched else lanes.gate
        paths = lanes.paths if program.paths else None
        fixed = lanes.table, lanes.hidden, gate, counts, paths
        tables = LaneTables(*fixed, settings.table, settings.thresholds, settings.eos, settings.exits, *kept)
        cpu = CpuStepState(tables, lanes.depth) if self._cpu is None else self._cpu
        cpu.take_tables(tables, max(lanes.window, 1))
        cpu.take_weights(model.plain_weights(), program.gate)
        asked = program.verify, program.prompts, program.gate, program.margin, self._whole, program.drops
        cpu.take_program(*asked, self._block(batch, cpu), settings.growth, settings.spiral)
        self._cpu = cpu

    def _block(self, batch: Batch, cpu: CpuStepState) -> Block | None:
        """The layers in one call, where nothing but their weights makes them what they are."""
        lanes, place = batch.lanes, batch.placement
        if batch.ops.run_block is None or not cpu.norms:
            return None
        plain = batch.model.plain_block(batch.longest, lanes.hidden)
        if plain is None:
            return None
        layers, shape, tables = plain
        planes = [(current.flat_keys, current.flat_values) for current in batch.layers[: len(layers)]]
        count = (place.total - 1) // place.size
        none = lanes.table[:0, 0]
        places = RowPlaces(none, none, none, count, place.blocks, place.starts, place.seen)
        return Block(layers, shape, planes, tables, places)


class GraphRunner(LateRunner):
    """Launches captured steps, which `graphs` keep; compiled before that, where `chosen` is "compile"."""

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
            # a parameter may have been given other memory; oneDNN's layout has no address
            self._weights = tuple(
                (id(current), 0 if current.is_mkldnn else current.data_ptr()) for current in self._constants
            )
            self._kept().evict_unless(batch.layers[0].flat_keys)
        return batch

    def _launch(self, longest: int, sampler: Sampler, count: int) -> tuple[AsyncCopy, Tensor]:
        batch = self.batch(longest)
        steps = self._kept().steps
        rules = self.settings.growth, self.settings.spiral
        key = (count, batch.program, batch.longest, sampler.fixed, self.chosen, *rules, self._weights)
        step = steps.get(key)
        parts = () if step is None else self._parts(batch, sampler)
        if step is None or len(parts) != len(step.parts) or not all(map(is_, parts, step.parts)):
            captured = self._captured(batch, sampler, count, key)
            # what the first step of a kind makes room for is there now
            step = steps[key] = StepGraph(captured, self._parts(batch, sampler), self._constants)
        step.captured.replay()
        lines, logits = step.captured.outputs
        return self._start_copy(lines, logits)

    def _kept(self) -> StepGraphs:
        assert self.graphs is not None, "a graph runner keeps graphs"
        return self.graphs

    def _parts(self, batch: Batch, sampler: Sampler) -> tuple[object, ...]:
        """What a run may replace by other tensors, while all others stay where they are."""
        place, settings, lanes = batch.placement, batch.settings, batch.lanes
        best = None if lanes.criteria is None else lanes.criteria.best
        of_settings = settings.table, settings.eos, settings.exits, settings.settled
        of_lanes = lanes.table, lanes.exit_state, best, lanes.probs, lanes.paths, lanes.masks
        return (*sampler.tensors, batch.layers[0].flat_keys, place.starts, place.blocks, *of_settings, *of_lanes)

    def _captured(self, batch: Batch, sampler: Sampler, count: int, key: Hashable) -> Captured:
        stages = self.lanes.table[:, STAGE]
        before = stages.clone()
        stages.fill_(self.lanes.idle)

        def step() -> tuple[Tensor, ...]:
            if self.chosen.name == "compile":
                return self._compiled(batch, sampler, count, key)
            return whole_step(batch, count, sampler, suspends=self.chosen.late)

        graphs = self._kept()
        try:
            with self._progress(f"a step of {count} rows"):
                if not graphs.steps and self.lanes.device.type == "cuda" and batch.ops.project_rows is not None:
                    self._compile_kernels(batch, sampler, count)
                return graphs.capture(step)
        finally:
            stages.copy_(before)

    def _compile_kernels(self, batch: Batch, sampler: Sampler, count: int) -> None:
        """Compiles what a pass launches side by side, where a first pass would compile one kernel after the other."""
        hidden = self.lanes.hidden[:count]
        none = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        rows = RowIndices(none, none, none, none)
        with compiled_together():
            # nobody's rows: they write no K/V
            view = PassRows(batch.layers, batch.placement, rows, batch.ops, batch.longest, none > 0)
            self.model.loop(hidden, view)
            if kernel_step.knows(batch, sampler.is_greedy):
                kernel_step.compile_kernels(batch, count, self.chosen.late)
            elif not self.model.stages[1]:
                self.model.read(hidden)

    def _compiled(self, batch: Batch, sampler: Sampler, count: int, key: Hashable) -> tuple[Tensor, ...]:
        """The step as a compiled program, which another run of the same shapes uses too."""
        state = tensors_of([batch.layers, self.lanes, self.settings, batch.placement, sampler.tensors])
        whole, late = ("graph", key, state_key(state)), self.chosen.late

        def step(batch: Batch, sampler: Sampler) -> tuple[Tensor, Tensor]:
            return whole_step(batch, count, sampler, suspends=late)

        lines, logits = programs_of(self.model).call(whole, step, batch, sampler)
        return lines, logits
