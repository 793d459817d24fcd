"""The ledger under its schema: whole lines only, of several writers, and what a killed one leaves."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.core.conditions import Conditions, Figure
from sigma0.bench.core.ledger import append_row, parse_row, read_rows, repair, row_schema
from sigma0.bench.core.lines import alone, append
from sigma0.bench.core.rows import DepthRow, DepthSample, FidelityRow
from sigma0.bench.strategyqa.asking import AnswerCache, AskSettings
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.messages import Completion
from tests.bench.running import LEDGER

ROW = next(row for row in read_rows(LEDGER) if isinstance(row, FidelityRow) and row.mode == "qexit")
ROW = ROW.model_copy(update={"n": 2, "commit": None})
CONDITIONS = {name: getattr(ROW, name) for name in Conditions.model_fields}


def fidelity_row(**changes):
    share = {"value": 0.5, "low": 0.25, "high": 0.75}
    return FidelityRow.model_validate({**ROW.model_dump(), "agreement": share, **changes})


def test_rows_come_back_as_they_went(tmp_path):
    path = tmp_path / "new" / "ledger.jsonl"
    sample = DepthSample(prompt="Where?", tokens=(("Here", 2), (".", 1)))
    depth = DepthRow(**CONDITIONS, time=ROW.time, mode="qexit", after_exit="drop", settings={}, samples=(sample,))
    rows = [fidelity_row(), depth, fidelity_row(mode="full", settings={})]
    assert read_rows(path) == []
    for row in rows:
        append_row(path, row)
    assert read_rows(path) == rows
    assert len({row.run for row in rows}) == 1 and len({row.key for row in rows}) == 3


@given(st.sampled_from(sorted({*CONDITIONS} - {"product_ms"})), st.integers(10, 99))
def test_another_condition_is_another_run(name, change):
    old = CONDITIONS[name]
    new = old + change if isinstance(old, int) else {"x": "y"} if name in ("kv", "versions") else f"x{change}"
    assert fidelity_row(**{name: new}).run != fidelity_row().run
    assert fidelity_row(time="2027-01-01T00:00:00+00:00", new_tokens=change).run == fidelity_row().run


def test_a_half_written_line_is_refused_by_readers_and_cut_off_by_writers(tmp_path, ledger):
    append_row(ledger, fidelity_row())
    whole = ledger.read_bytes()
    for length in (1, 40, len(whole) - 1):
        ledger.write_bytes(whole + whole[:length])
        with pytest.raises(ValueError, match="half-written"):
            read_rows(ledger)
        assert repair(ledger) == whole[:length]
        assert ledger.read_bytes() == whole and repair(ledger) == b""
    ledger.write_bytes(whole[:50])
    assert repair(ledger) == whole[:50] and read_rows(ledger) == []
    assert repair(tmp_path / "none.jsonl") == b""
    ledger.write_bytes(whole + b'{"model": "half')
    second = fidelity_row(mode="full", settings={})
    assert append_row(ledger, second) and read_rows(ledger) == [fidelity_row(), second]


def test_a_setting_is_kept_once_whoever_measured_it(ledger):
    assert append_row(ledger, fidelity_row())
    assert not append_row(ledger, fidelity_row(time="2027-01-01T00:00:00+00:00"))
    assert append_row(ledger, fidelity_row(threads=2))
    assert len(read_rows(ledger)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "benchmark"),
        ("not json", "JSON"),
        (json.dumps({**json.loads(fidelity_row().model_dump_json()), "colour": 1}), "colour"),
        (fidelity_row().model_dump_json().replace('"value":0.5', '"value":"half"', 1), "value"),
        (fidelity_row().model_dump_json().replace('"low":0.25', '"low":0.9', 1), "upside down"),
        (fidelity_row().model_dump_json().replace('"fidelity"', '"beauty"'), "beauty"),
    ],
)
def test_a_damaged_line_is_named_and_never_mixed_in(ledger, line, message):
    append_row(ledger, fidelity_row())
    ledger.write_text(ledger.read_text() + line + "\n")
    with pytest.raises(ValueError, match=f"line 2 .*{message}"):
        read_rows(ledger)
    assert repair(ledger) == b"", "a whole line is for a person to look at"


def test_the_published_schema_is_the_one_in_force():
    published = json.loads(LEDGER.with_suffix(".schema.json").read_text())
    assert published == row_schema()


def test_every_committed_row_is_valid_and_of_its_own_kind():
    rows = read_rows(LEDGER)
    assert rows
    assert len({(row.run, row.key) for row in rows}) == len(rows), "a setting was measured twice under one run"
    assert all(parse_row(row.model_dump_json()) == row for row in rows)


def test_a_figure_is_an_estimate():
    assert Figure.of(None) is None
    with pytest.raises(ValueError, match="finite"):
        Figure(value=float("inf"), low=0.0, high=1.0)
    with pytest.raises(ValueError, match="upside down"):
        Figure(value=0.5, low=0.6, high=0.4)


def test_lines_of_several_writers_are_whole(tmp_path):
    path = tmp_path / "lines"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, [path] * 2, "ab"))
    lines = path.read_text().splitlines()
    assert sorted(lines) == ["a" * 5000] * 20 + ["b" * 5000] * 20


def write(path, letter):
    for _ in range(20):
        with alone(path):
            append(path, letter.encode() * 5000)


def test_two_caches_share_a_file_that_a_third_was_killed_over(tmp_path):
    path, chat = tmp_path / "answers.jsonl", ScriptedChat([], "pocket")
    one, two = AnswerCache(path, {"pocket": "a"}), AnswerCache(path, {"pocket": "a"})
    questions = [[{"role": "user", "content": text}] for text in ("first", "second", "third")]
    one.put(chat, questions[0], AskSettings(), Completion("1"))
    with path.open("a") as file:
        file.write('{"key": "hal')
    two.put(chat, questions[1], AskSettings(), Completion("2"))
    one.put(chat, questions[2], AskSettings(), Completion("3"))
    result = AnswerCache(path, {"pocket": "a"})
    assert [result.get(chat, item, AskSettings()).text for item in questions] == ["1", "2", "3"]
    assert two.get(chat, questions[0], AskSettings()) is None, "read when it was opened"
