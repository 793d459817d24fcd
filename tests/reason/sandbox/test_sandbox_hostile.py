"""What hostile programs try, as root and as an ordinary user."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from sigma0.reason.sandbox.execution import MOST_PROCESSES
from sigma0.reason.sandbox.watching import KEPT_BYTES
from tests.reason.sandbox.sandboxes import SECRET, WHY_NOT, Sandboxed, attempts, interpreter_of_nobody


def test_files_outside_cannot_be_read_and_the_home_folder_holds_at_most_the_interpreter(box):
    with tempfile.NamedTemporaryFile(dir="/tmp") as file:
        os.chmod(file.name, 0o644)
        paths = ["/etc/shadow", "/etc/passwd", "/etc/hostname", file.name, __file__, str(Path.home() / ".bashrc")]
        obtained = attempts(box, f"print(json.dumps([attempt(open, path) for path in {paths}]))")
    assert "done" not in obtained
    home = str(Path.home())
    code = f"import json, os\nprint(json.dumps(os.listdir({home!r}) if os.path.isdir({home!r}) else []))"
    hidden = {path.name for path in Path.home().iterdir()} - {".pyenv", ".local", ".venv", "venv", "miniconda3"}
    assert not hidden & set(json.loads(box.run(code).stdout))


def test_nothing_can_be_written_outside_tmp(box):
    folders = ["/", "/usr", "/usr/lib", "/etc", "/dev", "/run", "/proc", "/proc/sys", "/root", "/home", "/var", "/sys"]
    code = f"""
import sys
folders = {folders} + [sys.prefix, sys.base_prefix]
found = [attempt(open, folder + "/written", "w") for folder in folders]
found += [attempt(open, path, "r+b") for path in ("/run/inside.py", os.path.realpath(sys.executable), "/tmp/main.py")]
found += [attempt(os.rename, "/tmp/main.py", "/tmp/other.py"), attempt(os.chmod, "/usr/bin/env", 0o777)]
print(json.dumps(found))
open("/tmp/written", "w").write("here")
"""
    assert "done" not in attempts(box, code)
    assert not Path("/tmp/written").exists()


def test_there_is_no_network(box):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        code = f"""
import socket
found = [attempt(socket.create_connection, address, 1.0) for address in
         (("127.0.0.1", {listener.getsockname()[1]}), ("1.1.1.1", 53), ("localhost", 80))]
for family in range(2, 46):
    for kind in (1, 2, 3, 5):
        found.append(attempt(socket.socket, family, kind))
print(json.dumps(found))
"""
        assert "done" not in attempts(box, code)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_processes_are_limited_and_a_fork_bomb_is_contained(box):
    code = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    result = box.run(code, timeout_s=2.0)
    assert not result.ok and (result.timed_out or result.cut == "memory")
    code = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(30)
        children += 1
except OSError:
    print(children)
"""
    result = box.run(code, memory_mb=2048)
    assert result.ok and int(result.stdout) < MOST_PROCESSES


def test_no_thread_has_hidden_descriptors_and_terminals_are_out_of_reach(box):
    code = """
import fcntl, termios
call("close_range", 50, 60, 0)
print(json.dumps([attempt(call, "close_range", 50, 60, 2), attempt(call, "unshare", 0x400),
                  attempt(os.openpty), attempt(open, "/dev/tty"), attempt(fcntl.ioctl, 0, termios.TIOCSTI, b"x"),
                  attempt(open, "/dev/console"), attempt(os.mknod, "/tmp/disk", 0o60600, 0xfe00)]))
"""
    assert "done" not in attempts(box, code)


def test_calls_that_are_not_listed_fail_and_those_of_a_foreign_architecture_end_the_process(box):
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86-64")
    refused = {"bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "keyctl": 250, "perf_event_open": 298}
    unnamed = {"landlock_create_ruleset": 444, "remap_file_pages": 216, "set_mempolicy": 238, "no such call": 9999}
    code = f"""
import errno
def error_of(number):
    assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1
    return errno.errorcode[ctypes.get_errno()]
calls = {[[*refused.values()], [*unnamed.values()]]}
print(json.dumps([[error_of(number) for number in numbers] for numbers in calls]))
"""
    assert attempts(box, code) == [["EPERM"] * len(refused), ["ENOSYS"] * len(unnamed)]
    result = box.run("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)\nprint('survived')")
    assert result.exit_code == 128 + signal.SIGSYS and not result.stdout


@pytest.mark.slow
def test_an_endless_loop_ends_with_its_time(box):
    result = box.run("print('begun')\nwhile True: pass", timeout_s=2.0)
    assert (result.timed_out, result.exit_code, result.ok, result.stdout) == (True, None, False, "begun\n")


def test_output_is_cut_and_that_of_two_streams_together(box):
    result = box.run("import os\nfor _ in range(2**14): os.write(1, b'x' * 2**16)", timeout_s=60.0)
    assert result.cut == "output" and result.stdout == "x" * KEPT_BYTES
    code = "import os\nwhile True:\n    os.write(1, b'o' * 2**12)\n    os.write(2, b'e' * 2**12)"
    result = box.run(code, timeout_s=60.0)
    assert result.cut == "output" and len(result.stdout) == len(result.stderr) == KEPT_BYTES


def test_a_program_that_takes_back_its_output_does_not_outlive_its_time(box):
    code = """
import os, threading
def take():
    back = os.open("/proc/self/fd/1", os.O_RDONLY)
    while True:
        os.read(back, 2**16)
try:
    os.close(os.open("/proc/self/fd/1", os.O_RDONLY))
except PermissionError:
    print("not to be had", flush=True)
else:
    for _ in range(4):
        threading.Thread(target=take, daemon=True).start()
while True:
    os.write(1, b"x")
"""
    result = box.run(code, timeout_s=2.0)
    assert (result.timed_out or result.cut == "output") and result.seconds < 60


def test_a_program_cannot_undo_that_it_was_begun(box):
    code = """
import builtins, gc, mmap
for each in gc.get_objects():
    if isinstance(each, mmap.mmap):
        each[:] = bytes(len(each))
held = next(value for name, value in vars(builtins).items() if isinstance(value, memoryview))
held.obj[:] = bytes(len(held.obj))
import os
for number in range(3, 64):
    try:
        os.write(number, b"x")
        os.ftruncate(number, 0)
    except OSError:
        pass
print("ran", flush=True)
os._exit(5)
"""
    result = box.run(code)
    assert (result.exit_code, result.stdout, result.assertions_run >= 0) == (5, "ran\n", True)


def test_no_process_outside_can_be_killed_or_seen(box):
    code = f"""
import signal
found = [attempt(os.kill, process, signal.SIGKILL) for process in ({os.getpid()}, {os.getppid()})]
os.kill(0, 0)
attempt(os.kill, 1, signal.SIGKILL)
attempt(os.kill, -1, signal.SIGKILL)
print(json.dumps(found))
"""
    assert "done" not in attempts(box, code)
    assert box.run("import os\nprint(*filter(str.isdigit, os.listdir('/proc')))").stdout == "1 2\n"


def test_proc_is_no_way_out(box):
    code = """
def look(path):
    assert "passwd" not in os.listdir(path)
    raise LookupError
def write(path):
    with open(path, "w") as file:
        file.write("|/tmp/x")
roots = ["/proc/1/root/etc", "/proc/1/cwd/etc", "/proc/self/root/../etc", "/proc/self/cwd/../etc",
         "/proc/1/task/1/root/etc", "/proc/self/root/proc/1/root/etc"]
settings = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger", "/proc/kmsg",
            "/proc/sys/vm/overcommit_memory", "/proc/sys/user/max_user_namespaces",
            "/proc/self/uid_map", "/proc/self/gid_map"]
found = [attempt(look, path) for path in roots] + [attempt(write, path) for path in settings]
print(json.dumps([each for each in found if each not in ("done", "AssertionError")]))
assert len(found) == len(roots) + len(settings)
"""
    assert len(attempts(box, code)) == 14


def test_the_environment_outside_cannot_be_read_nor_limits_raised(box):
    code = """
import os
for process in filter(str.isdigit, os.listdir("/proc")):
    try:
        print(open(f"/proc/{process}/environ").read())
    except OSError:
        pass
print(dict(os.environ))
"""
    result = box.run(code)
    assert result.ok and "OMP_NUM_THREADS" in result.stdout and SECRET not in result.stdout
    code = """
import resource
found = []
for name in ("AS", "NPROC", "NOFILE", "FSIZE", "CPU", "MEMLOCK"):
    which = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(which)[1]
    assert hard != resource.RLIM_INFINITY, name
    found.append(attempt(resource.setrlimit, which, (hard + 1, hard + 1)))
try:
    assert open("/proc/self/limits").read() == open("/proc/1/limits").read()
except PermissionError:
    pass
print(json.dumps(found))
"""
    assert "done" not in attempts(box, code)


def test_no_rights_are_held_nor_to_be_had_again_and_huge_pages_stay_off(box):
    code = """
import subprocess
namespaces = [attempt(call, "unshare", flag) for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000)]
mounts = [attempt(call, "mount", b"x", b"/tmp", b"tmpfs", 0, 0), attempt(call, "umount2", b"/tmp/main.py", 2)]
users = [attempt(os.setuid, 0), attempt(os.setgid, 0), attempt(os.setgroups, [0]), attempt(os.chroot, "/tmp")]
others = [attempt(call, "ptrace", 16, 1, 0, 0)]
assert subprocess.run(["id", "-u"], capture_output=True, text=True).stdout.strip() != "0"
assert 0 not in os.getresuid() + os.getresgid() + tuple(os.getgroups())
assert libc.prctl(41, 0, 0, 0, 0) == -1
def status(text):
    return dict(line.split() for line in text.splitlines() if line.startswith(("Cap", "NoNew", "Seccomp:", "THP")))
found = status(open("/proc/self/status").read())
assert status(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout) == found
print(json.dumps([namespaces + mounts + users + others, found]))
"""
    obtained, status = attempts(box, code)
    assert "done" not in obtained
    sets = {name: int(value, 16) for name, value in status.items() if name.startswith("Cap")}
    assert sets == dict.fromkeys(("CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"), 0)
    assert (status["NoNewPrivs:"], status["Seccomp:"], status.get("THP_enabled:", "0")) == ("1", "2", "0")


def test_a_process_left_behind_and_a_program_that_stops_itself_are_ended(box):
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print("ended")
"""
    result = box.run(code, timeout_s=60.0)
    assert result.ok and result.stdout == "ended\n" and result.seconds < 30
    assert box.run("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", timeout_s=1.0).timed_out


def test_a_sandbox_ends_with_its_caller(box):
    seconds = f"{1000 + os.getpid()}.{time.monotonic_ns()}"
    code = f"import subprocess\nsubprocess.run(['sleep', '{seconds}'])"
    job = json.dumps(box.job(code, timeout_s=600.0))
    caller = subprocess.Popen(box.command(), stdin=subprocess.PIPE, text=True, **box.settings())
    with caller:
        caller.stdin.write(job)
        caller.stdin.close()
        assert eventually(lambda: sleeping(seconds))
        caller.kill()
    assert eventually(lambda: not sleeping(seconds))


def sleeping(seconds):
    return any(process.info["cmdline"] == ["sleep", seconds] for process in psutil.process_iter(["cmdline"]))


def eventually(true, within_s=30.0):
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_with_a_filter_that_lets_all_through_nothing_runs(box):
    output = box.told("print('ran')", filtered=False)
    assert "result" not in output
    for reached in ("made a socket", "had memory that no process shows"):
        assert reached in output["unavailable"]
    assert box.who != "root" or "made a user namespace" in output["unavailable"]


def test_root_can_also_start_bubblewrap_as_another_user(folder):
    if WHY_NOT is not None or os.geteuid() != 0 or interpreter_of_nobody() is None:
        pytest.skip(WHY_NOT or "needs root, and an interpreter that any user may start")
    output = Sandboxed(folder, "root", interpreter_of_nobody()).told("import os\nprint(os.getresuid())", first_way=1)
    if output["unavailable"] is not None:
        pytest.skip(output["unavailable"])
    assert output["result"]["ok"] and not output["left"]
    assert not {"0", str(os.getuid())} & set(output["result"]["stdout"].strip("()\n").split(", "))
