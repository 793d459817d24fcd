"""Compiles kernels ahead of time for GPUs that need not be present, with the resources that they use."""

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sigma0.kernels.variants import Variant, variants

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Where kernels may start while the one before them ends.
PDL_TARGETS = ("sm_90", "sm_100")
# Dynamic shared memory of a program, in bytes; a kernel over it compiles and cannot be launched.
SHARED_LIMITS = {"sm_80": 166912, "sm_90": 232448}
NARROWEST = 8


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel uses; None where the target's tools do not report it."""

    kernel: str  # Its name
    target: str  # For which GPU
    dtype: str  # Of what it streams
    blocks: str  # Its configuration
    registers: int | None  # Of a thread
    spill_bytes: int | None  # Of a thread
    shared_bytes: int  # Of a program
    load_width: int | None  # Bytes of the widest load from global memory: those of the streaming loop
    fault: str | None  # What is wrong with it, or None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def compile_variant(variant: Variant, target: str) -> Compiled:
    """Compiles one configuration for one of `TARGETS`."""
    names = variant.function.arg_names
    given = dict(variant.constants)
    if "PDL" in given:
        given["PDL"] = target in PDL_TARGETS
    signature = {name: "constexpr" if name in given else kind for name, kind in variant.signature.items()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in variant.aligned
    }
    constants = {(names.index(name),): value for name, value in given.items()}
    source = ASTSource(variant.function, signature, constants, aligned)
    kernel = triton.compile(
        source,
        target=TARGETS[target],
        options={"num_warps": variant.warps, "enable_fp_fusion": "PDL" not in given, **variant.options},
    )
    registers, spills, width = _used(kernel)
    shared = int(kernel.metadata.shared)
    return Compiled(
        kernel=variant.kernel,
        target=target,
        dtype=str(variant.dtype).removeprefix("torch."),
        blocks=variant.blocks,
        registers=registers,
        spill_bytes=spills,
        shared_bytes=shared,
        load_width=width,
        fault=_fault(target, spills, shared, width),
    )


def compile_numbered(job: tuple[str, int]) -> Compiled:
    """`compile_variant` of a target and the number of a variant, for a process that can be told no more."""
    target, number = job
    return compile_variant(next(islice(variants(), number, None)), target)


def _fault(target: str, spills: int | None, shared: int, width: int | None) -> str | None:
    if spills:
        return f"{spills} bytes spilled"
    if shared > SHARED_LIMITS.get(target, shared):
        return f"{shared} bytes shared, over {SHARED_LIMITS[target]}"
    if width is not None and width < NARROWEST:
        return f"loads of {width} bytes"
    return None


def _used(kernel: Any) -> tuple[int | None, int | None, int | None]:
    """Registers, spilled bytes and the widest load; of CUDA kernels alone."""
    if "cubin" not in kernel.asm:
        return None, None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([_cuobjdump(), "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report.stdout + report.stderr)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"], _widest_load(kernel.asm["ptx"])


def _widest_load(ptx: str) -> int:
    """Bytes of the widest load from global memory, copies to shared memory included."""
    widths = [
        int(count or 1) * int(bits) // 8
        for count, bits in re.findall(r"ld\.global(?:\.[a-z]\w*(?<!v2)(?<!v4))*(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    ]
    widths += [int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)", ptx)]
    return max(widths, default=0)


def _cuobjdump() -> str:
    paths = sorted(Path(triton.__file__).parent.rglob("cuobjdump"))
    if not paths:
        raise FileNotFoundError("this triton ships no cuobjdump, which reports registers and spills")
    return str(paths[0])
