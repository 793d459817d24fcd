"""What a measurement was made with: weights, code, libraries, device."""

import platform
import shutil
import subprocess
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from sigma0.bench.ledger import Conditions
from sigma0.loading import resolve_model

_LIBRARIES = ("sigma0-lm", "torch", "transformers")


def describe(
    model: Any,
    name: str,
    prompts: str,
    ids: Sequence[tuple[int, ...]],
    max_new_tokens: int,
    batch_size: int = 1,
) -> Conditions:
    """The conditions of a run.

    Args:
        model: The loaded model.
        name: What it was loaded as.
        prompts: Where the prompts come from.
        ids: Their ids.
        max_new_tokens: New tokens of each prompt at most.
        batch_size: Prompts in a batch.
    """
    return Conditions(
        model=name,
        model_sha256=weights_sha256(name),
        total_loops=model.num_loops,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        device=_device(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        prompts=prompts,
        prompts_sha256=sha256(repr([tuple(row) for row in ids]).encode()).hexdigest(),
        n=len(ids),
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        commit=git_commit(),
        versions={"python": platform.python_version(), **{each: version(each) for each in _LIBRARIES}},
    )


def weights_sha256(name: str) -> str:
    """Digest of a checkpoint's weights, as `Conditions.model_sha256` says.

    Raises:
        ValueError: If no safetensors file is there.
    """
    source = resolve_model(name)
    folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, local_files_only=True))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{name!r} has no *.safetensors file")
    digests = [(_digest(file), file.name) for file in files]
    if len(digests) == 1:
        return digests[0][0]
    return sha256("".join(f"{digest}  {file}\n" for digest, file in digests).encode()).hexdigest()


def git_commit() -> str | None:
    """The commit of the code that runs, "+" behind it where tracked files differ; None outside a repository."""
    if shutil.which("git") is None or not _is_tracked():
        return None
    commit = _git("rev-parse", "HEAD").stdout.strip()
    # Results change while they are measured.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", ":(top,exclude)bench/results")
    return f"{commit}+" if changed.stdout.strip() else commit


def _is_tracked() -> bool:
    """Whether these sources stand in a repository of their own, not in an environment inside somebody else's."""
    return _git("ls-files", "--error-unmatch", Path(__file__).name, check=False).returncode == 0


def _git(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    folder = Path(__file__).resolve().parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=check)


def _digest(file: Path) -> str:
    found = sha256()
    with file.open("rb") as content:
        while chunk := content.read(2**20):
            found.update(chunk)
    return found.hexdigest()


def _device(device: torch.device) -> str:
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
