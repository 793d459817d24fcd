import fcntl
import os
import resource
import socket
import subprocess
import sys
import threading
from select import epoll

import pytest

from sigma0.reason.sandbox.accounting import _descriptor_bytes, processes_of, used_bytes

if not sys.platform.startswith("linux"):
    pytest.skip("reads /proc", allow_module_level=True)

PAGE = resource.getpagesize()


def descriptor_bytes():
    """Of this process: alone, and shared with others."""
    shared = {}
    return _descriptor_bytes(os.getpid(), shared), sum(shared.values())


def test_a_pipe_counts_once_whoever_holds_it():
    _, before = descriptor_bytes()
    reading, writing = os.pipe()
    copies = [os.dup(reading), os.dup(writing)]
    assert descriptor_bytes()[1] - before == 16 * PAGE
    for descriptor in (reading, writing, *copies):
        os.close(descriptor)
    assert descriptor_bytes()[1] == before


def test_a_socket_counts_as_what_its_buffers_may_hold(tmp_path):
    _, before = descriptor_bytes()
    one, other = socket.socketpair()
    counted = descriptor_bytes()[1] - before
    with one, other:
        one.setblocking(False)
        try:
            sent = 0
            while True:
                sent += one.send(b"x" * 2**16)
        except BlockingIOError:
            pass
    assert 0 < 2 * sent <= counted


def test_locks_and_what_is_watched_count(tmp_path):
    with (tmp_path / "file").open("w+b") as file, epoll() as watching:
        before, _ = descriptor_bytes()
        for number in range(10):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * number)
        assert descriptor_bytes()[0] - before == 10 * 256
        reading, writing = os.pipe()
        watching.register(reading)
        assert descriptor_bytes()[0] - before == 11 * 256
        os.close(reading)
        os.close(writing)


def waiting_process(code):
    """A process that runs code and then waits for the end of its input."""
    program = f"import sys, mmap, threading\n{code}\nprint(flush=True)\nsys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


@pytest.mark.parametrize(
    "code, least",
    [
        ("held = bytearray(b'x') * 2**25", 2**25),
        (
            "flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS\n"
            "held = [mmap.mmap(-1, 4096, flags=flags, prot=1 + number % 2 * 2) for number in range(8000)]",
            7900 * 4096,
        ),
        (
            "wait = threading.Event()\nfor _ in range(40): threading.Thread(target=wait.wait, daemon=True).start()",
            40 * 2**16,
        ),
    ],
    ids=["pages", "mappings", "threads"],
)
def test_what_a_process_takes_is_seen(code, least):
    with waiting_process("") as plain, waiting_process(code) as greedy:
        assert used_bytes(greedy.pid) - used_bytes(plain.pid) > 0.9 * least


def test_processes_are_seen_through_the_threads_that_started_them():
    children = []

    def start():
        children.append(waiting_process(""))
        wait.wait()

    wait = threading.Event()
    thread = threading.Thread(target=start)
    thread.start()
    while not children:
        pass
    assert children[0].pid in set(processes_of(os.getpid()))
    wait.set()
    thread.join()
    with children[0]:
        pass


def test_a_process_that_ended_counts_nothing():
    process = subprocess.Popen(["true"])
    process.wait()
    assert used_bytes(process.pid) == 0
