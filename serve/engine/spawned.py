"""The process of an engine, as the one that starts it sees it."""

import atexit
import pickle
import signal
import sys
from contextlib import AbstractContextManager
from multiprocessing import Pipe, get_context
from typing import Any

from sigma0.serve.engine.child import main

# What this process has imported is there at once in one that is forked; macOS' libraries do not bear that.
_CONTEXT: Any = get_context("fork" if sys.platform == "linux" else "spawn")


class EngineProcess(AbstractContextManager["EngineProcess"]):
    """Starts `sigma0.serve.engine.child`, which waits to be told what to load.

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
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: If the process is gone.
            OSError: As well.
        """
        return pickle.loads(self._connection.recv_bytes())

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
        """Waits for the end."""
        self._process.join()
        code: int = self._process.exitcode
        return code

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

    def __exit__(self, *exception: object) -> None:
        """Closes it."""
        self.close()
