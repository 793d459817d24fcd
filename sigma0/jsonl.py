"""Files of JSON lines: one object a line, read and appended with errors that name the file and the line."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from sigma0.errors import one_line

T = TypeVar("T")
MAX_LINES = 1_000_000


def dump_line(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """A dataclass as one line, its end included.

    Args:
        value: A dataclass whose fields JSON can hold.
        default: Makes plain JSON of a field that JSON cannot hold; None: such a field is a TypeError.
    """
    return json.dumps(asdict(value), ensure_ascii=False, default=default) + "\n"


def append_line(path: Path, line: str) -> None:
    """Appends a line as `dump_line` makes it; half a surrogate pair becomes `?`."""
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(line)


def parse_by_kind(adapters: Mapping[str, TypeAdapter[T]], line: str) -> T:
    """A line as the dataclass that its field `kind` names.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: For no JSON, an unknown kind, or bad fields.
    """
    value = json.loads(line)
    return adapters[value["kind"]].validate_python(value)


def parse_lines(path: Path, lines: Iterable[str], parse: Callable[[str], T], what: str) -> Iterator[T]:
    """Parses lines one by one; blank ones are left out.

    Args:
        path: The file, for errors.
        lines: Of the file, in order, from its first.
        parse: Makes an object of a line.
        what: What a line should be, for errors, such as "line of a trail".

    Raises:
        ValueError: For a malformed line, naming file and line.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = parse(line)
        except ValidationError as error:
            raise ValueError(f"line {number} of {str(path)!r}: {one_line(error)}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"line {number} of {str(path)!r} is no {what}") from error
        yield parsed


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        ValueError: If the file cannot be read, naming it.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as UTF-8 text: {error}") from error


def read_lines(path: Path, parse: Callable[[str], T], what: str, drop_torn: bool = False) -> list[T]:
    """All lines of a file.

    Args:
        path: A UTF-8 file, with or without a byte order mark.
        parse: Makes an object of a line.
        what: What a line should be, for errors.
        drop_torn: Leave out a last line without its end, which a killed writer left; by default it is parsed too.

    Raises:
        ValueError: If the file cannot be read or is too long, or a line is malformed; names file and line.
    """
    # not splitlines, which also parts at separators that may stand inside of a JSON string
    lines = read_text(path).split("\n")
    if drop_torn or not lines[-1]:
        lines.pop()
    if len(lines) > MAX_LINES:
        raise ValueError(f"{str(path)!r} holds more than {MAX_LINES} lines")
    return list(parse_lines(path, lines, parse, what))


def cut_torn_line(path: Path, is_header: Callable[[str], bool], what: str) -> None:
    """Cuts off a last line that a killed writer left without its end, so that the next one starts a line of its own.

    Args:
        path: A file that exists.
        is_header: Whether a line is the first line of such a file.
        what: What the file should be, for errors, such as "trail of an outer loop".

    Raises:
        ValueError: If the file cannot be written, or its first line is no header: it is left as it is.
    """
    try:
        with path.open("rb+") as file:
            first = file.readline()
            if first and not is_header(first.decode("utf-8", "replace")):
                raise ValueError(f"{str(path)!r} exists and is no {what}: name another file")
            end = whole = file.tell() if first.endswith(b"\n") else 0
            for line in file:
                end += len(line)
                whole = end if line.endswith(b"\n") else whole
            if first:
                file.truncate(whole)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error}") from error
