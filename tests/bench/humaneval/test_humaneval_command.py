import json
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from sigma0.bench.__main__ import app
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.rows import HumanEvalRow
from sigma0.bench.humaneval import command
from tests.bench.humaneval.examples import write_problems
from tests.reason.sandbox.sandboxes import needs_bubblewrap


@dataclass
class Nowhere:
    """A machine that can make no sandbox."""

    unavailable: str = "no code is run: no bubblewrap here"


@pytest.fixture
def run(tmp_path):
    data = write_problems(tmp_path / "problems.jsonl")
    ledger = tmp_path / "ledger.jsonl"

    def call(*words):
        common = ["--data", str(data), "--out", str(ledger), "--device", "cpu", "--max-new-tokens", "12"]
        return CliRunner().invoke(app, ["humaneval", *map(str, words), *common])

    return call


@needs_bubblewrap
def test_pocket_writes_is_judged_and_goes_on_where_it_was_cut_off(run, tmp_path, monkeypatch):
    file, config = tmp_path / "samples.jsonl", '{"mode": "qexit", "q": 0.6, "after_exit": "verify"}'
    words = ["pocket", "--exit-config", config, "--out-samples", file, "--json"]
    result = run(*words)
    assert result.exit_code == 0, result.output
    reported = json.loads(result.stdout)
    (row,) = read_rows(tmp_path / "ledger.jsonl")
    assert isinstance(row, HumanEvalRow) and json.loads(row.model_dump_json()) == reported["row"]
    assert row.n == 2 and row.prompts == "problems.jsonl" and row.exit_config["after_exit"] == "verify"
    assert sum(row.outcomes.values()) == 2 and row.outcomes["passed"] == 0
    assert 1 <= row.mean_depth.value <= 6 and row.passes_saved.value < 1
    assert [(item["task_id"], item["number"]) for item in reported["judged"]] == [("Test/0", 0), ("Test/1", 0)]

    whole = file.read_bytes()
    file.write_bytes(whole[: whole.rfind(b"\n", 0, -1) + 20])
    asked = []
    write = command.write_sample
    monkeypatch.setattr(command, "write_sample", lambda *item: asked.append(item[2].task_id) or write(*item))
    again = run(*words)
    assert again.exit_code == 0 and asked == ["Test/1"]
    assert json.loads(again.stdout)["judged"] == reported["judged"]
    assert len(read_rows(tmp_path / "ledger.jsonl")) == 1, "the same run is no second row"


@needs_bubblewrap
def test_samples_are_judged_later_without_the_model(run, tmp_path, monkeypatch):
    file = tmp_path / "samples.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(command, "Sandbox", Nowhere)
        result = run("pocket", "--out-samples", file)
        assert result.exit_code == 2 and "written and not judged: no code is run: no bubblewrap here" in result.output
        assert not (tmp_path / "ledger.jsonl").exists()
    assert run("pocket", "-n", 1, "--samples", 2, "--temperature", "0.9", "--out-samples", file).exit_code == 0
    (tmp_path / "ledger.jsonl").unlink()
    monkeypatch.delattr(command, "load_causal")
    result = run("--judge", file)
    assert result.exit_code == 0, result.output
    assert "2 new rows" in result.output and "syntax" in result.output
    rows = read_rows(tmp_path / "ledger.jsonl")
    assert [(row.n, row.samples, row.temperature) for row in rows] == [(2, 1, 0.0), (1, 2, 0.9)]


def test_nothing_is_judged_without_a_sandbox(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Sandbox", Nowhere)
    for words in (("pocket",), ("--judge", tmp_path / "samples.jsonl")):
        result = run(*words)
        assert result.exit_code == 2
        assert "no bubblewrap here; --out-samples writes samples" in " ".join(result.output.split())


@needs_bubblewrap
@pytest.mark.parametrize(
    ("words", "message"),
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
def test_bad_input_is_one_line(run, words, message):
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output
