"""Texts looked up in long contexts, in a process of its own: that takes tenths of seconds, in which others go on."""

import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from sigma0.children import start_child
from sigma0.signals.grounding.check import check

# Characters and texts of a context up to which a look takes a millisecond or two.
SHORT, FEW = 2_048, 16


def is_short(context: Sequence[str]) -> bool:
    """Whether a text can be looked up in a context at once."""
    return len(context) <= FEW and sum(map(len, context)) <= SHORT


def look_up(text: str, context: Sequence[str]) -> float | None:
    """How far a context bears a text out, in [0, 1]; None where nothing can be checked."""
    return check(text, context).score


class GroundingProcess:
    """Looks up one text after the other; may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def score(self, text: str, context: Sequence[str]) -> float | None:
        """As `look_up` says.

        Raises:
            ChildProcessError: If its process ends twice over it.
        """
        job = json.dumps([text, list(context)]).encode()
        with self._lock:
            for _ in range(2):
                try:
                    if self._connection is None:
                        self._connection = Connection(start_child(__name__, "_serve").detach())
                    self._connection.send_bytes(job)
                    score: float | None = json.loads(self._connection.recv_bytes())
                    return score
                except (EOFError, OSError):
                    # it was killed, for want of memory say: the next one starts anew
                    self._connection = None
        raise ChildProcessError("the process that looks texts up has ended")

    def close(self) -> None:
        """Ends its process."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _serve(descriptor: int) -> None:
    """Runs the process."""
    os.nice(5)
    # until the engine's has ended, also while it looks
    with Connection(descriptor) as connection, suppress(EOFError, ConnectionError):
        while True:
            text, context = json.loads(connection.recv_bytes())
            connection.send_bytes(json.dumps(look_up(text, context)).encode())
