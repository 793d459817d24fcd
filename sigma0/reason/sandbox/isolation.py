"""How bubblewrap is started: what a sandbox holds, and the ways in which it can be without rights."""

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The only places of a sandbox that can be written to.
SCRATCH = "/tmp"
SHARED_MEMORY = "/dev/shm"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_LOADER = ("/etc/ld.so.cache", "/etc/alternatives")
# Not zero, whose shared mappings hold memory that no process shows; nor terminals, counted over the whole machine.
_DEVICES = ("null", "full", "random", "urandom")
# No account has these: systemd lends them out to services. Each run has one, and so a count of processes, of its own.
_USERS = range(61184, 65520)
_ALWAYS = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    # for the launcher, which empties the bounding set and then gives this up, too
    *("--cap-add", "CAP_SETPCAP"),
)


class SandboxUnavailable(RuntimeError):
    """No isolation passes the start-up probe, or one that did fails: nothing was run."""


@dataclass(frozen=True)
class Way:
    """A way to be without rights inside."""

    name: str  # In reasons
    options: tuple[str, ...]  # Of bubblewrap
    starts_without_rights: bool = False  # Whether bubblewrap itself is started as a user without rights; needs root
    drops_inside: bool = False  # Whether the rights are given up inside, when all is mounted; needs root


_IN_A_USER_NAMESPACE = ("--unshare-user", "--disable-userns", *_ALWAYS)
_AS_ROOT = (*_ALWAYS, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")


def ways() -> tuple[Way, ...]:
    """Those that this user can try, the best first."""
    if os.geteuid() != 0:
        return (Way("in a user namespace", _IN_A_USER_NAMESPACE),)
    return (
        Way("as root that drops its rights inside", _AS_ROOT, drops_inside=True),
        Way("in another user's namespace", _IN_A_USER_NAMESPACE, starts_without_rights=True),
    )


def spare_user() -> int:
    """A user, and group, that nobody is."""
    return secrets.choice(_USERS)


def find_bubblewrap() -> str:
    """Its path.

    Raises:
        SandboxUnavailable: If there is none.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(f"the sandbox needs Linux and bubblewrap, and this is {sys.platform}")
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailable("bwrap is not on the PATH: install bubblewrap (apt-get install bubblewrap)")
    return os.path.realpath(path)


def interpreter() -> str:
    """The path of this interpreter: of its real file, or of a virtual environment's name for it."""
    return os.path.realpath(sys.executable) if sys.prefix == sys.base_prefix else sys.executable


def environment() -> dict[str, str]:
    """The whole environment of a sandbox; one thread for each library, since threads are counted."""
    single = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": SCRATCH,
        "TMPDIR": SCRATCH,
        "USER": "nobody",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        # each arena would reserve 64 MB of the address space that is limited
        "MALLOC_ARENA_MAX": "1",
        **dict.fromkeys(single, "1"),
    }


def root(scratch_bytes: int, files: Sequence[tuple[int, str]]) -> list[str]:
    """Bubblewrap's options for what a sandbox holds.

    Args:
        scratch_bytes: That fit into its private /tmp.
        files: Descriptors of files, and where they are to be read.

    Raises:
        SandboxUnavailable: If the interpreter cannot be had without the home folder.
    """
    options: list[str] = []
    for path in _SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    for path in _LOADER:
        options += ["--ro-bind-try", path, path]
    options += ["--proc", "/proc", "--tmpfs", "/dev"]
    for name in _DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        options += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    options += ["--symlink", "/proc/self/fd", "/dev/fd"]
    for path, size in ((SHARED_MEMORY, scratch_bytes // 4), (SCRATCH, scratch_bytes)):
        options += ["--perms", "1777", "--size", str(size), "--tmpfs", path]
    for path in interpreter_folders():
        for parent in reversed(Path(path).parents):
            # those that bubblewrap makes by itself only their owner may enter
            options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--ro-bind", os.path.realpath(path), path]
    for descriptor, path in files:
        options += ["--perms", "0444", "--ro-bind-data", str(descriptor), path]
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", SCRATCH]


def interpreter_folders() -> list[str]:
    """What this interpreter needs beside the system's folders: its own, and those of its virtual environment.

    Raises:
        SandboxUnavailable: If one of them holds the home folder.
    """
    given = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    folders: list[str] = []
    for path in sorted(given | {os.path.realpath(folder) for folder in given}):
        homes = [Path.home(), Path(os.path.realpath(Path.home()))]
        if any(home.is_relative_to(path) for home in homes):
            raise SandboxUnavailable(f"{path} holds Python and the home folder: use a virtual environment elsewhere")
        if not any(Path(path).is_relative_to(held) for held in (*_SYSTEM, *folders)):
            folders.append(path)
    return folders
