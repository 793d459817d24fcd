"""`python -m sigma0.bench device`: what a device is, and how fast a copy moves there."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import torch
import typer

from sigma0.bench.core.conditions import device_name, git_commit
from sigma0.bench.core.options import ReportFile
from sigma0.bench.core.output import measuring, tell_report
from sigma0.bench.speed.roofline import copy_bandwidth
from sigma0.commands.options import AsJson, Threads
from sigma0.models.load import resolve_device

LIBRARIES = ("sigma0-lm", "torch", "triton", "transformers", "torchao", "numpy")


def device(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Facts of a device, versions of the libraries, and the bandwidth of a plain copy, measured."""
    with measuring(threads):
        place = torch.device(resolve_device(device))
        facts: dict[str, Any] = {
            "device": device_name(place),
            "processors": os.cpu_count(),
            "python": platform.python_version(),
            "versions": {name: _version(name) for name in LIBRARIES},
            "commit": git_commit(),
        }
        if place.type == "cuda":
            result = torch.cuda.get_device_properties(place)
            facts |= {
                "capability": f"{result.major}.{result.minor}",
                "multiprocessors": result.multi_processor_count,
                "memory_bytes": result.total_memory,
                "l2_bytes": result.L2_cache_size,
                "cuda": torch.version.cuda,
            }
        facts["copy_bytes_per_second"] = copy_bandwidth(place)
        if tell_report(facts, out, as_json):
            typer.echo("\n".join(f"{name}: {value}" for name, value in facts.items()))


def _version(name: str) -> str | None:
    """Of an installed library; None where it is not."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
