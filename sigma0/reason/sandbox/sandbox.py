"""Running strangers' code where it can do no harm."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from sigma0.reason.sandbox.execution import Job, RunResult, execute, scratch_bytes
from sigma0.reason.sandbox.isolation import (
    SandboxUnavailable,
    Way,
    find_bubblewrap,
    interpreter,
    interpreter_folders,
    ways,
)
from sigma0.reason.sandbox.packing import pack
from sigma0.reason.sandbox.probe import SOURCE, bait
from sigma0.reason.sandbox.seccomp import filter_program

__all__ = ["RunResult", "Sandbox", "SandboxUnavailable"]

LONGEST_CODE = 2**20
LONGEST_COMMAND = 2**16
LEAST_MEMORY_MB = 48
_PROBE_S = 30.0


class Sandbox:
    """Runs programs without rights: bubblewrap, limits on all they take, and a filter of system calls.

    Inside there are the system's programs and this interpreter's libraries, to be read; a private /tmp, that ends with
    the run; no network, not even to itself; no other process, no home folder. A run has one time, one sum of memory
    over all its processes and files, 64 processes, and 8 MB of output at most, of which 64 kB of each stream are kept.
    Safe for use by several threads.
    """

    def __init__(self) -> None:
        self._alone = Lock()
        self._probed = False
        self._way: Way | None = None
        self._why: str | None = None

    @property
    def unavailable(self) -> str | None:
        """None where code can be run; else why not, and what to do. The first look runs the start-up probe."""
        with self._alone:
            if not self._probed:
                self._way, self._why = _choose()
                self._probed = True
        return self._why

    def run(self, code: str, timeout_s: float = 10.0, memory_mb: int = 512) -> RunResult:
        """Runs a Python program.

        Its assertions are counted where they are reached, also those in processes that it forks, and those of a program
        that is ended. The counts are kept in its own memory: a program bent on it can forge them, as it can assert what
        is empty.

        Args:
            code: The program, as a file would hold it; at most 1 MB.
            timeout_s: Wall clock, starting it included.
            memory_mb: For each process, and for all of them together with what they write to /tmp; at least 48.

        Raises:
            SandboxUnavailable: If no isolation passes the probe; nothing is run.
            ValueError: For bad arguments.
        """
        _check(timeout_s, memory_mb)
        program = code.encode(errors="surrogatepass")
        if len(program) > LONGEST_CODE:
            raise ValueError(f"code of {len(program)} bytes is too long: at most {LONGEST_CODE}")
        return execute(self._usable(), Job(timeout_s, memory_mb, program=program))

    def run_command(
        self, command: Sequence[str], folder: Path, timeout_s: float = 60.0, memory_mb: int = 1024
    ) -> RunResult:
        """Runs a command in a copy of a folder, which it can change and which ends with the run.

        Args:
            command: And its arguments; `python` is this interpreter, with its libraries. Found on the sandbox's own
                PATH: this interpreter's programs, then the system's.
            folder: Is copied; what the command writes does not come back. At most half of `memory_mb`.
            timeout_s: Wall clock, starting it included.
            memory_mb: As `run` takes it, the copy included.

        Raises:
            SandboxUnavailable: If no isolation passes the probe; nothing is run.
            ValueError: For bad arguments.
        """
        _check(timeout_s, memory_mb)
        words = tuple(command)
        if isinstance(command, str) or not words or not words[0] or any("\0" in word for word in words):
            raise ValueError(f"command must be a program's name and its arguments, got {command!r}")
        if len(json.dumps(words)) > LONGEST_COMMAND:
            raise ValueError(f"command is too long: at most {LONGEST_COMMAND} characters, as JSON")
        way = self._usable()
        if words[0] == "python":
            words = (interpreter(), *words[1:])
        with pack(Path(folder), scratch_bytes(memory_mb)) as archive:
            return execute(way, Job(timeout_s, memory_mb, command=words, archive=archive))

    def _usable(self) -> Way:
        why = self.unavailable
        if self._way is None:
            raise SandboxUnavailable(why)
        return self._way


def _check(timeout_s: float, memory_mb: int) -> None:
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s must be a number of seconds above 0, got {timeout_s}")
    if not isinstance(memory_mb, int) or memory_mb < LEAST_MEMORY_MB:
        raise ValueError(f"memory_mb must be a whole number of at least {LEAST_MEMORY_MB}, got {memory_mb!r}")


def _choose() -> tuple[Way | None, str | None]:
    """The first way that passes the probe; or why there is none."""
    try:
        find_bubblewrap()
        filter_program()
    except SandboxUnavailable as error:
        return None, f"no code is run: {error}"
    reasons = []
    for way in ways():
        try:
            why = _probe(way)
        except (SandboxUnavailable, OSError) as error:
            why = str(error)
        if why is None:
            return way, None
        reasons.append(f"{way.name}: {why}")
    needs = "bubblewrap 0.8 or later, and either user namespaces that any user may make, or root's right to mount"
    return None, f"no isolation passes the start-up probe, so no code is run; it needs {needs} ({'; '.join(reasons)})"


def _probe(way: Way) -> str | None:
    """What a hostile program could do, if anything."""
    with bait(["/", "/usr", "/dev", "/run", "/proc/sys", *interpreter_folders()]) as plan:
        program = f"{Path(SOURCE).read_text()}\n\nmain({plan!r})\n"
        result = execute(way, Job(_PROBE_S, 256, program=program.encode()))
    if result.ok and result.stdout == "[]\n" and (result.assertions_run, result.assertions_held) == (1, 1):
        return None
    return f"the probe printed: {result.stdout.strip() or result.stderr.strip() or 'nothing, and did not end'}"
