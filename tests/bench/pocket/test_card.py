"""The shipped cards hold the tables of the committed figures, and the tables hold every figure."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sigma0.bench.core.provenance import read_report
from sigma0.bench.figures.tables import MODELS, SHIPPED
from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.card import accuracy_table, model_card

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results"


@pytest.mark.parametrize("name", MODELS)
def test_weights_md_holds_the_card_of_the_committed_figures(name: str) -> None:
    evaluation, gate = (read_report(RESULTS / f"{name}-{part}.json")[1] for part in ("eval", "gate"))
    card = model_card(evaluation, gate)
    assert card in (ROOT / "weights.md").read_text()
    assert evaluation["model"] == gate["model"] == name
    result = CliRunner().invoke(app, ["card", str(RESULTS / f"{name}-eval.json"), str(RESULTS / f"{name}-gate.json")])
    assert result.exit_code == 0 and result.stdout == f"{card}\n"


def test_a_card_without_a_gate_is_the_accuracy_alone() -> None:
    path = RESULTS / "pocket-raven-eval.json"
    evaluation = read_report(path)[1]
    card = model_card(evaluation)
    assert f"({evaluation['n']:,} held-out look-ups)" in card and accuracy_table(evaluation) in card
    assert card in (ROOT / "weights.md").read_text()
    heads = [cell.strip() for cell in accuracy_table(evaluation).splitlines()[0].split("|")]
    assert heads[3:11] == ["1", "2", "3", "4", "6", "8", "12", "16"]
    result = CliRunner().invoke(app, ["card", str(path)])
    assert result.exit_code == 0 and result.stdout == f"{card}\n"


@pytest.mark.parametrize("name", SHIPPED)
def test_every_group_has_its_row(name: str) -> None:
    evaluation = read_report(RESULTS / f"{name}-eval.json")[1]
    table = accuracy_table(evaluation).splitlines()
    assert len(table) == 2 + sum(len(part) for part in evaluation["groups"].values())
    assert len({line.count("|") for line in table}) == 1
    whole = evaluation["groups"]["all"]["all"]
    assert table[-1].split(" | ")[1] == str(whole["n"])
    assert f"{100 * whole['loops'][-1]:.1f}" in table[-1]


def test_bare_figures_give_the_same_card(tmp_path: Path) -> None:
    figures = read_report(RESULTS / "pocket-eval.json")[1]
    (tmp_path / "eval.json").write_text(json.dumps(figures))
    result = CliRunner().invoke(app, ["card", str(tmp_path / "eval.json")])
    assert result.exit_code == 0 and result.stdout == f"{model_card(figures)}\n"


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["card", str(tmp_path / "none.json"), str(tmp_path / "none.json")])
    assert result.exit_code == 2 and "none.json" in result.output


def test_other_figures_are_refused() -> None:
    path = str(RESULTS / "pocket-eval.json")
    result = CliRunner().invoke(app, ["card", path, path])
    assert result.exit_code == 2 and "gate --json" in result.output
