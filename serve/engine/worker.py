"""An engine in a thread of the caller's process: for programs of one's own, and where its model is used beside it."""

import threading

import torch

from sigma0.serve.engine.client import EngineClient
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.loop import EngineLoop
from sigma0.serve.engine.wire import EngineFacts


class EngineService(EngineClient):
    """A `sigma0.serve.engine.messages.Service` of one engine, in a thread of its own.

    Args:
        engine: Owned by the thread from here on.
        name: Of the model.
        threads: CPU threads of torch in the engine's thread; None: torch's default.

    Attributes:
        name: Of the model.
        model: The looped model.
        tokenizer: Its tokenizer.
        context: Most tokens of prompt and answer together.
    """

    def __init__(self, engine: Engine, name: str, threads: int | None = None) -> None:
        super().__init__(EngineFacts.of(engine, name))
        self._engine, self._loop = engine, EngineLoop(engine, self._inbox, self._receive)
        self._threads = threads
        self._thread = threading.Thread(target=self._run, name="sigma0-engine", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            self._loop.run()
        finally:
            self._lose("the engine's thread has ended")
