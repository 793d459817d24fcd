"""The verdict bench: its figures out of real runs, and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

import sigma0
from sigma0.bench.__main__ import app
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.verdict import strange as strange_module
from sigma0.bench.verdict.asking import fates_of, switched
from sigma0.bench.verdict.measure import VerdictReport, asked, measure
from sigma0.bench.verdict.shifts import DROPPED, MIXES, SAME
from sigma0.bench.verdict.switches import SETTINGS
from sigma0.config import ExitConfig, FateConfig, Switches
from sigma0.signals.verdict import door


@pytest.mark.exhaustive
def test_figures_are_what_the_runs_say(asker, strange):
    asker = replace(asker, config=ExitConfig(q=0.6), on_answer=lambda: answers.append(1))
    prompts, answers = list(micro_world(6, "test", 3)), []
    report = measure(asker, "pocket", prompts, strange, 3, 0.05)
    assert len(answers) == asked(6, 2) and [row.setting for row in report.switches] == list(SETTINGS)
    runs = [
        sigma0.generate(
            asker.model, asker.tokenizer, each.content, exit_config=asker.config, policy=asker.policy, max_new_tokens=24
        )
        for each in prompts
    ]
    right = np.array([run.text.strip() == each.answer for run, each in zip(runs, prompts, strict=True)])
    opened = np.array([run.door == "converge" for run in runs])
    off, verdict, *_ = report.switches
    assert off.escalated is None and off.broken == 0 and off.answers == 6
    assert verdict.right.value == off.right.value == right.mean()
    assert verdict.escalated.value == pytest.approx(1 - opened.mean())
    passes, later = sum(run.loop_passes for run in runs), sum(len(run.tokens) - 1 for run in runs)
    assert verdict.passes_saved.value == pytest.approx(1 - passes / (asker.model.num_loops * later))
    rows = {row.shift: row for row in report.shifts}
    assert set(rows) == {SAME, "plain texts alone", "chats alone", *MIXES, DROPPED}
    same = rows[SAME].door
    assert same.opened_of_right.value == (right & opened).sum() / right.sum()
    assert same.right_of_opened.value == (right & opened).sum() / opened.sum()
    certificate = replace(asker.policy, rule="certificate")
    by_rule = {
        "confidence": opened,
        "certificate": np.array([door(run.verdict, certificate) == "converge" for run in runs]),
    }
    assert set(report.rules) == set(by_rule) and report.rules["confidence"].door == same
    for rule, through in by_rule.items():
        assert report.rules[rule].door.opened.value == through.mean() and through.any()
        assert report.rules[rule].points_more.value == pytest.approx(100 * (right[through].mean() - right.mean()))
    for place, name in enumerate(("plain texts alone", "chats alone")):
        assert rows[name].door.prompts == 3 and rows[name].door.right.value == right[place::2].mean()
    assert rows[DROPPED].door.prompts == 3
    assert TypeAdapter(VerdictReport).validate_python(json.loads(json.dumps(report.to_dict()))) == report


def test_the_environment_and_the_model_come_back(pocket, monkeypatch):
    monkeypatch.setenv("SIGMA0_LADDER", "1")
    model = pocket[0]
    before = model.fate_config
    with switched({"SIGMA0_INNER_BREAK": "1"}), fates_of(model, FateConfig(growth=7.0)):
        assert Switches().inner_break and not Switches().ladder and not Switches().verdict
        assert model.fate_config.growth == 7.0
    assert Switches().ladder and Switches().verdict and model.fate_config == before


@pytest.mark.slow
def test_the_command(tmp_path, strange, monkeypatch):
    prompts = tmp_path / "strange.jsonl"
    prompts.write_text("\n".join(each.model_dump_json() for each in strange))
    monkeypatch.setattr(strange_module.read_strange, "__defaults__", (prompts,))
    file = tmp_path / "verdict.json"
    result = CliRunner().invoke(app, ["verdict", "pocket", "--n", "2", "--hard", "--risk", "0.1", "--out", str(file)])
    assert result.exit_code == 0, result.output
    told = json.loads(file.read_text())
    assert told["answers"] == 2 and told["allowed"] == 0.1 and told["model"] == "pocket" and len(told["strange"]) == 6
    assert {"confidence", "mean entropy", "minimum margin", "mean depth", "length"} <= set(told["separations"])
    assert "right of those let through" in result.stdout and "| pocket | hard half | 1 |" in result.stdout
