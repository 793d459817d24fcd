"""What hostile programs can make the machine hold: one sum over all of it, as root and as an ordinary user."""

import platform

import pytest

from sigma0.reason.sandbox import execution, watching
from sigma0.reason.sandbox.cgroups import usable_parent
from sigma0.reason.sandbox.sandbox import Sandbox
from tests.reason.sandbox.sandboxes import attempts, needs_bubblewrap

SYS_EXIT = "60" if platform.machine() == "x86_64" else "93"


def test_two_gigabytes_are_not_to_be_had(box):
    result = box.run("x = bytearray(2 << 30)\nprint('had')")
    assert result.exit_code == 1 and "MemoryError" in result.stderr and not result.stdout


def test_files_count_as_memory(box):
    code = """
import os
block = b"x" * 2**20
for name in ("/tmp/a", "/dev/shm/b"):
    try:
        with open(name, "wb") as file:
            while True:
                file.write(block)
    except OSError as error:
        print(name, flush=True)
ballast = bytearray(b"x") * (70 << 20)
import time; time.sleep(30)
"""
    result = box.run(code, memory_mb=128)
    assert result.cut == "memory" and result.stdout.split() == ["/tmp/a", "/dev/shm/b"]


@pytest.mark.slow
def test_memory_that_belongs_to_no_process_is_not_to_be_had(box):
    code = """
import mmap
def share():
    file = os.open("/dev/zero", os.O_RDWR)
    mmap.mmap(file, 2**20)
print(json.dumps([attempt(os.memfd_create, "x"), attempt(mmap.mmap, -1, 2**20), attempt(share),
                  "done" if libc.shmget(0, 2**20, 0o1600) != -1 else "denied"]))
"""
    assert "done" not in attempts(box, code)


def test_no_socket_but_a_pair_of_streams_is_to_be_had_and_its_buffers_stay_as_they_are(box):
    code = """
import array, socket
one, other = socket.socketpair()
one.sendall(b"word")
assert other.recv(9) == b"word"
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
found = [attempt(socket.socket, socket.AF_UNIX), attempt(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM),
         attempt(socket.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET),
         attempt(one.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 2**24),
         attempt(one.sendmsg, [b"x"], rights), attempt(other.recvmsg, 1, 64), attempt(other.bind, "/tmp/name")]
print(json.dumps(found))
"""
    assert "done" not in attempts(box, code)


def test_a_pipe_keeps_its_size_and_takes_no_pages_on_loan(box):
    code = """
import fcntl
reading, writing = os.pipe()
again, to = os.pipe()
os.write(writing, b"x")
page = ctypes.create_string_buffer(4096)
lent = (ctypes.c_size_t * 2)(ctypes.addressof(page), 4096)
file = os.open("/tmp/main.py", os.O_RDONLY)
assert fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ) > 0
print(json.dumps([attempt(fcntl.fcntl, writing, fcntl.F_SETPIPE_SZ, 2**20), attempt(os.sendfile, to, file, 0, 8),
                  attempt(call, "splice", file, None, to, None, 8, 0), attempt(call, "tee", reading, to, 1, 0),
                  attempt(call, "vmsplice", to, ctypes.byref(lent), 1, 0)]))
"""
    assert "done" not in attempts(box, code)


# by their names, with the megabytes that they may take
BOMBS = {
    ("processes", 300): """
import os, time
for _ in range(10):
    if os.fork() == 0:
        block = bytearray(b"x") * (200 << 20)
        time.sleep(30)
time.sleep(30)
""",
    ("empty files", 48): """
number = 0
while True:
    open(f"/tmp/{number}", "w").close()
    number += 1
""",
    # 61 processes of some MB of pages, and 61 * 28 pairs of sockets, whose buffers take 700 MB more
    ("sockets", 512): """
import ctypes, os, socket, time
# a process that is not dumpable hides its descriptors from other processes of its user
assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0
for _ in range(60):
    if os.fork() == 0:
        break
pairs = [socket.socketpair() for _ in range(28)]
for end in sum(pairs, ()):
    end.setblocking(False)
    try:
        while True:
            end.send(b"x" * 2**16)
    except BlockingIOError:
        pass
time.sleep(100)
""",
    ("pipes", 96): """
import fcntl, os, time
def fill():
    while True:
        _, end = os.pipe2(os.O_NONBLOCK)
        try:
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 2**20)
        except OSError:
            pass
        try:
            while True:
                os.write(end, b"x" * 2**16)
        except BlockingIOError:
            pass
while True:
    try:
        if os.fork() == 0:
            fill()
    except OSError:
        time.sleep(100)
""",
    ("mappings", 160): """
import mmap, os, time
held = [mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=1 + number % 2 * 2)
        for number in range(15_000)]
for _ in range(5):
    if os.fork() == 0:
        break
time.sleep(100)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name, memory_mb", BOMBS)
def test_all_that_a_program_makes_the_machine_hold_counts_as_memory(box, name, memory_mb):
    result = box.run(BOMBS[name, memory_mb], memory_mb=memory_mb, timeout_s=60.0)
    assert (result.cut, result.exit_code, result.timed_out) == ("memory", None, False)


HIDDEN = {
    "ended leaders": """
import ctypes, os, threading, time
def hold():
    time.sleep(0.3)
    held = bytearray(b"x") * (60 << 20)
    time.sleep(100)
for _ in range(6):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall(SYS_EXIT, 0)
time.sleep(100)
""",
    "locks": """
import ctypes, fcntl, os, time
assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0
held = open("/tmp/locks", "wb")
for number in range(5000):
    fcntl.lockf(held, fcntl.LOCK_EX, 1, 2 * number)
path = f"/proc/{os.getpid()}/fdinfo/{held.fileno()}"
for _ in range(15):
    if os.fork() == 0:
        break
files = [os.open(path, os.O_RDONLY) for _ in range(50)]
for file in files:
    os.read(file, 1)
time.sleep(100)
""",
    "a long path": """
import mmap, os, time
for _ in range(5000):
    os.mkdir("\\n" * 255)
    os.chdir("\\n" * 255)
file = os.open("file", os.O_RDWR | os.O_CREAT)
os.truncate(file, 4096)
held = mmap.mmap(file, 4096)
files = [open("/proc/self/maps", "rb", 0) for _ in range(50)]
for file in files:
    while file.read(2**20):
        pass
time.sleep(100)
""",
}


@pytest.mark.grid(fast=0, slow=4)
@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize("counted", ["by us", "by the kernel"])
@pytest.mark.parametrize("code", HIDDEN.values(), ids=HIDDEN)
def test_what_a_look_at_the_first_thread_does_not_show_counts_as_memory(monkeypatch, code, counted):
    """360 MB of threads whose first one ended, 400 MB of texts of locks, 400 MB of paths; by each count alone."""
    if counted == "by us":
        monkeypatch.setattr(execution, "make_group", lambda *limits: None)
    elif usable_parent() is None:
        pytest.skip("no control group can be made here")
    else:
        monkeypatch.setattr(watching.Account, "used_bytes", lambda account: 0)
    code = code.replace("SYS_EXIT", SYS_EXIT)
    assert Sandbox().run(code, memory_mb=256, timeout_s=60.0).cut == "memory"
