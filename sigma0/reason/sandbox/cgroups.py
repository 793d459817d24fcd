"""A control group for each run, where one can be made: the kernel itself then holds a sandbox to its sum.

It charges the pages of processes and files, pipes, sockets, page tables and the kernel's records alike. Under cgroup v2
it can be made where an ancestor of this process's own group hands its memory and pids controllers down and may be
written to: as root beside systemd, or inside `systemd-run --user --scope`; the kernel then ends the whole group where
it goes over. Under v1 it can be made where the memory controller's group may be written to; the kernel then ends one
process, and who watches ends the rest. Elsewhere the sum that is counted from outside
(`sigma0.reason.sandbox.accounting`) is the only one; it is kept in all cases.
"""

import os
import secrets
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_CONTROLLERS = {"memory", "pids"}
_OF_SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class ControlGroup:
    """One that was made for a run."""

    folder: Path  # Its folder

    def take(self, processes: Iterable[int]) -> None:
        """Moves processes into it; what they start from then on is born in it.

        Raises:
            OSError: If the kernel refuses.
        """
        for process in processes:
            try:
                (self.folder / "cgroup.procs").write_text(str(process))
            except ProcessLookupError:
                # it ended meanwhile
                continue

    @property
    def was_killed(self) -> bool:
        """Whether the kernel ended processes of it for want of memory."""
        file = self.folder / "memory.events"
        # of v1 in a file by another name
        text = (file if file.exists() else self.folder / "memory.oom_control").read_text()
        events = dict(line.split() for line in text.splitlines())
        return int(events.get("oom_kill", "0")) > 0

    def remove(self) -> None:
        """Removes it; all that was in it has ended."""
        os.rmdir(self.folder)


def make_group(memory_bytes: int, processes: int) -> ControlGroup | None:
    """A new group with limits, to be removed by whoever asked; None where none can be made.

    Args:
        memory_bytes: Of everything in it together; none of it goes to swap.
        processes: And threads, at most.

    Raises:
        OSError: If the kernel refuses what it granted before.
    """
    parent = usable_parent()
    return None if parent is None else _made_in(parent, memory_bytes, processes)


@lru_cache(maxsize=1)
def usable_parent() -> Path | None:
    """The nearest group in which one can be made, tried with a process; None where there is none."""
    for parent in _ancestors():
        try:
            if _is_usable(parent):
                return parent
        except OSError:
            # one of another owner, or one that hands no controllers down: the next may do
            continue
    return None


def _is_usable(parent: Path) -> bool:
    # a group of v1 has one controller, and hands it down
    if not _is_of_v1(parent) and not _CONTROLLERS.issubset((parent / "cgroup.subtree_control").read_text().split()):
        return False
    group = _made_in(parent, 2**26, 8)
    try:
        # waits for the end of its input
        with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as waiting:
            group.take([waiting.pid])
    finally:
        group.remove()
    return True


def _is_of_v1(group: Path) -> bool:
    return (group / "memory.limit_in_bytes").exists()


def _made_in(parent: Path, memory_bytes: int, processes: int) -> ControlGroup:
    group = ControlGroup(parent / f"sigma0-{os.getpid()}-{secrets.token_hex(4)}")
    group.folder.mkdir()
    limits = {"memory.max": memory_bytes, "memory.oom.group": 1, "pids.max": processes, "memory.swap.max": 0}
    if _is_of_v1(parent):
        # pages first: both together may not be limited to less
        limits = {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes}
    try:
        for name, value in limits.items():
            # not there where swap is not counted
            if name not in _OF_SWAP or (group.folder / name).exists():
                (group.folder / name).write_text(str(value))
    except OSError:
        group.remove()
        raise
    return group


def _ancestors() -> Iterator[Path]:
    """Folders of this process's own groups, of v2 and then of v1's memory controller, each with those above it."""
    try:
        lines = [line.split(":", 2)[1:] for line in _OWN_GROUPS.read_text().splitlines()]
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return
    for kind, controller in (("cgroup2", ""), ("cgroup", "memory")):
        own_groups = [group for controllers, group in lines if controller in controllers.split(",")]
        for words in mounts:
            if words[words.index("-") + 1] != kind or controller not in ["", *words[-1].split(",")]:
                continue
            top = Path(words[4])
            for own_group in own_groups:
                try:
                    folder = top / Path(own_group).relative_to(words[3])
                except ValueError:
                    # mounted from a group that this process is not below
                    continue
                yield folder
                yield from (parent for parent in folder.parents if parent.is_relative_to(top))
