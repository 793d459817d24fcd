"""`python -m sigma0.bench kernels`: every kernel in Ouro-1.4B's shape, beside eager torch and `torch.compile`.

Each call's bytes are the least that its file states; "of a copy" is the share of the bandwidth of a plain copy measured
in the same run. A share of one decode pass compares with a pass of the block, over the same rows, of random weights.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn.functional import linear

from sigma0.bench.core.conditions import device_name, git_commit
from sigma0.bench.core.options import ReportFile
from sigma0.bench.core.output import BenchTable, measuring, step_bar, tell_report
from sigma0.bench.kernels.tune import products_of, write_table
from sigma0.bench.kernels.tune import tune as tuned
from sigma0.bench.speed.roofline import copy_bandwidth, time_of
from sigma0.bench.speed.shapes import SHAPES
from sigma0.commands.console import progress_bar
from sigma0.commands.options import AsJson, StatedDtype, Threads
from sigma0.kernels.collapse import WINDOW, CollapseRule, CollapseState, collapse_reference
from sigma0.kernels.collapse_kernel import collapse
from sigma0.kernels.depth_attention import DepthRows, depth_attention
from sigma0.kernels.exit_state import KEPT, ExitParams, ExitState, LoopEndWeights, RuleRows
from sigma0.kernels.loop_end import loop_end_reference
from sigma0.kernels.loop_end_kernel import loop_end
from sigma0.kernels.row_gated import row_gated, row_gated_reference
from sigma0.kernels.row_linear import row_linear, row_parts, row_parts_reference
from sigma0.kernels.row_norm_kernel import row_residual, row_residual_reference
from sigma0.kernels.row_product import TABLE
from sigma0.kernels.row_qkv import row_qkv, row_qkv_reference
from sigma0.kernels.span_attention import span_attention, spans_of
from sigma0.kernels.variants import LOOP_END
from sigma0.models.load import resolve_device

SHAPE, LOOPS = "ouro-1.4b", 4
WAYS = ("kernel", "eager", "compiled")


def kernels(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...; the kernels themselves need CUDA.")] = "auto",
    dtype: StatedDtype = "bfloat16",
    rows: Annotated[str, typer.Option(help="Rows of a pass, separated by commas.")] = "1,4,16,64",
    contexts: Annotated[str, typer.Option(help="Columns that a row attends to, separated by commas.")] = "512,4096",
    ways: Annotated[str, typer.Option(help=f"Some of {', '.join(WAYS)}; by default all, and eager off CUDA.")] = "",
    whole_pass: Annotated[bool, typer.Option(help="Time a pass of the block too, for the shares.")] = True,
    tune: Annotated[
        bool, typer.Option("--tune", help="Find the best tiling of each product, and write the table (--out).")
    ] = False,
    shape: Annotated[str, typer.Option(help=f"Whose products --tune divides: {', '.join(SHAPES)}.")] = SHAPE,
    seconds: Annotated[float, typer.Option(min=1, help="Time that --tune may take.")] = 110,
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Microseconds and bandwidth of every kernel in Ouro-1.4B's shape, beside eager torch and torch.compile."""
    with measuring(threads):
        place = torch.device(resolve_device(device))
        if tune:
            _tune(shape, place, getattr(torch, dtype), seconds, out or TABLE, as_json)
            return
        names = tuple(ways.split(",")) if ways else WAYS if place.type == "cuda" else ("eager",)
        unknown = sorted(set(names) - set(WAYS))
        if unknown:
            raise ValueError(f"no such way: {', '.join(unknown)}; there are {', '.join(WAYS)}")
        if "kernel" in names and place.type != "cuda":
            raise ValueError(f"the kernels are timed on CUDA only, not on {place.type}: use --ways eager")
        kind = getattr(torch, dtype)
        counts, columns = _numbers(rows), _numbers(contexts)
        passes = {count: pass_seconds(place, kind, count) for count in counts} if whole_pass else {}
        with step_bar("cases", len(counts) * (8 + len(columns)), hidden=as_json) as advance:
            copy, timings = measure(place, kind, counts, columns, names, passes, advance)
    report = {
        "shape": SHAPE,
        "device": device_name(place),
        "dtype": dtype,
        "torch": torch.__version__,
        "commit": git_commit(),
        "copy_gigabytes_per_second": copy / 1e9,
        "pass_microseconds": {str(count): seconds * 1e6 for count, seconds in passes.items()},
        "timings": timings,
    }
    if tell_report(report, out, as_json):
        _print(report)


def _tune(shape: str, place: torch.device, dtype: torch.dtype, seconds: float, table: Path, as_json: bool) -> None:
    if place.type != "cuda":
        raise ValueError(f"products are tuned on CUDA only, not on {place.type}: --tune needs a GPU")
    with progress_bar("products", len(products_of(shape)), hidden=as_json) as advance:
        rows = tuned(shape, place, dtype, seconds, advance)
    write_table(table, rows)
    for row in rows:
        typer.echo(json.dumps(row))
    typer.echo(f"{len(rows)} rows in {table}", err=True)


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"whole numbers from 1 on, separated by commas, not {text!r}")
    return tuple(int(part) for part in parts)


def _print(report: dict[str, Any]) -> None:
    copy = report["copy_gigabytes_per_second"]
    title = f"{report['shape']}, {report['dtype']}, {report['device']}; a copy moves {copy:.0f} GB/s"
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        **{name: itemgetter(name) for name in ("kernel", "size", "way")},
        "us": lambda timing: f"{timing['microseconds']:.1f}",
        "GB/s": lambda timing: f"{timing['gigabytes_per_second']:.0f}",
        "of a copy": lambda timing: f"{timing['of_a_copy']:.0%}",
        "of a pass": lambda timing: "" if timing["of_a_pass"] is None else f"{timing['of_a_pass']:.1%}",
    }
    BenchTable.of(columns, report["timings"], title, tuple(columns)[:3]).show()


_SEED, _EPSILON, _POSITIONS = 0, 1e-6, 1024
_WIDTH, _INNER, _VOCABULARY, _HEADS, _LAYERS = (
    SHAPES[SHAPE][name]
    for name in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_hidden_layers")
)


class _Case(NamedTuple):
    """One operation on one size."""

    kernel: str
    size: str
    bytes: int  # the least that it must read and write
    calls: int  # in a pass
    ours: Callable[..., object]
    eager: Callable[..., object]
    arguments: tuple[Any, ...]  # of both


def measure(
    device: torch.device,
    dtype: torch.dtype,
    rows: Sequence[int],
    contexts: Sequence[int],
    ways: Sequence[str],
    passes: dict[int, float],
    on_case: Callable[[], None],
) -> tuple[float, list[dict[str, Any]]]:
    """Times every operation on every size: so many rows, of which each attends to so many columns.

    `passes` are seconds of a pass by number of rows; {} leaves the shares out. `on_case` is told of each case.

    Returns:
        Bandwidth of a copy, bytes a second (median of three readings), and of each case and way the median of a call,
        its least bytes over that time, that over a copy's, and all calls of a pass over the time of a pass.
    """
    copy = statistics.median(copy_bandwidth(device) for _ in range(3))
    result = []
    for count, case in _cases(torch.empty(0, device=device, dtype=dtype), rows, contexts):
        for way in ways:
            made = {"kernel": case.ours, "eager": case.eager}.get(way) or torch.compile(case.eager)
            call = partial(made, *case.arguments)
            call()
            seconds = time_of(call, device)
            rate = case.bytes / seconds
            result.append(
                {
                    "kernel": case.kernel,
                    "size": case.size,
                    "way": way,
                    "microseconds": seconds * 1e6,
                    "gigabytes_per_second": rate / 1e9,
                    "of_a_copy": rate / copy,
                    "of_a_pass": case.calls * seconds / passes[count] if count in passes else None,
                }
            )
        on_case()
    return copy, result


def _cases(like: Tensor, rows: Sequence[int], contexts: Sequence[int]) -> Iterator[tuple[int, _Case]]:
    """Cases by their rows; tensors are drawn with the device and the dtype of `like`."""
    torch.manual_seed(_SEED)
    for count in rows:
        yield count, _loop_end(like, count)
        yield count, _collapse(like, count)
        yield from ((count, _attention(like, count, context)) for context in contexts)
    for count in rows:
        yield count, _qkv(like, count)
        yield count, _parts(like, count, _WIDTH)
        yield count, _residual(like, count)
        yield count, _gated(like, count)
        yield count, _parts(like, count, _INNER)
        yield count, _head(like, count)


def _drawn(like: Tensor, *sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(size, device=like.device, dtype=like.dtype) for size in sizes]


def _loop_end(like: Tensor, rows: int) -> _Case:
    hidden, previous, gate = _drawn(like, (rows, _WIDTH), (rows, _WIDTH), (_WIDTH,))
    weights = LoopEndWeights(None, 0.0, gate, like.new_zeros(1))
    state, slots = ExitState.empty(rows, _WIDTH, like.dtype, like.device), torch.arange(rows, device=like.device)
    state.counts[:, 0] = KEPT
    rules = RuleRows.of(ExitParams("qexit", 0.5, 2**30), rows, like.device)
    arguments = (hidden, previous, weights, state, slots, rules)
    size = (6 * rows + 1) * _WIDTH * like.itemsize
    return _Case(LOOP_END, f"{rows} rows of {_WIDTH}", size, 1, loop_end, loop_end_reference, arguments)


def _collapse(like: Tensor, rows: int) -> _Case:
    (logits,) = _drawn(like, (rows, _VOCABULARY))
    state, slots = CollapseState.empty(rows, like.device), torch.arange(rows, device=like.device)
    arguments = (logits, None, state, slots, CollapseRule())
    size = rows * (_VOCABULARY * like.itemsize + WINDOW * 4)
    return _Case("collapse", f"{rows} rows of {_VOCABULARY}", size, 1, collapse, collapse_reference, arguments)


def _attention(like: Tensor, rows: int, context: int) -> _Case:
    """Rows spread over the planes, each of a sequence of its own, so that nothing is read twice."""
    width = _WIDTH // _HEADS
    # as a cache keeps them: by position, and one position more that is nobody's
    held = (LOOPS, rows * context + 1, _HEADS, width)
    keys, values, query = _drawn(like, held, held, (rows, _HEADS, width))
    block_keys, block_values = (
        part[:, :-1].view(LOOPS, rows, context, _HEADS, width).transpose(2, 3) for part in (keys, values)
    )
    sequences = torch.arange(rows, device=like.device)
    planes = (sequences * LOOPS).div(rows, rounding_mode="floor")
    at = DepthRows(sequences, torch.full_like(sequences, context - 1), planes, None, None, None, context)
    lengths = [context] * rows
    spans = spans_of(planes.tolist(), [context * row for row in range(rows)], lengths, lengths)
    ours = partial(depth_attention, query, block_keys, block_values, at)
    eager = partial(span_attention, query, keys, values, spans)
    size = 2 * rows * context * _WIDTH * like.itemsize
    return _Case("depth_attention", f"{rows} rows, {context} columns", size, _LAYERS, ours, eager, (width**-0.5,))


def _qkv(like: Tensor, rows: int) -> _Case:
    head = _WIDTH // _HEADS
    tables = (_POSITIONS, head)
    hidden, weight, cos, sin = _drawn(like, (rows, _WIDTH), (3 * _WIDTH, _WIDTH), tables, tables)
    keys, values = (like.new_zeros(LOOPS, rows, _HEADS, head) for _ in range(2))
    index = torch.arange(rows, device=like.device)
    arguments = (hidden, weight, cos, sin, index, keys, values, index)
    # of each row the state and two lines of the tables, and what is written
    size = (weight.numel() + rows * (4 * _WIDTH + 2 * head)) * like.itemsize
    return _Case("row_qkv", f"{rows} rows of {_WIDTH}", size, _LAYERS, row_qkv, row_qkv_reference, arguments)


def _parts(like: Tensor, rows: int, width: int) -> _Case:
    """The product after attention or after the gates."""
    hidden, weight = arguments = tuple(_drawn(like, (rows, width), (_WIDTH, width)))
    size = weight.nbytes + hidden.nbytes + 4 * rows * _WIDTH
    return _Case("row_parts", f"{rows} rows of {width}", size, _LAYERS, row_parts, row_parts_reference, arguments)


def _residual(like: Tensor, rows: int) -> _Case:
    """Of two parts; two in a layer."""
    parts = torch.randn(2, rows, _WIDTH, device=like.device)
    after, residual, ahead = _drawn(like, (_WIDTH,), (rows, _WIDTH), (_WIDTH,))
    arguments = (parts, after, residual, ahead, (_EPSILON, _EPSILON))
    size = (2 + 3 * rows) * _WIDTH * like.itemsize + parts.nbytes
    name = f"{rows} rows of {_WIDTH}"
    return _Case("row_residual", name, size, 2 * _LAYERS, row_residual, row_residual_reference, arguments)


def _gated(like: Tensor, rows: int) -> _Case:
    hidden, gate_up = _drawn(like, (rows, _WIDTH), (2 * _INNER, _WIDTH))
    size = gate_up.nbytes + rows * (_WIDTH + _INNER) * like.itemsize
    name = f"{rows} rows of {_WIDTH}, {_INNER}"
    return _Case("row_gated", name, size, _LAYERS, row_gated, row_gated_reference, (hidden, gate_up))


def _head(like: Tensor, rows: int) -> _Case:
    """As a pass reads logits."""
    hidden, weight = _drawn(like, (rows, _WIDTH), (_VOCABULARY, _WIDTH))
    size = weight.nbytes + rows * (_WIDTH + _VOCABULARY) * like.itemsize
    return _Case(
        "row_linear", f"{rows} rows of {_WIDTH}, {_VOCABULARY} ids", size, 1, row_linear, linear, (hidden, weight)
    )


def pass_seconds(device: torch.device, dtype: torch.dtype, rows: int) -> float:
    """Seconds of the matrix products of one pass of the block: every weight of every layer is read once."""
    like = torch.empty(0, device=device, dtype=dtype)
    sizes = [(_WIDTH, _WIDTH)] * 4 + [(_WIDTH, _INNER)] * 2 + [(_INNER, _WIDTH)]
    weights = _drawn(like, *sizes * _LAYERS)
    inputs = {size: _drawn(like, (rows, size))[0] for size in (_WIDTH, _INNER)}

    def run() -> None:
        for weight in weights:
            inputs[weight.shape[0]] @ weight

    run()
    return time_of(run, device)
