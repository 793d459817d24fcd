"""The ledger: one JSON line for each measured setting, under one published schema.

Lines are appended whole, by one writer at a time, and stay whole where a writer is killed: a last line that it left
half-written is cut off by the next one. Anything else that is not a row is refused, naming the line, so that nothing is
silently mixed.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter

from sigma0.bench.core.lines import alone, append, cut, parsed
from sigma0.bench.core.rows import AnyRow, Measured

Row = Annotated[AnyRow, Field(discriminator="benchmark")]
_ROW: TypeAdapter[AnyRow] = TypeAdapter(Row)
R = TypeVar("R", bound=Measured)
Key = TypeVar("Key")


def row_schema() -> dict[str, Any]:
    """The JSON Schema of a row."""
    return _ROW.json_schema()


def parse_row(line: str | bytes) -> AnyRow:
    """One line of a ledger."""
    return _ROW.validate_json(line)


def read_rows(path: Path) -> list[AnyRow]:
    """All rows of a ledger; none where the file is missing.

    Raises:
        ValueError: For a line that is no row, named by its number; a last line without its end included.
    """
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        raise ValueError(f"{str(path)!r} ends in a half-written line: measure again with it, which cuts the line off")
    return parsed(path, parse_row, "row of this schema")


def runs_of(rows: Iterable[object], kind: type[R], key: Callable[[R], Key]) -> dict[Key, list[R]]:
    """The rows of one kind, in their order, by what those of a run share."""
    runs: dict[Key, list[R]] = {}
    for row in rows:
        if isinstance(row, kind):
            runs.setdefault(key(row), []).append(row)
    return runs


def append_rows(path: Path, rows: Iterable[AnyRow]) -> None:
    """Adds rows, each as `append_row` does."""
    for row in rows:
        append_row(path, row)


def append_row(path: Path, row: AnyRow) -> bool:
    """Adds a row, whole, and says whether it did: not if its run holds one of the same key, perhaps of another process.

    Raises:
        ValueError: If the ledger holds a line that is no row.
    """
    with alone(path):
        cut(path)
        if any((known.run, known.key) == (row.run, row.key) for known in read_rows(path)):
            return False
        append(path, row.model_dump_json().encode())
        return True


def repair(path: Path) -> bytes:
    """Cuts off a last line that a killed writer left without its end, and returns it."""
    with alone(path):
        return cut(path)


def check_ledger(path: Path) -> None:
    """Cuts off a half-written last line and reads the rest, before time is spent on what is to be appended."""
    repair(path)
    read_rows(path)
