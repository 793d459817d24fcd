"""The day on a GPU: its table of commands, what is run again, and all of it small on a CPU."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from sigma0.bench.commands import app
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.gpu.command import _run, _why_not
from sigma0.bench.gpu.parts import DAY, PART_SECONDS, REHEARSAL, Command, Part, named, parts
from sigma0.bench.gpu.running import Done, run

ROOT = Path(__file__).parents[3]
# What comes with extras alone, but for what the tests that are carried along need.
EXTRAS = ("scipy", "sklearn", "matplotlib", "gguf", "httpx", "fastapi", "uvicorn", "prometheus_client", "ray", "openai")
GOOD, BAD = Command("good", "platform", ()), Command("bad", "json.tool", ("there is no such file",))


def members(group):
    """Processes of a group that run; what has ended may still be listed until somebody reads its exit code."""
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return [
        each.pid
        for each in psutil.process_iter(["status"])
        if each.info["status"] not in ended and getpgid(each.pid) == group
    ]


def getpgid(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def gpu(*arguments):
    return CliRunner().invoke(app, ["gpu", *arguments])


def every(sizes, folder=Path("out")):
    return parts(sizes, folder, Path("tests"))


@pytest.mark.parametrize("sizes", [DAY, REHEARSAL], ids=["day", "rehearsal"])
def test_every_command_is_one_that_there_is(sizes):
    group = get_command(app)
    for part in every(sizes):
        assert len({command.name for command in part.commands}) == len(part.commands)
        for command in part.commands:
            if command.module == "sigma0.bench":
                arguments = list(command.arguments)
                name, own, options = group.resolve_command(group.make_context("bench", [*arguments]), arguments)
                # raises for an option that it does not have
                own.make_context(name, options)


def test_the_day_covers_what_it_is_for():
    names = {part.name for part in every(DAY)}
    assert len(names) == len(every(DAY)) and PART_SECONDS <= 480
    told = [" ".join(command.arguments) for part in every(DAY) for command in part.commands]
    for shape in ("ouro-1.4b", "ouro-2.6b"):
        for runner in ("eager", "cudagraph", "compile"):
            for context in (512, 4096, 16384):
                asked = f"--shape {shape} --runner {runner} --context {context}"
                own = [each for each in told if each.endswith(asked)]
                assert len(own) == 2 and "--ways full,never,finish,drop,verify" in own[0]
                assert "--ways full,verify --course rule" in own[1]
    assert [each.split()[-1] for each in told if "--by engine" in each and "rule" not in each] == [
        "1",
        "8",
        "32",
        "128",
    ]
    assert all("--device cuda" in each for each in told if not each.startswith("-m gpu"))


def test_parts_are_asked_for_by_name():
    assert [part.name for part in named(every(DAY), "engine,facts")] == ["engine", "facts"]
    assert named(every(DAY), "") == list(every(DAY))
    result = gpu("--part", "engine,fast", "--list")
    assert result.exit_code == 2 and "no such part: fast; there are facts, tests" in " ".join(result.stderr.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_gpu_nothing_is_run_and_it_is_said(tmp_path):
    result = gpu("--part", "facts,engine", "--out", str(tmp_path))
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.count("cannot run: torch sees no CUDA device") == 2 and not (tmp_path / "logs").exists()


def test_what_is_missing_is_named(tmp_path):
    part = Part("small", "", (), needs="a_package_that_is_not", files=())
    assert "a_package_that_is_not is not installed" in _why_not(part, REHEARSAL)
    assert str(tmp_path / "tests") in _why_not(replace(part, needs="", files=(tmp_path / "tests",)), REHEARSAL)
    assert not _why_not(replace(part, needs="pytest", files=(tmp_path,)), REHEARSAL)


def test_only_what_did_not_end_well_is_run_again(tmp_path, capsys):
    part = Part("small", "tries", (GOOD, BAD))

    def names(again=False):
        return [each.command for each in _run(part, Done(tmp_path / "done.jsonl"), tmp_path, again, 60)]

    assert names() == ["good", "bad"] and names() == ["bad"] and names(again=True) == ["good", "bad"]
    told = capsys.readouterr().err
    assert "2 commands, at most 60 s, 1 done before" in told and "[1/2] good: done in" in told
    assert "[2/2] bad: failed with exit code" in told and "small-bad.txt" in told
    other = replace(part, commands=(replace(GOOD, arguments=("terse",)), BAD))
    done = Done(tmp_path / "done.jsonl")
    assert done.has(part, GOOD) and not done.has(other, other.commands[0])


def test_time_that_is_up_stops_a_part(tmp_path, capsys):
    endless = Command("endless", "timeit", ("-n", "1", "import time; time.sleep(600)"))
    part = Part("small", "tries", (endless, GOOD))
    done = Done(tmp_path / "done.jsonl")
    (outcome,) = _run(part, done, tmp_path, False, 0.5)
    assert outcome.rc is None and 0.5 <= outcome.seconds < 60 and not done.has(part, endless)
    told = capsys.readouterr().err
    assert "stopped at the limit" in told and "[2/2] good: no time is left" in told


def test_no_process_outlives_its_limit(tmp_path):
    start = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"{start}; import os; print(os.getpgid(0), flush=True); import time; time.sleep(600)"
    # the family needs time to begin, more of it on a busy machine
    for limit in (1, 3, 10, 30, 90):
        outcome = run(Part("small", "", ()), Command("family", "timeit", ("-n", "1", code)), tmp_path, limit)
        if told := Path(outcome.log).read_text():
            break
    group = int(told)
    # a signal is sent, not waited for, by whoever is no parent: the last of them may take a moment to end
    deadline = time.monotonic() + 60
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not members(group)


@pytest.mark.exhaustive
def test_a_rehearsal_runs_every_part_with_the_dependencies_alone(tmp_path):
    lines = [f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))"]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "sigma0.bench", "gpu", "--rehearse", "--json", "--tests", str(ROOT / "tests")]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    ran = [json.loads(line) for line in found.stdout.splitlines()]
    rehearsed = {part.name for part in every(REHEARSAL) if not _why_not(replace(part, files=()), REHEARSAL)}
    assert {each["part"] for each in ran} == rehearsed >= {"facts", "tests", "kernels", "1.4b-eager", "engine"}
    assert all(each["rc"] == 0 for each in ran)
    folder = tmp_path / "gpu-rehearsal"
    assert json.loads((folder / "device.json").read_text())["copy_bytes_per_second"] > 0
    assert json.loads((folder / "kernels-1.json").read_text())["timings"]
    rows = [row for row in read_rows(folder / "leaderboard.jsonl") if row.benchmark == "speed"]
    assert {row.by for row in rows} == {"library", "engine"}
    verified = [row.same_tokens for row in rows if row.way == "verify" and row.course is None]
    assert verified == [True, True]
    page = (folder / "speed.md").read_text()
    assert "## Roofline" in page and "by the engine" in page
    # importing it takes nothing else either, though torchao may be missing
    subprocess.run([sys.executable, "-c", "import sigma0.bench.quantization.command"], env=environment, check=True)
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and again.stdout == "" and "done before" in again.stderr
