"""What a report under `bench/results` was made with, written into it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sigma0.bench.core.conditions import device_name, git_commit, library_versions
from sigma0.bench.core.digests import settings_sha256, weights_sha256
from sigma0.errors import one_line


class Digests(BaseModel):
    """A model's files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights_sha256: str  # As `Conditions.model_sha256` says
    settings_sha256: str  # As `Conditions.settings_sha256` says

    @classmethod
    def of(cls, name: str) -> "Digests":
        """Those of a shipped name, a folder or a hub id."""
        return cls(weights_sha256=weights_sha256(name), settings_sha256=settings_sha256(name))


class Provenance(BaseModel):
    """What a report was made with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str = Field(min_length=1)  # What was run, as one types it
    commit: str = Field(pattern=r"^[0-9a-f]{40}(\+[0-9a-f]{8})?$")  # Of the code, as `git_commit` says
    device: str = Field(min_length=1)  # Device type and the processor's name
    threads: int = Field(ge=1)  # CPU threads
    versions: dict[str, str]  # Of Python and of the libraries that compute
    models: dict[str, Digests]  # Digests of every model that was loaded, by its name
    inputs: dict[str, str] = {}  # Digests (sha256) of the files that the repository does not hold, by their name
    time: datetime  # When it ended, in ISO 8601, UTC
    note: str = ""  # What else a reader must know

    @classmethod
    def here(
        cls, command: str, models: Sequence[str], inputs: Mapping[str, Path] = {}, threads: int = 1
    ) -> "Provenance":
        """That of a command that has just ended on the CPU of this machine.

        Args:
            command: As one types it.
            models: Names that it loaded.
            inputs: Files that it read, and folders of models, by their names.
            threads: CPU threads.

        Raises:
            ValueError: Outside a repository: a report of unknown code is none.
        """
        commit = git_commit()
        if commit is None:
            raise ValueError("the commit of these sources is unknown: write reports in a clone of the repository")
        return cls(
            command=command,
            commit=commit,
            device=device_name(torch.device("cpu")),
            threads=threads,
            versions=library_versions(),
            models={
                **{name: Digests.of(name) for name in models},
                **{name: Digests.of(str(path)) for name, path in inputs.items() if path.is_dir()},
            },
            inputs={name: sha256(path.read_bytes()).hexdigest() for name, path in inputs.items() if path.is_file()},
            time=datetime.now(timezone.utc),
        )


def write_report(path: Path, provenance: Provenance, report: Any) -> None:
    """Writes a report with its provenance before it; plain JSON values."""
    content = {"provenance": provenance.model_dump(mode="json"), "report": report}
    path.write_text(json.dumps(content, indent=1) + "\n")


def figures_of(path: Path) -> Any:
    """What a file that `--json` printed says: a report with its provenance, or the bare figures."""
    content = json.loads(path.read_text())
    return content["report"] if isinstance(content, dict) and set(content) == {"provenance", "report"} else content


def read_report(path: Path) -> tuple[Provenance, Any]:
    """A report that `write_report` wrote.

    Raises:
        ValueError: If it does not say what it was made with.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or set(content) != {"provenance", "report"}:
        raise ValueError(f"{path.name} has no provenance: write it with python -m sigma0.bench all --only {path.stem}")
    try:
        return Provenance.model_validate(content["provenance"]), content["report"]
    except ValidationError as error:
        raise ValueError(f"the provenance of {path.name} is incomplete: {one_line(error)}") from error
