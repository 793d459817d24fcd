"""Spread over workers or not: the same figures to the last bit; seconds are what is exempt."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import numpy as np
import psutil
import pytest

import sigma0
from sigma0 import ExitConfig
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.replay import Trace
from sigma0.bench.core.rows import DepthRow, FidelityRow
from sigma0.bench.core.workers import KeptResults
from sigma0.bench.fidelity.grid import rule
from sigma0.bench.fidelity.runs import FreeJob, Work, do_item
from sigma0.calibrate.teacher_forcing import ForcedText
from tests.bench.core.worker_items import Here
from tests.bench.running import bench

# What depends on the clock, and on nothing else.
EXEMPT = {"time", "tokens_per_second", "speed_ratio"}
QUICK = ("--modes", "qexit,oracle", "--grid", '{"qexit": [0.5]}', "-n", "4", "--max-new-tokens", "6")


def test_workers_do_the_same_to_the_last_bit(tmp_path, monkeypatch):
    """Also where texts are read together: just as one process reads them, however many that is."""
    loaded = {"name": "pocket", "threads": 1, "options": {"device": "cpu", "dtype": "float32"}}
    current = Work(sigma0.load("pocket", device="cpu", dtype="float32")[0])
    rng = np.random.default_rng(0)
    texts = [ForcedText(tuple(rng.integers(5, 300, length).tolist()), new) for length, new in [(9, 3), (30, 8), (4, 1)]]
    configs = [ExitConfig(q=0.7), ExitConfig(q=0.7, after_exit="drop"), rule("accel-steps", 0.4, "finish")]
    jobs = [FreeJob(text.ids, config, 7) for text in texts for config in (ExitConfig(mode="full"), *configs)]
    jobs += [FreeJob(text.ids, ExitConfig(mode="full"), 7, Trace(6, (2, 3, 1), (), 4)) for text in texts]
    margin, fixed = ExitConfig(mode="margin", theta=0.5), ExitConfig(mode="fixed", depth=2)
    rules = {"q": configs[0], "margin": margin, "fixed": fixed}
    with KeptResults(tmp_path / "work.jsonl") as kept:
        pool = Here(1)
        spread = Work(None, lambda items: pool.spread(do_item, [{**item, "loaded": loaded} for item in items], kept))
        mine, theirs = current.free(jobs), spread.free(jobs)
        assert [replace(run, seconds=0.0) for run in mine] == [replace(run, seconds=0.0) for run in theirs]
        assert len({run.depths for run in mine}) > 4
        assert spread.free(jobs) == theirs, "kept results come back whole, seconds too"
        for first, second in zip(current.forced(texts, configs[1]), spread.forced(texts, configs[1]), strict=True):
            assert first.dtype == second.dtype and first.tobytes() == second.tobytes()
        for most in (2**13, 40):
            monkeypatch.setattr("sigma0.calibrate.teacher_forcing._TOKENS", most)
            first, second = (work.read([*texts, *texts[::-1]], rules) for work in (current, spread))
            for name in ("text", "is_new", "same", "kl"):
                assert getattr(first, name).dtype == getattr(second, name).dtype, name
                assert getattr(first, name).tobytes() == getattr(second, name).tobytes(), name
            assert all((first.exits[name] == second.exits[name]).all() for name in rules)


def command(out, workers):
    return ["fidelity", "pocket", *QUICK, "--workers", str(workers), "--out", str(out), "--device", "cpu"]


def started(out, environment, results):
    """A run with two workers once so many results are kept, and its processes."""
    line = [sys.executable, "-m", "sigma0.bench", *command(out, 2)]
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 900
    while time.monotonic() < until and process.poll() is None:
        kept = list(out.parent.glob(".*.work.jsonl"))
        if kept and kept[0].read_bytes().count(b"\n") >= results:
            break
        time.sleep(0.02)
    assert process.poll() is None, process.stderr.read()
    return process, psutil.Process(process.pid).children(recursive=True)


def told(path):
    """Rows without what the clock says."""
    return [row.model_dump(exclude={*EXEMPT, "product_ms"}) for row in read_rows(path)]


class Broken(Here):
    """A pool whose run breaks off after so many results."""

    def _each(self, function, items):
        yield from islice(super()._each(function, items), 3)
        raise RuntimeError("broken off")


@pytest.mark.exhaustive
def test_rows_of_two_workers_are_those_of_one(tmp_path, monkeypatch):
    """Also where the whole run breaks off and is started again, and then a worker is killed."""
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    out, alone = tmp_path / "two" / "rows.jsonl", tmp_path / "one.jsonl"
    out.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("sigma0.bench.core.workers.worker_pool", lambda *_: nullcontext(Broken(2)))
        assert isinstance(bench(*command(out, 2), code=1).exception, RuntimeError)
    (kept,) = out.parent.glob(".*.work.jsonl")
    assert kept.read_bytes().count(b"\n") == 3
    process, family = started(out, environment, 4)
    assert kept.exists(), "it goes on with the same file"
    busy = [child for child in family if child.is_running() and child.name().startswith("ray::do_")]
    for child in busy[:1]:
        child.send_signal(signal.SIGKILL)
    errors = process.communicate(timeout=900)[1]
    assert process.returncode == 0, errors
    assert not list(out.parent.glob(".*.work.jsonl")), "what was kept for the run goes with its end"
    bench(*command(alone, 1))
    assert told(out) == told(alone)
    kinds = [type(row) for row in read_rows(out)]
    # two of them at the thresholds that the model was calibrated with
    assert kinds == [FidelityRow] * 6 + [DepthRow]
    assert not list(tmp_path.glob(".*.work.jsonl")), "one worker keeps rows alone"
