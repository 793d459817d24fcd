"""One run in a sandbox: handed in through memory, watched, and told."""

import json
import math
import mmap
import os
import struct
import subprocess
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from pathlib import Path
from typing import Any, BinaryIO

from sigma0.reason import inside
from sigma0.reason.isolation import (
    SCRATCH,
    SandboxUnavailable,
    Way,
    environment,
    find_bubblewrap,
    interpreter,
    root,
    spare_user,
)
from sigma0.reason.seccomp import filter_program
from sigma0.reason.watching import Watched, first_process

MOST_PROCESSES = 64
_MOST_OPEN_FILES = 64
_LAUNCHER = "/run/inside.py"
_PROGRAM = f"{SCRATCH}/main.py"
_FOLDER = f"{SCRATCH}/work"


@dataclass(frozen=True)
class RunResult:
    """What became of a run.

    Attributes:
        ok: Whether it ended by itself with exit code 0.
        stdout: What it printed, cut at the limit.
        stderr: Likewise.
        exit_code: None where it was ended from outside.
        timed_out: Whether its time was over.
        assertions_run: Assertions reached while it ran, save those whose test is a bare constant.
        seconds: Wall clock.
        assertions_held: How many of them came out true; fewer were reached in vain, also if the code hid that.
        cut: The limit that ended it beside time: "output" or "memory"; None where none did.
    """

    ok: bool
    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool
    assertions_run: int
    seconds: float
    assertions_held: int = 0
    cut: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """What is to be run: a program, or a command in a folder.

    Attributes:
        timeout_s: Wall clock.
        memory_mb: For each process, and for all of them with their files.
        program: Python source.
        command: Words.
        archive: The folder, packed.
    """

    timeout_s: float
    memory_mb: int
    program: bytes | None = None
    command: tuple[str, ...] = ()
    archive: BinaryIO | None = None


def scratch_bytes(memory_mb: int) -> int:
    """Of the files that a sandbox can hold in its /tmp."""
    return memory_mb * 2**20 // 2


def execute(way: Way, job: Job) -> RunResult:
    """Runs it.

    Raises:
        SandboxUnavailable: If the sandbox cannot be made; nothing of the job is run.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        record = _record(stack)
        seen = stack.enter_context(mmap.mmap(record, inside.RECORD_BYTES, prot=mmap.PROT_READ))
        status, status_end = os.pipe()
        stack.callback(os.close, status)
        try:
            bubblewrap = stack.enter_context(_start(stack, way, job, record, status_end))
        finally:
            os.close(status_end)
        stack.callback(bubblewrap.kill)
        watched = Watched(bubblewrap, first_process(bubblewrap, status))
        cut = watched.wait(began + job.timeout_s, job.memory_mb * 2**20)
        begun, _, *counts = struct.unpack(f"{2 + 2 * inside.SLOTS}Q", seen[:])
        out, error = (stream.text() for stream in watched.streams)
        if not begun and cut is None:
            raise SandboxUnavailable(f"the sandbox did not start: {error[-1000:].strip() or 'it told nothing'}")
        code = bubblewrap.returncode if cut is None and bubblewrap.returncode >= 0 else None
        return RunResult(
            ok=code == 0,
            stdout=out,
            stderr=error,
            exit_code=code,
            timed_out=cut == "time",
            assertions_run=sum(counts[::2]),
            seconds=time.monotonic() - began,
            assertions_held=sum(counts[1::2]),
            cut=None if cut == "time" else cut,
        )


def _record(stack: ExitStack) -> int:
    """A file in memory, written to inside and read here, whose size nobody can change."""
    record = os.memfd_create("record", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, record)
    os.ftruncate(record, inside.RECORD_BYTES)
    fcntl(record, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    return record


def _hold(stack: ExitStack, content: bytes) -> int:
    """A file in memory of this content, at its start."""
    file = stack.enter_context(os.fdopen(os.memfd_create("handed"), "w+b"))
    file.write(content)
    file.seek(0)
    return file.fileno()


def _start(stack: ExitStack, way: Way, job: Job, record: int, status: int) -> "subprocess.Popen[bytes]":
    user = spare_user()
    files = [(_hold(stack, Path(inside.__file__).read_bytes()), _LAUNCHER)]
    if job.program is not None:
        files.append((_hold(stack, job.program), _PROGRAM))
    descriptors = [record, status, *(descriptor for descriptor, _ in files)]
    if job.archive is not None:
        descriptors.append(job.archive.fileno())
    options = [*way.options, "--die-with-parent", "--new-session", "--json-status-fd", str(status)]
    filtered = filter_program()
    if filtered is not None:
        descriptors.append(_hold(stack, filtered))
        options += ["--seccomp", str(descriptors[-1])]
    plan = _plan(job, user if way.drops_inside else None, record)
    outside = user if way.starts_without_rights else None
    return subprocess.Popen(
        [
            find_bubblewrap(),
            *options,
            *root(scratch_bytes(job.memory_mb), files),
            *("--", interpreter(), "-I", "-B", "-u", _LAUNCHER, json.dumps(plan)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # nothing of the environment outside: what bubblewrap was started with can be read inside
        env=environment(),
        cwd="/",
        pass_fds=descriptors,
        user=outside,
        group=outside,
        extra_groups=None if outside is None else [],
    )


def _plan(job: Job, identity: int | None, record: int) -> dict[str, Any]:
    """See `inside.main`."""
    return {
        "identity": identity,
        "record": record,
        "limits": {
            "AS": job.memory_mb * 2**20,
            # never before the wall clock, which may fail to end a run if this process is itself stopped
            "CPU": math.ceil(job.timeout_s) * (os.cpu_count() or 1) + 1,
            "NPROC": MOST_PROCESSES,
            "NOFILE": _MOST_OPEN_FILES,
            "FSIZE": scratch_bytes(job.memory_mb),
            "CORE": 0,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
            "SIGPENDING": 256,
        },
        "program": None if job.program is None else _PROGRAM,
        "command": list(job.command),
        "archive": None if job.archive is None else job.archive.fileno(),
        "folder": _FOLDER,
    }
