import json
from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import TypeAdapter

import sigma0
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.verdict import measure as study
from sigma0.bench.verdict.scores import switched
from sigma0.bench.verdict.tables import kept_sentence
from sigma0.calibrate.bootstrap import share
from sigma0.calibrate.doors import Judged, check_policy
from sigma0.config import ExitConfig, Switches
from sigma0.signals.verdict import DoorPolicy, door
from tests.bench.running import bench

STRANGE = [
    study.StrangePrompt(kind="trivia", prompt="Who is the president?"),
    study.StrangePrompt(kind="code", prompt="x = ["),
]


@pytest.mark.exhaustive
def test_figures_are_what_the_runs_say(asker):
    asker = replace(asker, config=ExitConfig(q=0.6), on_answer=lambda: answers.append(1))
    prompts, answers = list(micro_world(6, "test", 3)), []
    report = study.measure(asker, "pocket", prompts, STRANGE, 3, 0.05)
    assert len(answers) == study.asked(6, 2) and [row.setting for row in report.switches] == list(study.SETTINGS)
    settings = {"exit_config": asker.config, "policy": asker.policy, "max_new_tokens": 24}
    runs = [sigma0.generate(asker.model, asker.tokenizer, item.content, **settings) for item in prompts]
    right = np.array([run.text.strip() == item.answer for run, item in zip(runs, prompts, strict=True)])
    opened = np.array([run.door == "converge" for run in runs])
    off, verdict, *_ = report.switches
    assert off.escalated is None and off.broken == 0 and off.answers == 6
    assert verdict.right.value == off.right.value == right.mean()
    assert verdict.escalated.value == pytest.approx(1 - opened.mean())
    passes, later = sum(run.loop_passes for run in runs), sum(len(run.tokens) - 1 for run in runs)
    assert verdict.passes_saved.value == pytest.approx(1 - passes / (asker.model.num_loops * later))
    rows = {row.shift: row for row in report.shifts}
    assert set(rows) == {study.SAME, "plain texts alone", "chats alone", *study.MIXES, study.DROPPED}
    same = rows[study.SAME].door
    assert same.opened_of_right.value == (right & opened).sum() / right.sum()
    assert same.right_of_opened.value == (right & opened).sum() / opened.sum()
    certificate = replace(asker.policy, rule="certificate")
    certified = np.array([door(run.verdict, certificate) == "converge" for run in runs])
    by_rule = {"confidence": opened, "certificate": certified}
    assert set(report.rules) == set(by_rule) and report.rules["confidence"].door == same
    for rule, through in by_rule.items():
        assert report.rules[rule].door.opened.value == through.mean() and through.any()
        assert report.rules[rule].points_more.value == pytest.approx(100 * (right[through].mean() - right.mean()))
    for place, name in enumerate(("plain texts alone", "chats alone")):
        assert rows[name].door.prompts == 3 and rows[name].door.right.value == right[place::2].mean()
    assert rows[study.DROPPED].door.prompts == 3
    assert TypeAdapter(study.VerdictReport).validate_python(json.loads(json.dumps(asdict(report)))) == report


def test_the_environment_comes_back(monkeypatch):
    monkeypatch.setenv("SIGMA0_LADDER", "1")
    with switched({"SIGMA0_INNER_BREAK": "1"}):
        assert Switches().inner_break and not Switches().ladder and not Switches().verdict
    assert Switches().ladder and Switches().verdict


def shift(name, opened, wrong):
    right = np.arange(1000) >= wrong
    judged = Judged(np.where(np.arange(1000) < opened, 1.0, 0.0), np.zeros(1000, dtype=bool), right)
    return study.ShiftRow(name, check_policy(judged, DoorPolicy()), share(0, 1000))


@pytest.mark.parametrize(
    "opened, wrong, kept", [(1000, 20, "yes"), (1000, 90, "no"), (1000, 50, "open"), (0, 9, "yes")]
)
def test_a_risk_is_kept_or_broken_only_beyond_its_interval(opened, wrong, kept):
    row = shift("storm", opened, wrong)
    assert row.kept(0.05) == kept
    reported = kept_sentence({"pocket": SimpleNamespace(allowed=0.05, shifts=(shift("calm", 1000, 20), row))})
    assert reported.endswith("under: pocket: storm.") == (kept == "no")


def test_the_mixes_are_what_they_are_called():
    drawn = {name: list(micro_world(6, "test", 2, **mix)) for name, mix in study.MIXES.items()}
    assert all(isinstance(prompts[1].content, list) for prompts in drawn.values())
    assert all(item.answer.startswith(("Yes", "No")) for item in drawn["yes or no alone"])
    plain = {name: [str(item.content) for item in prompts] for name, prompts in drawn.items()}
    assert all(" old" in text for text in plain["ages alone"])
    usual = [str(item.content) for item in micro_world(6, "test", 2)]
    lengths = [sum(map(len, texts)) for texts in (plain["short stories"], usual, plain["longest stories"])]
    assert lengths == sorted(set(lengths))


def test_the_file_of_strange_prompts_and_a_bad_line_of_one(tmp_path):
    kinds = Counter(item.kind for item in {item.prompt: item for item in study.read_strange()}.values())
    assert kinds == dict.fromkeys(("trivia", "code", "other words", "shuffled words"), 50)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"kind": "code", "prompt": "x"}\n{"kind": "code"}\n')
    with pytest.raises(ValueError, match="line 2"):
        study.read_strange(file)


def test_rows_of_strange_prompts_count_both_forms(asker):
    rows = study.strange_rows(asker, STRANGE)
    known = [(form, *kind) for form in ("plain", "chat") for kind in (("trivia", 1), ("code", 1), ("all", 2))]
    assert [(row.form, row.kind, row.prompts) for row in rows] == known
    assert all(0 <= row.strange.value <= row.shut.value <= 1 for row in rows)
    assert all(0 <= row.doubted.value <= row.shut.value for row in rows)


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    prompts = tmp_path / "strange.jsonl"
    prompts.write_text("\n".join(item.model_dump_json() for item in STRANGE))
    monkeypatch.setattr(study.read_strange, "__defaults__", (prompts,))
    file = tmp_path / "verdict.json"
    result = bench("verdict", "pocket", "--n", 2, "--hard", "--risk", 0.1, "--out", file)
    reported = json.loads(file.read_text())
    assert (reported["answers"], reported["allowed"], reported["model"]) == (2, 0.1, "pocket")
    assert len(reported["strange"]) == 6
    assert {"confidence", "mean entropy", "minimum margin", "mean depth", "length"} <= set(reported["separations"])
    assert "right of those let through" in result.stdout and "| pocket | hard half | 1 |" in result.stdout
