"""The operations of a pass, as plain torch or as Triton kernels: selected by name, with no fallback on a failure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from sigma0.kernels.coded_attention import CodedRows, coded_attention_reference
from sigma0.kernels.coded_attention_kernel import coded_attention
from sigma0.kernels.coded_row_attention import attend_coded_rows
from sigma0.kernels.collapse import (
    FULL_ECHO,
    LOGIT_STATS,
    NGRAM,
    Collapse,
    CollapseRule,
    CollapseState,
    certainty,
    collapse_reference,
    leads_reference,
)
from sigma0.kernels.collapse_kernel import collapse, margin_met
from sigma0.kernels.collapse_rows import TextMemory, certainty_rows, collapse_rows
from sigma0.kernels.counter_noise import PURPOSE, combined, counter_words, gumbel
from sigma0.kernels.depth_attention import DepthRows, depth_attention, depth_attention_reference
from sigma0.kernels.exit_state import (
    DIVERGED,
    FATES,
    KEPT,
    LAST_LOOP,
    MET,
    MODES,
    STATISTICS,
    ExitParams,
    ExitState,
    Fate,
    LoopEndOutput,
    LoopEndWeights,
    RuleRows,
)
from sigma0.kernels.gram import PARALLEL, Fit, Steps, fate_of, solve
from sigma0.kernels.kv_quantizer import CodedPlanes, KVQuantizer
from sigma0.kernels.lane_rows import CpuStepState, EndWeights, LaneTables, RowCount, StepResult
from sigma0.kernels.loop_end import SHRINK, observe, observe_paths
from sigma0.kernels.loop_end_kernel import loop_end
from sigma0.kernels.native import is_available
from sigma0.kernels.path_fates import path_fates
from sigma0.kernels.plane_copy import copy_past_exits, copy_plane
from sigma0.kernels.row_attention import RowPlaces, attend_rows
from sigma0.kernels.row_block import Block, BlockLayer, BlockShape, run_block
from sigma0.kernels.row_choice import argmax_rows, margin_rows
from sigma0.kernels.row_dot import MOST_ROWS, row_dot
from sigma0.kernels.row_gated import row_gated
from sigma0.kernels.row_linear import row_linear, row_parts
from sigma0.kernels.row_norm import norm_rows
from sigma0.kernels.row_norm_kernel import row_norm, row_residual
from sigma0.kernels.row_product import DTYPES as ROW_DTYPES
from sigma0.kernels.row_product import compiled_together
from sigma0.kernels.row_qkv import row_qkv
from sigma0.kernels.span_attention import Span, span_attention, spans_of
from sigma0.kernels.step_rows import BegunRows, begin_rows, best_parts, commit_rows
from sigma0.presence import wants_triton

Backend = Literal["auto", "torch", "triton"]


class LoopEndModules(Protocol):
    """Modules of a model that are applied at the end of a loop."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The loop's norm, `[R, D]`."""

    def gate(self, hidden: Tensor) -> Tensor:
        """Gate logits `[R]` of normed states `[R, D]`."""

    def loop_end_weights(self) -> LoopEndWeights:
        """Weights of both."""


def no_broadcast(decision: Tensor) -> Tensor:
    """Identity; the model is on one rank."""
    return decision


@dataclass(frozen=True)
class Operations:
    """What a pass calls."""

    backend: Literal["torch", "triton"]  # "torch" or "triton"
    # End of a loop (`sigma0.kernels.loop_end`)
    loop_end: Callable[[LoopEndModules, Tensor, Tensor, ExitState, Tensor, ExitParams | RuleRows], LoopEndOutput]
    # Statistics of logits and ids (`sigma0.kernels.collapse`)
    collapse: Callable[[Tensor, Tensor | None, CollapseState | None, Tensor | None, CollapseRule], Collapse]
    # Whether the top-1 probability leads by a margin, for logits `[B, V]`; bool `[B]`
    margin_met: Callable[[Tensor, float | Tensor], Tensor]
    # Attention of rows each at its own plane; None where `attend_rows` or `span_attention` is used
    depth_attention: Callable[[Tensor, Tensor, Tensor, DepthRows, float], Tensor] | None
    # The same on a CPU where the functions in C++ were built, which writes the rows' K/V too; else None
    attend_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, RowPlaces, float], Tensor] | None = None
    host_rows: bool = False  # Whether steps run there by `sigma0.kernels.lane_rows`
    # The argmax of rows of float32 logits there (`sigma0.kernels.row_choice`); else None
    argmax_rows: Callable[[Tensor, int], Tensor] | None = None
    # All layers of a block over few rows there, in float32 (`sigma0.kernels.row_block`); else None
    run_block: Callable[..., Tensor] | None = None
    # RMS norm of rows, with what it is added to: there of float32, in Triton of `ROW_DTYPES`; else None
    norm_rows: Callable[..., Tensor] | None = None
    # The mildest of the last fates of many tokens there (`sigma0.kernels.path_fates`); else None
    path_fates: Callable[[Tensor, Tensor, Tensor, int, ExitParams], Tensor] | None = None
    # Entropy and margin there (`sigma0.kernels.collapse_rows`); else None
    certainty_rows: Callable[[Tensor], Tensor] | None = None
    # The same and repetition, of many texts on the host with a C++ compiler; else None
    collapse_rows: Callable[..., list[list[float]]] | None = None
    # Product of rows with a weight, of the same bits in any company (`sigma0.kernels.row_linear`; of up to
    # sixteen rows on a CPU, `sigma0.kernels.row_dot`); None where torch's own is taken
    linear_rows: Callable[[Tensor, Tensor], Tensor] | None = None
    # Packed product, rotary embedding and K/V write of normed rows (`sigma0.kernels.row_qkv`); None where a block
    # does them one by one
    project_rows: Callable[..., Tensor] | None = None
    # Gates and ups of normed rows (`sigma0.kernels.row_gated`); None as `project_rows`
    gate_rows: Callable[[Tensor, Tensor], Tensor] | None = None
    # Product of rows with a weight, in parts that `add_rows` adds up (`sigma0.kernels.row_linear`); None likewise
    parts_rows: Callable[[Tensor, Tensor], Tensor] | None = None
    # Parts, normed and added to the residual, and what is normed ahead of the next product
    # (`sigma0.kernels.row_norm_kernel`); None likewise
    add_rows: Callable[..., tuple[Tensor, Tensor]] | None = None
    # Whether whole steps run but for their layers by `sigma0.kernels.step_rows`, where these know them
    step_rows: bool = False
    # Attention over planes in few bits (`sigma0.kernels.coded_attention`)
    coded_attention: Callable[[Tensor, Sequence[Tensor], Sequence[CodedPlanes], CodedRows, float], Tensor] = (
        coded_attention_reference
    )
    # Rank 0's tensor on every rank of the tensor parallel group (`decode.parallel`); the identity where the model
    # is on one rank
    broadcast: Callable[[Tensor], Tensor] = no_broadcast

    def over_coded_planes(self) -> "Operations":
        """Those that do not reach into planes by themselves."""
        if not any((self.attend_rows, self.depth_attention, self.project_rows, self.run_block)):
            return self
        return replace(self, attend_rows=None, depth_attention=None, project_rows=None, run_block=None, step_rows=False)

    def product(self, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
        """The product of rows `[R, D]` of a dtype with a weight `[N, D]`."""
        return F.linear if self.linear_rows is None or dtype not in ROW_DTYPES else self.linear_rows

    def norms(self, dtype: torch.dtype) -> bool:
        """Whether `norm_rows` takes rows of a dtype; the one in C++ is no part of a compiled graph."""
        if self.backend == "triton":
            return dtype in ROW_DTYPES
        return dtype is torch.float32 and not torch.compiler.is_compiling()


def _loop_end_in_torch(
    end: LoopEndModules, raw: Tensor, previous: Tensor, state: ExitState, slots: Tensor, rule: ExitParams | RuleRows
) -> LoopEndOutput:
    """The model's own norm and gate, so that its hooks (offloading, quantization) run; then the reference."""
    hidden = end.norm(raw)
    gated = rule.watch or "qexit" in rule.modes
    return observe(hidden, previous, end.gate(hidden) if gated else raw.new_zeros(len(raw)), state, slots, rule)


def _loop_end_in_triton(
    end: LoopEndModules, raw: Tensor, previous: Tensor, state: ExitState, slots: Tensor, rule: ExitParams | RuleRows
) -> LoopEndOutput:
    """The norm by a launch of its own: which rule is in force changes no bit of a state."""
    weights = end.loop_end_weights()
    hidden = raw if weights.norm is None else row_norm(raw, weights.norm, weights.norm_eps)
    return loop_end(hidden, previous, weights, state, slots, rule)


TORCH = Operations("torch", _loop_end_in_torch, collapse_reference, leads_reference, None)
CPU = replace(
    TORCH,
    attend_rows=attend_rows,
    host_rows=True,
    margin_met=margin_rows,
    argmax_rows=argmax_rows,
    run_block=run_block,
    norm_rows=norm_rows,
    path_fates=path_fates,
    certainty_rows=certainty_rows,
    collapse_rows=collapse_rows,
    linear_rows=row_dot,
    coded_attention=attend_coded_rows,
)
TRITON = Operations(
    "triton",
    _loop_end_in_triton,
    collapse,
    margin_met,
    depth_attention,
    norm_rows=row_norm,
    linear_rows=row_linear,
    project_rows=row_qkv,
    gate_rows=row_gated,
    parts_rows=row_parts,
    add_rows=row_residual,
    step_rows=True,
    coded_attention=coded_attention,
)


# Products of libraries, which are chosen by the number of rows.
_LIBRARY_PRODUCTS = replace(TRITON, norm_rows=None, linear_rows=None, project_rows=None)


@lru_cache
def operations(backend: Backend, device: torch.device, deterministic: bool = True) -> Operations:
    """The operations of a backend.

    Args:
        backend: "torch", "triton", or "auto": triton on CUDA, elsewhere torch; on a CPU where they were built with
            attention, norm and products in C++.
        device: Where the tensors are.
        deterministic: With Triton, whether a row's bits are to be the same whatever rows come along.

    Raises:
        ValueError: For an unknown name, or for Triton where it cannot run.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"no such backend: {backend!r}; there are {', '.join(get_args(Backend))}")
    if backend == "auto" and device.type == "cpu" and is_available():
        return CPU
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return TORCH
    if find_spec("triton") is None:
        raise ValueError(f"backend {backend!r} needs triton on {device.type}: install it, or use backend='torch'")
    if not runs_triton(device):
        raise ValueError(
            f"backend 'triton' needs a CUDA device, got {device.type}: use backend='torch', or set TRITON_INTERPRET=1 "
            "to run the kernels slowly on a CPU"
        )
    chosen = TRITON if deterministic else _LIBRARY_PRODUCTS
    # of ids on the host
    return replace(chosen, collapse_rows=collapse_rows) if device.type == "cuda" and is_available() else chosen


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run there: on CUDA, and interpreted anywhere."""
    if not wants_triton():
        return False
    if device.type == "cuda":
        return True
    import triton

    return bool(triton.knobs.runtime.interpret)
