"""The contract between the decoder and a model: rows at different loops share one pass of the block."""

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sigma0.decode.ops import LoopEndWeights, Operations


class BatchRows(Protocol):
    """The rows of one pass, as the layers of a block see them.

    Attributes:
        longest: One more than the largest cache position, or a bound on it.
        ops: Operations of the pass.
    """

    longest: int
    ops: Operations

    def positions(self, device: torch.device) -> Tensor:
        """Positions for rotary embeddings, int64 `[R]`, on a device."""

    def project(
        self, layer: int, hidden: Tensor, norm: Tensor, epsilon: float, weight: Tensor, cos: Tensor, signed_sin: Tensor
    ) -> Tensor:
        """Rotated queries `[R, H, d]` of rows `[R, D]`, whose K/V it writes to the planes of their loops.

        Where `ops.project_rows` is None there is no such kernel.

        Args:
            layer: Layer index within the block.
            hidden: `[R, D]`.
            norm: Weight of the norm ahead, `[D]`.
            epsilon: Of that norm.
            weight: Queries, keys and values packed, `[(H + 2 H_kv) d, D]`.
            cos: Of all positions, `[P, d]`.
            signed_sin: Likewise; the first half of each has its sign turned.
        """

    def attend(self, layer: int, query: Tensor, keys: Tensor | None, values: Tensor | None, scaling: float) -> Tensor:
        """Writes each row's K/V to the plane of its loop, then attends to that plane up to the row's own position.

        Args:
            layer: Layer index within the block.
            query: `[R, H, d]`, rotated.
            keys: `[R, H_kv, d]`, rotated; None where `project` has written them.
            values: `[R, H_kv, d]`, or None likewise.
            scaling: Factor on the scores.

        Returns:
            `[R, H, d]`.
        """


class KVShape(Protocol):
    """A model, as far as the shape of its K/V goes; no weights are needed."""

    config: PreTrainedConfig
    num_block_layers: int
    num_loops: int


class LoopedModel(Protocol):
    """All that the decoder knows of a model: three stages over the rows of a pass, and the end of a loop."""

    config: PreTrainedConfig

    @property
    def device(self) -> torch.device:
        """Where ids are expected."""

    @property
    def operations(self) -> Operations:
        """Operations of a pass: plain torch or kernels."""

    def enter(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """What loop 1 starts from, `[R, D]`: embeddings of ids `[R]` at positions `[R]`, or what a prelude makes."""

    def reserve_positions(self, longest: int, like: Tensor) -> Hashable:
        """Makes whatever passes over so many positions read beside weights, for states of this device and dtype.

        Returns:
            Another value where programs that were compiled before read what is no more.
        """

    def loop(self, hidden: Tensor, rows: BatchRows) -> Tensor:
        """One loop of the shared block over rows `[R, D]`, before the loop's norm."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The loop's norm, `[R, D]`."""

    def gate(self, hidden: Tensor) -> Tensor:
        """Gate logits `[R]` of normed states `[R, D]`."""

    def loop_end_weights(self) -> LoopEndWeights:
        """Weights of norm and gate, for the kernel that applies both."""

    def read(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` of normed states `[R, D]`: the output head, or a coda and a head."""
