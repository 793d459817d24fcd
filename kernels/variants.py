"""Every kernel with every configuration that a launcher may ask for, as the ahead-of-time compiler wants it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import triton

from sigma0.kernels import (
    coded_attention_kernel,
    collapse_kernel,
    depth_attention,
    loop_end_kernel,
    plane_copy,
    row_gated,
    row_linear,
    row_norm_kernel,
    row_product,
    row_qkv,
    step_rows,
)

DTYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
# As launches round them up; 8192 takes Huginn's 5280.
WIDTHS = (128, 1024, 2048, 4096, 8192)
# Heads of 96 numbers are compiled as those of 128 are. Those of 24 start at no multiple of 16, their positions do.
HEAD_WIDTHS = (24, 32, 64, 96, 128)
# What rows of results, some of them older, call the kernel of `loop_end.py`.
LOOP_END = "loop_boundary"


@dataclass(frozen=True)
class Variant:
    """One kernel with one configuration."""

    kernel: str  # Name of its file
    function: Any  # The jitted function
    dtype: torch.dtype  # Of the tensors that it reads
    signature: Mapping[str, str]  # Triton's type of each argument that is not constant
    constants: Mapping[str, Any]  # Value of each constant argument
    aligned: frozenset[str]  # Integer arguments that a launch finds divisible by 16
    warps: int  # Warps of a program
    options: Mapping[str, int] = field(default_factory=dict)  # Further options of the launch

    @property
    def blocks(self) -> str:
        """The constants that size it, as text."""
        sizes = (
            "BLOCK",
            "TILE",
            "WIDTH",
            "GROUP",
            "SPLITS",
            "ANCHOR_BITS",
            "CODES",
            "PAIRS",
            "OUTPUTS",
            "STEP",
            "PARTS",
            "TURNS",
        )
        flags = [name.lower() for name, value in self.constants.items() if value is True]
        return " ".join([f"{name.lower()} {self.constants[name]}" for name in sizes if name in self.constants] + flags)


def variants() -> Iterator[Variant]:
    """All of them."""
    for dtype in DTYPES:
        yield from _loop_ends(dtype)
        yield from _collapses(dtype)
        yield from _attentions(dtype)
        yield from _coded_attentions(dtype)
    yield from _joins()
    for dtype in DTYPES:
        yield from _rows(dtype)
        yield from _row_norms(dtype)
        yield from _plane_copies(dtype)
        yield from _step_rows(dtype)


def _loop_ends(dtype: torch.dtype) -> Iterator[Variant]:
    function = loop_end_kernel._loop_end_kernel
    streamed = ("hidden", "previous", "gate_weight", "gate_bias", "differences")
    signature = _signature(
        function,
        dict.fromkeys(_pointers(*streamed), DTYPES[dtype]),
        dict.fromkeys(_pointers("gram", "gate", "statistics", "thresholds"), "*fp32"),
        dict.fromkeys(_pointers("counts", "fates", "decisions"), "*i32"),
        dict.fromkeys(_pointers("slots", "modes", "last_loops", "patience", "min_loops", "break_after"), "*i64"),
        dict.fromkeys(("growth", "spiral", "noise"), "fp32"),
    )
    # with a gate and without, as loops of a core end
    for width, watch, gate in product(WIDTHS, (True, False), (True, False)):
        yield Variant(
            LOOP_END,
            function,
            dtype,
            signature,
            {"WATCH": watch, "GATE": gate, "BLOCK": width, "PDL": False},
            frozenset({"width", "hidden_row_stride", "previous_row_stride"}),
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
        dict.fromkeys(_pointers("query", "keys", "values", "output"), DTYPES[dtype]),
        dict.fromkeys(_pointers("sequences", "row_positions", "row_planes", "starts"), "*i64"),
        dict.fromkeys(_pointers("block_tables", "arrived"), "*i32"),
        dict.fromkeys(_pointers("parts", "sums"), "*fp32"),
        dict.fromkeys(_pointers("seen"), "*i1"),
        {"scaling": "fp32"},
    )
    combinations = (
        (False, False, False),
        (False, True, False),
        (True, False, False),
        (True, True, True),
    )
    given = {"width", "query_row_stride", "query_head_stride", *strides}
    heads = {"width", *(f"{tensor}_head_stride" for tensor in ("query", "key", "value"))}
    for width in HEAD_WIDTHS:
        whole, rounded = width % 16 == 0, max(depth_attention.SMALLEST_TILE, triton.next_power_of_2(width))
        for starts, paged, seen in combinations:
            yield Variant(
                "depth_attention",
                function,
                dtype,
                signature,
                {
                    "STARTS": starts,
                    "SEEN": seen,
                    "PAGED": paged,
                    "GROUP": depth_attention.SMALLEST_TILE,
                    "TILE": depth_attention.tile_for(width, dtype),
                    "WIDTH": rounded,
                    "PART_TILES": depth_attention.PART_TILES,
                    "MOST_PARTS": depth_attention.MOST_PARTS,
                    "UPCAST": False,
                    "PDL": False,
                },
                frozenset(given if whole else given - heads),
                depth_attention.PART_WARPS,
                depth_attention.options_for(dtype, paged, seen),
            )


def _coded_attentions(dtype: torch.dtype) -> Iterator[Variant]:
    """Each width of a codec is a loop: those of `int8`, `int4` and `residual`, and all beside an anchor of 8 bits."""
    function = coded_attention_kernel._coded_part_kernel
    signature = _signature(
        function,
        dict.fromkeys(_pointers("query", "key_tail", "value_tail"), DTYPES[dtype]),
        dict.fromkeys(_pointers("key_codes", "value_codes"), "*u8"),
        dict.fromkeys(_pointers("key_scales", "value_scales"), "*bf16"),
        dict.fromkeys(_pointers("layout", "sequences", "row_positions", "row_planes", "starts", "blocks"), "*i64"),
        dict.fromkeys(_pointers("parts", "sums"), "*fp32"),
        dict.fromkeys(_pointers("seen"), "*i1"),
        {"scaling": "fp32"},
    )
    # contiguous with and without pads, and by block
    placed = ((True, True, False), (False, False, True))
    codecs = ((8, 0), (4, 0), (2 + 4, 4), (1 + 2 + 4 + 8, 8))
    for width, (codes, anchor_bits), (starts, seen, paged) in product(HEAD_WIDTHS, codecs, placed):
        yield Variant(
            "coded_attention",
            function,
            dtype,
            signature,
            {
                "STARTS": starts,
                "SEEN": seen,
                "PAGED": paged,
                "ANCHOR": 3 if anchor_bits else -1,
                "ANCHOR_BITS": anchor_bits,
                "CODES": codes,
                "SCALED": 8 if width % 16 else 16,
                "HEAD": width,
                "GROUP": depth_attention.SMALLEST_TILE,
                "TILE": coded_attention_kernel.tile_for(width, dtype),
                "WIDTH": max(depth_attention.SMALLEST_TILE, triton.next_power_of_2(width)),
                "PART_TILES": coded_attention_kernel.PART_TILES,
                "MOST_PARTS": depth_attention.MOST_PARTS,
                "UPCAST": False,
            },
            frozenset({"query_row_stride"} if width % 16 else {"query_row_stride", "query_head_stride"}),
            coded_attention_kernel.warps_for(dtype),
            coded_attention_kernel.options_for(dtype),
        )


def _joins() -> Iterator[Variant]:
    function = coded_attention_kernel._join_kernel
    signature = _signature(function, dict.fromkeys(_pointers("parts", "sums", "output"), "*fp32"))
    constants = {"SPLITS": depth_attention.MOST_PARTS, "WIDTH": 128}
    aligned = frozenset({"width"})
    yield Variant(
        "coded_attention_join",
        function,
        torch.float32,
        signature,
        constants,
        aligned,
        coded_attention_kernel.JOIN_WARPS,
    )


def _rows(dtype: torch.dtype) -> Iterator[Variant]:
    """Of any shape: what sizes them are the numbers of a step; widths divide by 16, the vocabulary need not."""
    streamed = ("hidden", "norm", "weight", "cos", "sin", "query", "keys", "values", "gated", "output")
    types = (
        dict.fromkeys(_pointers(*streamed), DTYPES[dtype]),
        dict.fromkeys(_pointers("positions", "flat_rows"), "*i64"),
    )
    aligned = frozenset({"width", "inner", "head_width", "hidden_row_stride"})
    for tiling in row_product.tilings(dtype):
        common = {"STEP": tiling.step, "UPCAST": False, "PDL": False}
        pairs = {"PAIRS": tiling.outputs // 2, **common}
        split = {"OUTPUTS": tiling.outputs, "SPLITS": tiling.splits, **common}
        whole: list[tuple[str, Any, dict[str, Any], dict[str, str]]] = [
            ("row_qkv", row_qkv._row_qkv_kernel, pairs, {}),
            ("row_gated", row_gated._row_gated_kernel, pairs, {}),
        ]
        parts = {"output_ptr": "*fp32"} if tiling.splits > 1 else {}
        cases = [("row_linear", row_linear._row_linear_kernel, split, parts), *(whole if tiling.splits == 1 else [])]
        for kernel, function, constants, current in cases:
            signature = _signature(function, *types, current)
            options = {"num_stages": tiling.stages}
            yield Variant(kernel, function, dtype, signature, constants, aligned, tiling.warps, options)


def _row_norms(dtype: torch.dtype) -> Iterator[Variant]:
    function = row_norm_kernel._row_norm_kernel
    streamed = dict.fromkeys(_pointers("hidden", "norm", "residual", "output"), DTYPES[dtype])
    signature = _signature(function, streamed, {"epsilon": "fp32"})
    aligned = frozenset({"width", "hidden_row_stride", "residual_row_stride"})
    for width in WIDTHS:
        constants = {"RESIDUAL": True, "BLOCK": width, "PDL": False}
        yield Variant("row_norm", function, dtype, signature, constants, aligned, row_norm_kernel.norm_warps(width))
    function = row_norm_kernel._row_residual_kernel
    streamed = dict.fromkeys(_pointers("behind", "residual", "ahead", "summed", "normed"), DTYPES[dtype])
    types = {"parts_ptr": "*fp32", "epsilon_behind": "fp32", "epsilon_ahead": "fp32"}
    signature = _signature(function, streamed, types)
    for width, parts in product(WIDTHS, (1, row_product.MOST_SPLITS)):
        constants = {"PARTS": parts, "BEHIND": True, "AHEAD": True, "BLOCK": width, "PDL": False}
        yield Variant("row_residual", function, dtype, signature, constants, aligned, row_norm_kernel.norm_warps(width))


def _plane_copies(dtype: torch.dtype) -> Iterator[Variant]:
    function = plane_copy._copy_past_exits_kernel
    places = dict.fromkeys(_pointers("addresses", "positions", "exits"), "*i64")
    signature = _signature(function, {"like_ptr": DTYPES[dtype]}, places)
    constants = {"BLOCK": plane_copy._BLOCK, "PDL": False}
    yield Variant("plane_copy", function, dtype, signature, constants, frozenset({"width"}), 4)


def _step_rows(dtype: torch.dtype) -> Iterator[Variant]:
    """Alone, and with all that a step may decide; of up to 4, and up to 32 loops."""
    states = ("hidden", "previous", "paths", "states", "embedding", "logits")
    tables = ("table", "settings", "blocks", "columns", "before", "lines", "eos", "given", "settled", "exits")
    types = (
        dict.fromkeys(_pointers(*states), DTYPES[dtype]),
        dict.fromkeys(_pointers(*tables), "*i64"),
        dict.fromkeys(_pointers("thresholds", "row_thresholds", "gate", "values"), "*fp32"),
        dict.fromkeys(_pointers("counts", "decisions", "ids"), "*i32"),
        {"met_ptr": "*i1"},
    )
    sizes = {"BLOCK": step_rows.BLOCK, "PDL": False}
    parts = {"PARTS": step_rows.PARTS, **sizes}
    kinds = ("CHECKS", "HOLDS", "SUSPENDS", "RULED", "GIVEN", "SETTLED", "PATHS")
    kernels: list[tuple[str, Any, dict[str, Any]]] = [("best_parts", step_rows._best_kernel, parts)]
    for all_of_it, turns in ((False, 4), (True, 4), (True, 32)):
        begins = {"PAGED": all_of_it, "LANES": step_rows.LANES, **sizes}
        decides = dict.fromkeys(kinds, all_of_it) | {"TURNS": turns, **parts}
        kernels += [("begin_rows", step_rows._begin_kernel, begins)] if turns == 4 else []
        kernels.append(("commit_rows", step_rows._settle_kernel, decides))
    for name, function, constants in kernels:
        aligned = frozenset({"width", "row_stride", "vocabulary", "part"})
        options = row_product.REGISTERS if name == "commit_rows" else {}
        yield Variant(name, function, dtype, _signature(function, *types), constants, aligned, 4, options)


def _pointers(*tensors: str) -> list[str]:
    """A kernel's arguments that point to these tensors."""
    return [f"{tensor}_ptr" for tensor in tensors]


def _signature(function: Any, *types: Mapping[str, str]) -> dict[str, str]:
    """Types by argument; whatever is not named is a 32-bit integer."""
    known = {name: kind for group in types for name, kind in group.items()}
    return {name: known.get(name, "i32") for name in function.arg_names}
