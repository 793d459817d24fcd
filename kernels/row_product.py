# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Products of the few rows of a decode pass with a weight, by tiles of 16 rows: what the `row_*` kernels share.

A pass over R rows reads every weight once and is bound by that, so a program holds some outputs' rows of the weight, or
a part of each (a split), with 16 rows of the pass beside them. Programs of the same outputs follow each other: where
R > 16 all but the first find the weight in the L2 cache. How a product is divided says `products.json` by its shape,
dtype and device, as `python -m sigma0.bench kernels --tune` has measured it, else a rule.

A row's bits depend on the row and the weight alone, not on R nor on its place: R is padded to a multiple of 16, no tile
is larger, one program adds up all products of an output's split, in float32 and in the order of its steps, and splits
are added in their order. Nothing of that is chosen by R.

With programmatic dependent launch (`SIGMA0_PDL=1`, compute capability 9.0 and newer) a kernel is started while the one
before it ends. It then fetches its first weights into the L2 cache, and waits before it reads or writes anything that
another kernel wrote or reads: every kernel of the chain waits, so that what ended is seen by all that follow. It lets
the next begin after its own wait, a product after its loop: so two run at once and no more. Any earlier was slower
on a GPU, where programs that wait take the places of those that load (`bench/gpu/README.md`).
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigma0.presence import wants_triton

ROW_TILE = 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TABLE = Path(__file__).with_name("products.json")
# Most splits of a product, each of which has its own sums.
MOST_SPLITS = 4
# For kernels of which a compiler would spill a few bytes, so that one program more fits.
REGISTERS: dict[str, int] = {"maxnreg": 255} if torch.version.hip is None else {}
# What a device that is none of the table's has room for.
_FEWEST_PROGRAMS, _FEWEST_NUMBERS = 256, 512


@dataclass(frozen=True)
class Tiling:
    """How a product is divided among programs."""

    outputs: int  # Of a program, at least 16
    step: int  # Numbers of a row in one step
    warps: int  # Of a program
    stages: int  # Steps in flight: what hides the memory's latency
    splits: int  # Parts of a row, each with programs of its own

    @property
    def options(self) -> dict[str, int]:
        """For a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def tiling_of(hidden: Tensor, weight: Tensor, splits: bool = False) -> Tiling:
    """How the product of rows `[R, D]` with a weight `[N, D]` is divided, whatever R is.

    Args:
        hidden: Rows.
        weight: For which a compiled program is made.
        splits: Whether rows may be split.
    """
    outputs, inner = map(int, weight.shape)
    return _tiling(outputs, inner, hidden.dtype, _capability(hidden.device), splits)


@cache
def _tiling(outputs: int, inner: int, dtype: torch.dtype, capability: int, splits: bool) -> Tiling:
    name = str(dtype).removeprefix("torch.")
    for row in read_table():
        known = (row["capability"], row["dtype"], row["outputs"], row["inner"], row["split"])
        if known == (capability, name, outputs, inner, splits):
            return Tiling(**row["tiling"])
    if dtype.itemsize == 4:
        tile = Tiling(16, 64, 4, 2, 1)
    elif splits or outputs >= 32 * _FEWEST_PROGRAMS:
        tile = Tiling(32, 128, 4, 4 if splits else 3, 1)
    else:
        tile = Tiling(16, 128, 2, 4, 1)
    parts = 1
    while splits and parts < MOST_SPLITS and inner // (2 * parts) >= _FEWEST_NUMBERS:
        if -(-outputs // tile.outputs) * parts >= _FEWEST_PROGRAMS:
            break
        parts *= 2
    return Tiling(tile.outputs, tile.step, tile.warps, tile.stages, parts)


def tilings(dtype: torch.dtype) -> list[Tiling]:
    """All that there may be in a dtype: the table's, and those of the rule."""
    name = str(dtype).removeprefix("torch.")
    measured = [Tiling(**row["tiling"]) for row in read_table() if row["dtype"] == name]
    ruled = [_tiling(outputs, 2048, dtype, 0, splits) for outputs in (16, 16384) for splits in (False, True)]
    return list(dict.fromkeys(measured + ruled))


@lru_cache
def read_table() -> list[dict[str, Any]]:
    """Rows of `products.json`: capability (90 for 9.0), dtype, outputs, inner, whether rows are split, tiling, us."""
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text())
    return rows


@contextmanager
def preferring(row: dict[str, Any]) -> Iterator[None]:
    """Divides products as a row says, before the table, so that it can be tried."""
    table = read_table()
    table.insert(0, row)
    _tiling.cache_clear()
    try:
        yield
    finally:
        table.remove(row)
        _tiling.cache_clear()


@cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """What every launch of a chain says: whether it starts while the kernel before it ends (`SIGMA0_PDL`).

    Products and sums are not fused: whether a compiler does that depends on what else a kernel computes, and the bits
    of a row would.
    """
    early = os.environ.get("SIGMA0_PDL", "0") == "1" and _capability(device) >= 90
    return {"PDL": early, "enable_fp_fusion": False} | ({"launch_pdl": True} if early else {})


def norm_reference(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm `[R, D]`, rounded to the model's dtype before and after the weight as transformers' modules do."""
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(hidden.dtype)


def check_product(hidden: Tensor, weight: Tensor, *others: Tensor) -> None:
    """Refuses rows `[R, D]`, a weight `[N, D]` and other tensors of one dtype that the kernels do not support.

    Raises:
        ValueError: For shapes, dtypes or strides.
    """
    if hidden.dtype not in DTYPES or {part.dtype for part in (weight, *others)} - {hidden.dtype}:
        dtypes = [part.dtype for part in (hidden, weight, *others)]
        raise ValueError(f"the kernel takes one dtype of float32, float16 and bfloat16, not {dtypes}")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"rows {tuple(hidden.shape)} and a weight {tuple(weight.shape)} have no product")
    if hidden.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the numbers of a row must lie side by side, and the rows of a weight")


def check_norm(hidden: Tensor, weight: Tensor) -> None:
    """Refuses the weight of a norm that is not `[D]`.

    Raises:
        ValueError: For its shape or strides.
    """
    if tuple(weight.shape) != hidden.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"a norm of {hidden.shape[1]} numbers, but its weight is {tuple(weight.shape)}")


# Whether products and norms are compiled where they would be launched.
_COMPILES_ONLY: ContextVar[bool] = ContextVar("compiles_only", default=False)


def start(kernel: Any, grid: tuple[int, ...], like: Tensor, *arguments: object, **options: object) -> None:
    """Launches a kernel; within `compiled_together` has it compiled for these arguments instead.

    Args:
        kernel: Jitted.
        grid: Programs along each axis.
        like: Any tensor of its device.
        *arguments: Of the kernel.
        **options: Its constants, warps and stages; those of `launch_options` are added.
    """
    options = options | launch_options(like.device)
    if _COMPILES_ONLY.get():
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


@contextmanager
def compiled_together() -> Iterator[None]:
    """Compiles side by side what is launched meanwhile by `start`, without running it: what it writes is not there."""
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        token = _COMPILES_ONLY.set(True)
        try:
            yield
        finally:
            _COMPILES_ONLY.reset(token)


if wants_triton():
    import triton
    import triton.language as tl

    # A kernel reads no global but a constexpr.
    _ROW_TILE = tl.constexpr(ROW_TILE)
    # Steps that are fetched ahead of a wait, and numbers of half a line of the cache, or of a whole one.
    _AHEAD, _LINE = tl.constexpr(2), tl.constexpr(32)

    def upcasts(kernel: object, dtype: torch.dtype) -> bool:
        """Whether operands go to float32: Triton's interpreter multiplies bfloat16 matrices wrongly."""
        return dtype == torch.bfloat16 and not isinstance(kernel, triton.JITFunction)

    @triton.jit
    def rows_of_tile(tile, rows):
        """Numbers of the rows of a tile, and which of them there are."""
        row = tile.to(tl.int64) * _ROW_TILE + tl.arange(0, _ROW_TILE)
        return row, row < rows

    @triton.jit
    def product(
        hidden_ptr,
        row_at,
        there,
        weight_ptr,
        outputs,
        wanted,
        width,
        begin,
        end,
        STEP: tl.constexpr,
        UPCAST: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Rows of a tile times rows of the weight, in the steps from begin to end: `[16, outputs]`, float32."""
        total = tl.zeros([_ROW_TILE, outputs.shape[0]], tl.float32)
        weight_row = weight_ptr + outputs.to(tl.int64)[:, None] * width
        if PDL:
            # into the L2 cache; a wait within a loop that is pipelined would come too late, and one step ahead of the
            # loop would hold up its first loads
            line = begin + tl.arange(0, _AHEAD * STEP // _LINE) * _LINE
            wanted_lines = wanted[:, None] & (line < width)[None, :]
            lines = tl.where(wanted_lines, weight_row + line[None, :], weight_ptr)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
            )
            tl.extra.cuda.gdc_wait()
        for start in range(begin, end, STEP):
            index = start + tl.arange(0, STEP)
            inside = (index < width)[None, :]
            w = tl.load(weight_row + index[None, :], mask=wanted[:, None] & inside, other=0.0)
            x = tl.load(hidden_ptr + row_at[:, None] + index[None, :], mask=there[:, None] & inside, other=0.0)
            if UPCAST:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        return total
