import json
from dataclasses import dataclass

import pytest

from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.rows import HumanEvalRow
from sigma0.bench.humaneval import command
from tests.bench.humaneval.examples import write_problems
from tests.bench.running import bench, refused, reported
from tests.reason.sandbox.sandboxes import needs_bubblewrap


@dataclass
class Nowhere:
    """A machine that can make no sandbox."""

    unavailable: str = "no code is run: no bubblewrap here"


@pytest.fixture
def words(tmp_path, ledger):
    data = write_problems(tmp_path / "problems.jsonl")
    return ("humaneval", "--data", data, "--out", ledger, "--device", "cpu", "--max-new-tokens", 12)


@needs_bubblewrap
def test_pocket_writes_is_judged_and_goes_on_where_it_was_cut_off(words, ledger, tmp_path, monkeypatch):
    file, config = tmp_path / "samples.jsonl", '{"mode": "qexit", "q": 0.6, "after_exit": "verify"}'
    words = (*words, "pocket", "--exit-config", config, "--out-samples", file)
    report = reported(*words)
    (row,) = read_rows(ledger)
    assert isinstance(row, HumanEvalRow) and json.loads(row.model_dump_json()) == report["row"]
    assert row.n == 2 and row.prompts == "problems.jsonl" and row.exit_config["after_exit"] == "verify"
    assert sum(row.outcomes.values()) == 2 and row.outcomes["passed"] == 0
    assert 1 <= row.mean_depth.value <= 6 and row.passes_saved.value < 1
    assert [(item["task_id"], item["number"]) for item in report["judged"]] == [("Test/0", 0), ("Test/1", 0)]

    whole = file.read_bytes()
    file.write_bytes(whole[: whole.rfind(b"\n", 0, -1) + 20])
    asked = []
    write = command.write_sample
    monkeypatch.setattr(command, "write_sample", lambda *item: asked.append(item[2].task_id) or write(*item))
    assert reported(*words)["judged"] == report["judged"] and asked == ["Test/1"]
    assert len(read_rows(ledger)) == 1, "the same run is no second row"


@needs_bubblewrap
def test_samples_are_judged_later_without_the_model(words, ledger, tmp_path, monkeypatch):
    file = tmp_path / "samples.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(command, "Sandbox", Nowhere)
        said = refused(*words, "pocket", "--out-samples", file)
        assert "written and not judged: no code is run: no bubblewrap here" in said and not ledger.exists()
    bench(*words, "pocket", "-n", 1, "--samples", 2, "--temperature", 0.9, "--out-samples", file)
    ledger.unlink()
    monkeypatch.delattr(command, "load_causal")
    result = bench(*words, "--judge", file)
    assert "2 new rows" in result.output and "syntax" in result.output
    assert [(row.n, row.samples, row.temperature) for row in read_rows(ledger)] == [(2, 1, 0.0), (1, 2, 0.9)]


def test_nothing_is_judged_without_a_sandbox(words, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Sandbox", Nowhere)
    for more in (["pocket"], ["--judge", tmp_path / "samples.jsonl"]):
        assert "no bubblewrap here; --out-samples writes samples" in refused(*words, *more)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["pocket", "--samples", "3"], "3 samples at temperature 0 would all be the same"),
        (["pocket", "--exit-config", '{"colour": 1}'], "colour"),
        (["pocket", "--exit-config", "[]"], "exit_config"),
        (["pocket", "--exit-config", "full"], "Expecting value"),
        (["pocket", "--memory", "1"], "the memory of a check must be at least 48 MB, got 1"),
        (["pocket", "--timeout", "nan"], "the time of a check must be a number of seconds above 0"),
        (["nobody"], "no such model"),
        (["--judge", "none.jsonl"], "there is no file 'none.jsonl' to judge"),
    ],
)
def test_bad_input_is_one_line(words, more, message):
    said = refused(*words, *more)
    assert message in said and "Traceback" not in said
