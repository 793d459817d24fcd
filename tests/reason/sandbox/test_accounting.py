import itertools
import os
import resource
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from select import epoll

import pytest

from sigma0.reason.sandbox.accounting import _MOST_FLEETING, Account, _descriptors, _threads, processes_of

if not sys.platform.startswith("linux"):
    pytest.skip("reads /proc", allow_module_level=True)

PAGE = resource.getpagesize()


def descriptor_bytes():
    """Of this process: alone, and shared with others."""
    shared = {}
    return _descriptors("/proc/self", shared, os.stat("/proc").st_dev), sum(shared.values())


def test_a_pipe_counts_once_whoever_holds_it():
    _, before = descriptor_bytes()
    reading, writing = os.pipe()
    copies = [os.dup(reading), os.dup(writing)]
    assert descriptor_bytes()[1] - before == 16 * PAGE
    for descriptor in (reading, writing, *copies):
        os.close(descriptor)
    assert descriptor_bytes()[1] == before


def test_a_socket_counts_as_what_its_buffers_may_hold():
    _, before = descriptor_bytes()
    one, other = socket.socketpair()
    counted = descriptor_bytes()[1] - before
    with one, other:
        one.setblocking(False)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += one.send(b"x" * 2**16)
    assert 0 < 2 * sent <= counted


def test_sets_of_watched_descriptors_and_open_files_of_proc_count_by_what_they_can_hold():
    before, _ = descriptor_bytes()
    with epoll(), open("/proc/self/maps"), open(os.devnull):
        after, _ = descriptor_bytes()
    assert (after.listed - before.listed, after.listings - before.listings) == (64 * 64 * 256, 1)
    assert after.plain - before.plain == 2**15


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
            # the first thread ends alone, as soon as the other has told
            "def hold():\n    held = bytearray(b'x') * 2**25\n    print(flush=True)\n    sys.stdin.read()\n"
            "threading.Thread(target=hold).start()\nimport ctypes\nctypes.CDLL(None).syscall(60, 0)",
            2**25,
        ),
        (
            "wait = threading.Event()\nfor _ in range(40): threading.Thread(target=wait.wait, daemon=True).start()",
            40 * 2**16,
        ),
    ],
    ids=["pages", "mappings", "pages of another thread", "threads"],
)
def test_what_a_process_takes_is_seen(code, least):
    with waiting_process("") as plain, waiting_process(code) as greedy:
        assert Account(greedy.pid).used_bytes() - Account(plain.pid).used_bytes() > 0.9 * least


def test_processes_are_seen_through_the_threads_that_started_them():
    # the thread of a pool lives until the pool is left
    with ThreadPoolExecutor(1) as pool, pool.submit(waiting_process, "").result() as child:
        assert child.pid in set(processes_of(os.getpid()))


def test_processes_that_end_and_threads_that_follow_each_other_too_fast_are_told(monkeypatch):
    process = subprocess.Popen(["true"])
    process.wait()
    assert Account(process.pid).used_bytes() == 0
    # A stand-in for the kernel's folder: which threads are caught in it is a matter of luck
    numbers = map(str, itertools.count())
    monkeypatch.setattr(os, "listdir", lambda folder: [next(numbers)])
    assert len(list(_threads(1))) == _MOST_FLEETING and Account(1).used_bytes() > 2**60
