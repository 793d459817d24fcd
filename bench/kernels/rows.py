"""Cases of the kernels that a pass of few rows calls in every layer, and of its head, in Ouro-1.4B's shape."""

from collections.abc import Iterator

import torch

from sigma0.bench.kernels.measure import LOOPS, SHAPE, Case, ways_of
from sigma0.bench.speed.shapes import SHAPES
from sigma0.kernels.row_gated import row_gated, row_gated_reference
from sigma0.kernels.row_linear import row_linear, row_parts, row_parts_reference
from sigma0.kernels.row_norm_kernel import row_residual, row_residual_reference
from sigma0.kernels.row_qkv import row_qkv, row_qkv_reference

_SEED, _EPSILON, _POSITIONS = 0, 1e-6, 1024


def row_cases(device: torch.device, dtype: torch.dtype, rows: tuple[int, ...], ways: tuple[str, ...]) -> Iterator[Case]:
    """Every operation on every number of rows.

    Args:
        device: Where.
        dtype: Of states, weights and K/V.
        rows: Rows of a pass.
        ways: Some of `WAYS`.
    """
    torch.manual_seed(_SEED)
    for count in rows:
        yield _qkv(device, dtype, count, ways)
        yield _parts(device, dtype, count, ways, "hidden_size")
        yield _residual(device, dtype, count, ways)
        yield _gated(device, dtype, count, ways)
        yield _parts(device, dtype, count, ways, "intermediate_size")
        yield _head(device, dtype, count, ways)


def _qkv(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    shape = SHAPES[SHAPE]
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    head_width = width // heads
    hidden, weight = (torch.randn(count, width, device=device, dtype=dtype) for count in (rows, 3 * width))
    cos, sin = (torch.randn(_POSITIONS, head_width, device=device, dtype=dtype) for _ in range(2))
    keys, values = (torch.zeros(LOOPS, rows, heads, head_width, device=device, dtype=dtype) for _ in range(2))
    index = torch.arange(rows, device=device)
    arguments = (hidden, weight, cos, sin, index, keys, values, index)
    # of each row the state and two lines of the tables, and what is written
    size = (weight.numel() + rows * (width + 2 * head_width + 3 * width)) * dtype.itemsize
    return Case(
        "row_qkv", f"{rows} rows of {width}", rows, size, shape["num_hidden_layers"],
        ways_of(ways, row_qkv, row_qkv_reference, *arguments),
    )  # fmt: skip


def _parts(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...], inner: str) -> Case:
    """The product behind attention or behind the gates."""
    shape = SHAPES[SHAPE]
    width, outputs = shape[inner], shape["hidden_size"]
    hidden, weight = (torch.randn(count, width, device=device, dtype=dtype) for count in (rows, outputs))
    size = (weight.numel() + hidden.numel()) * dtype.itemsize + 4 * rows * outputs
    return Case(
        "row_parts", f"{rows} rows of {width}", rows, size, shape["num_hidden_layers"],
        ways_of(ways, row_parts, row_parts_reference, hidden, weight),
    )  # fmt: skip


def _residual(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    """Of two parts; two in a layer."""
    shape = SHAPES[SHAPE]
    width = shape["hidden_size"]
    parts = torch.randn(2, rows, width, device=device)
    residual = torch.randn(rows, width, device=device, dtype=dtype)
    behind, ahead = (torch.randn(width, device=device, dtype=dtype) for _ in range(2))
    size = (2 * width + 3 * residual.numel()) * dtype.itemsize + 4 * parts.numel()
    return Case(
        "row_residual", f"{rows} rows of {width}", rows, size, 2 * shape["num_hidden_layers"],
        ways_of(ways, row_residual, row_residual_reference, parts, behind, residual, ahead, (_EPSILON, _EPSILON)),
    )  # fmt: skip


def _gated(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    shape = SHAPES[SHAPE]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    hidden, gate_up = (torch.randn(count, width, device=device, dtype=dtype) for count in (rows, 2 * inner))
    size = (gate_up.numel() + rows * (width + inner)) * dtype.itemsize
    return Case(
        "row_gated", f"{rows} rows of {width}, {inner}", rows, size, shape["num_hidden_layers"],
        ways_of(ways, row_gated, row_gated_reference, hidden, gate_up),
    )  # fmt: skip


def _head(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    """As a pass reads logits."""
    width, vocabulary = SHAPES[SHAPE]["hidden_size"], SHAPES[SHAPE]["vocab_size"]
    hidden, weight = (torch.randn(count, width, device=device, dtype=dtype) for count in (rows, vocabulary))
    size = (vocabulary * width + rows * (width + vocabulary)) * dtype.itemsize
    return Case(
        "row_linear", f"{rows} rows of {width}, {vocabulary} ids", rows, size, 1,
        ways_of(ways, row_linear, torch.nn.functional.linear, hidden, weight),
    )  # fmt: skip
