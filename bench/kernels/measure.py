"""Time and bandwidth of every kernel in Ouro-1.4B's shape, beside the same in eager torch and under `torch.compile`.

Each call's bytes are the least that its file states; "of a copy" is the share of the bandwidth of a plain copy measured
in the same run. A share of one decode pass compares with a pass of the block, over the same rows, of random weights.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from sigma0.bench.core.bandwidth import copy_bandwidth, time_of
from sigma0.bench.speed.shapes import SHAPES
from sigma0.kernels.collapse import WINDOW, CollapseRule, CollapseState, collapse_reference
from sigma0.kernels.collapse_kernel import collapse
from sigma0.kernels.depth_attention import DepthRows, depth_attention
from sigma0.kernels.exit_state import KEPT, ExitParams, ExitState, LoopEndWeights, RuleRows
from sigma0.kernels.loop_end import loop_end_reference
from sigma0.kernels.loop_end_kernel import loop_end
from sigma0.kernels.span_attention import span_attention, spans_of
from sigma0.kernels.variants import LOOP_END

SHAPE, LOOPS = "ouro-1.4b", 4
WAYS = ("kernel", "eager", "compiled")
_SEED = 0


@dataclass(frozen=True)
class Case:
    """One operation on one size.

    Attributes:
        kernel: Its name.
        size: In words.
        rows: Rows in the pass.
        bytes: The least that it must read and write.
        calls: How often a pass calls it.
        ways: What to time, by name.
    """

    kernel: str
    size: str
    rows: int
    bytes: int
    calls: int
    ways: dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """What was measured.

    Attributes:
        kernel: Name of the operation.
        size: In words.
        way: "kernel", "eager" or "compiled".
        microseconds: Median of a call.
        gigabytes_per_second: Least bytes over that time.
        of_a_copy: That over a copy's bandwidth.
        of_a_pass: Time of all calls in a pass over the time of a pass of the block; None where none was timed.
    """

    kernel: str
    size: str
    way: str
    microseconds: float
    gigabytes_per_second: float
    of_a_copy: float
    of_a_pass: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def cases(
    device: torch.device, dtype: torch.dtype, rows: tuple[int, ...], contexts: tuple[int, ...], ways: tuple[str, ...]
) -> Iterator[Case]:
    """Every operation on every size.

    Args:
        device: Where.
        dtype: Of states, logits and K/V.
        rows: Rows of a pass.
        contexts: Columns that each row attends to.
        ways: Some of `WAYS`.
    """
    torch.manual_seed(_SEED)
    for count in rows:
        yield _loop_end(device, dtype, count, ways)
        yield _collapse(device, dtype, count, ways)
        for context in contexts:
            yield _attention(device, dtype, count, context, ways)


def ways_of(
    names: tuple[str, ...], kernel: Callable[..., object], eager: Callable[..., object], *arguments: Any
) -> dict[str, Callable[[], object]]:
    """The calls of an operation in some of `WAYS`."""
    made = {"kernel": kernel, "eager": eager, "compiled": torch.compile(eager) if "compiled" in names else eager}
    return {name: partial(made[name], *arguments) for name in names}


def _loop_end(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    width = SHAPES[SHAPE]["hidden_size"]
    hidden, previous = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    gate = torch.randn(width, device=device, dtype=dtype)
    weights = LoopEndWeights(None, 0.0, gate, torch.zeros(1, device=device, dtype=dtype))
    state, slots = ExitState.empty(rows, width, dtype, device), torch.arange(rows, device=device)
    state.counts[:, 0] = KEPT
    rules = RuleRows.of(ExitParams("qexit", 0.5, 2**30), rows, device)
    arguments = (hidden, previous, weights, state, slots, rules)
    size = 6 * rows * width * dtype.itemsize + width * dtype.itemsize
    return Case(
        LOOP_END, f"{rows} rows of {width}", rows, size, 1,
        ways_of(ways, loop_end, loop_end_reference, *arguments),
    )  # fmt: skip


def _collapse(device: torch.device, dtype: torch.dtype, rows: int, ways: tuple[str, ...]) -> Case:
    vocabulary = SHAPES[SHAPE]["vocab_size"]
    logits = torch.randn(rows, vocabulary, device=device, dtype=dtype)
    state, slots = CollapseState.empty(rows, device), torch.arange(rows, device=device)
    arguments = (logits, None, state, slots, CollapseRule())
    size = rows * (vocabulary * dtype.itemsize + WINDOW * 4)
    return Case(
        "collapse", f"{rows} rows of {vocabulary}", rows, size, 1,
        ways_of(ways, collapse, collapse_reference, *arguments),
    )  # fmt: skip


def _attention(device: torch.device, dtype: torch.dtype, rows: int, context: int, ways: tuple[str, ...]) -> Case:
    """Rows spread over the planes, each of a sequence of its own, so that nothing is read twice."""
    heads = SHAPES[SHAPE]["num_attention_heads"]
    width = SHAPES[SHAPE]["hidden_size"] // heads
    # as a cache keeps them: by position, and one position more that is nobody's
    keys, values = (
        torch.randn(LOOPS, rows * context + 1, heads, width, device=device, dtype=dtype) for _ in range(2)
    )  # fmt: skip
    block_keys, block_values = (
        part[:, :-1].view(LOOPS, rows, context, heads, width).transpose(2, 3) for part in (keys, values)
    )
    query = torch.randn(rows, heads, width, device=device, dtype=dtype)
    sequences = torch.arange(rows, device=device)
    planes = (torch.arange(rows, device=device) * LOOPS).div(rows, rounding_mode="floor")
    columns = torch.full_like(sequences, context - 1)
    at = DepthRows(sequences, columns, planes, None, None, None, context)
    firsts, lengths = [context * row for row in range(rows)], [context] * rows
    spans = spans_of(planes.tolist(), firsts, lengths, lengths)
    scaling = width**-0.5
    size = 2 * rows * heads * context * width * dtype.itemsize
    return Case(
        "depth_attention",
        f"{rows} rows, {context} columns",
        rows,
        size,
        SHAPES[SHAPE]["num_hidden_layers"],
        ways_of(
            ways,
            partial(depth_attention, query, block_keys, block_values, at),
            partial(span_attention, query, keys, values, spans),
            scaling,
        ),
    )


def pass_seconds(device: torch.device, dtype: torch.dtype, rows: int) -> float:
    """Seconds of the matrix products of one pass of the block: every weight of every layer is read once."""
    shape = SHAPES[SHAPE]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    sizes = [(width, width)] * 4 + [(width, inner)] * 2 + [(inner, width)]
    layers = [
        [torch.randn(size, device=device, dtype=dtype) for size in sizes] for _ in range(shape["num_hidden_layers"])
    ]
    inputs = {size: torch.randn(rows, size, device=device, dtype=dtype) for size in (width, inner)}

    def run() -> None:
        for layer in layers:
            for weight in layer:
                inputs[weight.shape[0]] @ weight

    run()
    return time_of(run, device)


def measure(
    cases: Iterator[Case], device: torch.device, passes: dict[int, float], on_case: Callable[[], None] = lambda: None
) -> tuple[float, list[Timing]]:
    """Times every case.

    Args:
        cases: The cases.
        device: Where they are.
        passes: Seconds of a pass by number of rows; {} leaves the shares out.
        on_case: Told of each case.

    Returns:
        Bandwidth of a copy, bytes a second (median of three readings), and the timings.
    """
    copy = statistics.median(copy_bandwidth(device) for _ in range(3))
    found = []
    for case in cases:
        for way, call in case.ways.items():
            call()
            seconds = time_of(call, device)
            rate = case.bytes / seconds
            share = case.calls * seconds / passes[case.rows] if case.rows in passes else None
            found.append(Timing(case.kernel, case.size, way, seconds * 1e6, rate / 1e9, rate / copy, share))
        on_case()
    return copy, found
