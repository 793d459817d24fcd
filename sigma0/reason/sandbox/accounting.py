"""What a sandbox makes the machine hold, counted from outside: one sum over processes, files and kernel memory.

Pages of processes and files are read from the kernel. The rest is shown nowhere and is counted by what it can
be at most, which the filter of system calls keeps small: a pipe's buffer has its usual size, a socket is one end of a
pair with the usual buffers, and no descriptor is under way between processes. Nothing is read for this whose length a
program decides, but line by line: the kernel would make room for all of it at once, for whoever reads.

| counted | bytes |
|---|---|
| a thread | its kernel stack and its records: 64 KiB |
| a mapping | its record, and a link to each process that it was inherited from: 4 KiB |
| a file in what can be written to | its pages, and its records: 2 KiB |
| a lock | 256 |
| a set of watched descriptors (epoll) | 256 for each number and file that a process can put into it: 1 MiB |
| an open pipe | 16 pages |
| an open socket | twice the usual buffer, since a message may begin below the limit and end above it |
| an open file of /proc | 32 KiB, and what it can list: the records of all files (names on a path), locks and sets |
| any other descriptor | 32 KiB |
"""

import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from sigma0.reason.sandbox.isolation import SCRATCH, SHARED_MEMORY

# of a process, as its limit has it
MOST_OPEN_FILES = 64
_THREAD_BYTES = 64 * 1024
_MAPPING_BYTES = 4 * 1024
_FILE_BYTES = 2 * 1024
_PIPE_PAGES = 16
_DESCRIPTOR_BYTES = 32 * 1024
_LOCK_BYTES = 256
_WATCHING_BYTES = MOST_OPEN_FILES**2 * 256
_WATCHING = "anon_inode:[eventpoll]"
_PAGES = ("RssAnon", "RssShmem", "VmSwap", "VmPTE", "HugetlbPages")
_CHUNK = 64 * 1024
# Threads that begin and end, one after the other, and none of which stays to be looked at.
_MOST_FLEETING = 1000
_UNKNOWN = 2**62


class Account:
    """The sum for one sandbox, look by look.

    Args:
        init: Its first process.
    """

    def __init__(self, init: int) -> None:
        self._init = init
        # the most that there was to be listed: what was read into a file of /proc stays there
        self._listed = 0

    def used_bytes(self) -> int:
        """Memory now: of all processes, of the files in what they can write to, and of the kernel for both."""
        total = listed = listings = 0
        places: _Places | None = None
        # an open pipe or socket is one, however many processes hold it
        shared: dict[tuple[int, int], int] = {}
        for process in processes_of(self._init):
            places = places or _places(process)
            held = _process_bytes(process, shared, None if places is None else places.proc)
            total += held.plain
            listed += held.listed
            listings += held.listings
        if places is not None:
            total += places.pages
            listed += places.records
        self._listed = max(self._listed, listed)
        return total + listed + sum(shared.values()) + listings * (_DESCRIPTOR_BYTES + self._listed)


def processes_of(init: int) -> Iterator[int]:
    """A process and all that descend from it, without those that end meanwhile."""
    waiting = [init]
    while waiting:
        process = waiting.pop()
        yield process
        for thread in _threads(process):
            try:
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    waiting += map(int, file.read().split())
            except (FileNotFoundError, ProcessLookupError):
                # it ended meanwhile: what it left behind belongs to another thread now, or to the first process
                continue


def _threads(process: int) -> Iterator[str]:
    """Threads of a process, also those that begin meanwhile; the first may have ended alone, and then shows nothing."""
    seen: set[str] = set()
    while len(seen) < _MOST_FLEETING:
        try:
            new = set(os.listdir(f"/proc/{process}/task")) - seen
        except (FileNotFoundError, ProcessLookupError):
            return
        if not new:
            return
        yield from new
        seen |= new


def status_of(process: int | str) -> dict[str, str]:
    """Lines of /proc/PID/status by name; none where the process ended.

    Args:
        process: PID, or PID/task/TID for one of its threads.
    """
    try:
        with open(f"/proc/{process}/status") as file:
            return dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    except (FileNotFoundError, ProcessLookupError):
        return {}


def _process_bytes(process: int, shared: dict[tuple[int, int], int], proc: int | None) -> "_Held":
    """Of one process, as any of its threads shows it."""
    fleeting = 0
    for thread in _threads(process):
        described = status_of(f"{process}/task/{thread}")
        if _PAGES[0] not in described:
            # it has ended
            fleeting += 1
            continue
        held = _descriptors(f"/proc/{process}/task/{thread}", shared, proc)
        held.plain += sum(int(described.get(name, "0 kB").split()[0]) * 1024 for name in _PAGES)
        held.plain += int(described["Threads"]) * _THREAD_BYTES
        held.plain += _lines(f"/proc/{process}/task/{thread}/maps") * _MAPPING_BYTES
        return held
    return _Held(plain=_UNKNOWN if fleeting >= _MOST_FLEETING else 0)


@dataclass
class _Held:
    """By a process, beside what it shares with others."""

    plain: int = 0  # Bytes of it all but for what follows
    listed: int = 0  # Bytes of sets of watched descriptors
    listings: int = 0  # Open files of /proc


def _descriptors(folder: str, shared: dict[tuple[int, int], int], proc: int | None) -> _Held:
    """Of descriptors; pipes and sockets join the shared ones by device and inode.

    Args:
        folder: Of the process or a thread, below /proc.
        shared: By device and inode.
        proc: The device of /proc inside; None where it is not known, and then any file may be of it.
    """
    held = _Held()
    try:
        descriptors = os.listdir(f"{folder}/fd")
    except PermissionError:
        return _hidden_descriptors(folder)
    except OSError:
        # ended, or about to: its descriptors are closed
        return held
    for descriptor in descriptors:
        try:
            status = os.stat(f"{folder}/fd/{descriptor}")
            target = os.readlink(f"{folder}/fd/{descriptor}")
        except OSError:
            # closed meanwhile
            continue
        if stat.S_ISFIFO(status.st_mode):
            shared[status.st_dev, status.st_ino] = _PIPE_PAGES * os.sysconf("SC_PAGE_SIZE")
        elif stat.S_ISSOCK(status.st_mode):
            shared[status.st_dev, status.st_ino] = _socket_bytes()
        elif target == _WATCHING:
            held.listed += _WATCHING_BYTES
        elif stat.S_ISREG(status.st_mode) and proc in (status.st_dev, None):
            held.listings += 1
        else:
            held.plain += _DESCRIPTOR_BYTES
    return held


def _hidden_descriptors(folder: str) -> _Held:
    """Of a process that is not dumpable, which shows ordinary users no descriptors: each may be anything."""
    try:
        number = len(os.listdir(f"{folder}/fdinfo"))
    except PermissionError:
        number = MOST_OPEN_FILES
    except OSError:
        # it ended meanwhile
        number = 0
    return _Held(number * _socket_bytes(), number * _WATCHING_BYTES, number)


@lru_cache(maxsize=1)
def _socket_bytes() -> int:
    # asked of a socket: /proc/sys/net/core is not there in every network namespace
    one, other = socket.socketpair()
    with one, other:
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _lines(path: str) -> int:
    try:
        with open(path, "rb", buffering=0) as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
    except OSError:
        # it ended meanwhile
        return 0


@dataclass(frozen=True)
class _Places:
    """Where a sandbox can write to."""

    pages: int  # Bytes of its files
    records: int  # Bytes of the kernel's records of them, and of the locks on any file
    proc: int  # Device of its /proc


def _places(process: int) -> _Places | None:
    """None where this process cannot be looked through, or still sees the files outside."""
    pages = records = 0
    root = f"/proc/{process}/root"
    try:
        for path in (SCRATCH, SHARED_MEMORY):
            if os.stat(root + path).st_dev == os.stat(path).st_dev:
                return None
            status = os.statvfs(root + path)
            pages += (status.f_blocks - status.f_bfree) * status.f_frsize
            records += (status.f_files - status.f_ffree) * _FILE_BYTES
        proc = os.stat(f"{root}/proc").st_dev
    except OSError:
        return None
    return _Places(pages, records + _lines(f"{root}/proc/locks") * _LOCK_BYTES, proc)
