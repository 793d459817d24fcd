"""The picture of a training run."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.curve import draw_curve
from sigma0.bench.pocket.recipe import Recipe
from sigma0.bench.pocket.train import LOG, Report

RECIPE = replace(Recipe(), loops=3, note_loops=2, note_steps=5)


def test_a_run_becomes_a_picture(tmp_path: Path) -> None:
    reports = [Report(step, 1.0, {1: 0.1, 2: 0.5} | ({3: 0.9} if step >= 5 else {})) for step in range(300)]
    draw_curve(reports, RECIPE, tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.format == "PNG" and picture.width >= 800
    draw_curve(reports[:1], RECIPE, tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_no_steps_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step"):
        draw_curve([], RECIPE, tmp_path / "curve.png")


def test_the_command_draws_a_log(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text('{"step": 0, "loss": 2.0, "answers": {"1": 0.5, "2": 0.25, "3": 0.125}}\n')
    out = tmp_path / "picture.png"
    result = CliRunner().invoke(app, ["curve", str(tmp_path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.stat().st_size > 1000
    missing = CliRunner().invoke(app, ["curve", str(tmp_path / "none"), "--out", str(out)])
    assert missing.exit_code == 2 and "none" in missing.output
    unknown = CliRunner().invoke(app, ["curve", str(tmp_path), "--name", "purse"])
    assert unknown.exit_code == 2 and "purse" in unknown.output


def test_another_recipe_s_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 loops"):
        draw_curve([Report(0, 1.0, dict.fromkeys((1, 2, 3, 4), 0.5))], RECIPE, tmp_path / "curve.png")
