"""Paged K/V of an engine: the planes of every layer, and the block tables of its sequences."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.attention import Placement
from sigma0.decode.planes import BlockShape, LayerPlanes
from sigma0.decode.transfer import to_device


class PagedPlanes:
    """`sigma0.decode.runner.Storage` over blocks that sequences are given and lose.

    Args:
        shape: Of a block.
        blocks: How many.
        dtype: Of the K/V.
        device: Where they are.
        sequences: S, sequences at the same time.
        longest: Cache positions of the longest sequence; None: as many as there are blocks for.

    Attributes:
        planes: The planes of each layer.
        table: Block table, int64 `[S, n]`.
        first: First flat position of each sequence whose blocks follow each other, else -1.
        rooms: Positions that the blocks of each sequence hold.
    """

    def __init__(
        self,
        shape: BlockShape,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        sequences: int = 1,
        longest: int | None = None,
    ) -> None:
        self.shape = shape
        self.blocks = blocks
        like = torch.empty((shape.kv_heads, 0, shape.head_dim), dtype=dtype, device=device)
        self.planes = [LayerPlanes(like, count, blocks, shape.size) for count in shape.counts]
        width = blocks if longest is None else -(-longest // shape.size)
        with torch.inference_mode(False):
            self.table = torch.zeros((sequences, width), dtype=torch.int64, device=device)
        self.first = [0] * sequences
        self.rooms = [0] * sequences

    def place(self, sequence: int, blocks: Sequence[int]) -> None:
        """Sets the block table of a sequence."""
        in_place = list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))
        self.first[sequence] = blocks[0] * self.shape.size if in_place else -1
        self.rooms[sequence] = len(blocks) * self.shape.size
        self.table[sequence, : len(blocks)] = to_device(np.array(blocks, dtype=np.int64), self.table.device)

    def release(self, sequence: int) -> None:
        """Forgets where the blocks of a sequence lie: others are read at once only where all are in place."""
        self.first[sequence] = self.rooms[sequence] = 0

    def placement(self, longest: int) -> Placement:
        """Where cache positions lie."""
        total = self.blocks * self.shape.size + 1
        return Placement(self.shape.size, total, self.table, self.first, self.rooms)

    def note_exits(self, sequences: Tensor, cache_positions: Tensor, planes: Tensor, copy: bool = True) -> None:
        """Lets readers at loop t take plane min(t, exit) of tokens that run no further (`drop`).

        Args:
            sequences: int64 `[N]`.
            cache_positions: `[N]`.
            planes: Plane of the loop at which each exited, counted from 0, int64 `[N]`.
            copy: Unused: their K/V are copied to all deeper planes in any case.
        """
        flat = self.placement(0).flat(sequences, cache_positions)
        for layer in self.planes[: self.shape.layers]:
            layer.propagate_past_exit(flat, planes)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Fills blocks with zeros."""
        for layer in self.planes:
            layer.wipe(blocks)
