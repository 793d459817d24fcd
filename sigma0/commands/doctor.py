"""`sigma0 doctor`: what this installation has, what is off, and why."""

import json
import os
import platform
import runpy
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from sigma0.checkpoints import shipped_models
from sigma0.commands.console import print_table
from sigma0.commands.options import AsJson
from sigma0.presence import has_driver

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

DISTRIBUTION = "sigma0-lm"


def doctor(as_json: AsJson = False) -> None:
    """Print versions, devices, and what is installed or off, and why."""
    report = examine()
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2, ensure_ascii=False))
    else:
        print_report(report)


def print_report(report: "Report") -> None:
    """Prints a table for each section of the report."""
    for section in fields(report):
        findings: tuple[Finding, ...] = getattr(report, section.name)
        rows = []
        for finding in findings:
            mark = Text("on", style="green") if finding.ok else Text("off", style="yellow")
            rows.append((mark, finding.name, finding.detail))
        print_table(section.name, rows)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        ok: Whether it is there and usable.
        detail: Version or device; or why it is off and what to do.
    """

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """All findings, by section: `versions`, `devices`, `features`, `switches`, `models`."""

    versions: tuple[Finding, ...]
    devices: tuple[Finding, ...]
    features: tuple[Finding, ...]
    switches: tuple[Finding, ...]
    models: tuple[Finding, ...]


def examine() -> Report:
    """Looks at the machine and the installation, and probes the sandbox; loads no model.

    Torch is imported only where there may be a GPU to ask it for, since that takes longer than all the rest.
    """
    devices = _devices()
    return Report(
        versions=_versions(),
        devices=devices,
        features=(
            _triton(any(device.ok and device.name != "cpu" for device in devices)),
            _native(),
            _compiler(),
            _sandbox(),
        ),
        switches=_switches(),
        models=_models(),
    )


def _versions() -> tuple[Finding, ...]:
    python = Finding(name="python", ok=True, detail=platform.python_version())
    try:
        needed = _requirements(requires(DISTRIBUTION) or [])
    except PackageNotFoundError:
        needed = {}
    return python, _installed(DISTRIBUTION), *(_installed(name, needed[name]) for name in sorted(needed))


def _requirements(lines: list[str]) -> dict[str, "SpecifierSet"]:
    """The versions that the distribution needs here, extras left out."""
    from packaging.requirements import Requirement

    items = [Requirement(line) for line in lines]
    return {item.name: item.specifier for item in items if item.marker is None or item.marker.evaluate({"extra": ""})}


def _installed(name: str, needed: "SpecifierSet | None" = None) -> Finding:
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Finding(name=name, ok=False, detail=f"not installed; pip install {name}")
    if needed is not None and not needed.contains(installed, prereleases=True):
        return Finding(name=name, ok=False, detail=f"{installed}, but {needed} is needed")
    return Finding(name=name, ok=True, detail=installed)


def _devices() -> tuple[Finding, ...]:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    findings = [Finding(name="cpu", ok=True, detail=f"{count} CPUs, {platform.machine()}")]
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return *findings, Finding(name="cuda", ok=False, detail="torch is not installed; pip install torch")
    # the file says what torch was built for, and imports nothing of torch
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if has_driver(build):
        import torch

        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                properties = torch.cuda.get_device_properties(index)
                memory = properties.total_memory / 2**30
                findings.append(Finding(name=f"cuda:{index}", ok=True, detail=f"{properties.name}, {memory:.0f} GiB"))
            return tuple(findings)
    why = "no CUDA device is visible" if build["cuda"] is not None else "this torch was built without CUDA"
    return *findings, Finding(name="cuda", ok=False, detail=f"{why}; models run on the CPU")


def _triton(has_cuda: bool) -> Finding:
    if find_spec("triton") is None:
        return Finding(
            name="triton",
            ok=False,
            detail="not installed; torch's CUDA builds bring it",
        )
    chosen = "the kernels run on CUDA" if has_cuda else "the kernels need CUDA; here plain torch runs"
    return Finding(name="triton", ok=True, detail=f"{version('triton')}; {chosen}")


def _native() -> Finding:
    from sigma0.kernels.native import is_available, level

    if not is_available():
        detail = "no functions in C++, torch runs: install with a C++ compiler"
        return Finding(name="native", ok=False, detail=detail)
    try:
        return Finding(name="native", ok=True, detail=f"functions in C++ for a CPU, for {level()}")
    except ValueError as error:
        return Finding(name="native", ok=False, detail=str(error))


def _compiler() -> Finding:
    from sigma0.cpp_compiler import compiler

    found = compiler()
    if found is None:
        return Finding(
            name="compile", ok=False, detail="no C++ compiler for runner='compile' (set CXX, or install g++)"
        )
    return Finding(name="compile", ok=True, detail=f"{found}; steps with runner='compile'")


def _sandbox() -> Finding:
    from sigma0.reason.sandbox.sandbox import Sandbox

    why = Sandbox().unavailable
    return Finding(name="sandbox", ok=why is None, detail=why or "bubblewrap contains what the probe tried")


def _switches() -> tuple[Finding, ...]:
    from sigma0.config import switches

    effects = {
        "verdict": "every generation has a verdict",
        "inner_break": "a token whose loop diverges stops",
        "ladder": "what a verdict sends up goes up, where generate is given a ladder",
        "routing": "a server with a ladder hands up the answers whose verdict says escalate",
    }
    return tuple(
        Finding(
            name=f"SIGMA0_{name.upper()}", ok=on, detail=f"{effects[name]}{'' if on else '; set to 1 to turn it on'}"
        )
        for name, on in switches().model_dump().items()
    )


def _models() -> tuple[Finding, ...]:
    return tuple(Finding(name=name, ok=True, detail="shipped with the package") for name in shipped_models())
