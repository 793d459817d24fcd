"""Every kernel with every configuration that a launcher may ask for, as the ahead-of-time compiler wants it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sigma0.kernels import collapse_kernel, depth_attention, loop_end_kernel

DTYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
WIDTHS = (128, 1024, 2048, 4096)
HEAD_WIDTHS = (32, 64, 128)
# What rows of results, some of them older, call the kernel of `loop_end.py`.
LOOP_END = "loop_boundary"


@dataclass(frozen=True)
class Variant:
    """One kernel with one configuration.

    Attributes:
        kernel: Name of its file.
        function: The jitted function.
        dtype: Of the tensors that it reads.
        signature: Triton's type of each argument that is not constant.
        constants: Value of each constant argument.
        aligned: Integer arguments that a launch finds divisible by 16.
        warps: Warps of a program.
        options: Further options of the launch.
    """

    kernel: str
    function: Any
    dtype: torch.dtype
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str]
    warps: int
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def blocks(self) -> str:
        """The constants that size it, as text."""
        sizes = ("BLOCK", "TILE", "WIDTH", "GROUP", "SPLITS")
        flags = [name.lower() for name, value in self.constants.items() if value is True]
        return " ".join([f"{name.lower()} {self.constants[name]}" for name in sizes if name in self.constants] + flags)


def variants() -> Iterator[Variant]:
    """All of them."""
    for dtype in DTYPES:
        yield from _loop_ends(dtype)
        yield from _collapses(dtype)
        yield from _attentions(dtype)
    yield from _joins()


def _loop_ends(dtype: torch.dtype) -> Iterator[Variant]:
    function = loop_end_kernel._loop_end_kernel
    streamed = ("raw", "previous", "weight", "gate_weight", "gate_bias", "differences", "hidden")
    signature = _signature(
        function,
        dict.fromkeys(_pointers(*streamed), DTYPES[dtype]),
        dict.fromkeys(_pointers("gram", "gate", "statistics", "thresholds"), "*fp32"),
        dict.fromkeys(_pointers("counts", "fates", "decisions"), "*i32"),
        dict.fromkeys(_pointers("slots", "modes", "last_loops", "patience", "min_loops", "break_after"), "*i64"),
        dict.fromkeys(("growth", "spiral", "norm_eps", "noise"), "fp32"),
    )
    for width in WIDTHS:
        for watch in (True, False):
            yield Variant(
                LOOP_END,
                function,
                dtype,
                signature,
                {"WATCH": watch, "NORMALIZE": True, "BLOCK": width},
                frozenset({"width", "raw_row_stride", "previous_row_stride"}),
                loop_end_kernel.warps_for(width),
            )


def _collapses(dtype: torch.dtype) -> Iterator[Variant]:
    function = collapse_kernel._collapse_kernel
    numbers = [name for name in function.arg_names if name.endswith(("_low", "_slope", "_weight"))]
    signature = _signature(
        function,
        dict.fromkeys(_pointers("logits"), DTYPES[dtype]),
        dict.fromkeys(_pointers("sampled", "slots", "lengths", "token_ids", "top"), "*i64"),
        dict.fromkeys(_pointers("ids", "observed"), "*i32"),
        dict.fromkeys(_pointers("entropies", "thetas", "statistics"), "*fp32"),
        dict.fromkeys(_pointers("met"), "*i1"),
        dict.fromkeys((*numbers, "theta"), "fp32"),
    )
    for greedy, state, thetas in (
        (True, False, True),
        (True, False, False),
        (True, True, False),
        (False, True, False),
    ):
        # a launch turns a stride of 1 into a constant
        constants = {"id_stride": 1, "GREEDY": greedy, "STATE": state, "THETAS": thetas, "BLOCK": collapse_kernel.BLOCK}
        aligned = frozenset({"vocabulary", "row_stride"})
        yield Variant("collapse", function, dtype, signature, constants, aligned, collapse_kernel.WARPS)


def _attentions(dtype: torch.dtype) -> Iterator[Variant]:
    function = depth_attention._part_kernel
    strides = [
        f"{tensor}_{axis}_stride" for tensor in ("key", "value") for axis in ("plane", "block", "head", "position")
    ]
    signature = _signature(
        function,
        dict.fromkeys(_pointers("query", "keys", "values"), DTYPES[dtype]),
        dict.fromkeys(_pointers("sequences", "row_positions", "row_planes", "starts"), "*i64"),
        dict.fromkeys(_pointers("exits", "block_tables"), "*i32"),
        dict.fromkeys(_pointers("parts", "sums"), "*fp32"),
        dict.fromkeys(_pointers("seen"), "*i1"),
        {"scaling": "fp32"},
    )
    combinations = (
        (False, False, False, False),
        (False, False, True, False),
        (True, False, False, False),
        (True, True, False, False),
        (True, True, True, True),
    )
    for width in HEAD_WIDTHS:
        for starts, exits, paged, seen in combinations:
            yield Variant(
                "depth_attention",
                function,
                dtype,
                signature,
                {
                    "STARTS": starts,
                    "SEEN": seen,
                    "EXITS": exits,
                    "PAGED": paged,
                    "GROUP": depth_attention.SMALLEST_TILE,
                    "TILE": depth_attention.tile_for(width, dtype),
                    "WIDTH": width,
                    "PART_TILES": depth_attention.PART_TILES,
                    "MOST_PARTS": depth_attention.MOST_PARTS,
                    "UPCAST": False,
                },
                frozenset({"width", "query_row_stride", "query_head_stride", *strides}),
                depth_attention.PART_WARPS,
                depth_attention.stages_for(dtype, indirect=exits or paged),
            )


def _joins() -> Iterator[Variant]:
    function = depth_attention._join_kernel
    signature = _signature(function, dict.fromkeys(_pointers("parts", "sums", "output"), "*fp32"))
    constants = {"SPLITS": depth_attention.MOST_PARTS, "WIDTH": 128}
    aligned = frozenset({"width"})
    yield Variant(
        "depth_attention_join", function, torch.float32, signature, constants, aligned, depth_attention.JOIN_WARPS
    )


def _pointers(*tensors: str) -> list[str]:
    """A kernel's arguments that point to these tensors."""
    return [f"{tensor}_ptr" for tensor in tensors]


def _signature(function: Any, *types: Mapping[str, str]) -> dict[str, str]:
    """Types by argument; whatever is not named is a 32-bit integer."""
    known = {name: kind for group in types for name, kind in group.items()}
    return {name: known.get(name, "i32") for name in function.arg_names}
