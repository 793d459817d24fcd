"""Digests of a checkpoint's files, and whether weights are those that ship."""

from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from sigma0.checkpoints import shipped_models
from sigma0.models.load import checkpoint_folder


def weights_sha256(name: str) -> str:
    """Digest of a checkpoint's weights, as `Conditions.model_sha256` says.

    Raises:
        ValueError: If no safetensors file is there.
    """
    files = sorted(checkpoint_folder(name).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{name!r} has no *.safetensors file")
    return _digest(files[0]) if len(files) == 1 else _digest_of(files)


def settings_sha256(name: str) -> str:
    """Digest of a checkpoint's files that are not weights."""
    return _digest_of([path for path in checkpoint_folder(name).glob("*.json") if path.is_file()])


@cache
def shipped_weights(name: str) -> str | None:
    """Digest of the weights that ship under a name; None for other models."""
    return weights_sha256(name) if name in shipped_models() else None


def stale_mark(models: Mapping[str, str]) -> str:
    """What stands in a table behind the names of models: nothing, or which of them ship with other weights now.

    Args:
        models: The names, each with the digest of the weights that were measured.
    """
    stale = [name for name, digest in models.items() if shipped_weights(name) not in (None, digest)]
    return f" (**stale: other weights of {' and '.join(stale)} ship now**)" if stale else ""


def _digest_of(files: Sequence[Path]) -> str:
    lines = "".join(f"{_digest(file)}  {file.name}\n" for file in sorted(files))
    return sha256(lines.encode()).hexdigest()


def _digest(file: Path) -> str:
    found = sha256()
    with file.open("rb") as content:
        while chunk := content.read(2**20):
            found.update(chunk)
    return found.hexdigest()
