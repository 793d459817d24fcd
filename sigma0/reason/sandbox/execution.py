"""One run in a sandbox: code passed in through memory, watched, and its result collected."""

import json
import math
import mmap
import os
import socket
import struct
import subprocess
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import RLock
from typing import Any, BinaryIO

from sigma0.reason.sandbox.accounting import MOST_OPEN_FILES
from sigma0.reason.sandbox.cgroups import ControlGroup, make_group
from sigma0.reason.sandbox.inside import RECORD_BYTES, SLOTS, SOURCE
from sigma0.reason.sandbox.isolation import (
    SCRATCH,
    SandboxUnavailable,
    Way,
    environment,
    find_bubblewrap,
    interpreter,
    root,
    spare_user,
)
from sigma0.reason.sandbox.seccomp import filter_program
from sigma0.reason.sandbox.watching import Watched

MOST_PROCESSES = 64
_STACK_BYTES = 8 * 2**20
_LONGEST_CPU_S = 2**31
_LAUNCHER = "/run/inside.py"
_PROGRAM = f"{SCRATCH}/main.py"
_FOLDER = f"{SCRATCH}/work"
# A process that another thread forks meanwhile would keep the ends that are for bubblewrap: they are seen to close when
# it ends, too. So it is forked before they are made, or once they are closed here.
_STARTING = RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_STARTING.acquire, after_in_parent=_STARTING.release, after_in_child=_STARTING.release)


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
    """What is to be run: a program, or a command in a folder."""

    timeout_s: float  # Wall clock
    memory_mb: int  # For each process, and for all of them with their files
    program: bytes | None = None  # Python source
    command: tuple[str, ...] = ()  # Words
    archive: BinaryIO | None = None  # The folder, packed


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
        seen = stack.enter_context(mmap.mmap(record, RECORD_BYTES, prot=mmap.PROT_READ))
        group = make_group(job.memory_mb * 2**20, MOST_PROCESSES)
        if group is not None:
            stack.callback(group.remove)
        watched = _start(stack, way, job, record, group)
        cut = watched.wait(began + job.timeout_s, job.memory_mb * 2**20)
        if cut is None and group is not None and group.was_killed:
            cut = "memory"
        counts = struct.unpack(f"{2 * SLOTS}Q", seen[:])
    out, error = (stream.text() for stream in watched.streams)
    if not watched.has_begun and cut is None:
        raise SandboxUnavailable(f"the sandbox did not start: {error[-1000:].strip() or 'it printed nothing'}")
    code = watched.bubblewrap.returncode
    if cut is not None or code < 0:
        code = None
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
    # these modules and names are not there off Linux, where the package is imported all the same
    from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl

    record = os.memfd_create("record", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, record)
    os.ftruncate(record, RECORD_BYTES)
    fcntl(record, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    return record


def _start(stack: ExitStack, way: Way, job: Job, record: int, group: ControlGroup | None) -> Watched:
    """A sandbox within its limits, ended with the stack."""
    with _STARTING, ExitStack() as handed:
        status, status_end = os.pipe()
        stack.callback(os.close, status)
        line, line_end = (stack.enter_context(end) for end in socket.socketpair())
        handed.callback(os.close, status_end)
        handed.callback(line_end.close)
        user = spare_user()
        plan = _plan(job, user if way.drops_inside else None, record, line_end.fileno())
        descriptors = [record, status_end, line_end.fileno(), *([] if job.archive is None else [job.archive.fileno()])]
        options = [*way.options, "--json-status-fd", str(status_end)]
        options += _contents(handed, job, descriptors)
        words = [find_bubblewrap(), *options, "--", interpreter(), "-I", "-B", "-u", _LAUNCHER, json.dumps(plan)]
        outside = user if way.starts_without_rights else None
        bubblewrap = stack.enter_context(_open(words, descriptors, outside))
    stack.callback(bubblewrap.kill)
    return Watched(bubblewrap, status, line, group)


def _contents(handed: ExitStack, job: Job, descriptors: list[int]) -> list[str]:
    """Bubblewrap's options for what it holds and filters; the files that it is handed join the descriptors."""

    def hold(content: bytes) -> int:
        file = handed.enter_context(os.fdopen(os.memfd_create("handed"), "w+b"))
        file.write(content)
        file.seek(0)
        descriptors.append(file.fileno())
        return file.fileno()

    files = [(hold(Path(SOURCE).read_bytes()), _LAUNCHER)]
    if job.program is not None:
        files.append((hold(job.program), _PROGRAM))
    return ["--seccomp", str(hold(filter_program())), *root(scratch_bytes(job.memory_mb), files)]


def _open(words: list[str], descriptors: list[int], user: int | None) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # nothing of the environment outside: what bubblewrap was started with can be read inside
        env=environment(),
        cwd="/",
        pass_fds=descriptors,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )


def _plan(job: Job, identity: int | None, record: int, line: int) -> dict[str, Any]:
    """See `inside.main`."""
    return {
        "line": line,
        "identity": identity,
        "limits": list(_limits(job).items()),
        "record": record,
        "program": None if job.program is None else _PROGRAM,
        "command": list(job.command),
        "archive": None if job.archive is None else job.archive.fileno(),
        "folder": _FOLDER,
    }


def _limits(job: Job) -> dict[int, int]:
    """By the numbers of `resource`."""
    import resource

    return {
        resource.RLIMIT_AS: job.memory_mb * 2**20,
        # never before the wall clock, which may fail to end a run if this process is itself stopped
        resource.RLIMIT_CPU: min(math.ceil(job.timeout_s) * (os.cpu_count() or 1) + 1, _LONGEST_CPU_S),
        resource.RLIMIT_NPROC: MOST_PROCESSES,
        resource.RLIMIT_NOFILE: MOST_OPEN_FILES,
        resource.RLIMIT_FSIZE: scratch_bytes(job.memory_mb),
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        # at 0 a crash would still start the system's handler of crashes, outside
        resource.RLIMIT_CORE: 1,
    }
