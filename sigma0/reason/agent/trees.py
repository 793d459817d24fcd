"""A folder's files as bytes, bounded: what a workspace holds, and what a patch is drawn from."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VERSION_CONTROL = (".git", ".hg", ".svn")
CACHES = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".cache")
ENVIRONMENTS = (".tox", ".nox", ".venv", "venv", "node_modules", ".eggs")
LEFT_OUT_FOLDERS = frozenset((*VERSION_CONTROL, *CACHES, *ENVIRONMENTS))
# a folder that holds it is a virtual environment
ENVIRONMENT = "pyvenv.cfg"
MAX_LISTED = 100


@dataclass(frozen=True)
class StoredFile:
    """A file."""

    data: bytes  # Its bytes
    executable: bool = False  # Whether its owner may run it


@dataclass(frozen=True)
class Tree:
    """What a folder holds."""

    files: dict[str, StoredFile]  # By path, separated by `/`
    folders: tuple[str, ...]  # Paths
    # Path and reason of what was left out for another reason than its name; the first of them
    left_out: tuple[str, ...]


def read_tree(root: Path, max_entries: int, max_bytes: int) -> Tree:
    """Reads a folder.

    Folders of version control, virtual environments and caches are left out; so are symbolic links, special files, and
    names that no patch can carry.

    Args:
        root: The folder.
        max_entries: Files and folders at most.
        max_bytes: Of all files at most.

    Raises:
        ValueError: If it is no folder, cannot be read or is larger.
    """
    files: dict[str, StoredFile] = {}
    folders: list[str] = []
    left_out: list[str] = []
    room = max_bytes
    try:
        for path, is_folder in _walk(root, left_out):
            if len(files) + len(folders) >= max_entries:
                raise ValueError(f"{str(root)!r} holds more than {max_entries} entries: name a smaller folder")
            if is_folder:
                folders.append(path)
                continue
            files[path] = _read_file(root / path, room + 1)
            room -= len(files[path].data)
            if room < 0:
                raise ValueError(f"{str(root)!r} holds more than {max_bytes} bytes: name a smaller folder")
    except OSError as error:
        raise ValueError(f"{str(root)!r} cannot be read: {error}") from error
    return Tree(files, tuple(folders), tuple(left_out[:MAX_LISTED]))


def write_tree(tree: Tree, root: Path) -> None:
    """Makes a folder anew."""
    root.mkdir()
    for path in tree.folders:
        (root / path).mkdir()
    for path, file in tree.files.items():
        (root / path).write_bytes(file.data)
        (root / path).chmod(0o755 if file.executable else 0o644)


def unfit(name: str) -> str | None:
    """Why a patch cannot carry a name; None if it can."""
    if any(sign in '"\\' or ord(sign) < 32 or ord(sign) == 127 for sign in name) or name != name.strip():
        return "its name holds quotes, backslashes or control characters, or spaces around it"
    if any("\ud800" <= sign <= "\udfff" for sign in name):
        return "its name is no UTF-8"
    return None


def is_left_out(name: str) -> bool:
    """Whether files and folders of a name are left out."""
    return name in LEFT_OUT_FOLDERS or name == ENVIRONMENT or name.endswith(".pyc")


def _read_file(place: Path, at_most: int) -> StoredFile:
    with place.open("rb") as file:
        return StoredFile(file.read(at_most), bool(os.fstat(file.fileno()).st_mode & stat.S_IXUSR))


def _walk(root: Path, left_out: list[str]) -> Iterator[tuple[str, bool]]:
    """Paths, and whether each is a folder; a folder comes ahead of what it holds."""
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        for entry in sorted(os.scandir(root / prefix), key=lambda entry: entry.name):
            path = f"{prefix}{entry.name}"
            reason = _refused(entry)
            if reason:
                left_out.append(f"{path!a}: {reason}")
            elif is_left_out(entry.name):
                continue
            elif entry.is_file():
                yield path, False
            elif not (root / path / ENVIRONMENT).exists():
                yield path, True
                waiting.append(f"{path}/")


def _refused(entry: "os.DirEntry[str]") -> str | None:
    if entry.is_symlink():
        return "a symbolic link"
    if not entry.is_dir() and not entry.is_file():
        return "no ordinary file"
    return unfit(entry.name)
