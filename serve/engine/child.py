"""Process of an engine, which ends with the service that started it.

The service sends an `EngineSpec` with a number of threads and gets `EngineFacts` or `StartFailed`; from then on lists
of commands come, and reports go. What an engine needs is imported once signals and the end of the service are seen to,
and before the spec comes.
"""

import gc
import os
import pickle
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sigma0.serve.engine.heap import frozen_heap
from sigma0.serve.engine.queues import Inbox

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sigma0.serve.engine.wire import Command

# What a bad model or setting raises; anything else is a fault, whose frames are printed here.
REFUSALS = (ValueError, OSError, FloatingPointError)


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
    start: Inbox[bytes] = Inbox()
    inbox: Inbox[Command] = Inbox()
    threading.Thread(target=_read, args=(connection, start, inbox), name="sigma0-commands", daemon=True).start()
    with suppress(BrokenPipeError):
        # where the service is gone, `_read` ends this process, if it gets to it first
        _run(connection, start, inbox)


def _read(connection: "Connection[Any, Any]", start: Inbox[bytes], inbox: "Inbox[Command]") -> None:
    with suppress(EOFError, OSError):
        start.put(connection.recv_bytes())
        while True:
            inbox.put(*pickle.loads(connection.recv_bytes()))
    # nobody reads what is made here: not even the pass under way is finished
    os._exit(1)


def _run(connection: "Connection[Any, Any]", start: Inbox[bytes], inbox: "Inbox[Command]") -> None:
    import torch

    from sigma0.commands.console import log_to_stderr
    from sigma0.serve.engine.loop import EngineLoop
    from sigma0.serve.engine.spec import EngineSpec
    from sigma0.serve.engine.wire import EngineFacts, StartFailed

    def send(message: object) -> None:
        connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    log_to_stderr()
    spec: EngineSpec
    spec, threads = pickle.loads(start.take()[0])
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        engine = spec.build()
    except REFUSALS as error:
        kind = next(kind for kind in REFUSALS if isinstance(error, kind))
        send(StartFailed(kind, str(error)))
        return
    send(EngineFacts.apart_from(engine, spec.name))
    gc.enable()
    with frozen_heap():
        EngineLoop(engine, inbox, send).run()
