"""The ledger under its schema: whole rows only, and what a killed writer leaves."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.core.conditions import Figure
from sigma0.bench.core.ledger import append_row, parse_row, read_rows, repair, row_schema
from sigma0.bench.core.options import LEDGER
from sigma0.bench.core.rows import DepthRow, DepthSample, FidelityRow

ROOT = Path(__file__).parents[3]
CONDITIONS = {
    "model": "pocket",
    "model_sha256": "0" * 64,
    "settings_sha256": "2" * 64,
    "total_loops": 6,
    "parameters": 10,
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "prompts": "here",
    "prompts_sha256": "1" * 64,
    "n": 2,
    "batch_size": 1,
    "max_new_tokens": 8,
    "commit": None,
    "versions": {"python": "3.11"},
}
SHARE = {"value": 0.5, "low": 0.25, "high": 0.75}


def fidelity_row(**changes):
    row = {
        **CONDITIONS,
        "time": "2026-01-01T00:00:00+00:00",
        "mode": "qexit",
        "after_exit": "finish",
        "settings": {"q": 0.5},
        **dict.fromkeys(("agreement", "agreement_on_answers", "kl", "kl_on_answers", "exact_match"), SHARE),
        **dict.fromkeys(("first_divergence", "accuracy", "mean_depth")),
        **dict.fromkeys(("depth_saved", "passes_saved", "rows_saved"), SHARE),
        "prompt_rows": 1,
        "head_rows": 2,
        "new_tokens": 3,
        "reasons": {"threshold_met": 3},
        "tokens_per_second": 4.0,
        "speed_ratio": SHARE,
        "timed": 2,
    }
    return FidelityRow.model_validate({**row, **changes})


def test_rows_come_back_as_they_went(tmp_path):
    path = tmp_path / "new" / "ledger.jsonl"
    sample = DepthSample(prompt="Where?", tokens=(("Here", 2), (".", 1)))
    time, settings = "2026-01-01T00:00:00+00:00", {"q": 0.5}
    depth = DepthRow(**CONDITIONS, time=time, mode="qexit", after_exit="drop", settings=settings, samples=(sample,))
    rows = [fidelity_row(), depth, fidelity_row(mode="full", settings={})]
    assert read_rows(path) == []
    for row in rows:
        append_row(path, row)
    assert read_rows(path) == rows
    assert len({row.run for row in rows}) == 1 and len({row.key for row in rows}) == 3


@given(st.sampled_from(sorted(CONDITIONS)), st.integers(1, 9))
def test_another_condition_is_another_run(name, change):
    old = CONDITIONS[name]
    new = {"other": str(change)} if isinstance(old, dict) else old + change if isinstance(old, int) else f"x{change}"
    assert fidelity_row(**{name: new}).run != fidelity_row().run
    assert fidelity_row(time="2027-01-01T00:00:00+00:00", new_tokens=change).run == fidelity_row().run


def test_a_half_written_line_is_refused_by_readers_and_cut_off_by_writers(tmp_path):
    path = tmp_path / "ledger.jsonl"
    append_row(path, fidelity_row())
    whole = path.read_bytes()
    for cut in (1, 40, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        with pytest.raises(ValueError, match="half-written"):
            read_rows(path)
        assert repair(path) == whole[:cut]
        assert path.read_bytes() == whole and repair(path) == b""
    path.write_bytes(whole[:50])
    assert repair(path) == whole[:50] and read_rows(path) == []
    assert repair(tmp_path / "none.jsonl") == b""


def test_a_living_writer_cuts_off_what_a_killed_one_left(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first, second = fidelity_row(), fidelity_row(mode="full", settings={})
    assert append_row(path, first)
    path.write_bytes(path.read_bytes() + b'{"model": "half')
    assert append_row(path, second)
    assert read_rows(path) == [first, second]


def test_a_setting_is_kept_once_whoever_measured_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    assert append_row(path, fidelity_row())
    assert not append_row(path, fidelity_row(time="2027-01-01T00:00:00+00:00"))
    assert append_row(path, fidelity_row(threads=2))
    assert len(read_rows(path)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 2 .*benchmark"),
        ("not json", "line 2 .*JSON"),
        (json.dumps({**json.loads(fidelity_row().model_dump_json()), "colour": 1}), "line 2 .*colour"),
        (fidelity_row().model_dump_json().replace('"value":0.5', '"value":"half"', 1), "line 2 .*value"),
        (fidelity_row().model_dump_json().replace('"low":0.25', '"low":0.9', 1), "line 2 .*upside down"),
        (fidelity_row().model_dump_json().replace('"fidelity"', '"beauty"'), "line 2 .*beauty"),
    ],
)
def test_a_damaged_line_is_named_and_never_mixed_in(tmp_path, line, message):
    path = tmp_path / "ledger.jsonl"
    append_row(path, fidelity_row())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_rows(path)
    assert repair(path) == b"", "a whole line is for a person to look at"


def test_the_published_schema_is_the_one_in_force():
    published = json.loads((ROOT / LEDGER).with_suffix(".schema.json").read_text())
    assert published == row_schema()


def test_every_committed_row_is_valid_and_of_its_own_kind():
    rows = read_rows(ROOT / LEDGER)
    assert rows
    assert len({(row.run, row.key) for row in rows}) == len(rows), "a setting was measured twice under one run"
    assert all(parse_row(row.model_dump_json()) == row for row in rows)


def test_a_figure_is_an_estimate():
    assert Figure.of(None) is None
    with pytest.raises(ValueError, match="finite"):
        Figure(value=float("inf"), low=0.0, high=1.0)
    with pytest.raises(ValueError, match="upside down"):
        Figure(value=0.5, low=0.6, high=0.4)
