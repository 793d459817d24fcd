"""Running batch: the lanes of all running requests, prefill beside them, and one pass over both."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.finite import BROKEN
from sigma0.decode.grammar.rows import GrammarRows
from sigma0.decode.host_rows import row_count
from sigma0.decode.lanes import CACHE_POSITION, STAGE, Lanes
from sigma0.decode.late import LateRunner
from sigma0.decode.masks import logprobs_of
from sigma0.decode.paged_planes import PagedPlanes
from sigma0.decode.prefill import Chunk, Prefill
from sigma0.decode.runner import RunnerChoice, Step, silently
from sigma0.decode.runners import choose_runner, open_runner
from sigma0.decode.sampling import Sampler
from sigma0.decode.sampling_params import SamplingSettings
from sigma0.decode.settings import SequenceSettings
from sigma0.decode.step import SEQUENCE, TOKEN
from sigma0.decode.transfer import Bools, Ints, PassCounts, to_device, to_host
from sigma0.serve.engine.loop_notes import LoopNotes
from sigma0.serve.engine.messages import PromptToken, ServedModel
from sigma0.serve.engine.request import RequestState
from sigma0.serve.engine.saved_lanes import SavedLanes
from sigma0.serve.engine.scheduler import ScheduledStep
from sigma0.signals.canary import Tighten

_NO_PROMPT = 2**62


@dataclass(frozen=True)
class PassOutput:
    """Result of a pass.

    Attributes:
        lines: What the step emitted, as `sigma0.decode.step` names its columns, `[K, 9]`.
        step: The step, for the logits of its lines.
        left: Slot and cache position of each token that has left its lane after its last loop.
        complete: Leading cache positions that are exact in every plane now, by slot, where they fill a block.
    """

    lines: Ints
    step: Step
    left: Sequence[Sequence[int]]
    complete: Mapping[int, int]


class RunningBatch:
    """All running requests, by slot.

    Args:
        model: The looped model.
        planes: Paged K/V.
        slots: S.
        longest: Cache positions of the longest sequence.
        watch: Whether statistics are wanted.

    Attributes:
        lanes: Tokens that decode.
        prefill: Positions beside them.
        notes: On the loops of tokens; None without statistics.
        states: Request of each slot; None where it is free.
        counts: Passes and rows so far.
    """

    def __init__(self, model: ServedModel, planes: PagedPlanes, slots: int, longest: int, watch: bool) -> None:
        self._model, self._planes = model, planes
        with torch.no_grad():
            like = model.enter(*torch.zeros((2, 1), dtype=torch.int64, device=model.device))
        self.lanes = Lanes(slots, model.num_loops, like, model.state_width)
        # on a CPU the very memory of the table
        self._table: Ints | None = to_host(self.lanes.table[:-1]) if model.device.type == "cpu" else None
        self.prefill = Prefill()
        self.states: list[RequestState | None] = [None] * slots
        self.counts = PassCounts()
        self._settings = SequenceSettings(slots, model.num_loops, model.device)
        with torch.inference_mode(False):
            # one more than the longest: what is sampled behind it is written there
            ids = torch.zeros((slots, longest + 2), dtype=torch.int64, device=model.device)
        self._sampler = Sampler(SamplingSettings(slots, model.device), ids)
        self._grammars = GrammarRows(self.lanes, int(model.config.vocab_size))
        self._errors: dict[int, Exception] = {}
        waits = "the scheduler sees every step before the next"
        chosen = choose_runner(getattr(model, "runner", "auto"), model, waits=waits)
        self.notes = LoopNotes(model, self.lanes, whole=chosen.captured) if watch else None
        announce = getattr(model, "announce", silently)
        self._runner = open_runner(chosen, model, self.lanes, self._settings, planes, self.counts, announce)
        if isinstance(self._runner, LateRunner):
            self._runner.shows_lanes = self._table is None
        # the table on the host, as long as nothing has changed it
        self._known: Ints | None = None
        self._recomputing: set[int] = set()
        # last tokens of prompts, `[1, W]`, that wait until all positions before them have left: a coda reads these in
        # their order, and a request is not to end before the log-probabilities of its prompt are known
        self._waiting: dict[int, Tensor] = {}
        self._prompts: Ints = np.full(slots, _NO_PROMPT, dtype=np.int64)
        self._drops: Bools = np.zeros(slots, dtype=np.bool_)
        # cache positions below which all planes are those of a run of all loops
        self._exact: Ints = np.full(slots, _NO_PROMPT, dtype=np.int64)
        self._passes: Ints = np.zeros(slots, dtype=np.int64)
        self._rows: Ints = np.zeros(slots, dtype=np.int64)
        in_books = model.operations.host_rows and self._table is not None and not isinstance(self._runner, LateRunner)
        self._counted = row_count(self.lanes, self._prompts, self._passes, self._rows) if in_books else None

    def __len__(self) -> int:
        counted = self._counted
        if counted is not None:
            live = counted.live()
        else:
            live = int(np.count_nonzero(self._lines()[:, STAGE] < self.lanes.idle))
        return live + len(self.prefill) + len(self._waiting)

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

    def state_of(self, slot: int) -> RequestState:
        """The request in a slot."""
        state = self.states[slot]
        assert state is not None, f"a row of slot {slot}, which is free"
        return state

    @property
    def broken(self) -> list[int]:
        """Slots whose request cannot run on."""
        return list(self._errors)

    def error_of(self, slot: int) -> Exception | None:
        """What broke in a processor or the grammar of a slot's request."""
        return self._sampler.errors.get(slot) or self._errors.get(slot)

    def apply(self, step: ScheduledStep, states: Mapping[int, RequestState]) -> None:
        """Makes the batch what the scheduler wants it to be before a pass.

        Args:
            step: What it wants.
            states: Requests by their keys.
        """
        for entry, slot in step.preempted:
            self._preempt(states[entry.key], slot)
        for entry in step.admitted:
            self._admit(states[entry.key])
        for slot, blocks in step.tables.items():
            self._planes.place(slot, blocks)
        if step.wiped:
            # a NaN that an earlier request left must not reach the next one, not even with weight 0
            self._planes.wipe(step.wiped)
        if step.prefill:
            self._enter([(states[chunk.entry.key], chunk.start, chunk.stop) for chunk in step.prefill])
        self._resume()

    def _admit(self, state: RequestState) -> None:
        slot, request = state.entry.slot, state.request
        self.states[slot] = state
        if state.saved is not None:
            self._recomputing.add(slot)
        self._prompts[slot], self._drops[slot] = state.prompt_length, state.drops
        self._planes.begin(slot, state.entry.cached, state.last_loop - 1)
        self._exact[slot] = _NO_PROMPT if state.entry.exact is None else state.entry.exact
        self._passes[slot] = self._rows[slot] = 0
        self._settings.set_exit([slot], state.exit)
        self._settings.set_ends([slot], sorted(state.eos), state.last_position)
        hosted = Tighten(state.prompt_length) if request.on_collapse == "tighten" else None
        self._sampler.set(slot, state.sampling, state.entry.token_ids, hosted)
        if state.grammar is not None:
            first, limit = state.prompt_length, request.max_new_tokens
            self._follow(slot, partial(self._grammars.set, slot, state.grammar, first, state.forces, limit))
        self._use_program()

    def _follow(self, slot: int, act: Callable[[], None]) -> None:
        """Does something with the grammar of a slot's request; what breaks there ends that one alone."""
        try:
            act()
        except Exception as error:
            self._errors[slot] = error

    def _use_program(self, anew: bool = False) -> None:
        kernel = self.notes is not None and self.notes.from_kernel
        paths = self.notes is not None and self.notes.keeps_states
        draws, masked = self._sampler.program.draws, bool(self._grammars)
        program = self._settings.program(watch=kernel, paths=paths, draws=draws, masked=masked)
        if anew or program != self._runner.program:
            self._runner.use(program)

    def _preempt(self, state: RequestState, slot: int) -> None:
        if (self._lines()[slot * self.lanes.depth : (slot + 1) * self.lanes.depth, STAGE] == self.lanes.held).any():
            # its newest token has run no loop, and enters no segment before the one ahead is encoded
            state.entry.prefill_end -= 1
        # preempted again while it recomputes, it still has what was in flight before
        saved = SavedLanes.of(self.lanes, slot)
        if saved is not None:
            state.saved = saved
            state.saved_notes = None if self.notes is None else self.notes.save(slot)
        self.remove(slot)

    def remove(self, slot: int) -> None:
        """Removes the request in a slot with its rows."""
        state = self.state_of(slot)
        state.passes += int(self._passes[slot])
        state.rows += int(self._rows[slot])
        self._drop(slot)
        self._use_program()

    def reset(self) -> None:
        """Removes all requests, whatever a pass that broke has left of them."""
        for slot in range(len(self.states)):
            self._drop(slot)
        if isinstance(self._runner, LateRunner):
            self._runner.forget()
        self._use_program(anew=True)

    def _drop(self, slot: int) -> None:
        """Frees a slot, if it is not free."""
        self.states[slot] = None
        self._recomputing.discard(slot)
        self._waiting.pop(slot, None)
        self._prompts[slot] = self._exact[slot] = _NO_PROMPT
        self.lanes.clear(slot)
        self._known = None
        if self.lanes.probs is not None:
            # not a NaN for the next request's drafts
            self.lanes.probs[slot * self.lanes.depth : (slot + 1) * self.lanes.depth] = 0.0
        self.prefill.remove(slot)
        self._planes.release(slot)
        self._settings.clear(slot)
        self._sampler.clear(slot)
        self._grammars.clear(slot)
        self._errors.pop(slot, None)

    def work_of(self, slot: int) -> tuple[int, int]:
        """Passes with a row of a new token of the request in a slot, and its rows in them."""
        state = self.state_of(slot)
        return state.passes + int(self._passes[slot]), state.rows + int(self._rows[slot])

    def _resume(self) -> None:
        """Puts tokens that wait, and those of preempted requests, in flight once all before them are there."""
        for slot in [slot for slot in self._waiting if not self.prefill.has(slot)]:
            self._enter_lanes([(slot, self.state_of(slot).prompt_length - 1)], self._waiting.pop(slot))
        for slot in sorted(self._recomputing):
            state = self.state_of(slot)
            if not state.entry.remaining and not self.prefill.has(slot):
                assert state.saved is not None
                state.saved.restore(self.lanes, slot)
                self._follow(slot, partial(self._restore_grammar, slot, state, state.saved.loops))
                self._known = None
                if self.notes is not None:
                    self.notes.restore(slot, state.saved_notes)
                state.saved = None
                self._recomputing.remove(slot)

    def _restore_grammar(self, slot: int, state: RequestState, positions: Iterable[int]) -> None:
        self._grammars.restore(slot, state.entry.token_ids[state.prompt_length :], positions)

    @torch.no_grad()
    def _enter(self, entering: Sequence[tuple[RequestState, int, int]]) -> None:
        """Embeds positions and puts them before loop 1: the last one of a prompt in a lane, the others beside."""
        ids = [token_id for state, start, stop in entering for token_id in state.entry.token_ids[start:stop]]
        ranges = [np.arange(start, stop) for _, start, stop in entering]
        positions = to_device(np.concatenate(ranges), self._model.device)
        hidden = self._model.enter(to_device(np.array(ids), self._model.device), positions)
        lanes: list[tuple[int, int]] = []
        last: list[int] = []
        row = 0
        for (state, _, stop), own in zip(entering, ranges, strict=True):
            slot, behind = state.entry.slot, row + len(own)
            if stop == state.prompt_length and state.saved is None:
                own = own[:-1]
                if self._model.stages[1] or state.request.prompt_logprobs is not None:
                    self._waiting[slot] = hidden[behind - 1 : behind].clone()
                else:
                    lanes.append((slot, stop - 1))
                    last.append(behind - 1)
            if len(own):
                targets, reads = state.target_loops(own), state.read_loops(own)
                self.prefill.enter(slot, own, targets, hidden[row : row + len(own)], reads, state.final)
            row = behind
        if lanes:
            self._enter_lanes(lanes, hidden.index_select(0, to_device(np.array(last), self._model.device)))

    def _enter_lanes(self, tokens: Sequence[tuple[int, int]], hidden: Tensor) -> None:
        """Puts tokens, slot and cache position, before their first loop; `hidden` is `[N, W]`."""
        slots, at = to_device(np.array(tokens).T.copy(), self._model.device)
        self._known = None
        self.lanes.enter(self.lanes.lane_of(slots, at), hidden, at, at)
        for slot, _ in tokens:
            self._follow(slot, partial(self._grammars.start, slot))

    def run(self) -> PassOutput:
        """Runs a pass: a loop of every row, then the tokens of those that stop."""
        left, longest = self._count()
        self.counts.prompt_chunks += len(self.prefill.chunks)
        step = self._runner.step(longest, self._sampler, self.prefill)
        assert step is not None
        self._known = step.table
        if self._grammars:
            self._advance(step.lines)
        if self.notes is not None and step.looped is not None:
            self.notes.note(step.looped)
        complete = self._complete(left)
        return PassOutput(step.lines, step, left, complete if self._planes.segments is None else self._encode())

    @torch.no_grad()
    def _read_prompt(self, state: RequestState, chunk: Chunk) -> None:
        """Keeps the log-probabilities of the ids that follow positions of a prompt."""
        wanted = state.request.prompt_logprobs
        assert wanted is not None
        rows = np.flatnonzero(chunk.positions < state.prompt_length - 1)
        positions = chunk.positions[rows].tolist()
        for position, logits in zip(positions, self._model.read(chunk.select(rows).hidden), strict=True):
            token_id = state.request.prompt_ids[position + 1]
            state.prompt[position + 1] = PromptToken(token_id, *logprobs_of(logits, token_id, wanted))

    def _encode(self) -> dict[int, int]:
        """Encodes what is complete; leading positions that are exact in every plane and encoded now, by slot."""
        segments = self._planes.segments
        assert segments is not None
        known = segments.coded.copy()
        busy = {chunk.sequence for chunk in self.prefill.chunks}
        live = self._lines()[:, STAGE].reshape(-1, self.lanes.depth) < self.lanes.idle
        for slot, state in enumerate(self.states):
            entry = None if state is None else state.entry
            if entry is None or entry.ready is None or entry.entered < entry.ready or slot in busy or live[slot].any():
                continue
            assert state is not None
            if state.saved is None or min(state.saved.loops) >= entry.ready:
                self._planes.encode_to(slot, entry.ready)
                entry.ready += segments.segment
        self._runner.hold(busy)
        self._known = None
        self._errors.update(self._planes.pop_errors())
        complete: dict[int, int] = {}
        for slot in np.flatnonzero(segments.coded > known).tolist():
            # the last token of a prompt stops at its exit under `drop`
            exact = self._prompts[slot] - 1 if self._drops[slot] else self._exact[slot]
            if slot not in self._errors and self._planes.last_planes[slot] == self.lanes.depth - 1:
                complete[slot] = int(min(segments.coded[slot], exact))
        return complete

    def _advance(self, lines: Ints) -> None:
        """Masks what a step has fed; the lines of a request that cannot go on in its grammar are marked as broken."""
        errors = self._grammars.advance(lines.tolist())
        self._errors.update(errors)
        for slot in errors:
            lines[lines[:, SEQUENCE] == slot, TOKEN] = BROKEN

    def _count(self) -> tuple[list[list[int]], int]:
        """Counts the rows of new tokens in the coming pass.

        Returns:
            Slot and cache position of each token for which it is the last one, and a bound on the cache positions of
            all rows, plus one.
        """
        if self._counted is not None:
            left = self._counted.count()
            beside = (*self.prefill.chunks, *self.prefill.held)
            return left, max([self._counted.longest, *(int(chunk.positions[-1]) + 1 for chunk in beside)])
        longest = max([state.entry.entered for state in self.states if state is not None])
        depth, idle = self.lanes.depth, self.lanes.idle
        lines = self._lines()
        table = lines.reshape(-1, depth, lines.shape[1])
        stage, positions = table[..., STAGE], table[..., CACHE_POSITION]
        new = ((stage < idle) & (positions >= self._prompts[:, None])).sum(1)
        self._passes += new > 0
        self._rows += new
        if isinstance(self._runner, LateRunner):
            live = stage < idle
            self._runner.expect(int(live.sum()), int(live.any(axis=1).sum()))
        slots, lane = np.nonzero((stage == depth - 1) | (stage == idle - 1))
        return np.stack([slots, positions[slots, lane]], axis=1).tolist(), longest

    def _complete(self, left: Sequence[Sequence[int]]) -> dict[int, int]:
        """Takes prefill out that has run its loops; leading positions that are exact in every plane, by slot."""
        complete: dict[int, int] = {}
        for chunk in self.prefill.leave() if self.prefill.chunks else ():
            slot = chunk.sequence
            if self.state_of(slot).request.prompt_logprobs is not None:
                self._read_prompt(self.state_of(slot), chunk)
            early = chunk.positions[chunk.targets < self.lanes.depth]
            if self._drops[slot] and len(early):
                slots = np.full(len(early), slot)
                rows = to_device(np.stack([slots, early, np.full_like(slots, chunk.loops - 1)]), self._model.device)
                self._planes.note_exits(rows[0], rows[1], rows[2])
            whole = chunk.positions[chunk.targets == self.lanes.depth]
            whole = whole[whole < self._exact[slot]]
            if len(whole):
                complete[slot] = max(complete.get(slot, 0), int(whole[-1]) + 1)
        size = self._planes.shape.size
        for slot, position in left:
            # only whole blocks are registered, and no position is left out
            if not (position + 1) % size and position < self._exact[slot]:
                complete[slot] = max(complete.get(slot, 0), position + 1)
        return complete
