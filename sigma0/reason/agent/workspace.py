"""A bounded copy of a repository that may be changed, discarded, and exported as a patch."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from sigma0.reason.agent.patches import as_text, patch_between
from sigma0.reason.agent.trees import StoredFile, is_left_out, read_tree, unfit, write_tree

TESTS = ("tests/", "test/", "test_*.py", "*_test.py", "conftest.py")
# what decides which tests run, or would be imported in the test tool's stead
TEST_SETTINGS = ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")
TEST_TOOLS = ("pytest.py", "pytest/", "_pytest/", "sitecustomize.py", "usercustomize.py")
PROTECTED = (*TESTS, *TEST_SETTINGS, *TEST_TOOLS)
LISTED = 200
MAX_PATH = 1000
Count = Annotated[int, Field(ge=1, strict=True)]


class WorkspaceFault(ValueError):
    """What a workspace refuses to do; its message is written for the model."""


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class WorkspaceLimits:
    """How much a workspace holds at most.

    Attributes:
        entries: Files and folders in all.
        total_bytes: Of all files.
        text_bytes: Of a file that is read or edited.
        read_chars: Shown of a file at once.
    """

    entries: Count = 5000
    total_bytes: Count = 64 * 2**20
    text_bytes: Count = 512 * 2**10
    read_chars: Count = 12_000


class Workspace:
    """A private copy of a folder. The folder itself is read once, and never written.

    Folders of version control, virtual environments and caches are left out; so are symbolic links, special files, and
    names that a patch cannot carry.

    Args:
        source: The folder.
        limits: How much is copied at most.
        protected: Patterns of what `edit` refuses to change: of names, or with a `/` at the end of folders.

    Attributes:
        folder: The copy. Commands may be run in copies of it.
        left_out: Path and reason of what was left out for another reason than its name.
        revision: Counts up with every change.

    Raises:
        ValueError: If the source is no folder, or larger than allowed.
    """

    def __init__(
        self, source: Path, limits: WorkspaceLimits | None = None, protected: Sequence[str] = PROTECTED
    ) -> None:
        self.limits = limits or WorkspaceLimits()
        self.protected = tuple(protected)
        self.revision = 0
        self._original = read_tree(source, self.limits.entries, self.limits.total_bytes)
        self.left_out = self._original.left_out
        self._home = tempfile.TemporaryDirectory(prefix="sigma0-workspace-")
        self.folder = Path(self._home.name) / "work"
        write_tree(self._original, self.folder)

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the copy."""
        self._home.cleanup()

    def files(self) -> dict[str, StoredFile]:
        """The copy's files as they are now, by path."""
        return read_tree(self.folder, self.limits.entries, self.limits.total_bytes).files

    def list(self, path: str = ".") -> str:
        """What a folder holds: names, folders with a `/`, files with their size.

        Raises:
            WorkspaceFault: If there is no such folder.
        """
        place = self._place(path)
        if not place.is_dir():
            raise WorkspaceFault(f"{path!r} is no folder.")
        lines = []
        for entry in sorted(place.iterdir()):
            lines.append(f"{entry.name}/" if entry.is_dir() else f"{entry.name} ({entry.lstat().st_size} bytes)")
        more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
        return "\n".join(lines[:LISTED] + more) or "The folder is empty."

    def read(self, path: str, start: int = 1, lines: int = 200) -> str:
        """Lines of a file under a heading that tells which they are; cut at the limit.

        Args:
            path: The file.
            start: The first line, from 1.
            lines: How many at most.

        Raises:
            WorkspaceFault: If there is no such file, it is too large or no text, or has fewer lines.
        """
        whole = self.text(path).split("\n")
        if whole[-1] == "":
            whole.pop()
        if start > max(1, len(whole)):
            raise WorkspaceFault(f"{path!r} has {len(whole)} lines, none at {start}.")
        shown = whole[start - 1 : start - 1 + lines]
        text = "\n".join(shown)
        cut = "\n[cut here: ask for fewer lines]" if len(text) > self.limits.read_chars else ""
        heading = f"{path}, lines {start} to {start - 1 + len(shown)} of {len(whole)}:"
        return f"{heading}\n{text[: self.limits.read_chars]}{cut}"

    def text(self, path: str) -> str:
        """The whole text of a file.

        Raises:
            WorkspaceFault: If there is no such file, or it is too large or no text.
        """
        place = self._place(path)
        if not place.is_file():
            raise WorkspaceFault(f"{path!r} is no file.")
        if place.stat().st_size > self.limits.text_bytes:
            raise WorkspaceFault(f"{path!r} is larger than {self.limits.text_bytes} bytes.")
        text = as_text(place.read_bytes())
        if text is None:
            raise WorkspaceFault(f"{path!r} is no UTF-8 text.")
        return text

    def edit(self, path: str, old: str, new: str) -> None:
        """Replaces text that stands in a file exactly once, or makes a new file.

        Args:
            path: The file.
            old: What is replaced. Empty: `new` is the whole text of a file that is new or was empty.
            new: What takes its place.

        Raises:
            WorkspaceFault: If the path is protected or leads outside, the text does not stand there exactly once,
                nothing would change, or a limit would be passed.
        """
        place = self._place(path)
        self._check_writable(path)
        if old:
            text = _replaced(path, self.text(path), old, new)
        elif place.exists() and (not place.is_file() or place.stat().st_size):
            raise WorkspaceFault(f"{path!r} exists: name the text to replace in `old`.")
        else:
            text = new
        if as_text(text.encode()) is None:
            raise WorkspaceFault("The new text holds a NUL character.")
        self._check_room(place, len(text.encode()))
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text.encode())
        except OSError as error:
            raise WorkspaceFault(f"{path!r} cannot be written: {error.strerror}.") from error
        self.revision += 1

    def reset(self) -> None:
        """Restores the copy as it was at first: deleted, changed and new files alike."""
        shutil.rmtree(self.folder)
        write_tree(self._original, self.folder)
        self.revision += 1

    def patch(self) -> str:
        """A unified diff from the source to the copy; empty where they are equal."""
        return patch_between(self._original.files, self.files())

    def is_protected(self, path: str) -> bool:
        """Whether `edit` refuses a path."""
        parts = PurePosixPath(path).parts
        for pattern in self.protected:
            if pattern.endswith("/"):
                if any(fnmatchcase(part, pattern[:-1]) for part in parts[:-1]):
                    return True
            elif fnmatchcase(parts[-1], pattern):
                return True
        return False

    def _place(self, path: str) -> Path:
        """Where a path lies in the copy."""
        pure = PurePosixPath(path)
        if not path or pure.is_absolute() or ".." in pure.parts:
            raise WorkspaceFault(f"{path[:200]!r} is no path inside the workspace: give one relative to its root.")
        if any(map(unfit, pure.parts)) or len(path.encode()) > MAX_PATH or any(map(_is_long, pure.parts)):
            raise WorkspaceFault(f"{path[:200]!r} is no path that the workspace can hold.")
        here = self.folder
        for part in pure.parts:
            here = here / part
            if here.is_symlink():
                raise WorkspaceFault(f"{path!r} goes through a symbolic link.")
        return here

    def _check_writable(self, path: str) -> None:
        parts = PurePosixPath(path).parts
        if not parts:
            raise WorkspaceFault("Name a file.")
        if any(map(is_left_out, parts)):
            raise WorkspaceFault(f"{path!r} cannot be written: the patch would leave it out.")
        if self.is_protected(path):
            raise WorkspaceFault(f"{path!r} is read-only: it belongs to the tests or decides which of them run.")

    def _check_room(self, place: Path, size: int) -> None:
        if size > self.limits.text_bytes:
            raise WorkspaceFault(f"The file would be larger than {self.limits.text_bytes} bytes.")
        others = [path for path in self.folder.rglob("*") if path != place]
        new = sum(not parent.exists() for parent in (place, *place.parents))
        if len(others) + new > self.limits.entries:
            raise WorkspaceFault(f"The workspace would hold more than {self.limits.entries} files and folders.")
        if sum(path.stat().st_size for path in others if path.is_file()) + size > self.limits.total_bytes:
            raise WorkspaceFault(f"The workspace would hold more than {self.limits.total_bytes} bytes.")


def _is_long(name: str) -> bool:
    return len(os.fsencode(name)) > 255


def _replaced(path: str, text: str, old: str, new: str) -> str:
    if "\r\n" in text and "\r" not in old + new and "\n" not in text.replace("\r\n", ""):
        # models write line feeds, whatever the file has
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    first = text.find(old)
    if first < 0:
        raise WorkspaceFault(f"`old` does not stand in {path!r}: copy it from the file as it is now.")
    if text.find(old, first + 1) >= 0:
        raise WorkspaceFault(f"`old` stands in {path!r} more than once: add lines around it.")
    if old == new:
        raise WorkspaceFault("`old` and `new` are equal: nothing would change.")
    return text[:first] + new + text[first + len(old) :]
