"""The bytes that a token has to read, the time that they take at the bandwidth of a copy, and what the rest is.

A pass reads the weights of the block once. A row at loop t reads plane t up to its own position, and no two rows of a
pass read the same K/V. The weights of the head are read once in a pass that reads any row of it: in every pass of a
step that is launched as a graph, which cannot leave it out, and else at most once for each row of a sequence that is
read. The time at the bandwidth of a copy is a floor for what does not fit a cache; the rest are launches, the host,
arithmetic, activations, and bandwidth that was not reached.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.benchmark import Timer

from sigma0.bench.core.output import BenchTable
from sigma0.bench.core.rows import SpeedRow
from sigma0.bench.speed.decoders import OTHERS, Decoded
from sigma0.decode.kv_store import BlockShape
from sigma0.models.quantization import weight_bytes

_COPY_BYTES = 2**28


def time_of(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call; on CUDA with the cache flushed before each and the device's own clock."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=50, rep=200, return_mode="median")) / 1e3
    # a timer has one thread of its own unless it is told
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.3).median)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes that a plain copy reads and writes in a second; on a CPU with the threads of this process."""
    # written, since memory that was never written is one page of zeros on a CPU, which its cache holds
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / time_of(lambda: target.copy_(source), device)


HEADINGS = (
    "way", "runner", "tokens/s", "of a copy", "MB/token", "ms/token", "ideal", "block", "head", "K/V", "rest",
    "rest/pass",
)  # fmt: skip
_RUNNERS = ("eager", "cudagraph", "compile")
_TERMINAL = ("way", "runner", "tokens/s", "of a copy", "MB/token", "ideal", "rest/pass")
EXPLANATION = (
    "ms/token is measured; ideal: the milliseconds that a token's bytes take at the bandwidth of a copy, and of that "
    "the block's weights, the head's, and K/V. rest: what is left of the measured time, launches and host among it, in "
    "milliseconds a token and microseconds a pass. of a copy: ideal over measured; more than all of it where the "
    "weights fit a cache, which a copy does not."
)
LAUNCHES = (
    "Microseconds of a pass that its bytes do not explain (`rest/pass`), by runner. What they fall by from eager to a "
    "captured graph was spent on launches and the host."
)


def block_bytes(model: Any) -> int:
    """Bytes of the weights that a pass reads: of the shared block; of a core and its adapter, once for each loop."""
    base = model.base_model
    if model.stages == (0, 0):
        return weight_bytes(base.layers)
    return int(model.config.stride * (weight_bytes(base.adapter) + weight_bytes(base.core_block)))


def bytes_per_token(model: Any, run: Decoded, context: int) -> dict[str, float]:
    """Bytes read for a token of each sequence, by field of a `SpeedRow`.

    After S prompt tokens the first of n new ones is there: n - 1 are fed, the k-th at position S + k - 1.
    """
    batch, new_tokens = run.tokens.shape
    passes, rows, head_rows = run.passes / run.later, run.rows / run.later / batch, run.head_rows / run.later / batch
    head = sum(parameter.nbytes for parameter in model.get_output_embeddings().parameters())
    prelude, coda = model.stages
    entry = weight_bytes(model.base_model.prelude) if prelude else 0
    head += weight_bytes(model.base_model.coda) if coda else 0
    readings = passes if run.captured else min(passes, head_rows)
    # K/V of a position in one plane of one layer, and the mean of S + 1, ..., S + n - 1 positions that a row reads
    shape = BlockShape.of(model, 1)
    plane = replace(shape, layers=1, planes=1, stages=(0, 0)).bytes_with(model.dtype)
    planes = shape.layers * rows + prelude + coda * head_rows
    return {
        "block_bytes_per_token": block_bytes(model) * passes + entry,
        "head_bytes_per_token": head * readings,
        "kv_bytes_per_token": plane * (context + new_tokens / 2) * planes * batch,
    }


def roofline(row: SpeedRow) -> dict[str, float] | None:
    """Where the time of a token goes, in milliseconds, by `HEADINGS`; None of a row that says nothing of its bytes.

    The bandwidth of a copy that was reached is in percent; the rest, negative where the bytes came out of a cache, also
    in microseconds a pass.
    """
    copy, block, head, kv = (
        row.copy_bandwidth,
        row.block_bytes_per_token,
        row.head_bytes_per_token,
        row.kv_bytes_per_token,
    )
    if copy is None or block is None or head is None or kv is None:
        return None
    measured, to_ms = row.milliseconds_per_token.value, 1e3 / copy
    times = {"block": block * to_ms, "head": head * to_ms, "K/V": kv * to_ms}
    ideal = sum(times.values())
    return {
        "tokens/s": row.tokens_per_second.value,
        "of a copy": 100 * ideal / measured,
        "MB/token": (block + head + kv) / 1e6,
        "ms/token": measured,
        "ideal": ideal,
        **times,
        "rest": measured - ideal,
        "rest/pass": 1e3 * (measured - ideal) / row.passes_per_token,
    }


def roofline_table(rows: Sequence[SpeedRow], terminal: bool = False) -> BenchTable | None:
    """The table of a run, for a page or a terminal; None where none of its rows says what it read."""
    shown = _TERMINAL if terminal else HEADINGS
    lines = [
        [
            row.way,
            row.runner,
            *(f"{roof[name]:.1f} %" if name == "of a copy" else f"{roof[name]:.4g}" for name in shown[2:]),
        ]
        for row in rows
        if (roof := roofline(row)) is not None
    ]
    return BenchTable(shown, lines, left=shown[:2]) if lines else None


def bandwidth_text(rows: Sequence[SpeedRow]) -> str:
    """The bandwidth of a copy in a run."""
    return f"A copy moves {(rows[0].copy_bandwidth or 0.0) / 1e9:.4g} GB/s."


def launch_table(rows: Sequence[SpeedRow]) -> BenchTable | None:
    """What is left of a pass beside its bytes, one runner beside the others; None where only one was measured.

    Of two measurements of the same thing the later one stands.
    """
    by_case: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        roof = roofline(row)
        if roof is None or row.way in OTHERS:
            continue
        rule = row.mode if row.course is None else "course"
        sizes = (row.batch_size, row.context, row.max_new_tokens)
        case = (row.model, row.device, row.dtype, row.by, *map(str, sizes), row.way, rule)
        by_case.setdefault(case, {})[row.runner] = roof["rest/pass"]
    runners = sorted({runner for result in by_case.values() for runner in result}, key=_RUNNERS.index)
    several = {case: result for case, result in by_case.items() if len(result) > 1}
    if not several:
        return None
    headings = ("model", "device", "dtype", "by", "batch", "context", "new", "way", "rule", *runners)
    lines = [
        [*case, *(f"{result[runner]:.4g}" if runner in result else "-" for runner in runners)]
        for case, result in several.items()
    ]
    return BenchTable(headings, lines, left=("model", "device", "dtype", "by", "way", "rule"))
