"""Files of lines that several processes append to, each line whole, also where a writer was killed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


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
