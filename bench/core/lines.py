"""Files of lines that several processes append to, each line whole, also where a writer was killed; without torch."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from sigma0.errors import one_line

Parsed = TypeVar("Parsed")
# characters of an error that are told
_TOLD = 400


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keeps other processes that ask so too from the file; makes its folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield


def cut(path: Path) -> bytes:
    """Cuts off a last line that a killed writer left without its end, and returns it; to be called alone."""
    if not path.exists():
        return b""
    content = path.read_bytes()
    kept = content.rfind(b"\n") + 1
    if kept < len(content):
        with path.open("r+b") as file:
            file.truncate(kept)
    return content[kept:]


def append(path: Path, line: bytes) -> None:
    """Adds a line, without its end, for good; to be called alone."""
    with path.open("a+b") as file:
        end = file.tell()
        if end:
            file.seek(end - 1)
        whole = not end or file.read(1) == b"\n"
    if not whole:
        cut(path)
    with path.open("ab") as file:
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def parsed(path: Path, parse: Callable[[bytes], Parsed], what: str) -> list[Parsed]:
    """Every whole line of a file, as `parse` makes it; none where the file is missing.

    Raises:
        ValueError: For a line that is refused, named by its number: it is no `what`.
    """
    result = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], start=1):
        try:
            result.append(parse(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of {str(path)!r} is no {what}: {one_line(error)[:_TOLD]}") from error
    return result
