"""How the products of a model are divided best on a device: every tiling tried, in rows of `kernels/products.json`.

Each is timed in a CUDA graph over so many different weights that the L2 cache holds none of them, and what it computes
is compared with float64. Tilings are tried in a drawn order after the one in force, until a product's share of the
time is up.
"""

import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product as every
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigma0.bench.speed.shapes import settings_of
from sigma0.kernels.row_gated import row_gated, row_gated_reference
from sigma0.kernels.row_linear import row_linear, row_parts
from sigma0.kernels.row_product import TABLE, Tiling, compiled_together, preferring, read_table, tiling_of
from sigma0.kernels.row_qkv import row_qkv, row_qkv_reference

ROWS, REPLAYS = 4, 6
# Bytes of weights that one graph reads; numbers that a program holds of them in a step; its shared memory at most.
_WEIGHT_BYTES, _MOST_NUMBERS, _SHARED_BYTES = 220e6, 16384, 200_000
# Tilings that are compiled side by side, and a relative error that no rounding makes.
_CHUNK, _MOST_ERROR = 16, 1e-2
_SEED = 0
# What a row of the table is for.
_PLACE = ("capability", "dtype", "outputs", "inner", "split")


@dataclass(frozen=True)
class Product:
    """A product of a layer, or of the head."""

    name: str  # "qkv", "output", "gate-up", "down" or "head"
    outputs: int  # N
    inner: int  # K
    split: bool  # Whether its rows may be split
    head_width: int = 0  # d, for qkv
    kv_heads: int = 0  # H_kv, for qkv

    def row(self, capability: int, dtype: torch.dtype, tiling: Tiling, us: float) -> dict[str, Any]:
        """A row of the table."""
        return {
            "capability": capability,
            "dtype": str(dtype).removeprefix("torch."),
            **{name: getattr(self, name) for name in _PLACE[2:]},
            "tiling": asdict(tiling),
            "us": round(us, 2),
        }


def products_of(shape: str) -> list[Product]:
    """The products of a named shape."""
    sizes = settings_of(shape)
    width, inner, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    kv_heads, head_width = sizes.get("num_key_value_heads", heads), width // heads
    return [
        Product("qkv", (heads + 2 * kv_heads) * head_width, width, False, head_width, kv_heads),
        Product("output", width, width, True),
        Product("gate-up", 2 * inner, width, False),
        Product("down", width, inner, True),
        Product("head", sizes["vocab_size"], width, False),
    ]


def candidates(product: Product, dtype: torch.dtype, first: Tiling) -> list[Tiling]:
    """Tilings of a product that a device has room for, the one in force first, then in a drawn order."""
    splits = (1, 2, 4) if product.split else (1,)
    result = [
        tiling
        for tiling in starmap(Tiling, every((16, 32, 64), (64, 128, 256), (2, 4, 8), (3, 4, 5), splits))
        if product.inner // tiling.splits >= tiling.step
        and tiling.outputs <= (product.head_width or tiling.outputs)
        and tiling.outputs * tiling.step <= _MOST_NUMBERS
        and (tiling.outputs + 16) * tiling.step * tiling.stages * dtype.itemsize <= _SHARED_BYTES
    ]
    random.Random(_SEED).shuffle(result)
    return list(dict.fromkeys([first, *result]))


def search(
    result: Sequence[Tiling],
    time_of: Callable[[Tiling], float | None],
    until: float,
    prepare: Callable[[Sequence[Tiling]], None] = lambda some: None,
    now: Callable[[], float] = time.monotonic,
) -> dict[Tiling, float]:
    """Times tilings, the first ones first, until the time is up as `now` tells it, at least the first of them.

    `time_of` gives microseconds, None where one cannot run or is wrong; `prepare` is told of those that are timed next.
    """
    timed: dict[Tiling, float] = {}
    for place in range(0, len(result), _CHUNK):
        if timed and now() >= until:
            break
        some = result[place : place + _CHUNK]
        prepare(some)
        took = {tiling: time_of(tiling) for tiling in some}
        timed |= {tiling: us for tiling, us in took.items() if us is not None}
    if not timed:
        raise ValueError(f"none of {len(result)} tilings runs on this device")
    return timed


def tune(
    shape: str, device: torch.device, dtype: torch.dtype, seconds: float, on_product: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Rows of the table: the best tiling of every product of a shape, found in some seconds on CUDA."""
    major, minor = torch.cuda.get_device_capability(device)
    rows, start = [], time.monotonic()
    wanted = products_of(shape)
    for number, product in enumerate(wanted, start=1):
        trial = Trial(product, device, dtype, 10 * major + minor)
        result = candidates(product, dtype, tiling_of(trial.hidden, trial.weights[0], product.split))
        timed = search(result, trial.time_of, start + seconds * number / len(wanted), trial.compile)
        best = min(timed, key=lambda tiling: timed[tiling])
        rows.append(trial.row(best, timed[best]))
        on_product(number)
    return rows


class Trial:
    """A product on a device of a compute capability, 90 for 9.0, with different weights."""

    def __init__(
        self,
        product: Product,
        device: torch.device,
        dtype: torch.dtype,
        capability: int,
        weight_bytes: float = _WEIGHT_BYTES,
    ) -> None:
        self._product, self._capability = product, capability
        generator = torch.Generator(device).manual_seed(_SEED)

        def drawn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        self.hidden = drawn(ROWS, product.inner)
        count = max(4, int(weight_bytes / (product.outputs * product.inner * dtype.itemsize)) + 1)
        self.weights = [drawn(product.outputs, product.inner) / product.inner**0.5 for _ in range(count)]
        self._more: tuple[Tensor, ...] = ()
        if product.name == "qkv":
            index = torch.arange(ROWS, device=device)
            cos, sin = (drawn(ROWS, product.head_width) for _ in range(2))
            keys, values = (drawn(1, ROWS, product.kv_heads, product.head_width) for _ in range(2))
            self._more = (cos, sin, index, keys, values, index)

    def row(self, tiling: Tiling, us: float) -> dict[str, Any]:
        """A row of the table."""
        return self._product.row(self._capability, self.hidden.dtype, tiling, us)

    def call(self, weight: Tensor) -> Tensor:
        """The product with a weight, by the kernel that a pass calls; parts are not added up."""
        kernels: dict[str, Callable[..., Tensor]] = {"qkv": row_qkv, "gate-up": row_gated, "head": row_linear}
        return kernels.get(self._product.name, row_parts)(self.hidden, weight, *self._more)

    def exact(self, weight: Tensor) -> Tensor:
        """The same in float64."""
        hidden, weight = self.hidden.double(), weight.double()
        if self._product.name == "qkv":
            more = [item.double() if item.is_floating_point() else item for item in self._more]
            return row_qkv_reference(hidden, weight, *more)
        if self._product.name == "gate-up":
            return row_gated_reference(hidden, weight)
        return torch.nn.functional.linear(hidden, weight)

    def is_right(self) -> bool:
        """Whether the product is that of float64 but for rounding."""
        result, exact = self.call(self.weights[-1]).double(), self.exact(self.weights[-1])
        result = result.sum(0) if result.ndim > exact.ndim else result
        return bool((result - exact).norm() <= _MOST_ERROR * exact.norm())

    def compile(self, some: Iterable[Tiling]) -> None:
        """Compiles the kernel for some tilings side by side."""
        # one that does not compile is found where it is timed
        with suppress(*_refusals()), compiled_together():
            for tiling in some:
                with preferring(self.row(tiling, 0)):
                    self.call(self.weights[0])

    def time_of(self, tiling: Tiling) -> float | None:
        """Microseconds of a product, the best of several replays; None where it cannot run or is wrong."""
        with suppress(*_refusals()), preferring(self.row(tiling, 0)):
            return self._replayed() if self.is_right() else None
        return None

    def _replayed(self) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                self.call(weight)
        graph.replay()
        taken: list[float] = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
        return 1e3 * min(taken) / len(self.weights)


def _refusals() -> tuple[type[Exception], ...]:
    """Of a tiling that a device has no room for: of the compiler, of its passes and of the driver."""
    from triton.errors import TritonError

    return TritonError, RuntimeError


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows into a table in place of those for the same products; a file that is not there begins as ours."""
    known = json.loads(path.read_text()) if path.exists() else read_table()
    merged = {tuple(row[name] for name in _PLACE): row for row in (*known, *rows)}
    lines = ",\n".join(f"  {json.dumps(merged[place])}" for place in sorted(merged))
    path.write_text(f"[\n{lines}\n]\n")
    if path == TABLE:
        read_table.cache_clear()
