"""`python -m sigma0.bench all`, with recipes that run in no time, and what counts as a difference."""

import copy
import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.core import conditions
from sigma0.bench.core.conditions import Provenance, read_report
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.rerun import command, recipes
from sigma0.bench.rerun.recipes import OF_THE_RUN, TOLERANCE, Recipe, committed, differences, untimed
from sigma0.checkpoints import FETCHED, shipped_models
from tests.bench.running import LEDGER, bench, refused

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
    results = tmp_path / "results"
    results.mkdir()
    return results


def words(results, *more):
    return ("all", "--results", results, "--workers", 1, *more)


def test_what_is_committed_and_comes_again_has_no_difference_and_what_was_altered_is_named(says):
    assert "was not committed before" in bench(*words(says), code=1).stdout
    bench(*words(says, "--write"))
    assert sorted(path.name for path in says.iterdir()) == ["plain.json"], "neither timed nor without its file"
    assert read_report(says / "plain.json")[1] == {"arguments": ["whole"], "value": 1.5}
    again = bench(*words(says, "--json"))
    assert json.loads(again.stdout.splitlines()[-1])["different"] == 0
    path = says / "plain.json"
    path.write_text(path.read_text().replace("1.5", "1.6"))
    result = bench(*words(says), code=1).stdout
    assert "plain .value: 1.6, now 1.5" in result and "1 reports, 1 different" in result


def test_the_quick_part_has_reports_of_its_own(says):
    says.rmdir()
    bench(*words(says, "--quick", "--write"))
    output, report = read_report(says / "quick" / "plain.json")
    assert report["arguments"] == ["whole", "--quick"] and output.command == "python -m says whole --quick"
    bench(*words(says, "--quick"))


def test_files_are_given_by_name_and_named_reports_need_theirs(says, tmp_path):
    assert "--input text=FILE" in refused(*words(says, "--only", "reads"))
    (tmp_path / "text").write_text("abc")
    bench(*words(says, "--only", "reads", "--input", f"text={tmp_path / 'text'}", "--write"))
    output, report = read_report(says / "reads.json")
    assert report["arguments"] == [str(tmp_path / "text")] and list(output.inputs) == ["text"]
    assert output.command == "python -m says {text}", "no folder of this machine"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("--only", "nothing"), "nothing"), (("--input", "text"), "'text'"), (("--input", "text=/none"), "/none")],
)
def test_what_cannot_be_is_refused_by_name(says, arguments, named):
    assert named in refused(*words(says, *arguments))


def test_resuming_leaves_out_what_this_commit_has_made(says):
    bench(*words(says, "--write"))
    assert "0 reports" in bench(*words(says, "--write", "--resume")).stdout
    path = says / "plain.json"
    path.write_text(path.read_text().replace("a" * 40, "b" * 40))
    assert "1 reports" in bench(*words(says, "--write", "--resume")).stdout


def test_a_command_that_fails_is_told_with_the_end_of_what_it_said(says, tmp_path):
    (tmp_path / "says.py").write_text("raise SystemExit('nothing today')")
    failed = bench(*words(says, "--write"), code=1)
    assert "nothing today" in failed.stdout and not list(says.iterdir())
    (tmp_path / "says.py").write_text("print('no json')")
    assert "gave no report" in bench(*words(says), code=1).stdout


def test_a_trail_has_its_provenance_beside_it(says, tmp_path):
    (tmp_path / "says.py").write_text("import sys; open(sys.argv[2], 'w').write('{}\\n{}\\n')")
    bench(*words(says, "--only", "trail", "--write"))
    assert (says / "trail.jsonl").read_text() == "{}\n{}\n"
    output = Provenance.model_validate_json((says / "trail.provenance.json").read_text())
    assert output.command == "python -m says" and output.commit == "a" * 40


def test_every_recipe_names_what_is_there():
    for recipe in recipes.recipes().values():
        assert set(recipe.models) <= {*shipped_models(), *FETCHED}
        words = shlex.split(recipe.command)
        assert words[0] in ("sigma0", "sigma0.bench", "sigma0.bench.pocket", "sigma0.bench.retrofit", "sigma0.kernels")
        assert ("{prompts}" in words) == bool(recipe.prompts)
        assert recipe.is_ready or set(recipe.models) & set(FETCHED)
        assert all(recipe.told(quick).startswith(("python -m ", "sigma0 ")) for quick in (False, True))


@pytest.mark.exhaustive
def test_the_command_line_is_run_by_this_python(tmp_path):
    result = Recipe("size", "sigma0 size ouro-1.4b --json").run(False, {}, tmp_path)
    assert result["kind"] == "computed" and result["model"] == "ouro-1.4b"


@pytest.mark.exhaustive
def test_a_quick_part_gives_what_is_committed():
    result = bench("all", "--quick", "--only", "calibration-worlds", "--json")
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


@given(PLAIN, PLAIN)
def test_differences_are_the_same_both_ways_and_none_from_itself(one, two):
    assert list(differences(one, copy.deepcopy(one))) == []
    assert len(list(differences(one, two))) == len(list(differences(two, one)))


def test_each_kind_of_difference_is_told_with_its_place():
    before = {"a": [1, {"b": "x"}], "c": 0.5, "d": True, "e": None, "gone": 1}
    now = {"a": [1, {"b": "y"}, 3], "c": 0.6, "d": 1, "e": 0, "new": 2}
    assert list(differences(before, now)) == [
        ".a: 2 entries, now 3", ".a[1].b: 'x', now 'y'", ".c: 0.5, now 0.6", ".d: True, now 1", ".e: None, now 0",
        ".gone: only before", ".new: only now",
    ]  # fmt: skip
    assert list(differences(dict.fromkeys(OF_THE_RUN, 1), {})) == [], "what a run says of itself is left out"
    (output,) = differences("a" * 500, "b" * 500)
    assert len(output) < 120


def test_rounding_is_no_difference_and_one_answer_of_ten_thousand_in_a_count_is():
    assert list(differences(1.0, 1.0 + TOLERANCE / 2)) == []
    assert list(differences([12345], [12345 * (1 + TOLERANCE / 2)])) == []
    assert len(list(differences([0.5], [0.5 + 2 * TOLERANCE]))) == 1
    assert len(list(differences([1000], [1001]))) == 1
