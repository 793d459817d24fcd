"""Running batch: sequences in slots, their tokens in lanes, prefill beside them, and one pass over both.

A sequence is preempted by recomputation: its lanes are kept, the K/V of every position are recomputed, of those in
flight as far as they had been (under `drop` to the loop where a token had stopped), and the lanes are put back once all
of them are. So what comes out does not depend on being preempted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.compiled import no_progress
from sigma0.decode.grammar.rows import GrammarRows
from sigma0.decode.kv_store import PagedPlanes
from sigma0.decode.lanes import CACHE_POSITION, STAGE, Lanes
from sigma0.decode.logits import BROKEN
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import ExitParams, RowCount
from sigma0.decode.prefill import Chunk, Prefill
from sigma0.decode.runner import LateRunner, RunnerChoice, Step
from sigma0.decode.runners import choose_runner, open_runner
from sigma0.decode.sampling import DeviceSampler
from sigma0.decode.sampling_params import SamplingSettings
from sigma0.decode.sequences import SequenceParams, Suspended, all_of
from sigma0.decode.settings import NO_LIMIT, SequenceSettings
from sigma0.decode.stats import LoopStatsRecorder
from sigma0.decode.step import SEQUENCE, TOKEN
from sigma0.decode.transfer import Bools, Ints, PassCounts, to_device, to_host


@dataclass(frozen=True)
class _Running:
    """A sequence in a slot: what it asks, its ids at admission, and what is still to be put back in flight of it."""

    params: SequenceParams
    ids: Sequence[int]
    suspended: Suspended | None


@dataclass(frozen=True)
class PassOutput:
    """Result of a pass."""

    step: Step
    left: Sequence[Sequence[int]]  # Slot and cache position of each token that has left its lane after its last loop
    # Leading cache positions that are exact in every plane now, by slot, where they fill a block
    complete: Mapping[int, int]
    # Cache positions that may have entered by now, by slot, where segments before them were encoded
    ready: Mapping[int, int]
    # Slot, cache positions and logits `[N, V]` of prompts that the head was to read
    prompts: Sequence[tuple[int, list[int], Tensor]]


class RunningBatch:
    """All running sequences, by slot.

    Args:
        model: The looped model.
        planes: Paged K/V.
        slots: S.
        longest: Cache positions of the longest sequence.
        watch: Limits of the fates, where statistics are wanted; None for none.

    Attributes:
        lanes: Tokens that decode.
        prefill: Positions beside them.
        notes: On the loops of tokens; None without statistics.
        counts: Passes and rows so far.
    """

    def __init__(
        self, model: LoopedModel, planes: PagedPlanes, slots: int, longest: int, watch: ExitParams | None
    ) -> None:
        self._model, self.planes = model, planes
        with torch.no_grad():
            like = model.enter(*torch.zeros((2, 1), dtype=torch.int64, device=model.device))
        self.lanes = Lanes(slots, planes.shape.planes, like, model.state_width)
        # on a CPU the very memory of the table
        self._table: Ints | None = to_host(self.lanes.table[:-1]) if model.device.type == "cpu" else None
        self.prefill = Prefill()
        self._running: list[_Running | None] = [None] * slots
        self.counts = PassCounts()
        self._settings = SequenceSettings(slots, self.lanes.depth, model.device)
        with torch.inference_mode(False):
            # one more than the longest: what is sampled after it is written there
            ids = torch.zeros((slots, longest + 2), dtype=torch.int64, device=model.device)
        self._sampler = DeviceSampler(SamplingSettings(slots, model.device), ids)
        self._grammars = GrammarRows(self.lanes, int(model.config.vocab_size))
        self._errors: dict[int, Exception] = {}
        waits = "the scheduler sees every step before the next"
        chosen = choose_runner(getattr(model, "runner", "auto"), model, waits=waits)
        self.notes: LoopStatsRecorder[Any] | None = None
        if watch is not None:
            self.notes = LoopStatsRecorder(model, self.lanes, watch)
        progress = getattr(model, "progress", no_progress)
        self._runner = open_runner(chosen, model, self.lanes, self._settings, planes, self.counts, progress)
        if isinstance(self._runner, LateRunner):
            self._runner.shows_lanes = self._table is None
        # the table on the host, as long as nothing has changed it
        self._known: Ints | None = None
        self._recomputing: set[int] = set()
        # last tokens of prompts, `[1, W]`, that wait until all positions before them have left: a coda reads these in
        # their order, and a sequence is not to end before its prompt is read
        self._waiting: dict[int, Tensor] = {}
        self._prompts: Ints = np.full(slots, NO_LIMIT, dtype=np.int64)
        # leading cache positions that have entered beside the lanes, that may enter, and below which all planes are
        # those of a run of all loops
        self._entered, self._ready, self._exact = (np.full(slots, NO_LIMIT, dtype=np.int64) for _ in range(3))
        self._drops: Bools = np.zeros(slots, dtype=np.bool_)
        self._passes: Ints = np.zeros(slots, dtype=np.int64)
        self._rows: Ints = np.zeros(slots, dtype=np.int64)
        natively = model.operations.host_rows and self._table is not None and not isinstance(self._runner, LateRunner)
        counted = map(torch.from_numpy, (self._prompts, self._passes, self._rows))
        self._counted = RowCount(self.lanes.table, self.lanes.depth, *counted) if natively else None

    def __len__(self) -> int:
        counted = self._counted
        live = np.count_nonzero(self._lines()[:, STAGE] < self.lanes.idle) if counted is None else counted.live()
        return int(live) + len(self.prefill) + len(self._waiting)

    def _lines(self) -> Ints:
        """The table of lanes on the host, `[S T, 6]`."""
        if self._table is not None:
            return self._table
        if self._known is None:
            self._known = to_host(self.lanes.table[:-1])
        return self._known

    @property
    def runner(self) -> RunnerChoice:
        """What calls the step, and why."""
        return self._runner.chosen

    def params_of(self, slot: int) -> SequenceParams:
        """What the sequence in a slot asks."""
        return self._in(slot).params

    def _in(self, slot: int) -> _Running:
        running = self._running[slot]
        assert running is not None, f"a row of slot {slot}, which is free"
        return running

    @property
    def broken(self) -> list[int]:
        """Slots whose sequence cannot run on."""
        return list(self._errors)

    def error_of(self, slot: int) -> Exception | None:
        """What broke in a processor or the grammar of a slot's sequence."""
        return self._sampler.errors.get(slot) or self._errors.get(slot)

    def work_of(self, slot: int) -> tuple[int, int]:
        """Passes with a row of a new token of the sequence in a slot, and its rows in them."""
        return int(self._passes[slot]), int(self._rows[slot])

    def admit(
        self,
        slot: int,
        params: SequenceParams,
        ids: Sequence[int],
        cached: int = 0,
        exact: int | None = None,
        suspended: Suspended | None = None,
    ) -> None:
        """Gives a sequence a slot.

        Args:
            slot: Which, free so far.
            params: What it asks.
            ids: Its ids so far.
            cached: Leading cache positions that its blocks hold already.
            exact: Leading cache positions that are ever those of a run of all loops; None for all.
            suspended: What `preempt` returned of it; put back in flight once all before it is recomputed.
        """
        self._running[slot] = _Running(params, list(ids), suspended)
        if suspended is not None:
            self._recomputing.add(slot)
        self._prompts[slot], self._drops[slot] = params.prompt, params.exit.drop
        self.planes.begin(slot, cached, params.last_loop - 1)
        self._entered[slot], self._exact[slot] = cached, NO_LIMIT if exact is None else exact
        if self.planes.segments is not None:
            self._ready[slot] = cached + self.planes.segments.segment
        self._passes[slot], self._rows[slot] = (0, 0) if suspended is None else suspended.work
        self._settings.set_exit([slot], params.exit)
        self._settings.set_ends([slot], params.eos, params.prompt + params.limit - 1)
        self._sampler.set(slot, params.sampling, ids, params.hook)
        if params.grammar is not None:
            grammar = params.grammar, params.prompt, params.forces, params.limit
            self._follow(slot, partial(self._grammars.set, slot, *grammar))
        self._use_program()

    def _follow(self, slot: int, act: Callable[[], None]) -> None:
        """Does something with the grammar of a slot's sequence; what breaks there ends that one alone."""
        try:
            act()
        except Exception as error:
            self._errors[slot] = error

    def _use_program(self, anew: bool = False) -> None:
        paths = self.notes is not None
        draws, masked = self._sampler.program.draws, bool(self._grammars)
        program = self._settings.program(paths=paths, draws=draws, masked=masked)
        if anew or program != self._runner.program:
            self._runner.use(program)

    def preempt(self, slot: int, depths: Sequence[int]) -> Suspended | None:
        """Removes the sequence in a slot, whose new tokens were read at `depths`, for a time.

        Returns:
            What is in flight of it; None where it is to begin anew.
        """
        suspended = Suspended.of(self.lanes, slot)
        if suspended is None:
            # preempted again while it recomputes, it still has what was in flight before
            suspended = self._in(slot).suspended
        else:
            suspended = replace(suspended, depths=depths, work=self.work_of(slot))
        self.remove(slot)
        return suspended

    def remove(self, slot: int) -> None:
        """Removes the sequence in a slot with its rows."""
        self._in(slot)
        self._drop(slot)
        self._use_program()

    def reset(self) -> None:
        """Removes all sequences, whatever a pass that broke has left of them."""
        for slot in range(len(self._running)):
            self._drop(slot)
        if isinstance(self._runner, LateRunner):
            self._runner.forget()
        self._use_program(anew=True)

    def _drop(self, slot: int) -> None:
        """Frees a slot, if it is not free."""
        self._running[slot] = None
        self._recomputing.discard(slot)
        self._waiting.pop(slot, None)
        self._prompts[slot] = self._exact[slot] = NO_LIMIT
        self.lanes.clear(slot)
        self._known = None
        if self.lanes.probs is not None:
            # not a NaN for the next sequence's drafts
            self.lanes.probs[slot * self.lanes.depth : (slot + 1) * self.lanes.depth] = 0.0
        self.prefill.remove(slot)
        self.planes.release(slot)
        self._settings.clear(slot)
        self._sampler.clear(slot)
        self._grammars.clear(slot)
        self._errors.pop(slot, None)

    @torch.no_grad()
    def enter(self, entering: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Embeds stretches, at least one, each a slot, its first cache position and ids, and puts them before loop 1.

        The last one of a prompt comes into a lane, the others beside.
        """
        ids = [token_id for _, _, current in entering for token_id in current]
        ranges = [np.arange(start, start + len(current)) for _, start, current in entering]
        positions = to_device(np.concatenate(ranges), self._model.device)
        hidden = self._model.enter(to_device(np.array(ids), self._model.device), positions)
        lanes: list[tuple[int, int]] = []
        last: list[int] = []
        after = 0
        for (slot, start, _), current in zip(entering, ranges, strict=True):
            running, row, after, stop = self._in(slot), after, after + len(current), start + len(current)
            params, suspended = running.params, running.suspended
            self._entered[slot] = stop
            if stop == params.prompt and suspended is None:
                current = current[:-1]
                if self._model.stages[1] or params.reads_prompt:
                    self._waiting[slot] = hidden[after - 1 : after].clone()
                else:
                    lanes.append((slot, stop - 1))
                    last.append(after - 1)
            if len(current):
                whole = all_of(params.last_loop, current)
                targets, reads = (whole, whole) if suspended is None else suspended.loops_of(params, current)
                final = NO_LIMIT if params.exit.verify else params.prompt - 1
                self.prefill.enter(Chunk(slot, current, targets, 0, hidden[row : row + len(current)], reads, final))
        if lanes:
            self._enter_lanes(lanes, hidden.index_select(0, to_device(np.array(last), self._model.device)))

    def _enter_lanes(self, tokens: Sequence[tuple[int, int]], hidden: Tensor) -> None:
        """Puts tokens, slot and cache position, before their first loop; `hidden` is `[N, W]`."""
        slots, at = to_device(np.array(tokens).T.copy(), self._model.device)
        self._known = None
        self.lanes.enter(self.lanes.lane_of(slots, at), hidden, at, at)
        for slot, _ in tokens:
            self._follow(slot, partial(self._grammars.start, slot))

    def resume(self) -> None:
        """Puts tokens that wait, and those of preempted sequences, in flight once all before them are there."""
        for slot in [slot for slot in self._waiting if not self.prefill.has(slot)]:
            self._enter_lanes([(slot, self.params_of(slot).prompt - 1)], self._waiting.pop(slot))
        for slot in sorted(self._recomputing):
            running = self._in(slot)
            suspended = running.suspended
            assert suspended is not None
            if self._entered[slot] < suspended.end or self.prefill.has(slot):
                continue
            suspended.restore(self.lanes, slot)
            self._known = None
            new = running.ids[running.params.prompt :]
            self._follow(slot, partial(self._grammars.restore, slot, new, suspended.loops))
            self._running[slot] = replace(running, suspended=None)
            self._recomputing.remove(slot)

    def run(self) -> PassOutput:
        """Runs a pass: a loop of every row, then the tokens of those that stop."""
        left, longest = self._count()
        self.counts.prompt_chunks += len(self.prefill.chunks)
        step = self._runner.step(longest, self._sampler, self.prefill)
        assert step is not None
        self._known = step.table
        if self._grammars:
            self._advance(step.lines)
        complete, prompts = self._complete(left)
        ready: dict[int, int] = {}
        if self.planes.segments is not None:
            complete, ready = self._encode()
        return PassOutput(step, left, complete, ready, prompts)

    def _encode(self) -> tuple[dict[int, int], dict[int, int]]:
        """Encodes what is complete; leading positions that are exact and encoded now, and that may enter, by slot."""
        segments, lanes = self.planes.segments, self.lanes
        assert segments is not None
        known = segments.coded.copy()
        busy = {chunk.sequence for chunk in self.prefill.chunks} | self._waiting.keys()
        lines = self._lines().reshape(-1, lanes.depth, lanes.table.shape[1])
        live = lines[..., STAGE] < lanes.idle
        blocked = (lines[..., STAGE] == lanes.blocked) * (lines[..., CACHE_POSITION] + 1)
        entered, ready = np.maximum(self._entered, blocked.max(1)), {}
        for slot, running in enumerate(self._running):
            if running is None or entered[slot] < self._ready[slot] or slot in busy or live[slot].any():
                continue
            until = int(self._ready[slot])
            if running.suspended is None or min(running.suspended.loops) >= until:
                self.planes.encode_to(slot, until)
                self._ready[slot] = ready[slot] = until + segments.segment
        self.planes.block_lanes(lanes, busy)
        self._known = None
        self._errors.update(self.planes.pop_errors())
        complete: dict[int, int] = {}
        for slot in np.flatnonzero(segments.coded > known).tolist():
            # the last token of a prompt stops at its exit under `drop`
            exact = self._prompts[slot] - 1 if self._drops[slot] else self._exact[slot]
            if slot not in self._errors and self.planes.last_planes[slot] == lanes.depth - 1:
                complete[slot] = int(min(segments.coded[slot], exact))
        return complete, ready

    def _advance(self, lines: Ints) -> None:
        """Masks what a step has fed; the lines of a sequence that cannot go on in its grammar are marked as broken."""
        errors = self._grammars.advance(lines.tolist())
        self._errors.update(errors)
        for slot in errors:
            lines[lines[:, SEQUENCE] == slot, TOKEN] = BROKEN

    def _count(self) -> tuple[list[list[int]], int]:
        """Counts the rows of new tokens in the coming pass.

        Returns slot and cache position of each token that leaves after it, and a bound on all positions, plus one.
        """
        chunks = *self.prefill.chunks, *self.prefill.waiting
        beside = max([int(chunk.positions[-1]) + 1 for chunk in chunks]) if chunks else 0
        if self._counted is not None:
            left = self._counted.count()
            return left, max(self._counted.longest, beside)
        depth, idle = self.lanes.depth, self.lanes.idle
        lines = self._lines()
        table = lines.reshape(-1, depth, lines.shape[1])
        stage, positions = table[..., STAGE], table[..., CACHE_POSITION]
        live = stage < idle
        new = (live & (positions >= self._prompts[:, None])).sum(1)
        self._passes += new > 0
        self._rows += new
        if isinstance(self._runner, LateRunner):
            self._runner.expect(int(live.sum()), int(live.any(axis=1).sum()))
        slots, lane = np.nonzero((stage == depth - 1) | (stage == idle - 1))
        left = np.stack([slots, positions[slots, lane]], axis=1).tolist()
        return left, max(beside, int(((positions + 1) * live).max()))

    def _complete(self, left: Sequence[Sequence[int]]) -> tuple[dict[int, int], list[tuple[int, list[int], Tensor]]]:
        """Takes prefill out that has run its loops; positions that are exact in every plane, and prompts, by slot."""
        complete: dict[int, int] = {}
        prompts = []
        for chunk in self.prefill.leave() if self.prefill.chunks else ():
            slot, params = chunk.sequence, self.params_of(chunk.sequence)
            if params.reads_prompt:
                rows = np.flatnonzero(chunk.positions < params.prompt - 1)
                with torch.no_grad():
                    logits = self._model.read(chunk.select(rows).hidden)
                prompts.append((slot, chunk.positions[rows].tolist(), logits))
            early = chunk.positions[chunk.targets < self.lanes.depth]
            if self._drops[slot] and len(early):
                slots = all_of(slot, early)
                at = to_device(np.stack([slots, early, np.full_like(slots, chunk.loops - 1)]), self._model.device)
                self.planes.leave(at[0], at[1], at[2])
            whole = chunk.positions[chunk.targets == self.lanes.depth]
            whole = whole[whole < self._exact[slot]]
            if len(whole):
                complete[slot] = max(complete.get(slot, 0), int(whole[-1]) + 1)
        size = self.planes.shape.size
        for slot, position in left:
            # only whole blocks are registered, and no position is left out
            if not (position + 1) % size and position < self._exact[slot]:
                complete[slot] = max(complete.get(slot, 0), position + 1)
        return complete, prompts
