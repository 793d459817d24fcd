"""`sigma0 doctor`: what this installation has, what is off, and why."""

import json
import os
import platform
import runpy
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigma0.checkpoints import shipped_models
from sigma0.commands.options import AsJson
from sigma0.presence import has_driver

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

DISTRIBUTION = "sigma0-lm"
_EFFECTS = {
    "verdict": "every generation has a verdict",
    "inner_break": "a token whose loop diverges stops",
    "ladder": "what a verdict sends up goes up, where generate is given a ladder",
    "routing": "a server with a ladder hands up the answers whose verdict says escalate",
}


class Finding(NamedTuple):
    """One line of the report."""

    name: str  # What was looked at
    ok: bool  # Whether it is there and usable
    detail: str  # Version or device; or why it is off and what to do


def doctor(as_json: AsJson = False) -> None:
    """Print versions, devices, and what is installed or off, and why."""
    report = examine()
    if as_json:
        result = {section: [finding._asdict() for finding in findings] for section, findings in report.items()}
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
        return
    for section, findings in report.items():
        table = Table(title=section, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, ok, detail in findings:
            table.add_row(Text("on", style="green") if ok else Text("off", style="yellow"), name, detail)
        Console(highlight=False).print(table)


def examine() -> dict[str, list[Finding]]:
    """Looks at the machine and the installation, and probes the sandbox; all findings, by section. Loads no model.

    Torch is imported only where there may be a GPU to ask it for, since that takes longer than all the rest.
    """
    from sigma0.config import switches

    devices = list(_devices())
    has_cuda = any(device.ok and device.name != "cpu" for device in devices)
    return {
        "versions": list(_versions()),
        "devices": devices,
        "features": list(_features(has_cuda)),
        "switches": [
            Finding(f"SIGMA0_{name.upper()}", on, f"{_EFFECTS[name]}{'' if on else '; set to 1 to turn it on'}")
            for name, on in switches().model_dump().items()
        ],
        "models": [Finding(name, True, "shipped with the package") for name in shipped_models()],
    }


def _versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    yield Finding("python", True, platform.python_version())
    yield _installed(DISTRIBUTION)
    try:
        items = [Requirement(line) for line in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:
        return
    # extras left out
    needed = {it.name: it.specifier for it in items if it.marker is None or it.marker.evaluate({"extra": ""})}
    yield from (_installed(name, needed[name]) for name in sorted(needed))


def _installed(name: str, needed: "SpecifierSet | None" = None) -> Finding:
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Finding(name, False, f"not installed; pip install {name}")
    fits = needed is None or needed.contains(installed, prereleases=True)
    return Finding(name, fits, installed if fits else f"{installed}, but {needed} is needed")


def _devices() -> Iterator[Finding]:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cpu", True, f"{count} CPUs, {platform.machine()}")
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        yield Finding("cuda", False, "torch is not installed; pip install torch")
        return
    # the file says what torch was built for, and imports nothing of torch
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if has_driver(build):
        import torch

        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                properties = torch.cuda.get_device_properties(index)
                yield Finding(f"cuda:{index}", True, f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
            return
    why = "no CUDA device is visible" if build["cuda"] is not None else "this torch was built without CUDA"
    yield Finding("cuda", False, f"{why}; models run on the CPU")


def _features(has_cuda: bool) -> Iterator[Finding]:
    from sigma0.cpp_compiler import compiler
    from sigma0.reason.sandbox.sandbox import Sandbox

    if find_spec("triton") is None:
        yield Finding("triton", False, "not installed; torch's CUDA builds bring it")
    else:
        chosen = "the kernels run on CUDA" if has_cuda else "the kernels need CUDA; here plain torch runs"
        yield Finding("triton", True, f"{version('triton')}; {chosen}")
    yield _native()
    path = compiler()
    missing = "no C++ compiler for runner='compile' (set CXX, or install g++)"
    yield Finding("compile", path is not None, missing if path is None else f"{path}; steps with runner='compile'")
    why = Sandbox().unavailable
    yield Finding("sandbox", why is None, why or "bubblewrap contains what the probe tried")


def _native() -> Finding:
    from sigma0.kernels.native import is_available, level

    if not is_available():
        return Finding("native", False, "no functions in C++, torch runs: install with a C++ compiler")
    try:
        return Finding("native", True, f"functions in C++ for a CPU, for {level()}")
    except ValueError as error:
        return Finding("native", False, str(error))
