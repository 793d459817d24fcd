"""The process of an engine, as the one that starts it sees it. Imports no torch, so that both can do that at once."""

import os
import pickle
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from multiprocessing import Pipe
from typing import Any


class EngineProcess(AbstractContextManager["EngineProcess"]):
    """Starts `sigma0.serve.engine.child`, which imports torch and waits to be told what to load.

    Not by `multiprocessing`, which imports the caller's main module anew and waits at exit for processes that were not
    closed. Not in a session of its own: Linux schedules sessions against each other, and beside other work this one had
    half of the time.

    Attributes:
        pid: Its number.
    """

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sigma0.serve.engine.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.pid = self._process.pid

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
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self._process.wait()

    def how_it_ended(self) -> str:
        """In words; waits for the end."""
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"the engine's process {how}"

    def close(self) -> None:
        """Ends the process and the connection to it."""
        self.end()
        self._connection.close()

    def __exit__(self, *exception: object) -> None:
        """Closes it."""
        self.close()
