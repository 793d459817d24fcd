"""Continuous batching by loop: `step()` is schedule, run, postprocess.

A pass runs one loop of every row in flight: prefill chunks, rows whose tokens are still to be sampled, and rows that
run on to loop T after their exits. Requests stand at different loops, and start and finish between passes. A row of
cache position p at loop t attends to plane t of the positions up to p, all of which are at least as deep by then, so
that it sees what it would see alone. The same holds for prefill chunks: each enters one pass after the one before it.
The first token is sampled at its exit while the last prompt positions still run on to T.

Preemption is by recomputation. The loop count of each row in flight is kept; on resume the K/V of every position are
recomputed to that count (under `drop` to the loop where the row had stopped), and the rows are put back in flight once
all of them are. So the output does not depend on being preempted.
"""

from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sigma0.config import switches
from sigma0.decode.batch import TRAILING, Ints
from sigma0.decode.detokenizer import IncrementalDetokenizer
from sigma0.decode.finite import NOT_FINITE
from sigma0.decode.paged_kv import BlockShape, PagedPlanes
from sigma0.decode.paged_step import PassOutput
from sigma0.decode.parallel import tp_group
from sigma0.decode.step import Exits, TrailingLogits
from sigma0.decode.transfer import to_host
from sigma0.serve.engine.block_pool import BlockPool, root_hash
from sigma0.serve.engine.in_flight import InFlightBatch
from sigma0.serve.engine.messages import (
    Busy,
    EngineRequest,
    RequestFailed,
    RequestOutput,
    ServedModel,
    ServiceStatus,
    TokenOutput,
    check_request,
    context_length,
)
from sigma0.serve.engine.outputs import OutputProcessor, SampledToken
from sigma0.serve.engine.request import RequestState, VerifiedRequestState
from sigma0.serve.engine.scheduler import Scheduler, SequenceEntry

Event = tuple[int, TokenOutput | RequestOutput | RequestFailed]


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine.

    Attributes:
        max_running: Requests that run at most.
        max_waiting: Requests in the queue at most.
        pass_rows: Rows up to which prefill may fill a pass.
        page_size: Cache positions of a block of K/V.
        kv_bytes: Memory for K/V in bytes, allocated when the engine is made.
    """

    max_running: int = 16
    max_waiting: int = 64
    pass_rows: int = 256
    page_size: int = 16
    kv_bytes: int = 2**28


class Engine:
    """Requests in, tokens out, a pass at a time. Not safe for threads: one of them owns it.

    Args:
        model: A looped model.
        tokenizer: Its fast tokenizer.
        name: Of the model, in token outputs.
        limits: Its limits.
        watch: Whether statistics and verdicts are computed; None: as `SIGMA0_VERDICT` says.

    Raises:
        ValueError: If the K/V memory holds no block, or other processes hold parts of the model.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: PreTrainedTokenizerFast,
        name: str,
        limits: EngineLimits | None = None,
        watch: bool | None = None,
    ) -> None:
        if tp_group(model) is not None:
            raise ValueError("an engine needs a whole model: load it without tensor_parallel")
        self.limits = limits or EngineLimits()
        shape = BlockShape.of(model, self.limits.page_size)
        blocks = shape.count_in(self.limits.kv_bytes, model.dtype)
        self.model = model
        self.tokenizer = tokenizer
        self.pool = BlockPool(blocks, shape.size)
        slots = self.limits.max_running
        self.scheduler = Scheduler(self.pool, slots, self.limits.max_waiting, self.limits.pass_rows)
        self._planes = PagedPlanes(shape, blocks, model.dtype, model.device)
        self._batch = InFlightBatch(model, self._planes, self.scheduler, slots)
        longest = min(model.config.max_position_embeddings, blocks * shape.size)
        watching = switches().verdict if watch is None else watch
        self._outputs = OutputProcessor(model, name, slots, longest, watching)
        self._states: dict[int, RequestState] = {}
        self._keys = count()
        self._tokens = self._exit_loops = self._preemptions = 0
        eos = model.generation_config.eos_token_id
        self._eos = frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._states)

    def status(self) -> ServiceStatus:
        """Its counters and gauges."""
        return ServiceStatus(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            passes=self._batch.passes,
            rows=self._batch.rows_run,
            tokens=self._tokens,
            exit_loops=self._exit_loops,
            blocks_total=self.pool.total,
            blocks_used=self.pool.used,
            blocks_cached=self.pool.cached,
            preemptions=self._preemptions,
        )

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together: limited by the model's positions and by the K/V memory."""
        return context_length(self.model, self.pool.total, self.pool.size)

    def check(self, request: EngineRequest) -> None:
        """Refuses a request that can never run; may be called from any thread.

        Raises:
            ValueError: Naming what does not fit.
        """
        check_request(request, self.model, self.context)

    def submit(self, request: EngineRequest) -> int:
        """Queues a request; returns its number.

        Raises:
            ValueError: For one that can never run.
            Busy: If the queue is full.
        """
        self.check(request)
        prompt_length, rule = len(request.prompt_ids), self.model.exit_rule(request.exit_config)
        if self.scheduler.is_full:
            raise Busy(f"{len(self.scheduler.waiting)} requests are waiting already")
        root = root_hash(request.cache_salt)
        prompt_ids = list(request.prompt_ids)
        entry = SequenceEntry(next(self._keys), prompt_ids, prompt_length, prompt_length - 1, root=root)
        verifies = request.exit_config.after_exit == "verify"
        detokenizer = IncrementalDetokenizer(self.tokenizer, request.stop)
        kind = VerifiedRequestState if verifies else RequestState
        state = kind(entry, request, rule, detokenizer, self._eos, self.model, self._outputs.watch)
        self._states[entry.key] = state
        self.scheduler.add(entry)
        return entry.key

    def cancel(self, key: int) -> None:
        """Ends a request without further output."""
        state = self._states.get(key)
        if state is not None:
            self._remove(state)

    def step(self) -> list[Event]:
        """One pass; what it output."""
        self._schedule()
        return self._postprocess(self._batch.run()) if len(self._batch) else []

    def _schedule(self) -> None:
        for entry in self.scheduler.admit():
            state = self._states[entry.key]
            if not entry.preemptions:
                # on resume it also finds the blocks that it wrote itself
                state.cached = entry.cached
            self._batch.states[entry.slot] = state
            self._outputs.begin(state)
        self._batch.resume()
        entering: list[tuple[RequestState, Ints]] = []
        for key in list(self.scheduler.running):
            # one that was preempted within this loop runs no more
            if key in self.scheduler.running:
                state = self._states[key]
                positions = self._decode_positions(state)
                if positions:
                    # one that is preempted later in this loop was admitted later, and is not among these
                    entering.append((state, np.array(positions)))
        rows = len(self._batch) + sum(len(positions) for _, positions in entering)
        for chunk in self.scheduler.prefill_chunks(rows):
            entering.append((self._states[chunk.entry.key], np.arange(chunk.start, chunk.stop)))
        for state, chunk_positions in entering:
            self._outputs.enter(state, chunk_positions)
        self._batch.add(entering)
        if blocks := self.pool.pop_allocated():
            # a NaN that an earlier request left must not reach the next one, not even with weight 0
            self._planes.wipe(blocks)

    def _decode_positions(self, state: RequestState) -> list[int]:
        """Positions of new tokens to feed back, once all before them have entered; none if it was preempted instead."""
        entry = state.entry
        if not state.pending or entry.remaining > 0 or state.is_recomputing:
            return []
        slots = {running.key: running.slot for running in self.scheduler.running.values()}
        for preempted in self.scheduler.allocate(entry, state.pending[-1] + 1):
            self._preempt(self._states[preempted.key], slots[preempted.key])
        if entry.key not in self.scheduler.running:
            return []
        positions = list(state.pending)
        state.pending.clear()
        entry.prefill_end = entry.entered = positions[-1] + 1
        return positions

    def _preempt(self, state: RequestState, slot: int) -> None:
        self._outputs.save(state, slot)
        self._batch.preempt(state, slot)
        self._preemptions += 1

    def _remove(self, state: RequestState) -> None:
        """Ends a request, waiting or running."""
        slot = state.entry.slot
        self.scheduler.remove(state.entry)
        if slot >= 0:
            self._batch.remove(slot)
        del self._states[state.entry.key]

    def _postprocess(self, passed: PassOutput) -> list[Event]:
        """Samples tokens, retires rows, and makes the outputs of a pass."""
        rows = passed.rows
        self._outputs.record(rows, passed.fates, passed.loop_end_met)
        for slot, met, diverged in passed.first:
            state = self._batch.state_of(slot)
            assert isinstance(state, VerifiedRequestState)
            state.note_first(met, diverged)
        sampled_rows = np.concatenate([passed.stopped, self._checked(passed)])
        logits = self._batch.logits(sampled_rows) if len(sampled_rows) else None
        self._batch.retire(passed.stopped)
        if logits is None:
            return []
        greedy = to_host(torch.stack([logits.argmax(-1).double(), logits.amax(-1).isfinite().double()]))
        events: list[Event] = []
        sampled: list[SampledToken] = []
        for slot in np.unique(rows.batch_slots[sampled_rows]).tolist():
            state = self._batch.state_of(slot)
            indices = np.flatnonzero(rows.batch_slots[sampled_rows] == slot)
            try:
                sampled += self._sample(state, passed, sampled_rows, indices, logits, greedy)
            except Exception as error:
                events.append(self._fail(state, error))
        for token, output in zip(sampled, self._outputs.outputs(sampled), strict=True):
            try:
                events += self._output(token.state, output, token.is_last)
            except Exception as error:
                events.append(self._fail(token.state, error))
        return events

    def _fail(self, state: RequestState, error: Exception) -> Event:
        """Ends a request in which something broke; the others go on."""
        # the message may quote a prompt: the caller logs its type and frames
        failure = RequestFailed(f"{type(error).__name__} inside of this request")
        failure.__cause__ = error
        self._remove(state)
        return state.entry.key, failure

    def _checked(self, passed: PassOutput) -> Ints:
        """Rows whose draft tokens are verified in this pass, in the order of their positions."""
        rows = passed.rows
        checked = []
        for row in np.flatnonzero(rows.roles == TRAILING).tolist():
            state = self._batch.state_of(rows.batch_slots[row])
            if state.is_checked(int(rows.cache_positions[row]), int(rows.loops[row])):
                checked.append(row)
        order = sorted(checked, key=lambda row: int(rows.cache_positions[row]))
        return np.array(order, dtype=np.int64)

    def _sample(
        self,
        state: RequestState,
        passed: PassOutput,
        sampled_rows: Ints,
        indices: Ints,
        logits: Tensor,
        greedy: npt.NDArray[np.float64],
    ) -> list[SampledToken]:
        """The tokens of one request that become final in a pass, one at most.

        Args:
            state: The request.
            passed: The pass.
            sampled_rows: Rows with logits: first those that stop, then those whose drafts are verified, `[N]`.
            indices: Which of them are this request's.
            logits: `[N, V]`.
            greedy: Their argmax, and 1 where they are finite, on the host, `[2, N]`.
        """
        if not greedy[1, indices].all():
            raise FloatingPointError(NOT_FINITE)
        rows, stopped = passed.rows, len(passed.stopped)
        if not isinstance(state, VerifiedRequestState):
            (index,) = indices.tolist()
            token_id = int(greedy[0, index]) if state.is_greedy else state.sample(logits[index])
            depth = int(rows.loops[sampled_rows[index]])
            flags = bool(passed.met[index]), bool(passed.diverged[index])
            return [SampledToken(state, token_id, depth, *flags, logits[index], state.is_last(token_id))]
        exits = trailing = None
        drafted, checked = indices[indices < stopped], indices[indices >= stopped]
        if len(drafted):
            sequences = np.zeros(len(drafted), dtype=np.int64)
            loops = rows.loops[sampled_rows[drafted]]
            exits = Exits(sequences, loops, passed.met[drafted], logits[drafted], passed.diverged[drafted])
        if len(checked):
            sequences = np.zeros(len(checked), dtype=np.int64)
            which = sampled_rows[checked]
            trailing = TrailingLogits(sequences, rows.cache_positions[which], rows.loops[which], logits[checked])
        verified = state.verify(exits, trailing)
        if state.rejected_from is not None:
            self._batch.drop_from(state.entry.slot, state.rejected_from)
            state.rejected_from = None
        return [
            SampledToken(state, token.token_id, token.depth, token.met, token.diverged, row, token.last)
            for token, row in verified
        ]

    def _output(self, state: RequestState, token: TokenOutput, is_last: bool) -> list[Event]:
        """A token with its text, and the end of the request if it is the last."""
        text = state.detokenizer.add(token.id)
        is_last = is_last or state.detokenizer.stopped or state.collapses()
        if is_last:
            text += state.detokenizer.end()
        token = replace(token, text=text)
        state.outputs.append(token)
        self._tokens += 1
        self._exit_loops += token.depth
        events: list[Event] = [(state.entry.key, token)]
        if is_last:
            events.append((state.entry.key, self._outputs.finish(state)))
            self._remove(state)
        elif not isinstance(state, VerifiedRequestState):
            state.append(token.id)
        return events
