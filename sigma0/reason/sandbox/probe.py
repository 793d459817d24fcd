"""A program that tries to break out of a sandbox, and tells what it could do.

Its source is run inside, so it may import nothing but the standard library.
"""

import ctypes
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

SOURCE = __file__
_NEW_USER_NAMESPACE = 0x10000000


@contextmanager
def bait(read_only: list[str]) -> Iterator[dict[str, Any]]:
    """What the program tries to reach: a file, a listener and this very process; and folders to write to."""
    with tempfile.NamedTemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as listener:
        os.chmod(file.name, 0o644)
        process = os.getpid()
        yield {
            "file": file.name,
            "read_only": read_only,
            "port": listener.getsockname()[1],
            "process": process,
            "started": start_tick(process),
        }


def reached(plan: dict[str, Any]) -> list[str]:
    """What should have been out of reach and was not.

    Args:
        plan: `file` that lies outside, folders that are `read_only`, a `port` that someone outside listens on, a
            `process` outside, and the tick at which that `started`.
    """
    attempts: dict[str, Callable[[], Any]] = {
        "read a file outside": lambda: open(plan["file"], "rb").close(),
        "saw a process outside": lambda: _see(plan["process"], plan["started"]),
        "reached a port outside": lambda: socket.create_connection(("127.0.0.1", plan["port"]), 1.0).close(),
        "made a user namespace": _make_user_namespace,
        "made a socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "had memory that no process shows": lambda: os.close(os.memfd_create("probe")),
    }
    for folder in plan["read_only"]:
        attempts[f"wrote to {folder}"] = partial(os.mkdir, os.path.join(folder, "sigma0-probe"))
    reachable = [description for description, attempt in attempts.items() if _succeeds(attempt)]
    if 0 in (*os.getresuid(), *os.getresgid(), *os.getgroups()):
        reachable.append("is root")
    with open("/proc/self/status") as file:
        reachable += [
            f"could have rights: {line.strip()}" for line in file if line.startswith("Cap") and int(line[7:], 16)
        ]
    return reachable


def _succeeds(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


def _see(process: int, started: str) -> None:
    """Fails unless a process of this number is the very one outside."""
    if start_tick(process) != started:
        raise ProcessLookupError(process)


def start_tick(process: int) -> str:
    """When a process started, in ticks since the machine did."""
    with open(f"/proc/{process}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[19]


def _make_user_namespace() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER_NAMESPACE):
        raise OSError(ctypes.get_errno(), "unshare")


def main(plan: dict[str, Any]) -> None:
    """Prints what was reached; the assertion is there to be counted."""
    reachable = reached(plan)
    print(json.dumps(reachable))  # noqa: T201
    assert not reachable, reachable
