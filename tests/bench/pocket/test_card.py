"""Model cards: the tables hold the figures, and other figures are refused."""

import json
from pathlib import Path

from typer.testing import CliRunner

from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.card import accuracy_table

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def test_every_group_has_its_row() -> None:
    evaluation = json.loads((RESULTS / "pocket-eval.json").read_text())
    table = accuracy_table(evaluation).splitlines()
    assert len(table) == 2 + sum(len(part) for part in evaluation["groups"].values())
    assert len({line.count("|") for line in table}) == 1
    whole = evaluation["groups"]["all"]["all"]
    assert table[-1].split(" | ")[1] == str(whole["n"])
    assert f"{100 * whole['loops'][-1]:.1f}" in table[-1]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["card", str(tmp_path / "none.json"), str(tmp_path / "none.json")])
    assert result.exit_code == 2 and "none.json" in result.output


def test_other_figures_are_refused() -> None:
    path = str(RESULTS / "pocket-eval.json")
    result = CliRunner().invoke(app, ["card", path, path])
    assert result.exit_code == 2 and "gate --json" in result.output
