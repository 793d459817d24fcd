"""Hostile programs are run by a process of its own, as root and as an ordinary user, which tells what outlived them."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

from sigma0.reason.sandbox.sandbox import RunResult, Sandbox

NOBODY = 65534
WHY_NOT = Sandbox().unavailable
needs_bubblewrap = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
SECRET = "a secret of the environment"
# a filter of system calls that lets all of them through, as the kernel takes it: one instruction
ALLOW_ALL = struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)

DRIVER = """
import ctypes, json, os, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # what a sandbox leaves behind becomes this process's child
job = json.load(sys.stdin)
from sigma0.reason.sandbox import execution, sandbox
allow_all = job.pop("allow_all")
if not job.pop("filtered"):
    execution.filter_program = lambda: bytes.fromhex(allow_all)
first = job.pop("first_way")
ways = sandbox.ways
sandbox.ways = lambda: ways()[first:]
box = sandbox.Sandbox()
told = {"unavailable": box.unavailable}
if box.unavailable is None:
    told["result"] = box.run(**job).to_dict()
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        told["left"] = True
    except ChildProcessError:
        told["left"] = False
print(json.dumps(told))
"""


def folder_of_the_sandbox():
    """The files that the sandbox is made of, where any user can read them, without what the package imports."""
    folder = Path(tempfile.mkdtemp(prefix="sigma0-sandbox-"))
    package = folder / "sigma0" / "reason" / "sandbox"
    package.mkdir(parents=True)
    for path in (package.parents[1] / "__init__.py", package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    here = Path(sys.modules["sigma0.reason.sandbox.sandbox"].__file__).parent
    for path in here.glob("[!_]*.py"):
        shutil.copy(path, package)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


@lru_cache
def interpreter_of_nobody():
    """An interpreter that a user without rights can start, or None."""
    for path in (sys.executable, "/usr/bin/python3"):
        check = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
        try:
            if subprocess.run(check, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/").returncode == 0:
                return path
        except OSError:
            continue
    return None


class Sandboxed:
    """Runs programs in a sandbox on behalf of one kind of user."""

    def __init__(self, folder, who, interpreter=sys.executable):
        self.folder = folder
        self.who = who
        self.interpreter = interpreter
        self.as_nobody = os.geteuid() == 0 and who == "ordinary"

    def command(self):
        return [self.interpreter, "-B", "-c", DRIVER]

    def settings(self):
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if self.as_nobody else {}
        env = {"PYTHONPATH": str(self.folder), "PATH": os.environ["PATH"], "HUSH": SECRET}
        return {"env": env, "cwd": "/", **user}

    def job(self, code, **settings):
        return {"code": code, "first_way": 0, "filtered": True, "allow_all": ALLOW_ALL.hex(), **settings}

    def told(self, code, first_way=0, filtered=True, **settings):
        job = json.dumps(self.job(code, first_way=first_way, filtered=filtered, **settings))
        run = subprocess.run(self.command(), input=job, capture_output=True, text=True, timeout=100, **self.settings())
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    def run(self, code, **settings):
        told = self.told(code, **settings)
        if told["unavailable"] is not None:
            pytest.skip(told["unavailable"])
        assert not told["left"], "a process of the sandbox outlived it"
        return RunResult(**told["result"])


# what each of some attempts comes to: "done", or the name of its error; and calls that Python has no name for
TRY = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
def attempt(action, *arguments):
    try:
        action(*arguments)
        return "done"
    except Exception as error:
        return type(error).__name__
"""


def attempts(box, code, **settings):
    result = box.run(f"{TRY}\n{code}", **settings)
    assert result.ok, result.stderr
    return json.loads(result.stdout)
