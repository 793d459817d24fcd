"""Levels spread over workers or not: the same rows, but for seconds."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from sigma0.bench.core.ledger import read_rows
from sigma0.bench.strategyqa.opening import Opening, do_level, pieces_of
from sigma0.bench.strategyqa.registry import EXPERIMENTS, ONCE
from tests.bench.core.worker_items import Here
from tests.bench.running import bench


def opening(**changes):
    reported = {"n": 5, "device": "cpu", "dtype": "float32", "concurrency": 2, "retries": 0, "max_new_tokens": 6}
    return Opening(**(reported | changes))


def made(opened, names=ONCE):
    return [(name, EXPERIMENTS[name](opened.makings)) for name in names]


def test_as_many_items_go_to_a_worker_as_it_answers_at_a_time():
    reported = opening()
    opened = replace(reported.open(), concurrency=2)
    pieces = pieces_of(made(opened, ("L0", "L5", "L2")), reported, opened)
    result = [(piece["level"], piece["first"], piece["step"]) for piece in pieces]
    assert result == [("L5", 0, 5), *[(name, first, 2) for name in ("L0", "L2") for first in (0, 2, 4)]]


def test_an_opening_is_the_same_behind_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # a folder does not take the place of a name
    for name in ("world", "pocket", "big"):
        (tmp_path / name).mkdir()
    reported = opening(cache=Path("answers.jsonl"), ladder="pocket, big", route="verdict")
    assert Opening.model_validate_json(reported.model_dump_json()) == reported
    result = reported.resolved()
    assert result.cache == tmp_path / "answers.jsonl" and result.ladder == f"pocket,{tmp_path / 'big'}"
    assert (result.data, result.model, result.paragraphs) == ("world", "pocket", None)
    with pytest.raises(ValueError, match="seeds"):
        Opening(**{**dict(reported), "seeds": 3})


def test_a_worker_that_finds_something_else_under_the_names_is_refused(tmp_path):
    shown = tmp_path / "steps.json"
    shown.write_text("[]")
    reported = opening(template=shown)
    opened = reported.open()
    (piece, *_) = pieces_of([("L0", EXPERIMENTS["L0"](opened.makings))], reported, opened)
    shown.write_text("[ ]")
    with pytest.raises(ValueError, match="other weights, items or files under the same names"):
        do_level(piece)


def test_what_names_hide_is_in_the_digest(tmp_path):
    shown = tmp_path / "shown.json"
    digests = [opening().open().sha256(), opening(n=4).open().sha256()]
    for text in ("[]", "[ ]"):
        shown.write_text(text)
        digests.append(opening(demonstrations=shown).open().sha256())
    digests.append(opening(model="pocket-large").open().sha256())
    assert len(set(digests)) == 5
    assert opening().open().sha256() == digests[0]


def test_the_rows_of_workers_are_those_of_one_process(tmp_path, monkeypatch):
    """With Ray's workers, and where one is killed: `tests/bench/fidelity/test_work.py`, `core/test_workers.py`."""
    out, alone, pool = tmp_path / "two.jsonl", tmp_path / "one.jsonl", Here(2)
    pool.redone = 1
    monkeypatch.setattr("sigma0.bench.core.workers.worker_pool", lambda workers, *_: nullcontext(pool))
    # a worker that goes on to another run begins anew with a level that learns
    size = ("-e", "L0", "-e", "L5", "-n", 3, "--max-new-tokens", 6, "--device", "cpu", "--dtype", "float32")
    for path, workers in ((out, 2), (tmp_path / "again.jsonl", 2), (alone, 1)):
        result = bench("strategyqa", *size, "--workers", workers, "--out", path)
        assert ("1 parts were done again" in result.stderr) == (workers == 2)
    assert not list(tmp_path.glob(".two-*.work.jsonl")), "what was kept for the run goes with its end"
    # without what the clock says
    rows, expected = ([row.model_dump(exclude={"time", "seconds"}) for row in read_rows(path)] for path in (out, alone))
    assert rows == expected and [row["level"] for row in rows] == ["L0", "L5"]
