"""Commands in processes of their own, under a limit of time; and what is done, kept in a file."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sigma0.bench.core.lines import alone, append, cut
from sigma0.bench.gpu.parts import Command, Part


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        part: Its part.
        command: Its name.
        module: That Python ran.
        arguments: Of the module.
        rc: Its exit code; None where it was stopped at the limit.
        seconds: It took.
        log: What it printed.
    """

    part: str
    command: str
    module: str
    arguments: tuple[str, ...]
    rc: int | None
    seconds: float
    log: str

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two commands the same."""
        return self.part, self.command, self.module, *self.arguments


class Done:
    """Commands that have ended well, in a file that a later call goes on with.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with alone(path):
            cut(path)
        lines = path.read_text().splitlines() if path.exists() else []
        ended = (json.loads(line) for line in lines)
        self._keys = {(each["part"], each["command"], each["module"], *each["arguments"]) for each in ended}

    def has(self, part: Part, command: Command) -> bool:
        """Whether a command has ended well before."""
        return (part.name, command.name, command.module, *command.arguments) in self._keys

    def add(self, outcome: Outcome) -> None:
        """Keeps how a command ended, if it ended well."""
        if outcome.rc == 0:
            self._keys.add(outcome.key)
            with alone(self._path):
                append(self._path, json.dumps(asdict(outcome)).encode())


def run(part: Part, command: Command, logs: Path, limit: float) -> Outcome:
    """Runs a command to its end, or to the limit, where all of its processes are ended.

    Args:
        part: Its part.
        command: The command.
        logs: Folder for what it prints.
        limit: Seconds.
    """
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{part.name}-{command.name}.txt"
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", command.module, *command.arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            rc: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            rc = None
        finally:
            # compilers that it started too
            _end(process)
    return Outcome(part.name, command.name, command.module, command.arguments, rc, time.monotonic() - start, str(log))


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def last_line(log: str) -> str:
    """The last line of what a command printed."""
    lines = [line for line in Path(log).read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"
