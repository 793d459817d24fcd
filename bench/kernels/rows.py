"""Cases of the kernels that a pass of few rows calls in every layer, and of its head, in Ouro-1.4B's shape."""

from collections.abc import Iterator

import torch

from sigma0.bench.kernels.measure import LOOPS, SHAPE, Case, ways_of
from sigma0.bench.speed.shapes import SHAPES
from sigma0.kernels.row_head import row_head, row_head_reference
from sigma0.kernels.row_linear import row_linear
from sigma0.kernels.row_mlp import row_mlp, row_mlp_reference
from sigma0.kernels.row_norm_kernel import row_norm, row_norm_reference
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
        yield _linear(device, dtype, count, ways)
        yield _norm(device, dtype, count, ways)
        yield _mlp(device, dtype, count, ways)
        yield _head(device, dtype, count, ways)


def _qkv(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    shape = SHAPES[SHAPE]
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    head_width = width // heads
    hidden, weight = (torch.randn(count, width, device=device, dtype=dtype) for count in (rows, 3 * width))
    norm = torch.randn(width, device=device, dtype=dtype)
    cos, sin = (torch.randn(_POSITIONS, head_width, device=device, dtype=dtype) for _ in range(2))
    keys, values = (torch.zeros(LOOPS, rows, heads, head_width, device=device, dtype=dtype) for _ in range(2))
    index = torch.arange(rows, device=device)
    arguments = (hidden, norm, _EPSILON, weight, cos, sin, index, keys, values, index)
    # of each row the state and two lines of the tables, and what is written
    size = (weight.numel() + width + rows * (width + 2 * head_width + 3 * width)) * dtype.itemsize
    return Case(
        "row_qkv", f"{rows} rows of {width}", rows, size, shape["num_hidden_layers"],
        ways_of(ways, row_qkv, row_qkv_reference, *arguments),
    )  # fmt: skip


def _linear(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    """The product after attention."""
    shape = SHAPES[SHAPE]
    width = shape["hidden_size"]
    hidden, weight = (torch.randn(count, width, device=device, dtype=dtype) for count in (rows, width))
    size = (weight.numel() + 2 * hidden.numel()) * dtype.itemsize
    return Case(
        "row_linear", f"{rows} rows of {width}", rows, size, shape["num_hidden_layers"],
        ways_of(ways, row_linear, torch.nn.functional.linear, hidden, weight),
    )  # fmt: skip


def _norm(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    """Of what attention or the MLP returns, added to the state; two in a layer."""
    shape = SHAPES[SHAPE]
    width = shape["hidden_size"]
    hidden, residual = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(width, device=device, dtype=dtype)
    size = (width + 3 * hidden.numel()) * dtype.itemsize
    return Case(
        "row_norm", f"{rows} rows of {width}", rows, size, 2 * shape["num_hidden_layers"],
        ways_of(ways, row_norm, row_norm_reference, hidden, weight, _EPSILON, residual),
    )  # fmt: skip


def _mlp(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    shape = SHAPES[SHAPE]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    sizes = ((rows, width), (2 * inner, width), (width, inner), (width,))
    hidden, gate_up, down, norm = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
    size = (3 * inner * width + width + 2 * rows * (width + inner)) * dtype.itemsize
    return Case(
        "row_mlp", f"{rows} rows of {width}, {inner}", rows, size, shape["num_hidden_layers"],
        ways_of(ways, row_mlp, row_mlp_reference, hidden, gate_up, down, norm, _EPSILON),
    )  # fmt: skip


def _head(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    """Greedy, as a pass without draws reads; the reference writes the logits, which the bytes leave out."""
    width, vocabulary = SHAPES[SHAPE]["hidden_size"], SHAPES[SHAPE]["vocab_size"]
    hidden, weight = (torch.randn(count, width, device=device, dtype=dtype) for count in (rows, vocabulary))
    size = (vocabulary + rows) * width * dtype.itemsize
    return Case(
        "row_head", f"{rows} rows of {width}, {vocabulary} ids", rows, size, 1,
        ways_of(ways, row_head, row_head_reference, hidden, weight, None),
    )  # fmt: skip
