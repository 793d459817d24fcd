import json
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.core.ledger import parse_row, read_rows
from sigma0.bench.core.rows import HumanEvalRow
from sigma0.bench.figures.results import current
from sigma0.bench.humaneval import command
from sigma0.bench.humaneval.judging import Judgement, Limits
from sigma0.bench.humaneval.sampling import SampleFile
from sigma0.bench.humaneval.table import cells, estimates, exit_name, latest_humaneval, markdown, pass_at_k, row_of
from sigma0.bench.report import report
from tests.bench.humaneval.test_sampling import PROBLEMS, run_of, sample_of, write_problems
from tests.bench.running import LEDGER, RESULTS, bench, refused, reported
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


PASSED, WRONG, ENDLESS = (Judgement(outcome, "") for outcome in ("passed", "wrong", "time"))


def row(run=None, judged=((PASSED, PASSED), (WRONG, ENDLESS)), **loops):
    run = run or run_of(samples=2, temperature=0.8)
    samples = [[sample_of(problem, number, **loops) for number in range(run.samples)] for problem in PROBLEMS]
    return row_of(run, samples, judged, Limits(), ("a" * 40,))


def test_a_row_holds_the_shares_and_the_breakdown():
    result = row(finished=False)
    assert result.pass_at_k[1].value == 0.5 and list(result.pass_at_k) == [1]
    assert result.solved.value == 0.5 and 0 < result.solved.low < 0.5 < result.solved.high < 1
    assert result.outcomes == {"passed": 2, "syntax": 0, "exception": 0, "wrong": 1, "time": 1, "limits": 0}
    assert (result.unfinished, result.new_tokens) == (4, 16)
    assert result.mean_depth is result.passes_saved is result.rows_saved is None
    assert parse_row(result.model_dump_json()) == result
    # none of few is not told as nothing
    none = row(judged=[(WRONG, WRONG)] * 2)
    assert none.pass_at_k[1].value == none.solved.value == 0 and none.solved.high > 0.5


def test_savings_are_over_the_tokens_after_each_first():
    # three tokens after the first of each sample, six loops each at full depth
    result = row(depths=9, passes=12, rows=18)
    assert result.mean_depth.value == 3
    assert result.passes_saved.value == pytest.approx(1 - 12 / 18) and result.rows_saved.value == 0
    single = row(depths=0, passes=0, rows=0, new_tokens=1)
    assert single.mean_depth is None and single.passes_saved is None


def test_rows_of_other_settings_are_other_rows():
    rows = [row(), row(run_of(samples=2, temperature=0.8, seed=1)), row(run_of(samples=2, temperature=0.7))]
    assert len({item.key for item in rows}) == 3 and len({item.run for item in rows}) == 1
    again = rows[0].model_copy(update={"time": "9999"})
    assert latest_humaneval([*rows, again]) == [*rows[1:], again]


def test_exit_settings_have_short_names():
    for config, name in (
        (None, "no loops"),
        ({"mode": "full"}, "full"),
        ({"mode": "qexit", "q": 0.6}, "qexit 0.6, finish"),
        ({"mode": "fixed", "depth": 3, "after_exit": "drop"}, "fixed 3, drop"),
        ({"mode": "margin", "theta": 0.8, "after_exit": "verify"}, "margin 0.8, verify"),
        ({"mode": "accel", "eps": 0.1}, "accel 0.1, finish"),
    ):
        assert exit_name(row(run_of(samples=2, temperature=0.8, exit_config=config))) == name


def test_tables_hold_every_row_and_every_k(tmp_path, ledger, capsys):
    few, many = row(), row(run_of(samples=10, temperature=0.8), judged=[[PASSED] * 10, [WRONG] * 10])
    names, lines = cells([few, many])
    assert "pass@10" in names and lines[0][names.index("pass@10")] == "-"
    assert all(len(line) == len(names) for line in lines)
    ledger.write_text("".join(item.model_dump_json() + "\n" for item in (few, many)))
    report(ledger, None, check=False)
    assert markdown([few, many]) in (tmp_path / "humaneval.md").read_text()
    assert "pass@10" in capsys.readouterr().out


def test_the_committed_table_and_samples_are_those_of_the_ledger():
    rows = [row for row in current(read_rows(LEDGER)) if isinstance(row, HumanEvalRow)]
    assert (RESULTS / "humaneval.md").read_text() == f"# HumanEval\n\n{markdown(latest_humaneval(rows))}\n"
    runs = SampleFile(RESULTS / "humaneval-smollm2.jsonl").latest
    kept = {(run.conditions.run, run.settings.strip_prompt) for run in runs}
    assert kept <= {(row.run, row.strip_prompt) for row in rows}


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_passed_sample(n, passed, k):
    passed, k = min(passed, n), min(k, n)
    subsets = list(combinations(range(n), k))
    share = sum(min(subset) < passed for subset in subsets) / len(subsets)
    assert pass_at_k(n, passed, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_a_share_of_very_many_samples():
    assert pass_at_k(100_000, 25_000, 1) == pytest.approx(0.25)
    assert 0 < pass_at_k(100_000, 1, 100) < pass_at_k(100_000, 2, 100) < pass_at_k(100_000, 99_999, 100) == 1


def test_means_are_over_problems_for_each_k_that_the_samples_allow():
    result = estimates(10, [10, 0, 5, 0])
    assert sorted(result) == [1, 10]
    assert result[1].value == pytest.approx(0.375) and result[10].value == pytest.approx(0.5)
    for estimate in result.values():
        assert 0 <= estimate.interval[0] < estimate.value < estimate.interval[1] <= 1
    assert sorted(estimates(1, [1])) == [1] and sorted(estimates(100, [1])) == [1, 10, 100]
