"""The speed benchmark: its counts and its output; times are not judged here."""

import json

import pytest
from typer.testing import CliRunner

from sigma0.bench.__main__ import app
from sigma0.bench.speed import SHAPES


def run(*arguments):
    return CliRunner().invoke(app, ["speed", *arguments])


def test_json_holds_the_runs_and_their_conditions(pocket):
    result = run("pocket", "--context", "5", "--new-tokens", "4", "--repeats", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["parameters"] == sum(parameter.numel() for parameter in pocket[0].parameters())
    assert [row["name"] for row in report["runs"]] == ["full", "finish", "drop"]
    full, finish, drop = report["runs"]
    assert full["passes_per_token"] == report["total_loops"]
    assert full["speedup"] == full["ideal"] == 1
    for row in (finish, drop):
        assert 1 <= row["passes_per_token"] <= report["total_loops"]
        assert row["ideal"] == pytest.approx(report["total_loops"] / row["passes_per_token"])
        assert row["speedup"] == pytest.approx(full["milliseconds_per_token"] / row["milliseconds_per_token"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "either a model or --shape"),
        (["pocket", "--shape", "100m"], "either a model or --shape"),
        (["--shape", "huge"], f"no such shape: 'huge'; one of {', '.join(SHAPES)}"),
        (["pocket", "--new-tokens", "1"], "new tokens at least 2"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
