"""The verdict bench: its rows out of real runs, and its figures out of their definitions."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import sigma0
from sigma0.bench.__main__ import app
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.verdict.measure import SETTINGS, fates_of, measure, separate, switched
from sigma0.config import ExitConfig, FateConfig, Switches
from sigma0.signals.verdict import DoorPolicy


@pytest.fixture(scope="module")
def pocket():
    return sigma0.load("pocket", dtype="float32")


def test_rows_are_what_the_runs_say(pocket):
    model, tokenizer = pocket
    prompts, config, policy = list(micro_world(6, "test", 3)), ExitConfig(q=0.6), DoorPolicy(saturated_share=0.0)
    answers = []
    report = measure(model, tokenizer, "pocket", prompts, config, policy, lambda: answers.append(1))
    assert len(answers) == 6 * (1 + len(SETTINGS)) and [row.setting for row in report.rows] == list(SETTINGS)
    runs = [
        sigma0.generate(model, tokenizer, each.content, exit_config=config, policy=policy, max_new_tokens=24)
        for each in prompts
    ]
    right = np.array([run.text.strip() == each.answer for run, each in zip(runs, prompts, strict=True)])
    opened = np.array([run.door == "converge" for run in runs])
    off, verdict, *_ = report.rows
    assert off.escalated is None and off.broken == 0
    assert verdict.right.value == off.right.value == right.mean()
    assert verdict.escalated.value == pytest.approx(1 - opened.mean())
    passes, later = sum(run.loop_passes for run in runs), sum(len(run.tokens) - 1 for run in runs)
    assert verdict.passes_saved.value == pytest.approx(1 - passes / (model.num_loops * later))
    assert report.opened_for_right.value == (right & opened).sum() / right.sum()
    assert report.kept_right.value == (right & opened).sum() / opened.sum()
    assert report.points_more.value == pytest.approx(100 * (right[opened].mean() - right.mean()))


def test_the_environment_and_the_model_come_back(pocket, monkeypatch):
    monkeypatch.setenv("SIGMA0_LADDER", "1")
    model = pocket[0]
    before = model.fate_config
    with switched({"SIGMA0_INNER_BREAK": "1"}), fates_of(model, FateConfig(growth=7.0)):
        assert Switches().inner_break and not Switches().ladder and not Switches().verdict
        assert model.fate_config.growth == 7.0
    assert Switches().ladder and Switches().verdict and model.fate_config == before


def test_figures_of_a_score():
    doubt, wrong = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.0, 0.0, 1.0, 0.0])
    told = separate(doubt, wrong)
    assert told.auroc == pytest.approx(2 / 3)
    assert told.aurc == pytest.approx((0 + 0 + 1 / 3 + 1 / 4) / 4)
    assert told.excess_aurc == pytest.approx(told.aurc - (1 / 4) / 4)
    assert told.augrc == pytest.approx((0 + 0 + 1 / 4 + 1 / 4) / 4)
    assert told.coverage == 0.5
    assert separate(doubt, np.ones(4)).coverage == 0.0 and separate(doubt, np.zeros(4)).auroc is None


def test_the_command(tmp_path):
    file = tmp_path / "verdict.json"
    result = CliRunner().invoke(app, ["verdict", "pocket", "--n", "2", "--hard", "--out", str(file)])
    assert result.exit_code == 0, result.output
    told = json.loads(file.read_text())
    assert told["hard_half_only"] and told["answers"] == 2 and told["model"] == "pocket"
    assert set(told["separations"]) == {"verdict", "mean entropy", "minimum margin", "length", "random"}
    assert "the converge door opens for" in " ".join(result.stdout.split())
