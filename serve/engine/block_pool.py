"""Pages of K/V: who holds them, and which hold the beginning of a text that may come again. No tensors here.

A page is a stretch of `size` columns in all planes. Pages that are complete, every plane of every column exactly as a
run of all loops would write it, are known by what they hold: the hash of their ids chained to that of the page before.
A salt stands ahead of the first page, so that texts with different salts, or one and none, share no page. Known pages
stay when nobody holds them any more, and are given up oldest first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256


class PagePool:
    """A fixed number of pages.

    Args:
        total: Pages, at least 1.
        size: Columns of a page, at least 1.

    Raises:
        ValueError: For less.
    """

    def __init__(self, total: int, size: int) -> None:
        if total < 1 or size < 1:
            raise ValueError(f"a pool needs at least one page of one column, got {total} of {size}")
        self.total = total
        self.size = size
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._known: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._taken: list[int] = []

    @property
    def available(self) -> int:
        """Pages that can be had: free ones, and known ones that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.total - self.available

    @property
    def cached(self) -> int:
        """Known pages that nobody holds."""
        return len(self._idle)

    def pages_for(self, columns: int) -> int:
        """Pages that so many columns take."""
        return -(-columns // self.size)

    def take(self) -> int | None:
        """A page with nothing in it that counts; None where there is none."""
        if not self._free and self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._known[self._names.pop(page)]
            self._free.append(page)
        if not self._free:
            return None
        page = self._free.pop()
        self._holders[page] = 1
        self._taken.append(page)
        return page

    def taken(self) -> list[int]:
        """Pages that were taken since this was asked last: what they held is of no one any more."""
        taken, self._taken = self._taken, []
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Lets go of pages; known ones stay until room is needed, the last of a text going first."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is held by nobody"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._names:
                self._idle[page] = None
            else:
                self._free.append(page)

    def match(self, ids: Sequence[int], limit: int, root: bytes = b"") -> tuple[list[int], bytes]:
        """Takes hold of the known pages that a text begins with.

        Args:
            ids: The text.
            limit: Columns that may be found at most; only whole pages count.
            root: What stands ahead of the first page, see `root_name`.

        Returns:
            The pages, and the name of the last one; the root where there is none.
        """
        found: list[int] = []
        name = root
        for start in range(0, limit // self.size * self.size, self.size):
            next_name = page_name(name, ids[start : start + self.size])
            page = self._known.get(next_name)
            if page is None:
                break
            if not self._holders[page]:
                del self._idle[page]
            self._holders[page] += 1
            found.append(page)
            name = next_name
        return found, name

    def know(self, page: int, name: bytes) -> None:
        """Remembers a complete page by the text that ends with it."""
        if page not in self._names and name not in self._known:
            self._names[page] = name
            self._known[name] = page


def root_name(salt: str | None) -> bytes:
    """What stands ahead of a text's first page: b"" without a salt, else what nobody has who does not know it."""
    return b"" if salt is None else sha256(b"salt" + salt.encode()).digest()


def page_name(before: bytes, ids: Sequence[int]) -> bytes:
    """Name of a page: of its ids and, by the name of the page before it, of all before them; no two texts share one."""
    return sha256(before + ",".join(map(str, ids)).encode()).digest()
