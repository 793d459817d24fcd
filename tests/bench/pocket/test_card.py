"""The shipped cards hold the tables of the committed figures, and the tables hold every figure."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sigma0.bench.core.conditions import read_report
from sigma0.bench.figures.tables import MODELS, SHIPPED
from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.card import accuracy_table

ROOT = Path(__file__).parents[3]


def report(name, part):
    return str(ROOT / "bench" / "results" / f"{name}-{part}.json")


def card(*arguments):
    return CliRunner().invoke(app, ["card", *arguments])


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_md_holds_the_card_of_the_committed_figures_with_every_group(name, tmp_path):
    given = [report(name, "eval")] + [report(name, "gate")] * (name in MODELS)
    evaluation = read_report(Path(given[0]))[1]
    result = card(*given)
    assert result.exit_code == 0 and result.stdout.removesuffix("\n") in (ROOT / "weights.md").read_text()
    assert f"({evaluation['n']:,} held-out {'questions' if name in MODELS else 'look-ups'})" in result.stdout
    lines = accuracy_table(evaluation).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert len(rows) == 2 + sum(map(len, evaluation["groups"].values())) and len(set(map(len, rows))) == 1
    # of many loops a few have a column
    total = len(evaluation["groups"]["all"]["all"]["loops"])
    assert rows[0][2:-3] == list(map(str, (1, 2, 3, 4, 6, 8, 12, 16) if total == 16 else range(1, total + 1)))
    whole = evaluation["groups"]["all"]["all"]
    assert rows[-1][:2] == ["all", str(whole["n"])] and f"{100 * whole['loops'][-1]:.1f}" in rows[-1]
    # bare figures give the same
    (tmp_path / "eval.json").write_text(json.dumps(evaluation))
    assert card(str(tmp_path / "eval.json"), *given[1:]).stdout == result.stdout


def test_a_missing_file_and_other_figures_are_one_line():
    for given, named in (("none.json", "none.json"), (report("pocket", "eval"), "gate --json")):
        result = card(given, given)
        assert result.exit_code == 2 and named in result.output
