"""What a progressive run remembers between two processes: one JSON file, replaced whole after every iteration."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sigma0.errors import one_line
from sigma0.reason.messages import Usage

MAX_BYTES = 16 * 2**20
# up to it a float tells every whole number
MAX_SPENT = 2.0**53


class Memory(BaseModel):
    """The state of a run after an iteration.

    Attributes:
        problem: What is to be solved.
        solution: As it stands; None before the first.
        report: What the last failed verification found, for whoever reads the file.
        seed: Of the run.
        progressive: As `ProgressiveReasoningManager.to_dict` says; None in files older than it, which begin anew at the
            first stage with the solution that they hold.
        usage: Of all questions so far.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    problem: str
    solution: str | None = None
    report: str | None = None
    seed: int = 0
    progressive: dict[str, Any] | None = None
    usage: dict[str, Annotated[float, Field(ge=0, le=MAX_SPENT, allow_inf_nan=False)]] = {}

    @property
    def spent(self) -> Usage:
        """The usage.

        Raises:
            ValueError: For unknown keys.
        """
        unknown = sorted(set(self.usage) - set(asdict(Usage())))
        if unknown:
            raise ValueError(f"the memory's usage holds unknown keys: {', '.join(unknown)}")
        values = {name: value if name == "seconds" else int(value) for name, value in self.usage.items()}
        return Usage(**values)  # type: ignore[arg-type]


def read_memory(path: Path) -> Memory:
    """The memory in a file.

    Raises:
        ValueError: If it cannot be read or is none, naming what is wrong.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"the memory file {str(path)!r} is larger than {MAX_BYTES} bytes")
        return Memory.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"the memory file {str(path)!r} cannot be read: {error}") from error
    except ValidationError as error:
        raise ValueError(f"the memory file {str(path)!r}: {one_line(error)}") from error


def write_memory(path: Path, memory: Memory) -> None:
    """Replaces the file in one step, so that a crash leaves the old or the new one, whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(memory.model_dump_json(indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
