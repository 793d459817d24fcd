"""The contract between the decoder and a model: rows at different loops share one pass of the block."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sigma0.decode.ops import BlockLayer, BlockShape, EndWeights, LoopEndWeights, Operations

PlainBlock = tuple[Sequence[BlockLayer], BlockShape, tuple[Tensor, Tensor]]


class KVShape(Protocol):
    """A model, as far as the shape of its K/V goes; no weights are needed."""

    config: PreTrainedConfig

    @property
    def num_block_layers(self) -> int:
        """L, layers of the shared block."""

    @property
    def num_loops(self) -> int:
        """T."""

    @property
    def stages(self) -> tuple[int, int]:
        """Layers of prelude and coda, whose K/V lie after those of the block; (0, 0) for neither."""


class LoopedModel(KVShape, Protocol):
    """All that the decoder knows of a model: the stages of a pass over its rows, and the end of a loop.

    What is in flight of a token is `[W]`: its state `[D]`, and after it what every loop reads of it. W > D only where
    a loop ends without a norm. `rows` are `sigma0.decode.attention.PassRows`, which stand above this.
    """

    @property
    def state_width(self) -> int:
        """D."""

    @property
    def device(self) -> torch.device:
        """Where ids are expected."""

    @property
    def operations(self) -> Operations:
        """Operations of a pass: plain torch or kernels."""

    def enter(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """What loop 1, or the prelude, starts from, `[R, W]`: of ids `[R]` at positions `[R]`."""

    def prelude(self, hidden: Tensor, rows: Any) -> Tensor:
        """What loop 1 starts from, `[R, W]`, where there is a prelude: of rows `[R, W]` as they have entered."""

    def reserve_positions(self, longest: int, like: Tensor) -> Hashable:
        """Makes whatever passes over so many positions read beside weights, for states of this device and dtype.

        Returns:
            Another value where programs that were compiled before read what is no more.
        """

    def loop(self, hidden: Tensor, rows: Any) -> Tensor:
        """One loop of the shared block over rows `[R, W]`, before the loop's norm."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The loop's norm, `[R, W]`."""

    def gate(self, hidden: Tensor) -> Tensor:
        """Gate logits `[R]` of normed states `[R, D]`."""

    def loop_end_weights(self) -> LoopEndWeights:
        """Weights of norm and gate, for the kernel that applies both."""

    def plain_weights(self) -> EndWeights:
        """Weights of `norm`, `gate`, `enter` and `read`, of which each does what its formula says and nothing else."""

    def plain_block(self, longest: int, like: Tensor) -> PlainBlock | None:
        """The layers of `loop`, where they do what their formulas say and nothing else, and what they share.

        Args:
            longest: Positions that there are.
            like: A state, for device and dtype.

        Returns:
            Also cos and signed sin of all positions, `[P, d]`; None where a layer does anything else.
        """

    def read(self, hidden: Tensor, rows: Any = None) -> Tensor:
        """Logits `[R, V]` of rows `[R, W]` after a loop: the output head, or a coda and a head.

        Args:
            hidden: Normed.
            rows: Where they are, each at the plane of the coda that it writes; None where there is no coda.
        """
