"""`python -m sigma0.bench all`, with recipes that run in no time, and what counts as a difference."""

import copy
import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sigma0.bench.commands import app
from sigma0.bench.core import conditions
from sigma0.bench.core.conditions import Provenance, read_report
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.rerun import command, recipes
from sigma0.bench.rerun.compare import OF_THE_RUN, TOLERANCE, committed, differences, untimed
from sigma0.bench.rerun.recipes import Recipe
from sigma0.checkpoints import shipped_models

LEDGER = Path(__file__).parents[3] / "bench" / "results" / "leaderboard.jsonl"
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(-1e3, 1e3) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
SAYS = "import json, sys; print(json.dumps({'arguments': sys.argv[1:], 'value': 1.5}))"


@pytest.fixture
def says(tmp_path, monkeypatch):
    """A module that reports its arguments, and a commit for what it reports."""
    (tmp_path / "says.py").write_text(SAYS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(conditions, "git_commit", lambda: "a" * 40)
    monkeypatch.setattr(command, "git_commit", lambda: "a" * 40)
    known = {
        "plain": Recipe("plain", "says whole", quick="--quick"),
        "timed": Recipe("timed", "says", timed=True),
        "trail": Recipe("trail", "says", file="--trail", timed=True),
        "reads": Recipe("reads", "says {text}"),
    }
    monkeypatch.setattr(recipes, "recipes", lambda: known)
    return tmp_path / "results"


def invoke(results, *arguments):
    return CliRunner().invoke(app, ["all", "--results", str(results), "--workers", "1", *arguments])


def test_what_is_committed_and_comes_again_has_no_difference(says):
    says.mkdir()
    assert invoke(says, "--write").exit_code == 0
    assert sorted(path.name for path in says.iterdir()) == ["plain.json"], "neither timed nor without its file"
    assert read_report(says / "plain.json")[1] == {"arguments": ["whole"], "value": 1.5}
    again = invoke(says, "--json")
    assert again.exit_code == 0 and json.loads(again.stdout.splitlines()[-1])["different"] == 0


def test_a_figure_that_was_altered_is_found_and_named(says):
    says.mkdir()
    invoke(says, "--write")
    path = says / "plain.json"
    path.write_text(path.read_text().replace("1.5", "1.6"))
    result = invoke(says)
    assert result.exit_code == 1 and "plain .value: 1.6, now 1.5" in result.stdout
    assert "1 reports, 1 different" in result.stdout


def test_what_was_never_committed_is_a_difference(says):
    says.mkdir()
    result = invoke(says)
    assert result.exit_code == 1 and "was not committed before" in result.stdout


def test_the_quick_part_has_reports_of_its_own(says):
    assert invoke(says, "--quick", "--write").exit_code == 0
    output, report = read_report(says / "quick" / "plain.json")
    assert report["arguments"] == ["whole", "--quick"] and output.command == "python -m says whole --quick"
    assert invoke(says, "--quick").exit_code == 0


def test_files_are_given_by_name_and_named_reports_need_theirs(says, tmp_path):
    says.mkdir()
    missing = invoke(says, "--only", "reads")
    assert missing.exit_code == 2 and "--input text=FILE" in missing.stderr
    (tmp_path / "text").write_text("abc")
    assert invoke(says, "--only", "reads", "--input", f"text={tmp_path / 'text'}", "--write").exit_code == 0
    output, report = read_report(says / "reads.json")
    assert report["arguments"] == [str(tmp_path / "text")] and list(output.inputs) == ["text"]
    assert output.command == "python -m says {text}", "no folder of this machine"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("--only", "nothing"), "nothing"), (("--input", "text"), "'text'"), (("--input", "text=/none"), "/none")],
)
def test_what_cannot_be_is_refused_by_name(says, arguments, named):
    refused = invoke(says, *arguments)
    assert refused.exit_code == 2 and named in refused.stderr


def test_resuming_leaves_out_what_this_commit_has_made(says):
    says.mkdir()
    invoke(says, "--write")
    assert "0 reports" in invoke(says, "--write", "--resume").stdout
    path = says / "plain.json"
    path.write_text(path.read_text().replace("a" * 40, "b" * 40))
    assert "1 reports" in invoke(says, "--write", "--resume").stdout


def test_a_command_that_fails_is_told_with_the_end_of_what_it_said(says, monkeypatch, tmp_path):
    (tmp_path / "says.py").write_text("raise SystemExit('nothing today')")
    says.mkdir()
    failed = invoke(says, "--write")
    assert failed.exit_code == 1 and "nothing today" in failed.stdout and not list(says.iterdir())
    (tmp_path / "says.py").write_text("print('no json')")
    failed = invoke(says)
    assert failed.exit_code == 1 and "gave no report" in failed.stdout


def test_a_trail_has_its_provenance_beside_it(says, tmp_path):
    (tmp_path / "says.py").write_text("import sys; open(sys.argv[2], 'w').write('{}\\n{}\\n')")
    says.mkdir()
    assert invoke(says, "--only", "trail", "--write").exit_code == 0
    assert (says / "trail.jsonl").read_text() == "{}\n{}\n"
    output = Provenance.model_validate_json((says / "trail.provenance.json").read_text())
    assert output.command == "python -m says" and output.commit == "a" * 40


def test_every_recipe_names_what_is_there():
    for recipe in recipes.recipes().values():
        assert set(recipe.models) <= set(shipped_models())
        words = shlex.split(recipe.command)
        assert words[0] in ("sigma0", "sigma0.bench", "sigma0.bench.pocket", "sigma0.kernels")
        assert ("{prompts}" in words) == bool(recipe.prompts)
        assert all(recipe.told(quick).startswith(("python -m ", "sigma0 ")) for quick in (False, True))


@pytest.mark.exhaustive
def test_the_command_line_is_run_by_this_python(tmp_path):
    result = Recipe("size", "sigma0 size ouro-1.4b --json").run(False, {}, tmp_path)
    assert result["kind"] == "computed" and result["model"] == "ouro-1.4b"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["calibration-worlds"])
def test_a_quick_part_gives_what_is_committed(name):
    result = CliRunner().invoke(app, ["all", "--quick", "--only", name, "--json"])
    assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["different"] == 0


def test_rows_are_compared_with_the_newest_of_the_same_setting_whatever_time_they_took():
    rows = [row for row in read_rows(LEDGER) if row.benchmark == "fidelity"]
    lines = [row.model_dump_json() for row in rows]
    result = [untimed(line) for line in lines[-3:]]
    assert not any(name in item for item in result for name in ("time", "speed_ratio", "commit", "tokens_per_second"))
    assert committed(result, rows) == result
    changed = [{**item, "n": 7} for item in result]
    assert committed(changed, rows) == [None, None, None]
    earlier = rows[-1].model_copy(update={"head_rows": rows[-1].head_rows + 1})
    assert committed(result[-1:], [earlier, rows[-1]]) == result[-1:]
    assert committed(result[-1:], [rows[-1], earlier]) != result[-1:]


@given(PLAIN)
def test_a_report_does_not_differ_from_itself(value):
    assert list(differences(value, copy.deepcopy(value))) == []


@given(PLAIN, PLAIN)
def test_differences_are_the_same_both_ways(one, two):
    assert len(list(differences(one, two))) == len(list(differences(two, one)))


def test_each_kind_of_difference_is_told_with_its_place():
    before = {"a": [1, {"b": "x"}], "c": 0.5, "d": True, "e": None, "gone": 1}
    now = {"a": [1, {"b": "y"}, 3], "c": 0.6, "d": 1, "e": 0, "new": 2}
    assert list(differences(before, now)) == [
        ".a: 2 entries, now 3", ".a[1].b: 'x', now 'y'", ".c: 0.5, now 0.6", ".d: True, now 1", ".e: None, now 0",
        ".gone: only before", ".new: only now",
    ]  # fmt: skip


def test_rounding_is_no_difference_and_one_answer_of_ten_thousand_in_a_count_is():
    assert list(differences(1.0, 1.0 + TOLERANCE / 2)) == []
    assert list(differences([12345], [12345 * (1 + TOLERANCE / 2)])) == []
    assert len(list(differences([0.5], [0.5 + 2 * TOLERANCE]))) == 1
    assert len(list(differences([1000], [1001]))) == 1


def test_what_a_run_says_of_itself_is_left_out():
    assert list(differences(dict.fromkeys(OF_THE_RUN, 1), {})) == []


def test_long_values_are_told_in_part():
    (output,) = differences("a" * 500, "b" * 500)
    assert len(output) < 120
