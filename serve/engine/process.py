"""An engine in a process of its own, so that its passes and the event loop do not share an interpreter."""

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from sigma0.serve.engine.client import EngineClient
from sigma0.serve.engine.spec import EngineSpec
from sigma0.serve.engine.wire import Close, EngineFacts, StartFailed

_LOG = logging.getLogger(__name__)
# Seconds for the pass under way when a service is closed.
PATIENCE = 5.0


class ProcessService(EngineClient):
    """A `sigma0.serve.engine.messages.Service` of one engine, in a process that ends with this one.

    The weights are in that process alone. Not by `multiprocessing`, which imports the caller's main module anew and
    waits at exit for processes that were not closed.

    Args:
        spec: What the engine is made of.
        threads: CPU threads of torch in the engine's process; None: torch's default.

    Attributes:
        name: Of the model.
        model: The settings of the looped model.
        tokenizer: Its tokenizer.
        context: Most tokens of prompt and answer together.
        pid: Number of the engine's process.

    Raises:
        ValueError: As `EngineSpec.build` does.
        ChildProcessError: If the process ended before its engine was made.
    """

    def __init__(self, spec: EngineSpec, threads: int | None = None) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sigma0.serve.engine.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.pid = self._process.pid
        try:
            super().__init__(self._facts(spec, threads))
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            raise
        self._reader = threading.Thread(target=self._read, name="sigma0-reports", daemon=True)
        self._writer = threading.Thread(target=self._write, name="sigma0-commands", daemon=True)
        self._reader.start()
        self._writer.start()

    def _facts(self, spec: EngineSpec, threads: int | None) -> EngineFacts:
        try:
            self._send((spec, threads))
            facts = self._received()
        except (EOFError, OSError) as error:
            raise ChildProcessError(f"{self._end_of_process()} before the model was loaded") from error
        if isinstance(facts, StartFailed):
            raise facts.kind(facts.message)
        assert isinstance(facts, EngineFacts)
        return facts

    def _send(self, message: object) -> None:
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _received(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())

    def _write(self) -> None:
        is_open = True
        # where the process is gone, the reader notices as well
        with suppress(OSError):
            while is_open:
                commands = self._inbox.take()
                self._send(commands)
                is_open = Close() not in commands

    def _read(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    self._receive(self._received())
        finally:
            # one that has ended stays as it was, and one whose reports cannot be read is of no use
            self._process.kill()
            how = self._end_of_process()
            if self._process.returncode:
                _LOG.error("%s: no more requests are taken", how)
            self._lose(f"{how}: the server must be started again")

    def _join(self) -> None:
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()
        self._writer.join()
        self._connection.close()

    def _end_of_process(self) -> str:
        """How the process ended, once its end of the connection is closed."""
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"the engine's process {how}"
