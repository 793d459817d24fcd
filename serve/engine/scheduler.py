"""Who enters the next pass: admission, prompt rows beside decoding ones, and who gives way when pages run out.

First come, first admitted. A text is read a stretch at a time: what is left of a pass's rows beside those under way is
shared evenly by all texts that are still to be read, so that a long prompt neither holds up decoding nor a short one.
When pages run out, the one admitted last gives its own up and goes back to the head of the queue; the one admitted
first is never put back, so that work always ends.
"""

from collections import deque
from dataclasses import dataclass, field

from sigma0.serve.engine.block_pool import PagePool, page_name


@dataclass
class Entry:
    """A text as the scheduler sees it.

    Attributes:
        key: Its number.
        ids: All of its ids; what is written is added by the engine.
        goal: Columns that are to be read before it can write on.
        reusable: Columns that pages of an earlier text may stand for.
        read: Columns that have entered so far.
        slot: Its place in the engine's tables while it runs.
        pages: Held, in the order of its columns.
        known: Leading pages that others may find.
        name: Of the last of those.
        cached: Columns that were found instead of read, when it was admitted last.
        preemptions: How often it was put back.
        root: What stands ahead of its first page: texts share pages only where it is the same.
    """

    key: int
    ids: list[int]
    goal: int
    reusable: int
    read: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    known: int = 0
    name: bytes = b""
    cached: int = 0
    preemptions: int = 0
    root: bytes = b""

    def __post_init__(self) -> None:
        self.name = self.root


@dataclass(frozen=True)
class Stretch:
    """Columns of a text that enter the next pass.

    Attributes:
        entry: Whose.
        start: The first.
        stop: One past the last.
    """

    entry: Entry
    start: int
    stop: int


class Scheduler:
    """Queues texts and hands out slots, pages and rows.

    Args:
        pool: The pages.
        max_running: Texts that run at most.
        max_waiting: Texts in the queue at most.
        pass_rows: Rows that reading texts may bring a pass up to; decoding ones are never held back.

    Raises:
        ValueError: For a limit under 1.
    """

    def __init__(self, pool: PagePool, max_running: int, max_waiting: int, pass_rows: int) -> None:
        for name, value in (("max_running", max_running), ("max_waiting", max_waiting), ("pass_rows", pass_rows)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.pool = pool
        self.max_waiting = max_waiting
        self.pass_rows = pass_rows
        self.waiting: deque[Entry] = deque()
        self.running: dict[int, Entry] = {}
        self._slots = list(range(max_running - 1, -1, -1))

    @property
    def is_full(self) -> bool:
        """Whether the queue takes no more; those that can begin at once do not count as waiting."""
        return len(self.waiting) >= self.max_waiting + len(self._slots)

    def add(self, entry: Entry) -> None:
        """Queues a text."""
        self.waiting.append(entry)

    def remove(self, entry: Entry) -> None:
        """Forgets a text that is over, or not wanted any more."""
        if entry.key in self.running:
            self._let_go(entry)
        else:
            self.waiting.remove(entry)

    def admit(self) -> list[Entry]:
        """Takes texts from the queue as long as there are slots and pages to read them and to write one token."""
        admitted = []
        while self.waiting and self._slots:
            entry = self.waiting[0]
            found, name = self.pool.match(entry.ids, entry.reusable, entry.root)
            missing = self.pool.pages_for(entry.goal + 1) - len(found)
            # a page for each that runs already, lest the newcomer be put back at once
            if self.pool.available < missing + len(self.running):
                self.pool.release(found)
                break
            self.waiting.popleft()
            entry.pages, entry.known, entry.name = found, len(found), name
            entry.read = entry.cached = len(found) * self.pool.size
            entry.slot = self._slots.pop()
            self.running[entry.key] = entry
            while len(entry.pages) < self.pool.pages_for(entry.goal):
                page = self.pool.take()
                assert page is not None
                entry.pages.append(page)
            admitted.append(entry)
        return admitted

    def stretches(self, rows: int) -> list[Stretch]:
        """What is read next.

        Args:
            rows: Rows that the pass has already.
        """
        room = max(0, self.pass_rows - rows)
        # of more texts than rows the oldest, or short ones that keep coming would hold a long one up for ever
        reading = [entry for entry in self.running.values() if entry.read < entry.goal][:room]
        found = []
        for left, entry in zip(range(len(reading), 0, -1), sorted(reading, key=_left), strict=True):
            count = min(_left(entry), -(-room // left))
            if count:
                found.append(Stretch(entry, entry.read, entry.read + count))
                entry.read += count
                room -= count
        return found

    def make_room(self, entry: Entry, columns: int) -> list[Entry]:
        """Gives a running text pages for so many columns.

        Returns:
            Those that had to give theirs up, the text itself perhaps among them: it is then in the queue.
        """
        preempted: list[Entry] = []
        while len(entry.pages) < self.pool.pages_for(columns):
            page = self.pool.take()
            if page is not None:
                entry.pages.append(page)
                continue
            last = next(reversed(self.running.values()))
            self.preempt(last)
            preempted.append(last)
            if last is entry:
                break
        return preempted

    def preempt(self, entry: Entry) -> None:
        """Puts a running text back to the head of the queue; who does it says what is to be read anew."""
        self._let_go(entry)
        entry.preemptions += 1
        self.waiting.appendleft(entry)

    def complete(self, entry: Entry, columns: int) -> None:
        """Tells others of the leading columns of a text that are exact in every plane."""
        size = self.pool.size
        for place in range(entry.known, columns // size):
            entry.name = page_name(entry.name, entry.ids[place * size : (place + 1) * size])
            self.pool.know(entry.pages[place], entry.name)
            entry.known = place + 1

    def _let_go(self, entry: Entry) -> None:
        del self.running[entry.key]
        self._slots.append(entry.slot)
        self.pool.release(entry.pages)
        entry.pages, entry.slot, entry.known, entry.name, entry.read = [], -1, 0, entry.root, 0


def _left(entry: Entry) -> int:
    return entry.goal - entry.read
