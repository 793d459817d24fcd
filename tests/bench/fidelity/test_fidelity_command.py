"""The commands as a user runs them: rows, resuming, clear errors, tables, pictures; and workers, to the last bit."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import numpy as np
import psutil
import pytest

import sigma0
from sigma0 import ExitConfig
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.replay import Trace
from sigma0.bench.core.rows import DepthRow, FidelityRow, Promise
from sigma0.bench.core.workers import KeptResults
from sigma0.bench.fidelity.grid import GRID, MODES, plan, rule
from sigma0.bench.fidelity.runs import FreeJob, Work, do_item
from sigma0.bench.fidelity.table import SHORT_COLUMNS, calibrated, markdown, oracle_share, short_table
from sigma0.calibrate.teacher_forcing import ForcedText
from sigma0.models.exit_thresholds import ExitThresholds
from tests.bench.core.worker_items import Here
from tests.bench.running import bench, refused

QUICK = ("--modes", "qexit,fixed,oracle", "--grid", '{"qexit": [0.5, 0.9]}', "--n", "3", "--max-new-tokens", "6")


def rows_of(path):
    return [row for row in read_rows(path) if isinstance(row, FidelityRow)]


# whoever looks at a whole run is slow with it
@pytest.fixture(scope="module", params=[pytest.param("whole run", marks=pytest.mark.slow)])
def ledger(tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "rows.jsonl"
    bench("fidelity", "pocket", *QUICK, "--out", path)
    return path


@pytest.mark.exhaustive
def test_a_run_leaves_one_row_for_each_setting(ledger):
    rows = rows_of(ledger)
    assert [(row.mode, row.after_exit) for row in rows] == [
        ("full", "finish"),
        # two of the grid and the calibrated one
        *[("qexit", "finish")] * 3,
        *[("qexit", "drop")] * 3,
        *[("fixed", "finish")] * 5,
        ("oracle", "finish"),
    ]
    assert {row.n for row in rows} == {3} and len({row.run for row in rows}) == 1
    for row in rows:
        assert row.passes_saved.value == pytest.approx(row.depth_saved.value)
        if row.after_exit == "drop":
            assert row.rows_saved.value == pytest.approx(row.passes_saved.value)
    assert isinstance(read_rows(ledger)[-1], DepthRow)


def test_a_second_start_measures_nothing_again(ledger):
    before = ledger.read_bytes()
    result = bench("fidelity", "pocket", *QUICK, "--out", ledger, "--json")
    assert ledger.read_bytes() == before
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["mode"] for row in printed] == [row.mode for row in rows_of(ledger)]


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_behind_its_last_whole_row(ledger, tmp_path):
    copy = tmp_path / "rows.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    copy.write_bytes(b"".join(lines[:3]) + lines[3][:100])
    assert "half-written" in bench("fidelity", "pocket", *QUICK, "--out", copy).output
    again, whole = read_rows(copy), read_rows(ledger)
    assert [row.key for row in again] == [row.key for row in whole]
    assert again[:3] == whole[:3]
    for mine, theirs in zip(rows_of(copy), rows_of(ledger), strict=True):
        assert mine.passes_saved == theirs.passes_saved and mine.agreement == theirs.agreement


def test_a_damaged_ledger_is_refused(ledger, tmp_path):
    copy = tmp_path / "rows.jsonl"
    copy.write_bytes(ledger.read_bytes().replace(b'"mode":"fixed"', b'"mood":"fixed"', 1))
    for words in (("fidelity", "pocket", *QUICK, "--out", copy), ("report", copy)):
        assert "is no row of this schema" in refused(*words)


@pytest.mark.exhaustive
def test_a_text_file_is_measured_without_accuracy(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("Mary went to the park.\n\nTom is with\n\nThe cup is in the hat. The hat")
    out = tmp_path / "rows.jsonl"
    grid = ("--modes", "full,margin", "--grid", '{"margin": [0.5]}', "--max-new-tokens", "6")
    bench("fidelity", "pocket", "--prompts", text, *grid, "--out", out)
    rows = rows_of(out)
    assert [row.mode for row in rows] == ["full", "margin", "margin", "margin", "margin"]
    assert {row.n for row in rows} == {3} and all(row.accuracy is None for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--modes", "qexit,fast"), "no such mode: 'fast'"),
        (("--after", "later"), "no such setting of after_exit: 'later'"),
        (("--grid", '{"qexit": [2.0]}'), "must lie in (0, 1]"),
        (("--grid", '{"fixed": [1]}'), "mode 'fixed' has no grid"),
        (("--grid", "[1]"), "--grid '[1]'"),
        (("--grid", '{"margin": [0.3]}', "--modes", "full"), "not among the modes measured"),
        (("--grid", '{"qexit": [0.5, 0.5]}'), "at least one, each once"),
        (("--prompts", "one.txt"), "holds one prompt"),
        (("--prompts", "long.txt"), "prompt 2 has"),
        (("--prompts", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_bad_input_is_told_in_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("Mary")
    Path("long.txt").write_text("Mary\n\n" + "Mary went to the park. " * 600)
    assert message in refused("fidelity", "pocket", *arguments, "--out", "rows.jsonl")
    assert not Path("rows.jsonl").exists()


def test_a_checkpoint_without_a_gate_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    model, tokenizer = sigma0.load("pocket", device="cpu")
    folder = tmp_path / "gateless"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if "gate" not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "early_exit_gate" in refused("fidelity", folder, *QUICK, "--out", tmp_path / "rows.jsonl")


def test_the_report_draws_and_tells(ledger, tmp_path):
    result = bench("report", ledger, "--out", tmp_path)
    rows = rows_of(ledger)
    assert markdown(calibrated(rows), rows, columns=SHORT_COLUMNS) in result.stdout
    whole = (tmp_path / "fidelity-pocket.md").read_text()
    assert markdown(rows, rows, intervals=True) in whole
    assert len([line for line in whole.splitlines() if line.startswith("|")]) == len(rows) + 2
    for name in ("fidelity-pocket", "depth-pocket"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bench("report", ledger, "--out", tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first, "the same rows, other pictures"


def test_a_ledger_without_rows_of_fidelity_is_told(tmp_path):
    only = tmp_path / "none.jsonl"
    for message in ("there is no ledger", "no row of fidelity"):
        assert message in refused("report", only)
        only.write_text("")


@pytest.mark.exhaustive
def test_corrected_answers_are_another_run(tmp_path):
    out, questions = tmp_path / "rows.jsonl", tmp_path / "q.jsonl"
    for answer in ("wrong", " Mary is in the park. "):
        first = {"prompt": "Mary went to the park. Where is Mary?", "answer": answer}
        questions.write_text("\n".join(map(json.dumps, [first, {"prompt": "Tom", "answer": "x"}])))
        bench("fidelity", "pocket", "--prompts", questions, "--modes", "full", "--out", out)
    assert [row.accuracy.value for row in rows_of(out)] == [0.0, 0.5]


def test_the_short_table_shows_every_rule_at_its_calibrated_threshold(ledger):
    """Chosen on other prompts: a cheaper row of the grid, measured on these, does not take its place."""
    rows = rows_of(ledger)
    model, _ = sigma0.load("pocket", device="cpu")
    known = model.exit_thresholds.qexit
    shown = calibrated(rows)
    assert [f"{row.mode} {row.after_exit}" for row in shown] == ["qexit finish", "qexit drop", "oracle finish"]
    for row in shown[:2]:
        assert row.settings == {"q": known.q}
        assert row.promise == Promise(agreement=known.agreement, confidence=0.95, prompts=known.prompts)
    assert [row.promise for row in rows if row.settings in ({"q": 0.5}, {"q": 0.9})] == [None] * 4
    table = short_table(rows)
    assert f"| qexit (q {known.q}) | finish | {100 * known.agreement:g} % |" in table
    assert "Not measured" not in table and "keeps 98%" not in table
    oracle = next(row for row in rows if row.mode == "oracle")
    assert oracle_share(oracle, rows) == 1.0 and oracle_share(oracle, rows[:1]) is None


def test_what_is_calibrated_is_shown_once_and_what_is_not_is_named(ledger):
    rows = rows_of(ledger)
    bare = [row.model_copy(update={"promise": None, "model": "other"}) for row in rows]
    assert "Not measured at one: qexit (`sigma0 calibrate other --exit all --prompts FILE`" in short_table(bare)
    assert [row.mode for row in calibrated(bare)] == ["oracle"]
    # of a rule that was calibrated twice the last is shown
    again = next(row for row in rows if row.promise is not None).model_copy(update={"settings": {"q": 0.123}})
    assert [row.settings for row in calibrated([*rows, again])[:2]].count({"q": 0.123}) == 1
    assert len(calibrated([*rows, again])) == len(calibrated(rows))


def test_the_plan_holds_every_mode_once():
    settings = plan(MODES, ("finish", "drop"), 6, {})
    assert len({setting.key for setting in settings}) == len(settings)
    grid = sum(map(len, GRID.values()))
    assert len(settings) == 1 + 2 * grid + 5 + len(GRID["qexit"]) + 2
    assert plan(("qexit",), ("finish",), 6, {})[0].mode == "full"
    scales = {item.mode: item.config.accel_scale for item in settings if item.config.mode == "accel"}
    assert scales == {"accel": None, "accel-steps": "steps"}


def test_the_plan_takes_each_rules_calibrated_threshold_in_every_way():
    promise = {"agreement": 0.99, "confidence": 0.95, "prompts": 2000, "mean_depth": 2.0}
    accel = {**promise, "patience": 1, "eps": 0.4, "accel_scale": "states"}
    steps = {**accel, "eps": 0.58, "accel_scale": "steps"}
    known = ExitThresholds.parse({"margin": {**promise, "theta": 0.9}, "accel": accel, "accel_steps": steps})
    settings = plan(("margin", "accel", "accel-steps"), ("finish", "drop"), 6, {}, known)
    assert len({setting.key for setting in settings}) == len(settings), "0.9 stands on the grid too"
    promised = {(item.mode, item.config.after_exit): item.config for item in settings if item.promise is not None}
    assert set(promised) == set(product(("margin", "accel", "accel-steps"), ("finish", "drop")))
    assert promised["margin", "drop"] == ExitConfig(mode="margin", theta=0.9, after_exit="drop")
    steps = promised["accel-steps", "finish"]
    assert (steps.eps, steps.patience, steps.accel_scale) == (0.58, 1, "steps")


# What depends on the clock, and on nothing else.
EXEMPT = {"time", "tokens_per_second", "speed_ratio"}
FEW = ("--modes", "qexit,oracle", "--grid", '{"qexit": [0.5]}', "-n", "4", "--max-new-tokens", "6")


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
    return ["fidelity", "pocket", *FEW, "--workers", str(workers), "--out", str(out), "--device", "cpu"]


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
