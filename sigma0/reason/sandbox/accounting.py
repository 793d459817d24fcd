"""What a sandbox makes the machine hold, counted from outside: one sum over processes, files and kernel memory.

Pages of processes and files are read from the kernel. The rest is shown nowhere and is counted by what it can
be at most, which the filter of system calls keeps small: a pipe's buffer has its usual size, a socket is one end of a
pair with the usual buffers, and no descriptor is under way between processes.

| counted | bytes |
|---|---|
| a thread | its kernel stack and its records: 64 KiB |
| a mapping | its record, and a link to each process that it was inherited from: 4 KiB |
| a file in what can be written to | its pages, and its records: 2 KiB |
| an open pipe | 16 pages |
| an open socket | twice the usual buffer, since a message may begin below the limit and end above it |
| any other descriptor | 32 KiB, for what is buffered of files in /proc |
| a lock, a watched descriptor | 256 bytes |
"""

import os
import socket
import stat
from collections.abc import Iterator
from functools import lru_cache

from sigma0.reason.sandbox.isolation import SCRATCH, SHARED_MEMORY

# of a process, as its limit has it
MOST_OPEN_FILES = 64
_THREAD_BYTES = 64 * 1024
_MAPPING_BYTES = 4 * 1024
_FILE_BYTES = 2 * 1024
_PIPE_PAGES = 16
_DESCRIPTOR_BYTES = 32 * 1024
_ENTRY_BYTES = 256
_ENTRIES = (b"lock:", b"tfd:")
_PAGES = ("RssAnon", "RssShmem", "VmSwap", "VmPTE", "HugetlbPages")
_CHUNK = 64 * 1024


def used_bytes(init: int) -> int:
    """Memory of a sandbox: of all its processes, of the files in what it can write to, and of the kernel for both.

    Args:
        init: Its first process.
    """
    total = 0
    files: int | None = None
    # an open pipe or socket is one, however many processes hold it
    shared: dict[tuple[int, int], int] = {}
    for process in processes_of(init):
        described = status_of(process)
        total += sum(int(described.get(name, "0 kB").split()[0]) * 1024 for name in _PAGES)
        total += int(described.get("Threads", "0")) * _THREAD_BYTES
        total += _lines(f"/proc/{process}/maps") * _MAPPING_BYTES
        total += _descriptor_bytes(process, shared)
        if files is None:
            files = _file_bytes(process)
    return total + sum(shared.values()) + (files or 0)


def processes_of(init: int) -> Iterator[int]:
    """A process and all that descend from it, without those that end meanwhile."""
    waiting = [init]
    while waiting:
        process = waiting.pop()
        yield process
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    waiting += map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            # it ended meanwhile: what it left behind belongs to the first process now
            continue


def status_of(process: int) -> dict[str, str]:
    """Lines of /proc/PID/status by name; none where the process ended."""
    try:
        with open(f"/proc/{process}/status") as file:
            return dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    except (FileNotFoundError, ProcessLookupError):
        return {}


def _descriptor_bytes(process: int, shared: dict[tuple[int, int], int]) -> int:
    """Of a process's descriptors, but for pipes and sockets, which join the shared ones by device and inode."""
    total = 0
    try:
        descriptors = os.listdir(f"/proc/{process}/fd")
    except PermissionError:
        return _hidden_descriptor_bytes(process)
    except OSError:
        # ended, or about to: its descriptors are closed
        return 0
    for descriptor in descriptors:
        try:
            status = os.stat(f"/proc/{process}/fd/{descriptor}")
            total += _entries(f"/proc/{process}/fdinfo/{descriptor}") * _ENTRY_BYTES
        except OSError:
            # closed meanwhile
            continue
        if stat.S_ISFIFO(status.st_mode):
            shared[status.st_dev, status.st_ino] = _PIPE_PAGES * os.sysconf("SC_PAGE_SIZE")
        elif stat.S_ISSOCK(status.st_mode):
            shared[status.st_dev, status.st_ino] = _socket_bytes()
        else:
            total += _DESCRIPTOR_BYTES
    return total


def _hidden_descriptor_bytes(process: int) -> int:
    """Of a process that is not dumpable, which shows ordinary users no descriptors: each may be a socket."""
    try:
        number = len(os.listdir(f"/proc/{process}/fdinfo"))
    except PermissionError:
        number = MOST_OPEN_FILES
    except OSError:
        # it ended meanwhile
        number = 0
    return number * _socket_bytes()


@lru_cache(maxsize=1)
def _socket_bytes() -> int:
    # asked of a socket: /proc/sys/net/core is not there in every network namespace
    one, other = socket.socketpair()
    with one, other:
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _entries(path: str) -> int:
    """Locks on an open file, or what it watches for."""
    with open(path, "rb") as file:
        text = file.read()
    return sum(text.count(word) for word in _ENTRIES)


def _lines(path: str) -> int:
    try:
        with open(path, "rb", buffering=0) as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
    except OSError:
        # it ended meanwhile
        return 0


def _file_bytes(process: int) -> int | None:
    """None where this process cannot be looked through, or still sees the files outside."""
    total = 0
    try:
        for path in (SCRATCH, SHARED_MEMORY):
            inside = f"/proc/{process}/root{path}"
            if os.stat(inside).st_dev == os.stat(path).st_dev:
                return None
            status = os.statvfs(inside)
            total += (status.f_blocks - status.f_bfree) * status.f_frsize + (
                status.f_files - status.f_ffree
            ) * _FILE_BYTES
    except OSError:
        return None
    return total
