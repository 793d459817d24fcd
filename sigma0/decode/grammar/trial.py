"""Strangers' grammars are tried in a process of their own before an engine compiles them.

The grammar engine is native code: a text that overflows its stack ends the process that it runs in, and some texts take
seconds or gigabytes. One process holds the vocabulary, and forks for each text a child with limits of time, memory and
stack. A child that breaks one of them ends alone.
"""

import json
import os
import pickle
import resource
import signal
import socket
import sys
import threading
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import Any

from sigma0.children import start_child
from sigma0.decode.grammar.closing import Texts
from sigma0.decode.grammar.compiled import TokenizerRecipe, compile_grammar
from sigma0.decode.grammar.spec import Spec

# Seconds for one text, of a processor and by the clock; bytes beyond those of the vocabulary.
CPU, WALL, MEMORY = 1.0, 1.5, 2**28
# Bytes of stack: half of what a thread of an engine has, so that what passes here does not overflow there.
_STACK = 2**22
_LARGE = "takes more time or memory than this server spends on one: use fewer or shorter rules, counts and alternatives"
# Texts whose outcome is kept.
_KEPT = 256


class GrammarTrial:
    """Tries grammars of one vocabulary; may be called from any thread.

    Args:
        recipe: Of the vocabulary.
    """

    def __init__(self, recipe: TokenizerRecipe) -> None:
        self._recipe = pickle.dumps(recipe)
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._known: OrderedDict[Spec, int | None] = OrderedDict()

    def least(self, spec: Spec) -> int | None:
        """Tokens of the shortest answer that was found; None where none was.

        Raises:
            ValueError: In one line, for a spec that is wrong, cannot be enforced, or breaks a limit.
        """
        with self._lock:
            if spec in self._known:
                self._known.move_to_end(spec)
                return self._known[spec]
        answer = self._try(spec)
        if "error" in answer:
            raise ValueError(answer["error"])
        least: int | None = answer["least"]
        with self._lock:
            self._known[spec] = least
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return least

    def close(self) -> None:
        """Ends its process."""
        with self._lock:
            if self._control is not None:
                self._control.close()
                self._control = None

    def _try(self, spec: Spec) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as connection:
            with theirs, self._lock:
                self._bind_buffers(theirs)
            try:
                connection.send_bytes(pickle.dumps(spec))
                if connection.poll(2 * WALL):
                    return dict(json.loads(connection.recv_bytes()))
            except (EOFError, OSError):
                # it has ended by a signal: of its own clock, or of the engine's fault
                pass
        return {"error": _LARGE}

    def _bind_buffers(self, job: socket.socket) -> None:
        """Gives a connection to the process, which is started where there is none, or none any more."""
        for _ in range(2):
            try:
                if self._control is None:
                    self._control = self._start()
                socket.send_fds(self._control, [b"+"], [job.fileno()])
                return
            except OSError:
                self._control = None
        raise RuntimeError("the process that tries grammars cannot be started")

    def _start(self) -> socket.socket:
        ours = start_child(__name__, "_serve")
        connection = Connection(os.dup(ours.fileno()))
        with connection:
            connection.send_bytes(self._recipe)
        return ours


def _serve(control: int) -> None:
    """Runs the process: reads the vocabulary, and forks a child for each connection, until the server has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Connection(os.dup(control)) as connection:
        engine, texts = pickle.loads(connection.recv_bytes()).build()
    jobs = socket.socket(fileno=control)
    while True:
        sent, files, _, _ = socket.recv_fds(jobs, 1, 1)
        if not sent:
            return
        if os.fork() == 0:
            jobs.close()
            _limit()
            threading.stack_size(_STACK)
            worker = threading.Thread(target=_answer, args=(Connection(files[0]), engine, texts))
            worker.start()
            worker.join()
            os._exit(0)
        for item in files:
            os.close(item)


def _limit() -> None:
    """Holds this process to its limits; the signals of both clocks end it, whatever it runs."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.setitimer(signal.ITIMER_PROF, CPU)
    signal.setitimer(signal.ITIMER_REAL, WALL)


def _answer(connection: Connection, engine: Any, texts: Texts) -> None:
    """Compiles what a connection sends, and says what came of it."""
    answer: dict[str, Any]
    try:
        answer = {"least": compile_grammar(pickle.loads(connection.recv_bytes()), engine, texts).least}
    except ValueError as error:
        answer = {"error": str(error)}
    except MemoryError:
        answer = {"error": _LARGE}
    connection.send_bytes(json.dumps(answer).encode())
