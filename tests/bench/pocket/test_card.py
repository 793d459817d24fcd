"""The shipped cards hold the tables of the committed figures, and the tables hold every figure."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sigma0
from sigma0.bench.core.conditions import read_report
from sigma0.bench.figures.tables import MODELS, SHIPPED
from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.card import about, accuracy_table
from sigma0.bench.pocket.world import draw
from sigma0.checkpoints import resolve_model
from sigma0.checkpoints.about import read_about

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


@pytest.mark.grid(fast=1, slow=2)
@pytest.mark.parametrize("name", sigma0.shipped_models())
def test_the_shipped_files_are_what_the_command_prints(name):
    shipped = read_about(resolve_model(name))
    assert json.loads(CliRunner().invoke(app, ["about", name]).stdout) == shipped.model_dump(mode="json")


@pytest.mark.slow
def test_every_word_of_other_stories_is_in_the_list():
    known = about()
    for item in (item for index in range(300) for item in draw("test", 11, index).items):
        assert known.unseen(f"{item.prompt} {item.answer}") == []
