"""Queues: an inbox, from any thread for one that waits; a mailbox, for one reader on an event loop."""

import asyncio
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items in the order in which they were put in."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._wake = threading.Condition()

    def put(self, *items: T) -> None:
        """Adds items."""
        with self._wake:
            self._items += items
            self._wake.notify()

    def take(self, wait: bool = True) -> list[T]:
        """All items that are there.

        Args:
            wait: Whether to wait for the next one where there is none.
        """
        with self._wake:
            while wait and not self._items:
                self._wake.wait()
            taken, self._items = self._items, []
        return taken


class Mailbox(Generic[T]):
    """Items in the order in which they were put in, with less around them than `asyncio.Queue` has for many."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Adds an item. To be called on the reader's event loop, or before there is a reader."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> T:
        """The next item, as soon as there is one."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._items.popleft()
