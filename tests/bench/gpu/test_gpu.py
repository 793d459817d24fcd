"""Many measurements of a GPU in one process: their table, what is left out or run again, and all of it on a CPU."""

import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import torch

from sigma0 import ExitConfig
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.gpu import worker
from sigma0.bench.gpu.command import run
from sigma0.bench.gpu.equality import Written, compare
from sigma0.bench.gpu.measure import kernels_of
from sigma0.bench.gpu.parts import DAY, REHEARSAL, Outcomes, Part, named, parts
from tests.bench.running import ROOT, bench, refused

# What comes with extras alone, but for what the tests that are carried along need.
EXTRAS = ("scipy", "sklearn", "matplotlib", "gguf", "httpx", "fastapi", "uvicorn", "prometheus_client", "ray", "openai")


def part(name, statement="pass", seconds=0.1):
    return Part(name, f"tries {name}", seconds, "timeit:timeit", {"stmt": statement, "number": 1})


def states(folder):
    return [(line["part"], line["state"]) for line in Outcomes(folder).lines()]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [DAY, REHEARSAL], ids=["day", "rehearsal"])
def test_every_part_is_a_call_that_there_is(sizes):
    every = parts(sizes, Path("out"))
    assert len({item.name for item in every}) == len(every) and pickle.loads(pickle.dumps(every)) == every
    for item in every:
        module, _, name = item.function.partition(":")
        inspect.signature(getattr(import_module(module), name)).bind(**item.arguments)


def test_the_most_important_comes_first_and_fits():
    every = parts(DAY, Path("out"))
    names = [item.name for item in every]
    wanted = ["equality", "cudagraph", "compile", "eager", "profile", "kernels", "prompts"]
    wanted += [*(f"engine-{n}" for n in (1, 8, 32, 128)), "context-4096", "context-16384", "static", "int8"]
    assert [name for name in names if name in wanted] == wanted and names.index("equality") == 1
    # seven minutes and the imports
    assert sum(item.seconds for item in every[: names.index("prompts") + 1]) + 30 < 420
    assert all("cuda" in (item.arguments["device"], item.arguments.get("shape")) for item in every)
    assert [item.name for item in named(every, "prompts,facts")] == ["prompts", "facts"] and named(every, "") == every


def test_a_part_that_there_is_not_is_named_and_the_list_is_told(tmp_path):
    assert "no such part: fast; there are facts, equality" in refused("gpu", "--part", "profile,fast", "--list")
    (facts, equality) = parts(DAY, tmp_path)[:2]
    Outcomes(tmp_path).add(facts, "done", 1.0)
    Outcomes(tmp_path).add(equality, "failed", 1.0, "told")
    output = bench("gpu", "--list", "--out", tmp_path).stdout.splitlines()
    assert output[0].endswith("; done") and output[1].endswith(f"; {equality.seconds:g} s")


def test_the_list_imports_no_torch_and_makes_no_folder(tmp_path):
    code = "import sys; from tests.bench.running import bench; bench('gpu', '--list'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert not list(tmp_path.iterdir())


def test_one_that_fails_is_told_and_the_others_go_on(tmp_path, capsys):
    bad, good, long = part("bad", "raise ValueError('no such thing')"), part("good"), part("long", seconds=99)
    worker.work([bad, long, good], tmp_path, time.time() + 60)
    assert states(tmp_path) == [("bad", "began"), ("bad", "failed"), ("good", "began"), ("good", "done")]
    output = capsys.readouterr().err
    assert "[1/3] bad: failed after 0 s: ValueError: no such thing" in output and "[3/3] good: done" in output
    assert re.search(r"\[2/3\] long: 99 s do not fit into [1-6]\d s; the same call goes on here", output)
    assert "no such thing" in (tmp_path / "logs" / "bad.txt").read_text()
    outcomes = Outcomes(tmp_path)
    with (tmp_path / "done.jsonl").open("a") as file:
        file.write('{"part": "go')  # as a killed process leaves it
    assert outcomes.done(good) and not outcomes.done(replace(good, arguments={})) and not outcomes.done(bad)
    assert outcomes.tried(bad) and not outcomes.tried(long)


STUB = """
import os, pickle, sys
from sigma0.bench.gpu.parts import Outcomes
wanted, folder, until = pickle.load(sys.stdin.buffer)
for part in wanted:
    Outcomes(folder).add(part, "began")
    if part.name == "hangs":
        os._exit(1)
    Outcomes(folder).add(part, "failed" if part.name == "bad" else "done")
    if part.name == "breaks":
        os._exit(1)
"""


def test_behind_one_that_ends_the_process_a_new_one_goes_on(tmp_path, capsys):
    stub = (sys.executable, "-c", STUB)
    wanted = [part(name) for name in ("first", "breaks", "hangs", "last")]
    assert not run(wanted, tmp_path, time.time() + 60, stub)
    ended = [(name, state) for name, state in states(tmp_path) if state != "began"]
    assert ended == [("first", "done"), ("breaks", "done"), ("hangs", "stopped"), ("last", "done")]
    assert "hangs: stopped at its limit, or it ended the process (exit code 1)" in capsys.readouterr().err
    assert run([part("first")], tmp_path, time.time() + 60, stub)
    assert not run([part("bad")], tmp_path, time.time() + 60, stub)
    # nothing is started where nothing fits, and one that cannot begin is not started again
    assert run([part("long", seconds=99)], tmp_path / "none", time.time() + 60, stub)
    assert not run([part("first")], tmp_path, time.time() + 60, (sys.executable, "-c", "raise SystemExit(2)"))
    assert states(tmp_path / "none") == []


@pytest.mark.slow
def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    start = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    hangs = part("hangs", f"{start}; open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); child.wait()")
    began = time.time()
    assert not run([hangs], tmp_path, began + 40)
    assert states(tmp_path) == [("hangs", "began"), ("hangs", "stopped")]
    assert "Timeout" in (tmp_path / "logs" / "hangs.txt").read_text() and time.time() < began + 90
    child = int((tmp_path / "pid").read_text())
    # the kernel ends a killed process when it comes to it
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.time() < began + 90, "a process that it started is still there"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_gpu_nothing_is_run_and_it_is_said(tmp_path):
    command = [sys.executable, "-m", "sigma0.bench", "gpu", "--part", "facts,equality", "--out", str(tmp_path)]
    obtained = subprocess.run(command, capture_output=True, text=True, check=False)
    assert obtained.returncode == 1 and "torch sees no CUDA device" in obtained.stderr and states(tmp_path) == []


def test_the_first_bit_that_differs_is_told():
    keys = torch.zeros(4, 2, 5, 3, 8)
    same = Written(torch.tensor([1, 2]), torch.zeros(2, 7), keys, keys)
    later, earlier = keys.clone(), keys.clone()
    later[1, 0, 4, 2, 7] = later[3, 1, 2, 0, 0] = 1
    assert same.first_difference(replace(same, keys=later)) == {"what": "keys", "loop": 4, "layer": 1, "position": 2}
    earlier[0, 0, 0, 0, 0] = 1
    assert same.first_difference(replace(same, values=earlier))["what"] == "values"
    assert same.first_difference(replace(same, tokens=torch.tensor([1, 3]))) == {"what": "tokens", "token": 1}
    assert same.first_difference(same) is None


@pytest.mark.slow
def test_bits_are_equal_on_a_cpu_and_one_that_is_not_is_found(monkeypatch):
    obtained = compare("cpu", new_tokens=4)
    assert len(obtained) == 12 and all(row["equal"] and row["first"] is None for row in obtained)
    assert {row["rows"] for row in obtained} == {1, 16}
    early = {"full": ExitConfig(mode="full"), "early": ExitConfig(mode="fixed", depth=1, after_exit="drop")}
    monkeypatch.setattr("sigma0.bench.gpu.equality.rules", lambda loops: early)
    rows = compare("cpu", new_tokens=4)
    assert [row["pair"] for row in rows if not row["equal"]] == ["early and full"] * 2


def test_kernels_that_overlap_are_busy_once():
    output = kernels_of([(0, 4, "a"), (2, 6, "b"), (3, 5, "a"), (9, 10, "a")], passes=2)
    assert (output["launches"], output["busy"], output["gaps"]) == (2.0, 3.5, 1.5)
    assert output["kernels"][0] == {"name": "a", "launches": 1.5, "each": 7 / 3, "a_pass": 3.5}
    assert kernels_of([], 1)["kernels"] == []


@pytest.mark.slow
def test_a_rehearsal_runs_every_part_with_the_dependencies_alone(tmp_path):
    lines = [f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))"]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "sigma0.bench", "gpu", "--rehearse"]
    obtained = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    folder = tmp_path / "gpu-rehearsal"
    assert obtained.returncode == 0, obtained.stderr + "".join(log.read_text() for log in (folder / "logs").iterdir())
    ran = {name for name, state in states(folder) if state == "done"}
    assert ran >= {item.name for item in parts(REHEARSAL, folder)} - {"int8"}
    assert json.loads((folder / "device.json").read_text())["copy_bytes_per_second"] > 0
    assert json.loads((folder / "kernels.json").read_text())["timings"]
    assert all(way["launches"] > 0 for way in json.loads((folder / "profile.json").read_text())["ways"].values())
    assert {row["reader"] for row in json.loads((folder / "prompts.json").read_text())} == {"sigma0", "huggingface"}
    rows = [row for row in read_rows(folder / "leaderboard.jsonl") if row.benchmark == "speed"]
    assert {row.by for row in rows} == {"library", "engine"}
    assert [row.same_tokens for row in rows if row.way == "verify" and row.course is None] == [True]
    page = (folder / "speed.md").read_text()
    assert "## Roofline" in page and "by the engine" in page
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "\n0 of " in f"\n{again.stderr.splitlines()[-1]}"
