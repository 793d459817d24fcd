"""The operations of a pass, as plain torch or as Triton kernels: chosen by name, never by whether one of them failed.

On CUDA with the kernels, everything between two loops is queued without waiting, but for one read: which tokens stopped
(`decode.step`), since the host composes the next pass. Under `full` and `fixed` it knows, and nothing is read. A token
that stopped is read once more, as an id, to tell it and to see whether the text ends; under `verify` the ids of a whole
pass come over in one read. Logits processors and drawing of tokens may read more, and so does transformers' own loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from sigma0.kernels.boundary import (
    DIVERGED,
    FATES,
    KEPT,
    MET,
    STATISTICS,
    Boundary,
    BoundaryRule,
    BoundaryState,
    BoundaryWeights,
    Fate,
)
from sigma0.kernels.collapse import (
    ALPHA,
    FLOOR,
    GRAM,
    LAGS,
    READINGS,
    SETTLED,
    SHORTEST,
    WARM_UP,
    WINDOW,
    Collapse,
    CollapseRule,
    CollapseState,
    certainty,
    collapse,
    collapse_reference,
    leads,
    leads_reference,
)
from sigma0.kernels.depth_attention import DepthRows, PlaneGroup, depth_attention, plane_attention
from sigma0.kernels.gram import PARALLEL, Fit, Steps, fate_of, solve
from sigma0.kernels.loop_boundary import SHRINK, loop_boundary, observe, observe_paths

__all__ = [
    "ALPHA",
    "DIVERGED",
    "FATES",
    "FLOOR",
    "GRAM",
    "KEPT",
    "LAGS",
    "MET",
    "PARALLEL",
    "READINGS",
    "SETTLED",
    "SHORTEST",
    "SHRINK",
    "STATISTICS",
    "WARM_UP",
    "WINDOW",
    "Backend",
    "Boundary",
    "BoundaryRule",
    "BoundaryState",
    "BoundaryWeights",
    "Collapse",
    "CollapseRule",
    "CollapseState",
    "DepthRows",
    "Fate",
    "Fit",
    "Operations",
    "PlaneGroup",
    "Steps",
    "alone",
    "certainty",
    "fate_of",
    "leads_reference",
    "observe",
    "observe_paths",
    "operations",
    "plane_attention",
    "solve",
]

Backend = Literal["auto", "torch", "triton"]


class LoopEnd(Protocol):
    """What of a model works at the end of a loop."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The loop's norm, `[R, D]`."""

    def gate(self, hidden: Tensor) -> Tensor:
        """Gate logits `[R]` of normed states `[R, D]`."""

    def boundary_weights(self) -> BoundaryWeights:
        """Weights of both."""


def alone(decision: Tensor) -> Tensor:
    """The decision as it is: there is nobody to agree with."""
    return decision


@dataclass(frozen=True)
class Operations:
    """What a pass calls.

    Attributes:
        backend: "torch" or "triton".
        loop_boundary: End of a loop (`sigma0.kernels.loop_boundary`).
        collapse: Reading of logits and ids (`sigma0.kernels.collapse`).
        leads: Whether the likeliest id leads by a margin, for logits `[B, V]`; bool `[B]`.
        plane_attention: Attention of rows in groups of one plane; None where `depth_attention` is used.
        depth_attention: Attention of rows each at its own plane; None where `plane_attention` is used.
        agree: What every process goes by that holds a part of the model (`decode.parallel`), given what this one would
            decide; the same tensor where the model is whole.
    """

    backend: Literal["torch", "triton"]
    loop_boundary: Callable[[LoopEnd, Tensor, Tensor, BoundaryState, Tensor, BoundaryRule], Boundary]
    collapse: Callable[[Tensor, Tensor | None, CollapseState | None, Tensor | None, CollapseRule], Collapse]
    leads: Callable[[Tensor, float], Tensor]
    plane_attention: Callable[[Tensor, Tensor, Tensor, tuple[PlaneGroup, ...], float], Tensor] | None
    depth_attention: Callable[[Tensor, Tensor, Tensor, DepthRows, float], Tensor] | None
    agree: Callable[[Tensor], Tensor] = alone


def _boundary_in_torch(
    end: LoopEnd, raw: Tensor, previous: Tensor, state: BoundaryState, slots: Tensor, rule: BoundaryRule
) -> Boundary:
    """The model's own norm and gate, so that its hooks (offloading, quantization) stay at work; then the reference."""
    hidden = end.norm(raw)
    gated = rule.watch or rule.decides_by == "qexit"
    return observe(hidden, previous, end.gate(hidden) if gated else raw.new_zeros(len(raw)), state, slots, rule)


def _boundary_in_triton(
    end: LoopEnd, raw: Tensor, previous: Tensor, state: BoundaryState, slots: Tensor, rule: BoundaryRule
) -> Boundary:
    return loop_boundary(raw, previous, end.boundary_weights(), state, slots, rule)


TORCH = Operations("torch", _boundary_in_torch, collapse_reference, leads_reference, plane_attention, None)
TRITON = Operations("triton", _boundary_in_triton, collapse, leads, None, depth_attention)


@lru_cache
def operations(backend: Backend, device: torch.device) -> Operations:
    """The operations that a name stands for.

    Args:
        backend: "torch", "triton", or "auto": triton on CUDA, torch elsewhere.
        device: Where the tensors are.

    Raises:
        ValueError: For an unknown name, or for Triton where it cannot run.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"no such backend: {backend!r}; there are {', '.join(get_args(Backend))}")
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return TORCH
    if find_spec("triton") is None:
        raise ValueError(f"backend {backend!r} needs triton on {device.type}: install it, or use backend='torch'")
    if device.type != "cuda" and not _interpreted():
        raise ValueError(
            f"backend 'triton' needs a CUDA device, got {device.type}: use backend='torch', or set TRITON_INTERPRET=1 "
            "to run the kernels slowly on a CPU"
        )
    return TRITON


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
