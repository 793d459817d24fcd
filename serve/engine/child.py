"""Process of an engine, which ends with the service that started it: `python -m sigma0.serve.engine.child SOCKET`.

The service sends an `EngineSpec` with a number of threads and gets `EngineFacts` or `StartFailed`; from then on lists
of commands come, and reports go.
"""

import gc
import os
import pickle
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from sigma0.commands.console import log_to_stderr
from sigma0.serve.engine.loop import EngineLoop, Inbox
from sigma0.serve.engine.spec import EngineSpec
from sigma0.serve.engine.wire import EngineFacts, StartFailed

# What a bad model or setting raises; anything else is a fault, whose frames are printed here.
REFUSALS = (ValueError, OSError, FloatingPointError)


def main(connection: "Connection[Any, Any]") -> None:
    """Makes an engine and runs its loop.

    Args:
        connection: To the service.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # sent to all processes of a service manager's unit: the service drains the engine
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr()
    inbox = Inbox()
    spec, threads = _received(connection)
    threading.Thread(target=_read, args=(connection, inbox), name="sigma0-commands", daemon=True).start()
    try:
        _run(connection, inbox, spec, threads)
    except BrokenPipeError:
        # as below: it was noticed here first
        os._exit(1)


def _run(connection: "Connection[Any, Any]", inbox: Inbox, spec: EngineSpec, threads: int | None) -> None:
    def send(message: object) -> None:
        connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        engine = spec.build()
    except REFUSALS as error:
        kind = next(kind for kind in REFUSALS if isinstance(error, kind))
        send(StartFailed(kind, str(error)))
        return
    send(EngineFacts.apart_from(engine, spec.name))
    # loaded objects stay: a collection need not visit them
    gc.collect()
    gc.freeze()
    EngineLoop(engine, inbox, send).run()


def _read(connection: "Connection[Any, Any]", inbox: Inbox) -> None:
    with suppress(EOFError, OSError):
        while True:
            inbox.put(*_received(connection))
    # the service is gone, and nobody reads what is made here: not even the pass under way is finished
    os._exit(1)


def _received(connection: "Connection[Any, Any]") -> Any:
    return pickle.loads(connection.recv_bytes())


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
