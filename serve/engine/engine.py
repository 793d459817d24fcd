"""Continuous batching by loop: `step()` is schedule, pass, emit.

A pass runs one loop of every row there is: prompts a stretch at a time, tokens that are still to be read, and tokens
that run on behind their exits. Requests stand at different loops and come and go between passes. A row of column p at
loop t attends to plane t of the columns up to p, all of which are at least as deep by then, so that it sees what it
would see alone; so does a prompt's next stretch, which enters one pass behind the one before it. The token behind a
prompt is read at its exit while the prompt's last columns still run on to T.

A request that gives its pages up is put back into the queue with a note of how far each of its rows had got. All its
columns are then read anew, each to where it was (under `drop` to where it had stopped), and go on from there once all
of them are: what it writes does not depend on whether it was put back.
"""

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigma0.config import switches
from sigma0.decode.batch import Ints
from sigma0.decode.detokenizer import TextFeed
from sigma0.decode.finite import NOT_FINITE
from sigma0.decode.paged_kv import PagedPlanes, PageShape
from sigma0.decode.paged_step import Passed
from sigma0.decode.parallel import processes_of
from sigma0.decode.rows import FOLLOWER
from sigma0.decode.step import Exits, Readings
from sigma0.decode.transfer import to_host
from sigma0.serve.engine.block_pool import PagePool, root_name
from sigma0.serve.engine.in_flight import Flight
from sigma0.serve.engine.messages import Busy, Job, JobDone, JobFailed, ServiceStatus, TokenTold
from sigma0.serve.engine.outputs import Read, Teller
from sigma0.serve.engine.request import Running, Verified
from sigma0.serve.engine.scheduler import Entry, Scheduler
from sigma0.serve.engine.validation import check_job, context_of

Event = tuple[int, TokenTold | JobDone | JobFailed]


@dataclass(frozen=True)
class EngineLimits:
    """What an engine may hold.

    Attributes:
        max_running: Requests that run at most.
        max_waiting: Requests in the queue at most.
        pass_rows: Rows that reading prompts may bring a pass up to.
        page_size: Columns of a page.
        kv_bytes: Of K/V, fixed when the engine is made.
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
        name: Of the model, in what is told.
        limits: What it may hold.
        watch: Whether statistics and verdicts are told; None: as `SIGMA0_VERDICT` says.

    Raises:
        ValueError: If the K/V hold no page, or other processes hold parts of the model.
    """

    def __init__(
        self, model: Any, tokenizer: Any, name: str, limits: EngineLimits | None = None, watch: bool | None = None
    ) -> None:
        if processes_of(model) is not None:
            raise ValueError("an engine needs a whole model: load it without tensor_parallel")
        self.limits = limits or EngineLimits()
        shape = PageShape.of(model, self.limits.page_size)
        pages = shape.count_in(self.limits.kv_bytes, model.dtype)
        self.model = model
        self.tokenizer = tokenizer
        self.pool = PagePool(pages, shape.size)
        running = self.limits.max_running
        self.scheduler = Scheduler(self.pool, running, self.limits.max_waiting, self.limits.pass_rows)
        self._planes = PagedPlanes(shape, pages, model.dtype, model.device)
        self._flight = Flight(model, self._planes, self.scheduler, running)
        longest = min(model.config.max_position_embeddings, pages * shape.size)
        watching = switches().verdict if watch is None else watch
        self._teller = Teller(model, name, running, longest, watching)
        self._jobs: dict[int, Running] = {}
        self._keys = count()
        self._tokens = self._exit_loops = self._preemptions = 0
        told = model.generation_config.eos_token_id
        self._eos = frozenset() if told is None else frozenset([told] if isinstance(told, int) else told)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._jobs)

    def status(self) -> ServiceStatus:
        """How it stands."""
        return ServiceStatus(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            passes=self._flight.passes,
            rows=self._flight.rows_run,
            tokens=self._tokens,
            exit_loops=self._exit_loops,
            pages_total=self.pool.total,
            pages_used=self.pool.used,
            pages_cached=self.pool.cached,
            preemptions=self._preemptions,
        )

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together: as many as the model's positions and the K/V hold."""
        return context_of(self.model, self.pool.total, self.pool.size)

    def check(self, job: Job) -> None:
        """Refuses what can never run; may be called from any thread.

        Raises:
            ValueError: Naming what does not fit.
        """
        check_job(job, self.model, self.context)

    def submit(self, job: Job) -> int:
        """Queues a request; returns its number.

        Raises:
            ValueError: For one that can never run.
            Busy: If the queue is full.
        """
        self.check(job)
        goal, rule = len(job.prompt_ids), self.model.exit_rule(job.exit_config)
        if self.scheduler.is_full:
            raise Busy(f"{len(self.scheduler.waiting)} requests are waiting already")
        entry = Entry(next(self._keys), list(job.prompt_ids), goal, goal - 1, root=root_name(job.cache_salt))
        verified = job.exit_config.after_exit == "verify"
        feed = TextFeed(self.tokenizer, job.stop)
        kind = Verified if verified else Running
        running = kind(entry, job, rule, feed, self._eos, self.model, self._teller.watch)
        self._jobs[entry.key] = running
        self.scheduler.add(entry)
        return entry.key

    def cancel(self, key: int) -> None:
        """Forgets a request; nothing more is told of it."""
        running = self._jobs.get(key)
        if running is not None:
            self._forget(running)

    def step(self) -> list[Event]:
        """One pass; what came of it."""
        self._schedule()
        return self._emit(self._flight.run()) if len(self._flight) else []

    def _schedule(self) -> None:
        for entry in self.scheduler.admit():
            running = self._jobs[entry.key]
            if not entry.preemptions:
                # later it finds what it has written itself
                running.cached = entry.cached
            self._flight.by_slot[entry.slot] = running
            self._teller.begin(running)
        self._flight.go_on()
        entering: list[tuple[Running, Ints]] = []
        for key in list(self.scheduler.running):
            # one that was put back in this loop runs no more
            if key in self.scheduler.running:
                running = self._jobs[key]
                fed = self._fed_back(running)
                if fed:
                    # whoever is put back later in this loop was admitted later, and is not among these
                    entering.append((running, np.array(fed)))
        rows = len(self._flight) + sum(len(columns) for _, columns in entering)
        for stretch in self.scheduler.stretches(rows):
            entering.append((self._jobs[stretch.entry.key], np.arange(stretch.start, stretch.stop)))
        for running, own in entering:
            self._teller.enter(running, own)
        self._flight.enter(entering)
        if taken := self.pool.taken():
            # what is no number must not be seen by whoever has the page next, not even with weight 0
            self._planes.wipe(taken)

    def _fed_back(self, running: Running) -> list[int]:
        """Columns of tokens that are fed back, once all before them have entered; none if it was put back for them."""
        entry = running.entry
        if not running.waiting or entry.read < entry.goal or running.is_replaying:
            return []
        slots = {each.key: each.slot for each in self.scheduler.running.values()}
        for other in self.scheduler.make_room(entry, running.waiting[-1] + 1):
            self._put_back(self._jobs[other.key], slots[other.key])
        if entry.key not in self.scheduler.running:
            return []
        columns = list(running.waiting)
        running.waiting.clear()
        entry.goal = entry.read = columns[-1] + 1
        return columns

    def _put_back(self, running: Running, slot: int) -> None:
        self._teller.save(running, slot)
        self._flight.put_back(running, slot)
        self._preemptions += 1

    def _forget(self, running: Running) -> None:
        """Ends a request, whatever it was at."""
        slot = running.entry.slot
        self.scheduler.remove(running.entry)
        if slot >= 0:
            self._flight.clear(slot)
        del self._jobs[running.entry.key]

    def _emit(self, passed: Passed) -> list[Event]:
        """Reads what stopped, lets rows leave, and tells the tokens."""
        rows = passed.rows
        self._teller.put(rows, passed.fates, passed.held)
        for slot, met, diverged in passed.first:
            running = self._flight.owner(slot)
            assert isinstance(running, Verified)
            running.judge_first(met, diverged)
        checked = self._checked(passed)
        read = np.concatenate([passed.stopped, checked])
        logits = self._flight.head(read) if len(read) else None
        self._flight.settle(passed.stopped)
        if logits is None:
            return []
        likeliest = to_host(torch.stack([logits.argmax(-1).double(), logits.amax(-1).isfinite().double()]))
        events: list[Event] = []
        settled: list[Read] = []
        for slot in np.unique(rows.texts[read]).tolist():
            running = self._flight.owner(slot)
            own = np.flatnonzero(rows.texts[read] == slot)
            try:
                settled += self._settled(running, passed, read, own, len(passed.stopped), logits, likeliest)
            except Exception as error:
                events.append(self._failed(running, error))
        for each, token in zip(settled, self._teller.tell(settled), strict=True):
            try:
                events += self._tell(each.running, token, each.is_last)
            except Exception as error:
                events.append(self._failed(each.running, error))
        return events

    def _failed(self, running: Running, error: Exception) -> Event:
        """Ends a request in which something broke; the others go on."""
        # what it says may quote a prompt: whoever asked logs what it was and where
        failed = JobFailed(f"{type(error).__name__} inside of this request")
        failed.__cause__ = error
        self._forget(running)
        return running.entry.key, failed

    def _checked(self, passed: Passed) -> Ints:
        """Rows whose tokens were proposed in an earlier pass and are read again."""
        rows, found = passed.rows, []
        for row in np.flatnonzero(rows.roles == FOLLOWER).tolist():
            running = self._flight.owner(rows.texts[row])
            if running.reads_again(int(rows.columns[row]), int(rows.loops[row])):
                found.append(row)
        order = sorted(found, key=lambda row: int(rows.columns[row]))
        return np.array(order, dtype=np.int64)

    def _settled(
        self,
        running: Running,
        passed: Passed,
        read: Ints,
        own: Ints,
        stopped: int,
        logits: Tensor,
        likeliest: Any,
    ) -> list[Read]:
        """The tokens of one request that a pass settles, one at most."""
        if not likeliest[1, own].all():
            raise FloatingPointError(NOT_FINITE)
        rows = passed.rows
        if not isinstance(running, Verified):
            (place,) = own.tolist()
            token_id = int(likeliest[0, place]) if running.is_plain else running.choose(logits[place])
            depth = int(rows.loops[read[place]])
            flags = bool(passed.met[place]), bool(passed.diverged[place])
            return [Read(running, token_id, depth, *flags, logits[place], running.is_last(token_id))]
        exits = readings = None
        first, again = own[own < stopped], own[own >= stopped]
        if len(first):
            none = np.zeros(len(first), dtype=np.int64)
            exits = Exits(none, rows.loops[read[first]], passed.met[first], logits[first], passed.diverged[first])
        if len(again):
            none = np.zeros(len(again), dtype=np.int64)
            readings = Readings(none, rows.columns[read[again]], rows.loops[read[again]], logits[again])
        told = running.take(exits, readings)
        if running.dropped is not None:
            self._flight.take_back(running.entry.slot, running.dropped)
            running.dropped = None
        return [Read(running, each.token_id, each.depth, each.met, each.diverged, row, each.last) for each, row in told]

    def _tell(self, running: Running, token: TokenTold, is_last: bool) -> list[Event]:
        """A token, and the end if it is the last."""
        text = running.feed.add(token.id)
        is_last = is_last or running.feed.stopped or running.collapses()
        if is_last:
            text += running.feed.end()
        token = replace(token, text=text)
        running.told.append(token)
        self._tokens += 1
        self._exit_loops += token.depth
        events: list[Event] = [(running.entry.key, token)]
        if is_last:
            events.append((running.entry.key, self._teller.done(running)))
            self._forget(running)
        elif not isinstance(running, Verified):
            running.append(token.id)
        return events
