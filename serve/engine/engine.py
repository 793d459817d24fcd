"""Continuous batching by loop: `step()` is schedule, run, postprocess.

A pass runs one loop of every token in flight. Tokens that decode are in lanes (`sigma0.decode.lanes`), T for each
request; the positions of prompts before the last one run beside them. Requests stand at different loops, and start and
finish between passes. A row of cache position p at loop t attends to plane t of the positions up to p, all of which are
at least as deep by then, so that it sees what it would see alone. The first token is sampled at its exit while the last
prompt positions still run on to T.
"""

import secrets
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from sigma0.config import ExitConfig, switches
from sigma0.decode.batch import PassOutput, RunningBatch
from sigma0.decode.detokenizer import IncrementalDetokenizer, eos_ids
from sigma0.decode.grammar.compiled import CompiledGrammar
from sigma0.decode.grammar.vocabulary import vocabulary_of
from sigma0.decode.kv_store import BlockShape, PagedPlanes
from sigma0.decode.logits import BROKEN
from sigma0.decode.parallel import tp_group
from sigma0.decode.runner import RunnerChoice
from sigma0.decode.step import ENDS, SEQUENCE, TOKEN
from sigma0.decode.transfer import PassCounts, to_device
from sigma0.serve.engine.block_pool import BlockPool, root_hash
from sigma0.serve.engine.grounding import is_short, look_up
from sigma0.serve.engine.messages import (
    Busy,
    EngineLimits,
    EngineRequest,
    RequestFailed,
    RequestOutput,
    ServiceStatus,
    SlotView,
    TokenOutput,
    check_request,
    context_length,
)
from sigma0.serve.engine.outputs import UNKNOWN, OutputProcessor, Unjudged
from sigma0.serve.engine.request import RequestState
from sigma0.serve.engine.scheduler import ScheduledStep, Scheduler, SequenceEntry

if TYPE_CHECKING:
    from sigma0.models.hf_generate import DepthGenerationMixin

KeyedEvent = tuple[int, TokenOutput | RequestOutput | Unjudged | RequestFailed]


class Engine:
    """Requests in, tokens out, a pass at a time. Not safe for threads: one of them owns it.

    Args:
        model: A looped model.
        tokenizer: Its fast tokenizer.
        name: Of the model, in token outputs.
        limits: Its limits.
        watch: Whether statistics and verdicts are computed; None: as `SIGMA0_VERDICT` says.

    Attributes:
        context: Most tokens of prompt and answer together: limited by the model's positions and by the K/V memory.
        counts: What new tokens took so far, and what prompts took.
        defers_long: Whether outputs whose long context is to be looked through are left to the caller to judge.

    Raises:
        ValueError: If the K/V memory holds no block, or other processes hold parts of the model.
    """

    def __init__(
        self,
        model: "DepthGenerationMixin",
        tokenizer: PreTrainedTokenizerFast,
        name: str,
        limits: EngineLimits | None = None,
        watch: bool | None = None,
    ) -> None:
        if tp_group(model) is not None:
            raise ValueError("an engine needs a whole model: load it without tensor_parallel")
        self.limits = limits or EngineLimits()
        shape, slots = BlockShape.of(model, self.limits.page_size), self.limits.max_running
        kv = model.kv_config
        codecs = shape.codecs(kv) if kv.is_coded else ()
        self._segment = kv.segment if kv.is_coded else None
        blocks = shape.count_in(self.limits.kv_bytes, model.dtype, codecs, slots * (self._segment or 0))
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._open_scheduler(blocks, shape.size)
        self.context = context_length(model, blocks, shape.size)
        planes = PagedPlanes(shape, blocks, model.dtype, model.device, slots, self.context, kv)
        watching = switches().verdict if watch is None else watch
        # what diverges is the same under every rule
        fates = model.exit_rule(ExitConfig(mode="full")).params(watch=True)
        self._batch = RunningBatch(model, planes, slots, self.context, fates if watching else None)
        self.counts: PassCounts = self._batch.counts
        self._outputs = OutputProcessor(model, name, self._batch.lanes, self._batch.notes)
        self._states: dict[int, RequestState] = {}
        self.defers_long = False
        self._keys = count()
        self._tokens = self._exit_loops = self._preemptions = 0
        self._eos = eos_ids(model.generation_config.eos_token_id)

    def _open_scheduler(self, blocks: int, size: int) -> None:
        limits = self.limits
        self.pool = BlockPool(blocks, size)
        self.scheduler = Scheduler(self.pool, limits.max_running, limits.max_waiting, limits.pass_rows, self._segment)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._states)

    def status(self) -> ServiceStatus:
        """Its counters and gauges."""
        return ServiceStatus(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            passes=self.counts.passes,
            rows=self.counts.rows + self.counts.prompt_rows,
            tokens=self._tokens,
            exit_loops=self._exit_loops,
            blocks_total=self.pool.total,
            blocks_used=self.pool.used,
            blocks_cached=self.pool.cached,
            preemptions=self._preemptions,
        )

    def slots(self) -> tuple[SlotView, ...]:
        """The requests that run, in the order of their lanes, and those that wait, in that of the queue."""
        running = sorted(self.scheduler.running.values(), key=lambda entry: entry.slot)
        return tuple(self._states[entry.key].view() for entry in (*running, *self.scheduler.waiting))

    @property
    def runner(self) -> RunnerChoice:
        """What calls the step, and why."""
        return self._batch.runner

    def submit(self, request: EngineRequest, grammar: CompiledGrammar | None = None, key: int | None = None) -> int:
        """Queues a request; returns its number.

        Args:
            request: The request.
            grammar: What `compile` made of it; None: it is compiled here, if there is one.
            key: Its number; None: the next one.

        Raises:
            ValueError: For one that can never run.
            Busy: If the queue is full.
        """
        check_request(request, self.model, self.context)
        grammar = grammar or self.compile(request)
        if self.scheduler.is_full:
            raise Busy(f"{len(self.scheduler.waiting)} requests are waiting already")
        length = len(request.prompt_ids)
        exact = self._exact(length, request.exit_config)
        entry = SequenceEntry(
            next(self._keys) if key is None else key,
            list(request.prompt_ids),
            length,
            length - 1 if exact is None else min(exact, length - 1),
            exact=exact,
            window=self.model.num_loops,
            # what is found in the cache is not read
            root=root_hash(request.cache_salt if request.prompt_logprobs is None else secrets.token_hex(16)),
        )
        detokenizer = IncrementalDetokenizer(self.tokenizer, request.stop)
        watch, text = self._outputs.watch, self._outputs.texts.text()
        eos = frozenset[int]() if request.ignore_eos else self._eos
        self._states[entry.key] = RequestState(entry, request, detokenizer, eos, self.model, watch, text, grammar)
        self.scheduler.add(entry)
        return entry.key

    def compile(self, request: EngineRequest) -> CompiledGrammar | None:
        """What the answer of a request follows; may be called from any thread. The last few grammars are kept."""
        if request.grammar is None:
            return None
        vocabulary = vocabulary_of(self.tokenizer, int(self.model.config.vocab_size), self._eos)
        return vocabulary.compile(request.grammar)

    def _exact(self, length: int, config: ExitConfig) -> int | None:
        """Leading positions of a sequence with such a prompt whose planes are a run of all loops; None for all."""
        if not self.model.stages[1]:
            return length if config.after_exit == "drop" else None
        if config.after_exit == "verify":
            return None
        # the coda's K/V of what is read at exits, or of a prompt that runs fewer loops, belong to this request alone
        fewer = self.model.exit_rule(config).last_loop < self.model.num_loops
        return 0 if fewer else length - 1

    def cancel(self, key: int) -> None:
        """Ends a request without further output."""
        state = self._states.get(key)
        if state is not None:
            self._remove(state)

    def reset(self) -> list[int]:
        """Ends all requests without further output, and empties the prefix cache, whatever state both are in.

        A step that breaks leaves requests between scheduler and batch, and blocks that nothing has been written to.

        Returns:
            The numbers of the requests.
        """
        keys = list(self._states)
        self._states.clear()
        self._open_scheduler(self.pool.total, self.pool.size)
        self._batch.reset()
        self._outputs.reset()
        return keys

    def step(self) -> list[KeyedEvent]:
        """One pass; what it output."""
        with torch.no_grad():
            events = self._schedule()
            return events + self._postprocess(self._batch.run()) if len(self._batch) else events

    def _schedule(self) -> list[KeyedEvent]:
        """Makes the batch what the scheduler wants it to be; ends of requests whose grammar broke at that."""
        step = self.scheduler.schedule(len(self._batch))
        self._preemptions += len(step.preempted)
        if step.preempted:
            self._outputs.flush()
        self._apply(step)
        return [self._fail(self._state_of(slot), self._batch.error_of(slot)) for slot in self._batch.broken]

    def _apply(self, step: ScheduledStep) -> None:
        """Makes the batch what the scheduler wants it to be before a pass."""
        batch, states = self._batch, self._states
        for entry, slot in step.preempted:
            state = states[entry.key]
            state.suspended = batch.preempt(slot, [token.depth for token in state.outputs])
            if state.suspended is not None:
                entry.prefill_end = state.suspended.end
        for entry in step.admitted:
            state = states[entry.key]
            if not entry.preemptions:
                # on resume it also finds the blocks that it wrote itself
                state.admit(entry.cached)
            batch.admit(entry.slot, state.params, entry.token_ids, entry.cached, entry.exact, state.suspended)
            state.suspended = None
        for slot, blocks in step.tables.items():
            batch.planes.place(slot, blocks)
        if step.wiped:
            # a NaN that an earlier request left must not reach the next one, not even with weight 0
            batch.planes.wipe(step.wiped)
        if step.prefill:
            batch.enter([(entry.slot, start, entry.token_ids[start:stop]) for entry, start, stop in step.prefill])
        batch.resume()

    def _state_of(self, slot: int) -> RequestState:
        """The request in a slot."""
        return self._states[self._batch.params_of(slot).key]

    def _remove(self, state: RequestState) -> None:
        """Ends a request, waiting or running."""
        entry = state.entry
        if entry.slot >= 0:
            self._batch.remove(entry.slot)
        self.scheduler.remove(entry)
        state.is_over = True
        del self._states[entry.key]

    def _postprocess(self, passed: PassOutput) -> list[KeyedEvent]:
        """Takes in the tokens of a pass, and makes its outputs."""
        batch, lines, feed = self._batch, passed.step.lines.tolist(), self.scheduler.feed
        events: list[KeyedEvent] = []
        broken = {line[SEQUENCE] for line in lines if line[TOKEN] == BROKEN}
        rows: list[int] = []
        states: list[RequestState] = []
        watch = counts = reads = self._outputs.watch
        for row, (emitted, slot, token_id, _, fed_at, _, ends, _, fresh) in enumerate(lines):
            if slot in broken:
                continue
            state = self._state_of(slot)
            if fresh and not ends:
                feed(state.entry, fed_at, token_id)
            if emitted:
                rows.append(row)
                states.append(state)
                counts = counts or state.stops
                reads = reads or state.request.logprobs is not None
        for slot, positions, prompt_logits in passed.prompts:
            self._state_of(slot).note_prompt(positions, prompt_logits)
        for slot, ready in passed.ready.items():
            self._state_of(slot).entry.ready = ready
        for slot, exact in passed.complete.items():
            if slot not in broken:
                self.scheduler.register(self._state_of(slot).entry, exact)
        for slot in broken:
            state = self._state_of(slot)
            events.append(self._fail(state, batch.error_of(slot)))
        current = lines if len(rows) == len(lines) else [lines[row] for row in rows]
        logits = passed.step.logits if rows and reads else None
        known = [UNKNOWN] * len(rows)
        if rows and counts:
            read = logits
            if logits is not None and len(rows) < len(logits):
                read = logits.index_select(0, to_device(np.array(rows), logits.device))
            known = self._outputs.known(states, current, read)
        if watch:
            left = [(self._state_of(slot), slot, position) for slot, position in passed.left if slot not in broken]
            # after what has told the newest ids, which are read with the states
            self._outputs.note_left(left)
        for row, state, line, signs in zip(rows, states, current, known, strict=True):
            detokenizer = state.detokenizer
            try:
                text, is_last = detokenizer.add(line[TOKEN]), line[ENDS]
                is_last = is_last or detokenizer.stopped or (state.stops and state.collapses(signs.repetition))
                if is_last:
                    text += detokenizer.end()
            except Exception as error:
                events.append(self._fail(state, error))
                continue
            token = self._outputs.output(state, text, line, signs, logits, row)
            self._tokens += 1
            self._exit_loops += token.depth
            state.add(token)
            events.append((state.entry.key, token))
            if is_last:
                events.append(self._finish(state))
        return events

    def _finish(self, state: RequestState) -> KeyedEvent:
        """The end of a request."""
        try:
            output = self._outputs.finish(state, self._batch.work_of(state.entry.slot))
            finished: RequestOutput | Unjudged = output
            if self._outputs.watch:
                judge = partial(self._outputs.judged, output, state.request)
                later = self.defers_long and not is_short(state.request.context)
                finished = Unjudged(judge) if later else judge(look_up)
        except Exception as error:
            return self._fail(state, error)
        self._remove(state)
        return state.entry.key, finished

    def _fail(self, state: RequestState, error: Exception | None) -> KeyedEvent:
        """Ends a request in which something broke, None for logits that are no numbers; the others go on."""
        # the message may quote a prompt: the caller logs its type and frames
        kind = "FloatingPointError" if error is None else type(error).__name__
        self._remove(state)
        return state.entry.key, RequestFailed(f"{kind} inside of this request", kind)
