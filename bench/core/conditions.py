"""What a measurement was made with: weights, code, libraries, device."""

import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from sigma0.bench.core.digests import settings_sha256, weights_sha256
from sigma0.bench.core.rows import Conditions
from sigma0.models.hf_generate import DepthGenerationMixin

_LIBRARIES = ("sigma0-lm", "torch", "transformers")
# git's exit code for "no repository here" and for every other trouble.
_TROUBLE = 128


def describe(
    model: Any,
    name: str,
    prompts: str,
    ids: Sequence[tuple[int, ...]],
    answers: Sequence[str | None],
    max_new_tokens: int,
    batch_size: int = 1,
) -> Conditions:
    """The conditions of a run.

    Args:
        model: The loaded model.
        name: What it was loaded as.
        prompts: Where the prompts come from.
        ids: Their ids.
        answers: Their known answers.
        max_new_tokens: New tokens of each prompt at most.
        batch_size: Prompts in a batch.
    """
    return describe_weights(
        model, name, weights_sha256(name), settings_sha256(name), prompts, ids, answers, max_new_tokens, batch_size
    )


def describe_weights(
    model: Any,
    name: str,
    model_sha256: str,
    settings_sha256: str,
    prompts: str,
    ids: Sequence[tuple[int, ...]],
    answers: Sequence[str | None],
    max_new_tokens: int,
    batch_size: int = 1,
) -> Conditions:
    """As `describe`, for weights that no checkpoint holds: their digests are the caller's to give."""
    known = [(tuple(row), answer) for row, answer in zip(ids, answers, strict=True)]
    return Conditions(
        model=name,
        model_sha256=model_sha256,
        settings_sha256=settings_sha256,
        total_loops=model.num_loops if isinstance(model, DepthGenerationMixin) else 1,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        device=device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        prompts=prompts,
        prompts_sha256=sha256(repr(known).encode()).hexdigest(),
        n=len(ids),
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        commit=git_commit(),
        versions=library_versions(),
        quantization=getattr(model, "quantization", None),
        stride=getattr(model.config, "stride", 1),
        kv=model.kv_config.to_dict() if isinstance(model, DepthGenerationMixin) and model.kv_config.is_coded else None,
        product_ms=product_ms(model.device, torch.get_num_threads()),
    )


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that compute."""
    return {"python": platform.python_version(), **{each: version(each) for each in _LIBRARIES}}


def git_commit() -> str | None:
    """The commit of the code that runs, with "+" and a digest behind it where sources differ from it.

    Returns:
        None outside a repository, or where these sources are not part of it.

    Raises:
        ValueError: If git refuses to tell.
    """
    if shutil.which("git") is None or not _is_tracked():
        return None
    root = Path(_git("rev-parse", "--show-toplevel").strip())
    commit = _git("rev-parse", "HEAD").strip()
    # Results change while they are measured.
    everything_else = ("--", ":(top)", ":(top,exclude)bench/results")
    changed = _git("diff", "HEAD", *everything_else)
    new = _git("ls-files", "--others", "--exclude-standard", "--full-name", "--", ":(top)*.py").split()
    if not changed and not new:
        return commit
    text = changed + "".join(f"{name}\n{(root / name).read_text()}" for name in new)
    return f"{commit}+{sha256(text.encode()).hexdigest()[:8]}"


def _is_tracked() -> bool:
    """Whether these sources stand in a repository of their own, not in an environment inside somebody else's."""
    found = _run_git("ls-files", "--error-unmatch", Path(__file__).name)
    if found.returncode == _TROUBLE and "not a git repository" not in found.stderr:
        raise ValueError(f"git does not tell the commit of these sources: {found.stderr.strip()}")
    return found.returncode == 0


def _git(*arguments: str) -> str:
    found = _run_git(*arguments)
    if found.returncode:
        raise ValueError(f"git {' '.join(arguments[:2])} failed: {found.stderr.strip()}")
    return found.stdout


def _run_git(*arguments: str) -> subprocess.CompletedProcess[str]:
    folder = Path(__file__).resolve().parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def device_name(device: torch.device) -> str:
    """The device in words, with the name of the GPU or processor."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({_processor()})" if device.type == "cpu" else device.type


def _processor() -> str:
    """Name of the processor, as far as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    # machines of one name differ: virtual ones hide which processor they have
    return ", ".join([name, *(f"L{level} {size}" for level, size in sorted(_caches().items()) if level > 1)])


def _caches() -> dict[int, str]:
    """Sizes of the caches of the first core, by level, where the system tells them."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    return {int((each / "level").read_text()): (each / "size").read_text().strip() for each in folders}


@lru_cache
def product_ms(device: torch.device, threads: int) -> float:
    """Milliseconds of a fixed product, float32 `[1024, 1024]` twice, the fastest of ten: how fast a machine is."""
    matrix = torch.ones(1024, 1024, device=device)
    times = []
    for _ in range(10):
        began = perf_counter()
        # read back, so that a GPU has ended
        float((matrix @ matrix)[0, 0])
        times.append(1000 * (perf_counter() - began))
    return round(min(times), 3)
