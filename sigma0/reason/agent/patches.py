"""Differences between two states of a folder, as a text that `git apply` and `patch -p1` take."""

from collections.abc import Iterator, Mapping
from difflib import unified_diff

from sigma0.reason.agent.trees import StoredFile


def as_text(data: bytes) -> str | None:
    """The text that a patch can hold; None for bytes that are no UTF-8 or hold a NUL."""
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def patch_between(before: Mapping[str, StoredFile], after: Mapping[str, StoredFile]) -> str:
    """A unified diff from one state to another, by path.

    Args:
        before: Files by their paths, separated by `/`, without quotes, backslashes and control characters.
        after: Likewise.

    Raises:
        ValueError: For a changed file that is no text, naming it.
    """
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return "".join("".join(_file_diff(path, before.get(path), after.get(path))) for path in changed)


def _file_diff(path: str, old: StoredFile | None, new: StoredFile | None) -> Iterator[str]:
    # of an empty file this line alone tells the name, and patch reads one with spaces only in quotes
    quote = '"' if " " in path else ""
    yield f"diff --git {quote}a/{path}{quote} {quote}b/{path}{quote}\n"
    if old is None:
        assert new is not None
        yield f"new file mode {_mode(new)}\n"
    elif new is None:
        yield f"deleted file mode {_mode(old)}\n"
    elif old.executable != new.executable:
        yield f"old mode {_mode(old)}\nnew mode {_mode(new)}\n"
    # a tab ends a name with spaces; without one patch would cut it at the first
    tab = "\t" if " " in path else ""
    from_name = "/dev/null" if old is None else f"a/{path}{tab}"
    to_name = "/dev/null" if new is None else f"b/{path}{tab}"
    old_lines, new_lines = _lines(path, old), _lines(path, new)
    for line in unified_diff(old_lines, new_lines, from_name, to_name):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _mode(file: StoredFile) -> str:
    return "100755" if file.executable else "100644"


def _lines(path: str, file: StoredFile | None) -> list[str]:
    """Lines as patches know them: separated by line feeds alone."""
    text = as_text(b"" if file is None else file.data)
    if text is None:
        raise ValueError(f"{path!r} is changed and no UTF-8 text: a patch cannot hold it")
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])
