"""An engine in a process of its own, so that its passes and the event loop do not share an interpreter."""

import logging
import threading
from contextlib import suppress

from sigma0.serve.engine.child import EngineProcess
from sigma0.serve.engine.client import EngineClient
from sigma0.serve.engine.wire import Command, EngineFacts, EngineSpec, Tell, take_all

_LOG = logging.getLogger(__name__)
# Seconds for the pass under way when a service is closed, and for a process that closed its connection to end.
PATIENCE = 5.0


class ProcessService(EngineClient):
    """A `sigma0.serve.engine.messages.Service` of one engine, in a process that ends with this one.

    The weights are in that process alone.

    Args:
        spec: What the engine is made of.
        threads: CPU threads of torch in the engine's process; None: torch's default.
        process: One that was started ahead; None: starts one.

    Attributes:
        pid: Number of the engine's process.

    Raises:
        ValueError: As `EngineSpec.build` does.
        ChildProcessError: If the process ended before its engine was made.
    """

    def __init__(self, spec: EngineSpec, threads: int | None = None, process: EngineProcess | None = None) -> None:
        self._process = process or EngineProcess()
        self.pid = self._process.pid
        try:
            super().__init__(self._facts(spec, threads))
        except BaseException:
            self._process.close()
            raise
        self._ends = False
        self._reader = threading.Thread(target=self._read, name="sigma0-reports", daemon=True)
        self._writer = threading.Thread(target=self._write, name="sigma0-commands", daemon=True)
        self._reader.start()
        self._writer.start()

    def _facts(self, spec: EngineSpec, threads: int | None) -> EngineFacts:
        try:
            self._process.send((spec, threads))
            facts = self._process.receive()
        except (EOFError, OSError) as error:
            raise ChildProcessError(f"{self._process.how_it_ended()} before the model was loaded") from error
        if isinstance(facts, Exception):
            raise facts
        assert isinstance(facts, EngineFacts)
        return facts

    def _write(self) -> None:
        commands: list[Command] = []
        # where the process is gone, the reader notices as well
        with suppress(OSError):
            while Tell.CLOSE not in commands:
                commands = take_all(self._inbox)
                self._process.send(commands)

    def _read(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    self._receive(self._process.receive())
        finally:
            # a process whose reports cannot be read is of no use
            code, how = self._process.end(PATIENCE), self._process.how_it_ended()
            if code and not self._ends:
                _LOG.error("%s: no more requests are taken", how)
            self._lose(f"{how}: the server must be started again")

    def _join(self) -> None:
        # whatever its status is then, it was told to end
        self._ends = True
        self._process.end(PATIENCE)
        self._reader.join()
        self._writer.join()
        self._process.close()
