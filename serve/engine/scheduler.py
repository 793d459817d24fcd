"""Scheduler: admission, prefill chunks beside decoding rows, and preemption when blocks run out.

`schedule` says what the next pass runs; then the engine runs the model, and tells what came of it by `feed`, `register`
and `remove`. A pass feeds a token back by itself, so its block is reserved before.

First come, first admitted. Prompts are prefilled in chunks: the rows of a pass that decoding leaves are shared evenly
by all sequences with tokens still to prefill, so that a long prompt delays neither decoding nor a short prompt. When
blocks run out, the sequence admitted last is preempted: it frees its blocks and returns to the head of the queue. The
one admitted first is never preempted, so that work always ends.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from sigma0.serve.engine.block_pool import BlockPool, block_hash


@dataclass
class SequenceEntry:
    """A sequence as the scheduler sees it."""

    key: int  # Number of its request
    token_ids: list[int]  # All of its ids, drafts included
    prefill_end: int  # Cache positions that must have entered before it can decode
    cacheable: int  # Leading cache positions that blocks of the prefix cache may stand for
    # Leading cache positions that are ever written in every plane as a run of all loops does; None for all
    exact: int | None = None
    window: int = 1  # Cache positions that decode at the same time, at most
    entered: int = 0  # Cache positions that have entered so far
    slot: int = -1  # Batch slot while it runs; -1 in the queue
    blocks: list[int] = field(default_factory=list)  # Block table, in the order of its cache positions
    registered: int = 0  # Leading blocks that are registered in the prefix cache
    last_hash: bytes = b""  # Hash of the last of those
    cached: int = 0  # Cache positions found in the prefix cache when it was last admitted
    preemptions: int = 0  # How often it was preempted
    root: bytes = b""  # Hash ahead of its first block: only sequences with the same one share blocks
    # Cache positions that may have entered, since the segments before them are encoded; None for all
    ready: int | None = None

    @property
    def remaining(self) -> int:
        """Cache positions still to prefill."""
        return self.prefill_end - self.entered

    @property
    def may_enter(self) -> int:
        """Cache positions that may enter now."""
        return self.remaining if self.ready is None else min(self.remaining, self.ready - self.entered)


# Cache positions of a sequence that enter the next pass: the first one, and one past the last.
PrefillChunk = tuple[SequenceEntry, int, int]


@dataclass(frozen=True)
class ScheduledStep:
    """What the next pass needs, to be applied in this order."""

    preempted: tuple[tuple[SequenceEntry, int], ...] = ()  # Sequences that run no more, each with the slot that it had
    admitted: tuple[SequenceEntry, ...] = ()  # Sequences that have a slot now; one that was preempted may be among them
    tables: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # Block tables that are new or longer, by slot
    wiped: tuple[int, ...] = ()  # Blocks whose content is void
    prefill: tuple[PrefillChunk, ...] = ()  # Cache positions that enter


# Of a pass in which nothing changes but the tokens in flight: most of them.
_NOTHING = ScheduledStep()


class Scheduler:
    """Queues sequences and hands out batch slots, blocks and rows.

    Args:
        pool: The blocks.
        max_running: Sequences that run at most.
        max_waiting: Sequences in the queue at most; 0 where only what can start at once is taken.
        pass_rows: Rows up to which prefill may fill a pass; decoding rows are never delayed.
        segment: Cache positions that are encoded together, a multiple of a block's: a segment is prefilled once the
            one before it is encoded, and blocks of the prefix cache stand for whole ones. None without a codec.

    Raises:
        ValueError: For a limit under 1, a queue under 0, or a segment that is no multiple of a block.
    """

    def __init__(
        self, pool: BlockPool, max_running: int, max_waiting: int, pass_rows: int, segment: int | None = None
    ) -> None:
        least = {"max_running": (max_running, 1), "max_waiting": (max_waiting, 0), "pass_rows": (pass_rows, 1)}
        for name, (value, bound) in least.items():
            if value < bound:
                raise ValueError(f"{name} must be at least {bound}, got {value}")
        if segment is not None and segment % pool.size:
            raise ValueError(f"a segment of {segment} cache positions is no multiple of a block of {pool.size}")
        self.pool = pool
        self.segment = segment
        self.max_waiting = max_waiting
        self.pass_rows = pass_rows
        self.waiting: deque[SequenceEntry] = deque()
        self.running: dict[int, SequenceEntry] = {}
        self._slots = max_running
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._changed: set[int] = set()
        # those with positions still to prefill, in the order of `running`, and those whose next token may lack a block
        self._filling: dict[int, SequenceEntry] = {}
        self._short: set[int] = set()

    @property
    def is_full(self) -> bool:
        """Whether the queue takes no more; those that can start at once do not count as waiting."""
        return len(self.waiting) >= self.max_waiting + len(self._free_slots)

    def add(self, entry: SequenceEntry) -> None:
        """Queues a sequence."""
        self.waiting.append(entry)

    def remove(self, entry: SequenceEntry) -> None:
        """Drops a sequence that is finished or cancelled."""
        if entry.key in self.running:
            self._release(entry)
        else:
            self.waiting.remove(entry)

    def schedule(self, rows: int) -> ScheduledStep:
        """What the next pass runs.

        Args:
            rows: Rows that the pass has already: tokens that decode, and prefill under way.
        """
        if not (self._short or self.waiting or self._filling or self._changed):
            return _NOTHING
        preempted: list[tuple[SequenceEntry, int]] = []
        short = [entry for entry in self.running.values() if entry.key in self._short]
        self._short.clear()
        for entry in short:
            # one before it may have preempted it
            if entry.key in self.running:
                preempted += self.reserve(entry, entry.entered + 1)
        admitted = self.admit()
        prefill = self.prefill_chunks(rows)
        tables = {entry.slot: tuple(entry.blocks) for key, entry in self.running.items() if key in self._changed}
        self._changed.clear()
        return ScheduledStep(
            tuple(preempted), tuple(admitted), tables, tuple(self.pool.pop_allocated()), tuple(prefill)
        )

    def feed(self, entry: SequenceEntry, position: int, token_id: int) -> None:
        """Takes in an id that was fed back at a cache position; whatever stood there or after it is dropped."""
        entry.token_ids[position:] = (token_id,)
        entry.entered = entry.prefill_end = position + 1
        if position + 1 >= len(entry.blocks) * self.pool.size:
            self._short.add(entry.key)

    def admit(self) -> list[SequenceEntry]:
        """Starts queued sequences as long as there are slots, and blocks to prefill them and to feed one token."""
        admitted = []
        while self.waiting and self._free_slots:
            entry = self.waiting[0]
            blocks, last_hash = self._match(entry)
            missing = self.pool.blocks_for(entry.prefill_end + 1) - len(blocks)
            # one block to spare for each that runs already, lest the newcomer be preempted at once
            if self.pool.available < missing + len(self.running):
                self.pool.free(blocks)
                break
            self.waiting.popleft()
            entry.blocks, entry.registered, entry.last_hash = blocks, len(blocks), last_hash
            entry.entered = entry.cached = len(blocks) * self.pool.size
            entry.ready = None if self.segment is None else entry.entered + self.segment
            entry.slot = self._free_slots.pop()
            self.running[entry.key] = entry
            # at the same distance from slot to slot, so that rows of many sequences are read at once on a CPU
            near = entry.slot * (self.pool.total // self._slots)
            entry.blocks += self.pool.allocate_run(missing, near, blocks[-1] if blocks else None)
            self._changed.add(entry.key)
            if entry.remaining:
                self._filling[entry.key] = entry
            admitted.append(entry)
        return admitted

    def _match(self, entry: SequenceEntry) -> tuple[list[int], bytes]:
        """Blocks of the prefix cache that a sequence begins with, and the hash of the last one."""
        blocks, last_hash = self.pool.match_prefix(entry.token_ids, entry.cacheable, entry.root)
        whole = 1 if self.segment is None else self.segment // self.pool.size
        if len(blocks) % whole:
            # the others were a part of a segment
            self.pool.free(blocks)
            limit = len(blocks) // whole * whole * self.pool.size
            blocks, last_hash = self.pool.match_prefix(entry.token_ids, limit, entry.root)
        return blocks, last_hash

    def prefill_chunks(self, rows: int) -> list[PrefillChunk]:
        """The prefill of the next pass, which has so many rows already."""
        room = max(0, self.pass_rows - rows)
        if not room or not self._filling:
            return []
        # of more sequences than rows the oldest, or short ones that keep coming would starve a long one
        unfinished = [(wanted, entry) for entry in self._filling.values() if (wanted := entry.may_enter)][:room]
        shortest_first = sorted(unfinished, key=itemgetter(0))
        chunks = []
        for left, (wanted, entry) in zip(range(len(unfinished), 0, -1), shortest_first, strict=True):
            count = min(wanted, -(-room // left))
            if count:
                chunks.append((entry, entry.entered, entry.entered + count))
                entry.entered += count
                room -= count
                if not entry.remaining:
                    del self._filling[entry.key]
        return chunks

    def reserve(self, entry: SequenceEntry, positions: int) -> list[tuple[SequenceEntry, int]]:
        """Extends the block table of a running sequence to so many cache positions, preempting others if needed.

        Returns:
            The preempted sequences, each with the slot that it had; `entry` itself may be among them.
        """
        preempted: list[tuple[SequenceEntry, int]] = []
        while len(entry.blocks) < self.pool.blocks_for(positions):
            block = self.pool.allocate_run(1, after=entry.blocks[-1])
            if block:
                entry.blocks += block
                self._changed.add(entry.key)
                continue
            last = next(reversed(self.running.values()))
            preempted.append((last, last.slot))
            self.preempt(last)
            if last is entry:
                break
        return preempted

    def preempt(self, entry: SequenceEntry) -> None:
        """Moves a running sequence to the head of the queue; what had entered is to be recomputed."""
        if entry.remaining == 0:
            # blocks of others may not stand for what is still in flight, as far as can be known here
            exact = entry.entered if entry.exact is None else entry.exact
            entry.cacheable = max(0, min(entry.entered - entry.window, exact))
        self._release(entry)
        entry.preemptions += 1
        self.waiting.appendleft(entry)

    def register(self, entry: SequenceEntry, positions: int) -> None:
        """Registers the full blocks of so many leading cache positions, which are exact in every plane."""
        size = self.pool.size
        for index in range(entry.registered, positions // size):
            entry.last_hash = block_hash(entry.last_hash, entry.token_ids[index * size : (index + 1) * size])
            self.pool.register(entry.blocks[index], entry.last_hash)
            entry.registered = index + 1

    def _release(self, entry: SequenceEntry) -> None:
        del self.running[entry.key]
        self._filling.pop(entry.key, None)
        self._short.discard(entry.key)
        self._free_slots.append(entry.slot)
        self.pool.free(entry.blocks)
        entry.blocks, entry.slot = [], -1
