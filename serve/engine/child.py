"""The process of an engine: how it is started, what it runs, and how it ends with the service that started it.

The service sends an `EngineSpec` with a number of threads and gets `EngineFacts` or an error; from then on lists of
commands come, and reports go. What an engine needs is imported once signals and the end of the service are seen to, and
before the spec comes.
"""

import atexit
import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe, get_context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sigma0.serve.engine.wire import Command

# What this process has imported is there at once in one that is forked; macOS' libraries do not bear that.
_CONTEXT: Any = get_context("fork" if sys.platform == "linux" else "spawn")
# What a bad model or setting raises; anything else is a fault, whose frames are printed here.
REFUSALS = (ValueError, OSError, FloatingPointError)


class EngineProcess:
    """Starts a process that waits to be told what to load.

    It is forked, so it has to be started before this process computes with torch or asks for a GPU, and best once
    torch is imported. Not in a session of its own: Linux schedules sessions against each other, and beside other work
    this one had half of the time.

    Attributes:
        pid: Its number.
    """

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = _CONTEXT.Process(target=main, args=(theirs, self._connection), name="sigma0-engine")
            self._process.start()
        self.pid: int = self._process.pid
        # before multiprocessing waits for it, which ends where this connection does
        atexit.register(self.close)

    def send(self, message: object) -> None:
        """Sends a message.

        Raises:
            OSError: If the process is gone.
        """
        _send(self._connection, message)

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: If the process is gone, or an OSError.
        """
        return self._connection.recv()

    def end(self, patience: float = 0.0) -> int:
        """Ends the process, and returns its exit code; one that has ended stays as it was.

        Args:
            patience: Seconds to end by itself.
        """
        self._process.join(patience)
        if self._process.exitcode is None:
            self._process.kill()
        return self._code()

    def _code(self) -> int:
        """Its exit code, once it has ended; another thread that waits as well may be the one that is told first."""
        self._process.join()
        while (code := self._process.exitcode) is None:
            time.sleep(0.001)
        return int(code)

    def how_it_ended(self) -> str:
        """In words; waits for the end."""
        code = self._code()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"the engine's process {how}"

    def close(self) -> None:
        """Ends the process and the connection to it."""
        atexit.unregister(self.close)
        self.end()
        self._connection.close()


def _send(connection: "Connection[Any, Any]", message: object) -> None:
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def main(connection: "Connection[Any, Any]", theirs: "Connection[Any, Any]") -> None:
    """Makes an engine and runs its loop.

    Args:
        connection: To the service.
        theirs: The service's end of it, which a forked process has as well.
    """
    theirs.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        # a terminal and a service manager send them to all processes: the service drains the engine
        signal.signal(number, signal.SIG_IGN)
    start: SimpleQueue[bytes] = SimpleQueue()
    inbox: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, start, inbox), name="sigma0-commands", daemon=True).start()
    with suppress(BrokenPipeError):
        # where the service is gone, `_read` ends this process, if it gets to it first
        _run(connection, start, inbox)


def _read(connection: "Connection[Any, Any]", start: "SimpleQueue[bytes]", inbox: "SimpleQueue[Command]") -> None:
    with suppress(EOFError, OSError):
        start.put(connection.recv_bytes())
        while True:
            for command in connection.recv():
                inbox.put(command)
    # nobody reads what is made here: not even the pass under way is finished
    os._exit(1)


def _run(connection: "Connection[Any, Any]", start: "SimpleQueue[bytes]", inbox: "SimpleQueue[Command]") -> None:
    import torch

    from sigma0.commands.console import log_to_stderr
    from sigma0.serve.engine.loop import EngineLoop
    from sigma0.serve.engine.wire import EngineFacts, EngineSpec

    send = partial(_send, connection)
    log_to_stderr()
    spec: EngineSpec
    # unpickled here, where it imports what it needs
    spec, threads = pickle.loads(start.get())
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        engine = spec.build()
    except REFUSALS as error:
        kind = next(kind for kind in REFUSALS if isinstance(error, kind))
        send(kind(str(error)))
        return
    send(EngineFacts.of(engine, with_weights=False))
    gc.enable()
    with frozen_heap():
        EngineLoop(engine, inbox, send).run()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leaves what is there out of garbage collections, so that one that a large request triggers need not visit it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
