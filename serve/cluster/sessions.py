"""Which engine read a chat last: a chat's next prompt begins with its last one, whose K/V lie there."""

from array import array
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

LIMIT = 2**16


class SessionTable:
    """Prompts that were read, by the hash of all of their ids, and where; the ones not seen for longest are forgotten.

    Whole prompts, not their first pages: chats that share a long system prompt are told apart, and a new one is free
    to go anywhere.

    Args:
        limit: Prompts that are remembered, at least 1.

    Raises:
        ValueError: For less.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 1:
            raise ValueError(f"a table needs room for at least one prompt, got {limit}")
        self._limit = limit
        self._engines: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        # how many prompts have which length, and the lengths in order: only there a beginning is looked up
        self._counts: Counter[int] = Counter()
        self._lengths: list[int] = []

    def find(self, ids: Sequence[int], root: bytes = b"") -> str | None:
        """The engine that read the longest known prompt with which these ids begin; None where there is none.

        Args:
            ids: A prompt.
            root: Of its pages (`sigma0.serve.engine.block_pool.root_hash`): prompts with another one share none.
        """
        raw, found, start = _raw(ids), None, 0
        hashed = blake2b(digest_size=16, key=root)
        for length in self._lengths:
            if length > len(ids):
                break
            hashed.update(raw[start:length])
            start = length
            name = hashed.digest()
            if name in self._engines:
                self._engines.move_to_end(name)
                found = self._engines[name][0]
        return found

    def note(self, ids: Sequence[int], engine: str, root: bytes = b"") -> None:
        """Remembers that an engine reads a prompt, whose pages have a root."""
        name = blake2b(_raw(ids), digest_size=16, key=root).digest()
        if name not in self._engines:
            if not self._counts[len(ids)]:
                insort(self._lengths, len(ids))
            self._counts[len(ids)] += 1
        self._engines[name] = engine, len(ids)
        self._engines.move_to_end(name)
        if len(self._engines) > self._limit:
            _, (_, length) = self._engines.popitem(last=False)
            self._counts[length] -= 1
            if not self._counts[length]:
                del self._counts[length]
                self._lengths.remove(length)


def _raw(ids: Sequence[int]) -> memoryview:
    return memoryview(array("q", ids))
