"""Child processes that run one function of a module, connected by a socket."""

import os
import socket
import subprocess
import sys


def start_child(module: str, function: str) -> socket.socket:
    """Starts a process that calls a function with the descriptor of a socket; the other end of it.

    Not by `multiprocessing`, which imports the caller's main module anew. It has one thread, so that it can be forked,
    and is away from the terminal, whose Ctrl-C is for the caller. It has to end where its socket does.
    """
    ours, theirs = socket.socketpair()
    program = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}({theirs.fileno()})"
    with theirs:
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    return ours
