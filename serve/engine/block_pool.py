"""Block pool of the paged K/V: allocation, reference counts and the prefix cache. No tensors here.

A block holds `size` consecutive cache positions in all planes. A block whose every position is exact in every plane,
as a run of all loops would write it, is registered under its hash: that of its ids chained to the hash of the block
before it. A salt is hashed ahead of the first block, so that prompts with different salts, or one with and one without,
share no block. Registered blocks stay cached when no request holds them, and are evicted oldest first.

Blocks of one sequence follow each other where that can be had, since such a sequence is read in place on a CPU.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import compress, islice


class BlockPool:
    """A fixed number of blocks with reference counts.

    Args:
        total: Number of blocks, at least 1.
        size: Cache positions of a block, at least 1.

    Raises:
        ValueError: For less.
    """

    def __init__(self, total: int, size: int) -> None:
        if total < 1 or size < 1:
            raise ValueError(f"a pool needs at least one block of one position, got {total} of {size}")
        self.total = total
        self.size = size
        # one byte for each block, 1 where it is free
        self._free = bytearray(b"\1" * total)
        self._free_count = total
        self._references = [0] * total
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        self._allocated: list[int] = []

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones that no request holds."""
        return self._free_count + len(self._unreferenced)

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.total - self.available

    @property
    def cached(self) -> int:
        """Registered blocks that no request holds."""
        return len(self._unreferenced)

    def blocks_for(self, positions: int) -> int:
        """Number of blocks for so many cache positions."""
        return -(-positions // self.size)

    def allocate_run(self, count: int, near: int = 0, after: int | None = None) -> list[int]:
        """Blocks whose content is void, after each other where there is such a run; the oldest cached are evicted.

        Args:
            count: How many.
            near: Where a run is looked for first.
            after: The block before them in their sequence.

        Returns:
            The blocks in their order; empty where there are not so many.
        """
        if count > self.available:
            return []
        while self._free_count < count:
            oldest, _ = self._unreferenced.popitem(last=False)
            del self._block_of[self._hash_of.pop(oldest)]
            self._free[oldest] = 1
            self._free_count += 1
        run = b"\1" * count
        start = self._free.find(run, near)
        if after is not None and self._free.startswith(run, after + 1):
            start = after + 1
        elif start < 0:
            start = self._free.find(run)
        pieces = range(start, self.total) if start >= 0 else compress(range(self.total), self._free)
        blocks = list(islice(pieces, count))
        self._free_count -= count
        for block in blocks:
            self._free[block], self._references[block] = 0, 1
        self._allocated += blocks
        return blocks

    def pop_allocated(self) -> list[int]:
        """Blocks that were allocated since the last call; their content is stale and must be wiped."""
        allocated, self._allocated = self._allocated, []
        return allocated

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each block; registered ones stay cached, those at the end being evicted first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} has no reference"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._unreferenced[block] = None
            else:
                self._free[block] = 1
                self._free_count += 1

    def match_prefix(self, token_ids: Sequence[int], limit: int, root: bytes = b"") -> tuple[list[int], bytes]:
        """Takes a reference of each registered block that a sequence begins with.

        Args:
            token_ids: The sequence.
            limit: Cache positions that may be matched at most; only whole blocks count.
            root: Hash ahead of the first block, see `root_hash`.

        Returns:
            The blocks, and the hash of the last one; the root where there is none.
        """
        blocks: list[int] = []
        last_hash = root
        for start in range(0, limit // self.size * self.size, self.size):
            next_hash = block_hash(last_hash, token_ids[start : start + self.size])
            block = self._block_of.get(next_hash)
            if block is None:
                break
            if not self._references[block]:
                del self._unreferenced[block]
            self._references[block] += 1
            blocks.append(block)
            last_hash = next_hash
        return blocks, last_hash

    def register(self, block: int, content_hash: bytes) -> None:
        """Makes a complete block available to `match_prefix` under its hash."""
        if block not in self._hash_of and content_hash not in self._block_of:
            self._hash_of[block] = content_hash
            self._block_of[content_hash] = block


def root_hash(salt: str | None) -> bytes:
    """The hash ahead of a sequence's first block: b"" without a salt, else one that needs the salt to be computed."""
    return b"" if salt is None else sha256(b"salt" + salt.encode()).digest()


def block_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a block's ids and, through the hash of the block before it, of all ids before them."""
    return sha256(previous + array("q", token_ids).tobytes()).digest()
