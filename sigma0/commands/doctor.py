"""What this installation has, what is off, and why."""

import platform
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

import torch
from packaging.requirements import Requirement
from pydantic import BaseModel, ConfigDict

from sigma0.config import switches
from sigma0.models.load import shipped_models
from sigma0.reason.sandbox.sandbox import Sandbox

DISTRIBUTION = "sigma0-lm"


class Finding(BaseModel):
    """One line of the report.

    Attributes:
        name: What was looked at.
        ok: Whether it is there and usable.
        detail: Version or device; or why it is off and what to do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    ok: bool
    detail: str


class Report(BaseModel):
    """All findings, by section: `versions`, `devices`, `features`, `switches`, `models`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: tuple[Finding, ...]
    devices: tuple[Finding, ...]
    features: tuple[Finding, ...]
    switches: tuple[Finding, ...]
    models: tuple[Finding, ...]


def examine() -> Report:
    """Looks at the machine and the installation, and probes the sandbox; loads no model."""
    return Report(
        versions=_versions(), devices=_devices(), features=_features(), switches=_switches(), models=_models()
    )


def _versions() -> tuple[Finding, ...]:
    findings = [Finding(name="python", ok=True, detail=platform.python_version())]
    for name in (DISTRIBUTION, *sorted(_requirements())):
        findings.append(_installed(name))
    return tuple(findings)


def _requirements() -> dict[str, Requirement]:
    """What the distribution needs here, extras left out."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}
    wanted = [Requirement(line) for line in lines]
    return {item.name: item for item in wanted if item.marker is None or item.marker.evaluate({"extra": ""})}


def _installed(name: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name=name, ok=False, detail=f"not installed; pip install {name}")
    wanted = _requirements().get(name)
    if wanted is not None and not wanted.specifier.contains(found, prereleases=True):
        return Finding(name=name, ok=False, detail=f"{found}, but {wanted.specifier} is needed")
    return Finding(name=name, ok=True, detail=found)


def _devices() -> tuple[Finding, ...]:
    findings = [Finding(name="cpu", ok=True, detail=f"{torch.get_num_threads()} threads, {platform.machine()}")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / 2**30
            findings.append(Finding(name=f"cuda:{index}", ok=True, detail=f"{properties.name}, {memory:.0f} GiB"))
    else:
        built = torch.version.cuda is not None
        why = "no CUDA device is visible" if built else "this torch was built without CUDA"
        findings.append(Finding(name="cuda", ok=False, detail=f"{why}; models run on the CPU"))
    return tuple(findings)


def _features() -> tuple[Finding, ...]:
    return _triton(), _sandbox()


def _triton() -> Finding:
    if find_spec("triton") is None:
        return Finding(name="triton", ok=False, detail="not installed (Linux x86-64 only); use backend='torch' on CUDA")
    chosen = "the kernels run on CUDA" if torch.cuda.is_available() else "the kernels need CUDA; here plain torch runs"
    return Finding(name="triton", ok=True, detail=f"{version('triton')}; {chosen}")


def _sandbox() -> Finding:
    why = Sandbox().unavailable
    return Finding(name="sandbox", ok=why is None, detail=why or "bubblewrap contains what the probe tried")


def _switches() -> tuple[Finding, ...]:
    told = {
        "verdict": "every generation has a verdict",
        "inner_break": "a token whose loop diverges stops",
        "ladder": "what a verdict sends up goes up, where generate is given a ladder",
        "routing": "a server with a ladder hands up the answers whose verdict says escalate",
    }
    values = switches().model_dump()
    return tuple(
        Finding(name=f"SIGMA0_{name.upper()}", ok=on, detail=f"{told[name]}{'' if on else '; set to 1 to turn it on'}")
        for name, on in values.items()
    )


def _models() -> tuple[Finding, ...]:
    return tuple(Finding(name=name, ok=True, detail="shipped with the package") for name in shipped_models())
