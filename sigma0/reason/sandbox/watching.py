"""Watching a sandbox from outside: its output drained, its time and memory limited, all of it ended together."""

import json
import os
import random
import selectors
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from sigma0.reason.sandbox.accounting import Account, processes_of, status_of
from sigma0.reason.sandbox.cgroups import ControlGroup
from sigma0.reason.sandbox.isolation import SandboxUnavailable

Cut = Literal["time", "output", "memory"]
KEPT_BYTES = 64 * 1024
WRITTEN_BYTES = 8 * 2**20
_LOOK_EVERY_S = 0.02
_CHUNK = 64 * 1024


@dataclass
class Stream:
    """What one stream carried."""

    descriptor: int  # Where it is read
    kept: bytearray = field(default_factory=bytearray)  # The first of it
    written: int = 0  # Bytes in all

    def read(self) -> bool:
        """Reads once; False at its end.

        Raises:
            BlockingIOError: If there is nothing to read.
        """
        chunk = os.read(self.descriptor, _CHUNK)
        self.written += len(chunk)
        self.kept += chunk[: KEPT_BYTES - len(self.kept)]
        return bool(chunk)

    def text(self) -> str:
        """What was kept."""
        return self.kept.decode(errors="replace")


class Watched:
    """A sandbox under way.

    Args:
        bubblewrap: That makes it.
        status: Where bubblewrap writes its status.
        line: To the launcher inside: it waits for a byte, and sends one when it is ready to run the program.
        group: That all inside is put into, where there is one.

    Attributes:
        streams: Standard output and standard error.
        has_begun: Once it ended, whether the program was begun.

    Raises:
        SandboxUnavailable: If bubblewrap did not begin.
    """

    def __init__(
        self,
        bubblewrap: "subprocess.Popen[bytes]",
        status: int,
        line: socket.socket,
        group: ControlGroup | None = None,
    ) -> None:
        assert bubblewrap.stdout is not None and bubblewrap.stderr is not None
        self.bubblewrap = bubblewrap
        self.has_begun = False
        self.streams = (Stream(bubblewrap.stdout.fileno()), Stream(bubblewrap.stderr.fileno()))
        self.init = first_process(bubblewrap, status)
        self._init_handle = _handle(self.init, bubblewrap.pid)
        for stream in self.streams:
            os.set_blocking(stream.descriptor, False)
        self._line = line
        self._group = group
        if self._init_handle is not None:
            if group is not None:
                # the first process before its children: those that it starts meanwhile are born in the group
                group.take(processes_of(self.init))
            with suppress(BrokenPipeError):
                line.send(b"\0")

    def wait(self, deadline: float, memory_bytes: int) -> Cut | None:
        """Waits for its end, and brings it about where a limit is reached.

        Args:
            deadline: By the monotonic clock.
            memory_bytes: For all processes and files inside together.

        Returns:
            The limit that ended it; None where it ended by itself.
        """
        try:
            return self._until(deadline, memory_bytes)
        finally:
            self.end()

    def _until(self, deadline: float, memory_bytes: int) -> Cut | None:
        ended = os.pidfd_open(self.bubblewrap.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(ended, selectors.EVENT_READ)
                for stream in self.streams:
                    selector.register(stream.descriptor, selectors.EVENT_READ, stream)
                return self._loop(selector, deadline, memory_bytes)
        finally:
            os.close(ended)

    def _loop(self, selector: selectors.BaseSelector, deadline: float, memory_bytes: int) -> Cut | None:
        next_look = time.monotonic()
        account = Account(self.init)
        while True:
            for key, _ in selector.select(max(0.0, min(deadline, next_look) - time.monotonic())):
                if key.data is None:
                    return None
                # a program can open its own output, and take back what it wrote
                with suppress(BlockingIOError):
                    if not key.data.read():
                        selector.unregister(key.fileobj)
            if sum(stream.written for stream in self.streams) > WRITTEN_BYTES:
                return "output"
            if time.monotonic() >= deadline:
                return "time"
            if time.monotonic() >= next_look:
                if account.used_bytes() > memory_bytes or (self._group is not None and self._group.was_killed):
                    return "memory"
                # at no time that could be foreseen inside
                next_look = time.monotonic() + _LOOK_EVERY_S * random.uniform(0.5, 1.5)

    def end(self) -> None:
        """Ends all that is left of it, waits until nothing is, and reads what it wrote last."""
        if self._init_handle is not None:
            # with the first process of a PID namespace the kernel ends all others, and it goes last
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_handle, signal.SIGKILL)
            with selectors.DefaultSelector() as selector:
                selector.register(self._init_handle, selectors.EVENT_READ)
                selector.select()
            os.close(self._init_handle)
            self._init_handle = None
        self.bubblewrap.kill()
        self.bubblewrap.wait()
        # nobody is left to write; but a process that was forked outside meanwhile may hold the ends for writing open
        for stream in self.streams:
            with suppress(BlockingIOError):
                while stream.read():
                    pass
        with suppress(ConnectionResetError, BlockingIOError):
            self.has_begun = bool(self._line.recv(1, socket.MSG_DONTWAIT))


def _handle(init: int, bubblewrap: int) -> int | None:
    """A handle on the first process inside; None where it has ended, and its number may be another's."""
    try:
        handle = os.pidfd_open(init)
    except ProcessLookupError:
        return None
    if _parent(init) == bubblewrap:
        return handle
    os.close(handle)
    return None


def _parent(process: int) -> int | None:
    parent = status_of(process).get("PPid")
    return None if parent is None else int(parent)


def first_process(bubblewrap: "subprocess.Popen[bytes]", status: int, within_s: float = 10.0) -> int:
    """The number of the first process inside, from what bubblewrap writes to its status descriptor.

    Raises:
        SandboxUnavailable: If bubblewrap did not get so far.
    """
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(status, selectors.EVENT_READ)
        while b"\n" not in output and selector.select(within_s):
            part = os.read(status, 4096)
            if not part:
                break
            output += part
    if b"\n" in output:
        return int(json.loads(output.splitlines()[0])["child-pid"])
    bubblewrap.kill()
    try:
        _, error = bubblewrap.communicate(timeout=1.0)
    except subprocess.TimeoutExpired:
        error = b"it hung"
    raise SandboxUnavailable(f"bubblewrap did not start: {error[:500].decode(errors='replace').strip()}")
