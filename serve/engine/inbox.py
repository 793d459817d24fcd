"""An inbox: items from any thread for one that waits for them."""

import threading
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
