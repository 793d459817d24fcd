import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sigma0.reason.sandbox import execution, isolation, sandbox, seccomp
from sigma0.reason.sandbox.sandbox import RunResult, Sandbox, SandboxUnavailable
from tests.marks import slow
from tests.reason.sandbox.sandboxes import ALLOW_ALL, SECRET, WHY_NOT, needs_bubblewrap


@pytest.fixture(scope="module")
def box():
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    return Sandbox()


@pytest.fixture
def nothing_starts(monkeypatch):
    def started(*_, **__):
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess, "Popen", started)


@pytest.mark.parametrize("package", ["bubblewrap", "libseccomp2"])
def test_without_a_package_nothing_runs_and_the_way_out_is_told(monkeypatch, tmp_path, nothing_starts, package):
    if package == "bubblewrap":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(seccomp, "_LIBRARY", "libseccomp-that-is-not-there.so.2")
        monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: "/usr/bin/bwrap")
        seccomp.filter_program.cache_clear()
    box = Sandbox()
    assert f"apt-get install {package}" in box.unavailable
    for run, what in ((box.run, ("print(1)",)), (box.run_command, (["true"], tmp_path))):
        with pytest.raises(SandboxUnavailable, match=f"install {package}"):
            run(*what)


def test_off_linux_nothing_runs(monkeypatch, nothing_starts):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in Sandbox().unavailable


@needs_bubblewrap
@pytest.mark.parametrize(
    "change, output",
    [
        (lambda options: tuple(item for item in options if item != "--unshare-net"), "reached a port outside"),
        (lambda options: (*options, "--no-such-option"), "no-such-option"),
    ],
)
def test_a_way_that_contains_too_little_fails_the_probe_and_nothing_runs(monkeypatch, change, output):
    monkeypatch.setattr(execution, "filter_program", lambda: ALLOW_ALL)
    monkeypatch.setattr(
        sandbox, "ways", lambda: [replace(way, options=change(way.options)) for way in isolation.ways()]
    )
    box = Sandbox()
    assert output in box.unavailable
    with pytest.raises(SandboxUnavailable):
        box.run("print(1)")


@needs_bubblewrap
def test_a_folder_that_shows_or_takes_files_fails_the_probe(monkeypatch, tmp_path):
    tmp_path.chmod(0o755)
    shown = [*isolation.interpreter_folders(), str(tmp_path)]
    monkeypatch.setattr(isolation, "interpreter_folders", lambda: shown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert "read a file outside" in Sandbox().unavailable
    monkeypatch.undo()
    monkeypatch.setattr(sandbox, "interpreter_folders", lambda: ["/tmp"])
    assert "wrote to /tmp" in Sandbox().unavailable


@needs_bubblewrap
def test_rights_that_are_not_given_up_keep_everything_from_running(monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setattr(sandbox, "ways", lambda: (replace(isolation.ways()[0], drops_inside=False),))
    assert "rights could not be given up" in Sandbox().unavailable


@needs_bubblewrap
def test_the_probe_runs_once(monkeypatch):
    calls = []
    monkeypatch.setattr(sandbox, "_probe", lambda way: calls.append(way))
    box = Sandbox()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: box.unavailable, range(4))) == {None}
    assert len(calls) == 1


def test_times_memory_code_and_commands_have_their_bounds(tmp_path):
    box = Sandbox()
    for timeout_s in (0, -1.0, float("nan"), float("inf")):
        for run, what in ((box.run, ("",)), (box.run_command, (["true"], tmp_path))):
            with pytest.raises(ValueError, match="timeout_s must be"):
                run(*what, timeout_s=timeout_s)
    for memory_mb in (0, sandbox.LEAST_MEMORY_MB - 1, -1, 100.5):
        with pytest.raises(ValueError, match="memory_mb must be"):
            box.run("", memory_mb=memory_mb)
    with pytest.raises(ValueError, match="too long"):
        box.run("#" * (sandbox.LONGEST_CODE + 1))
    for command in ([], [""], "true", ["echo", "a\0b"], ["echo", "x" * 70_000], ["echo", "\x01" * 20_000]):
        with pytest.raises(ValueError, match="command"):
            box.run_command(command, tmp_path)


def test_a_program_is_told_as_it_ended_and_is_given_nothing(box, monkeypatch):
    result = box.run("import sys\nprint('out')\nprint('error', file=sys.stderr)\nsys.exit(3)")
    assert result == RunResult(False, "out\n", "error\n", 3, False, 0, result.seconds)
    assert box.run("import os\nprint(end='left')\nos._exit(0)").stdout == "left"
    assert box.run("import sys\nsys.exit('why')").stderr == "why\n"
    assert box.run("import os\nos.kill(os.getpid(), 9)", memory_mb=sandbox.LEAST_MEMORY_MB).exit_code == 128 + 9
    monkeypatch.setenv("HUSH", SECRET)
    result = box.run("import os, sys\nprint(repr(sys.stdin.read()), os.environ.get('HUSH'), os.getcwd(), os.listdir())")
    assert result.stdout.startswith("'' None /tmp ['main.py'")


@pytest.mark.parametrize("timeout_s, ended", [(0.001, True), (1e300, False)])
def test_a_time_may_be_short_and_long(box, timeout_s, ended):
    assert box.run("print(1)", timeout_s=timeout_s).timed_out == ended


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("hooked", [True, False])
def test_a_process_that_another_thread_forks_meanwhile_takes_none_of_the_time(box, monkeypatch, hooked):
    """It lives on, with the ends of all pipes that there were when it was forked, in Python or outside of its hooks."""
    assert box.unavailable is None
    children, threads = [], []
    libc, pipe = ctypes.PyDLL(None), os.pipe

    def fork():
        process = os.fork() if hooked else libc.fork()
        if process == 0:
            libc.alarm(60)
            libc.pause()
        children.append(process)

    def forked_after():
        ends = pipe()
        # the fourth is that of subprocess itself, which waits for its end
        if hooked or len(children) < 3:
            thread = threading.Thread(target=fork)
            thread.start()
            # it waits until the sandbox is started, or it is there
            thread.join(0.3)
            threads.append(thread)
        return ends

    monkeypatch.setattr(os, "pipe", forked_after)
    try:
        result = box.run("print(1)", timeout_s=30.0)
    finally:
        for thread in threads:
            thread.join()
        for process in children:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    assert (result.ok, result.stdout) == (True, "1\n") and result.seconds < 30


def test_bytes_that_are_no_text_are_replaced_and_no_descriptor_is_left_open(box):
    assert box.run("import os\nos.write(1, b'a\\xffb')").stdout == "a\ufffdb"
    box.run("")
    before = os.listdir("/proc/self/fd")
    box.run("")
    box.run("while True: pass", timeout_s=0.2)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    "code",
    [
        "def f(:\n    pass",
        "  x = 1",
        "x = (\n\n1 +",
        "1 / 0",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('so') from error",
        "def f(x):\n    assert (\n        x ==\n        2\n    ), f'not {x}'\n\nfor x in 2, 2, 3:\n    f(x)",
        "def f(): f()\nf()",
        "class C:\n    assert 1 + 1 == 2\n    assert [] or 0, 'class'",
        "import asyncio\n\nasync def f():\n    assert await asyncio.sleep(0, 0), 'async'\n\nasyncio.run(f())",
        "from __future__ import annotations\nfrom __future__ import nothing",
        "x = 1\nfrom __future__ import annotations",
        "# -*- coding: latin-1 -*-\nraise ValueError('é')",
        "raise SystemExit('bye')",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
        "await x",
        "return",
    ],
)
def test_failures_are_told_as_python_tells_them(box, tmp_path, code):
    path = tmp_path / "main.py"
    path.write_text(code)
    plain = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True)
    result = box.run(code)
    assert result.exit_code == plain.returncode
    output = [line for line in plain.stderr.replace(str(path), "/tmp/main.py").splitlines() if "repeated" not in line]
    ours = [line for line in result.stderr.splitlines() if "repeated" not in line]
    assert [line for line in ours if " 0x" not in line] == [line for line in output if " 0x" not in line]


@pytest.mark.parametrize("code", ["x = 1\0", "x = '\ud800'", "(" * 5000 + ")" * 5000, "-" * 100_000 + "1"])
def test_what_is_no_program_ends_with_code_1(box, code):
    result = box.run(code)
    assert result.exit_code == 1 and result.stderr


def test_a_program_is_the_main_module_and_sees_only_its_own_names(box):
    code = '"""Doc."""\nfrom __future__ import annotations\nimport sys\nprint(sorted(globals()))\n'
    code += "print(__name__, __doc__, __file__, sys.argv, sys.modules['__main__'].__dict__ is globals())"
    names, output = box.run(code).stdout.splitlines()
    assert {"__name__", "__doc__", "annotations", "sys"} <= set(eval(names))
    assert not {"main", "counted", "json", "plan"} & set(eval(names))
    assert output == "__main__ Doc. /tmp/main.py ['/tmp/main.py'] True"


@pytest.mark.parametrize(
    "end",
    [
        "os._exit(0)",
        "os.kill(os.getpid(), 9)",
        slow("while True: pass"),
        "os.write(1, b'x' * 10**7)",
        "os.closerange(0, 99)",
    ],
)
def test_counts_outlive_any_end(box, end):
    # only the endless one waits for its time, which is long enough for a busy machine to begin
    result = box.run(f"import os\nx = [1]\nassert x\nassert x\n{end}", timeout_s=2.0 if "while" in end else 60.0)
    assert (result.assertions_run, result.assertions_held) == (2, 2)


def test_assertions_of_threads_and_children_are_all_counted(box):
    code = """
import multiprocessing, threading
def check(times):
    for number in range(times):
        assert number >= 0
threads = [threading.Thread(target=check, args=(5000,)) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
with multiprocessing.get_context("fork").Pool(3) as pool:
    pool.map(check, [1000] * 6)
"""
    result = box.run(code)
    assert result.ok, result.stderr
    assert result.assertions_run == result.assertions_held == 26_000


def test_programs_may_do_what_python_programs_do(box):
    code = """
import asyncio, concurrent.futures, fcntl, mmap, multiprocessing, os, shutil, signal, sqlite3, subprocess, tempfile
async def cat(text):
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    return (await process.communicate(text))[0] + await asyncio.to_thread(lambda: b"!")
assert asyncio.run(cat(b"x")) == b"x!"
fork = multiprocessing.get_context("fork")
queue = fork.Queue()
fork.Process(target=queue.put, args=(1,)).start()
assert queue.get() == 1
one, other = multiprocessing.Pipe()
one.send(2)
assert other.recv() == 2
with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as pool:
    assert list(pool.map(abs, [-1, 2])) == [1, 2]
# a folder of its own: an environment that lies in /tmp is seen there
os.mkdir("/tmp/own")
with sqlite3.connect("/tmp/own/data") as data:
    data.execute("create table t (x)")
    data.execute("insert into t values (3)")
assert data.execute("select x from t").fetchall() == [(3,)]
shutil.copytree("/tmp/own", "/tmp/copy/of")
os.chdir("/tmp/own")
shell = "cp -a data again && tar cf x.tar again && ls -l | sort | wc -l && touch y && rm y"
assert subprocess.run(shell, shell=True, capture_output=True).returncode == 0
with tempfile.TemporaryFile() as file:
    file.truncate(4096)
    fcntl.lockf(file, fcntl.LOCK_EX)
    mmap.mmap(file.fileno(), 4096)[0] = 1
signal.setitimer(signal.ITIMER_REAL, 100)
os.sched_getaffinity(0)
"""
    # several interpreters at once, each counted whole
    result = box.run(code, timeout_s=120.0, memory_mb=2048)
    assert result.ok and result.assertions_held == 6, result


def test_a_group_takes_the_sandbox_and_ends_with_it_where_there_is_one(box, monkeypatch):
    assert box.unavailable is None
    output = []

    class Group:
        was_killed = False

        def take(self, processes):
            output.append([Path(f"/proc/{process}/stat").read_text().split()[1] for process in processes])

        def remove(self):
            output.append("removed")

    monkeypatch.setattr(execution, "make_group", lambda *limits: output.append(limits) or Group())
    assert box.run("print(1)", memory_mb=64).ok
    assert output[0] == (64 * 2**20, execution.MOST_PROCESSES) and output[2:] == ["removed"]
    # bubblewrap's own first process; the launcher may not have been started by then
    assert output[1][0] == "(bwrap)" and len(output[1]) <= 2
    monkeypatch.setattr(Group, "was_killed", True)
    assert box.run("print(1)").cut == "memory"


def test_many_run_at_once(box):
    def go(number):
        return box.run(f"x = {number}\nfor _ in range({number}): assert x\nprint(x)", timeout_s=60.0)

    with ThreadPoolExecutor(6) as pool:
        results = [(result.stdout, result.assertions_run) for result in pool.map(go, range(6))]
    assert results == [(f"{n}\n", n) for n in range(6)]


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "adding.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_adding.py").write_text("from adding import add\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    (folder / "adding.py").chmod(0o400)
    return folder


def test_the_tests_of_a_folder_are_run_and_fail_and_pass(box, repository):
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    failed = box.run_command(command, repository)
    assert failed.exit_code == 1 and "1 failed" in failed.stdout and "assert -1 == 3" in failed.stdout, failed
    (repository / "adding.py").chmod(0o600)
    (repository / "adding.py").write_text("def add(a, b):\n    return a + b\n")
    passed = box.run_command(command, repository)
    assert passed.ok and "1 passed" in passed.stdout and passed.assertions_run == 0


def test_a_command_works_on_a_copy(box, repository):
    (repository / "out").symlink_to("/etc/shadow")
    before = {path.name: path.lstat().st_mtime_ns for path in repository.iterdir()}
    command = "pwd && rm test_adding.py && echo x > new && echo y > adding.py && cat new adding.py && cat out"
    result = box.run_command(["sh", "-c", command], repository)
    assert result.stdout == "/tmp/work\nx\ny\n" and not result.ok and "out" in result.stderr
    assert {path.name: path.lstat().st_mtime_ns for path in repository.iterdir()} == before


def test_python_is_this_interpreter(box, tmp_path):
    output = "import sys, numpy\nprint(sys.version_info[:3] == " + str(tuple(sys.version_info[:3])) + ", sys.prefix)"
    assert box.run_command(["python", "-c", output], tmp_path).stdout == f"True {sys.prefix}\n"
    by_name = box.run_command(["sh", "-c", f'python -c "{output}"'], tmp_path)
    assert sys.prefix == sys.base_prefix or by_name.stdout == f"True {sys.prefix}\n"


def test_a_command_that_is_not_there_is_told_and_others_are_limited_like_a_program(box, tmp_path):
    result = box.run_command(["no-such-program", "x"], tmp_path)
    assert result.exit_code == 127 and "no-such-program" in result.stderr
    assert box.run_command(["sleep", "1000"], tmp_path, timeout_s=0.5).timed_out
    assert box.run_command(["yes"], tmp_path).cut == "output"


def test_a_folder_must_be_there_and_fit_and_a_launcher_that_ends_early_is_no_result(box, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no folder"):
        box.run_command(["true"], tmp_path / "none")
    (tmp_path / "large").write_bytes(bytes(30 * 2**20))
    with pytest.raises(ValueError, match="holds more than"):
        box.run_command(["true"], tmp_path, memory_mb=48)
    # the sandbox stood and its launcher did not: nothing of the job was run, so nothing is told of it
    assert box.unavailable is None
    monkeypatch.setattr(execution, "interpreter", lambda: "/bin/false")
    with pytest.raises(SandboxUnavailable, match="the sandbox did not start"):
        execution.execute(next(iter(isolation.ways())), execution.Job(10.0, 256, program=b"print(1)"))
