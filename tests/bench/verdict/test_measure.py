import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

import sigma0
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.verdict import measure as study
from sigma0.bench.verdict import scores as scoring
from sigma0.bench.verdict.scores import switched
from sigma0.bench.verdict.tables import draw_features, kept_sentence
from sigma0.calibrate.bootstrap import share
from sigma0.calibrate.confidence import fit_confidence
from sigma0.calibrate.doors import Judged, check_policy
from sigma0.config import ExitConfig, Switches
from sigma0.signals.evidence import FEATURES
from sigma0.signals.verdict import DoorPolicy, door
from tests.bench.running import bench

STRANGE = [
    study.StrangePrompt(kind="trivia", prompt="Who is the president?"),
    study.StrangePrompt(kind="code", prompt="x = ["),
]


@pytest.mark.exhaustive
def test_figures_are_what_the_runs_say(client):
    client = replace(client, config=ExitConfig(q=0.6), on_answer=lambda: answers.append(1))
    prompts, answers = list(micro_world(6, "test", 3)), []
    report = study.measure(client, "pocket", prompts, STRANGE, 3, 0.05)
    assert len(answers) == study.asked(6, 2) and [row.setting for row in report.switches] == list(study.SETTINGS)
    settings = {"exit_config": client.config, "policy": client.policy, "max_new_tokens": 24}
    runs = [sigma0.generate(client.model, client.tokenizer, item.content, **settings) for item in prompts]
    right = np.array([run.text.strip() == item.answer for run, item in zip(runs, prompts, strict=True)])
    opened = np.array([run.door == "converge" for run in runs])
    off, verdict, *_ = report.switches
    assert off.escalated is None and off.broken == 0 and off.answers == 6
    assert verdict.right.value == off.right.value == right.mean()
    assert verdict.escalated.value == pytest.approx(1 - opened.mean())
    passes, later = sum(run.loop_passes for run in runs), sum(len(run.tokens) - 1 for run in runs)
    assert verdict.passes_saved.value == pytest.approx(1 - passes / (client.model.num_loops * later))
    rows = {row.shift: row for row in report.shifts}
    assert set(rows) == {study.SAME, "plain texts alone", "chats alone", *study.MIXES, study.DROPPED}
    same = rows[study.SAME].door
    assert same.opened_of_right.value == (right & opened).sum() / right.sum()
    assert same.right_of_opened.value == (right & opened).sum() / opened.sum()
    certificate = replace(client.policy, rule="certificate")
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


def test_rows_of_strange_prompts_count_both_forms(client):
    rows = study.strange_rows(client, STRANGE)
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


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_ties_count_as_the_mean_over_all_their_orders(answers):
    doubt, wrong = (np.array(item, dtype=float) for item in zip(*answers, strict=True))
    orders = [order for order in permutations(range(len(doubt))) if list(doubt[list(order)]) == sorted(doubt)]
    kept = np.mean([np.cumsum(wrong[list(order)]) for order in orders], axis=0)
    np.testing.assert_allclose(scoring.wrong_among_kept(doubt, wrong), kept, atol=1e-12)
    assert scoring.aurc(doubt, wrong) == pytest.approx(np.mean(kept / np.arange(1, len(doubt) + 1)))
    assert scoring.augrc(doubt, wrong) == pytest.approx(np.mean(kept) / len(doubt))
    bad, good = doubt[wrong == 1], doubt[wrong == 0]
    pairs = (bad[:, None] > good[None]) + 0.5 * (bad[:, None] == good[None])
    assert scoring.auroc(doubt, wrong) == (pytest.approx(pairs.mean()) if pairs.size else None)


def test_figures_of_a_score():
    doubt, wrong = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.0, 0.0, 1.0, 0.0])
    output, area = scoring.separate(doubt, wrong), scoring.measure_abstention(doubt, wrong, resamples=200)
    assert output.auroc.value == pytest.approx(2 / 3) and output.auroc.interval[0] <= 2 / 3 <= output.auroc.interval[1]
    assert output.aurc == area.aurc.value == pytest.approx((0 + 0 + 1 / 3 + 1 / 4) / 4)
    assert output.excess_aurc == pytest.approx(output.aurc - (1 / 4) / 4)
    assert output.augrc == area.augrc.value == pytest.approx((0 + 0 + 1 / 4 + 1 / 4) / 4)
    assert area.auroc.value == output.auroc.value and area.aurc.interval[0] < output.aurc < area.aurc.interval[1]
    assert output.coverage == 0.5
    assert scoring.separate(doubt, np.ones(4)).coverage == 0.0 and scoring.separate(doubt, np.zeros(4)).auroc is None
    for scores, answers in ((0, 0), (2, 1)):
        with pytest.raises(ValueError, match=f"{scores} scores for {answers} answers"):
            scoring.measure_abstention(np.zeros(scores), np.zeros(answers))


def test_paired_differences_are_narrower_than_their_parts():
    rng = np.random.default_rng(0)
    wrong = (rng.random(400) < 0.3).astype(float)
    doubt = rng.normal(size=400) + wrong
    other = doubt + 0.1 * rng.normal(size=400)
    more, alone = scoring.auroc_more(doubt, other, wrong), scoring.separate(doubt, wrong).auroc
    assert more.value == pytest.approx(alone.value - scoring.separate(other, wrong).auroc.value)
    assert more.interval[1] - more.interval[0] < 0.2 * (alone.interval[1] - alone.interval[0])
    assert scoring.auroc_more(doubt, other, wrong * 0) is None


def test_scores_are_read_off_the_runs(client):
    answers = client.answers(list(micro_world(4, "test", 9)))
    output = scoring.doubts(answers)
    for place, run in enumerate(answers.runs):
        assert output["confidence"][place] == pytest.approx(1 - run.verdict.confidence)
        assert output["mean entropy"][place] == pytest.approx(np.mean([token.entropy for token in run.tokens]))
        assert output["minimum margin"][place] == pytest.approx(1 - min(token.margin for token in run.tokens))
        assert output["mean depth"][place] == pytest.approx(run.verdict.depth / run.total_loops)
        assert output["length"][place] == len(run.tokens)
    assert len(set(output["random"])) == 4


def drawn(n, seed):
    rng = np.random.default_rng(seed)
    evidence = np.exp(rng.normal(-2, 1.5, (n, len(FEATURES))))
    evidence[:, FEATURES.index("length")] = rng.integers(1, 20, n)
    entropy, doubt = (np.log(evidence[:, FEATURES.index(name)]) for name in ("mean_entropy", "most_doubt"))
    return SimpleNamespace(evidence=evidence, right=rng.random(n) < 1 / (1 + np.exp(entropy + 0.3 * doubt + 1)))


@pytest.mark.exhaustive
def test_what_is_read_loses_and_what_is_not_does_not(tmp_path):
    fit, held = drawn(2000, 0), drawn(1000, 1)
    fitted = fit_confidence(fit.evidence, fit.right, [[1, 2]] * 2000)
    held.evidence[0, FEATURES.index("mean_depth")] = np.nan
    uses = {use.name: use for use in scoring.feature_uses(held, fitted.model)}
    assert list(uses) == list(FEATURES)
    assert {name for name, use in uses.items() if use.stored} == set(fitted.model.features)
    first, second = uses["mean_entropy"], uses["most_doubt"]
    assert first.drop.value > second.drop.value > 0.0 and first.drop.interval[0] <= first.drop.value
    assert first.auroc > second.auroc > 0.55
    assert uses["length"].drop is None and uses["length"].auroc == pytest.approx(0.5, abs=0.06)
    assert uses["mean_depth"].auroc is None
    assert not any(use.stored for use in scoring.feature_uses(held, None))
    file = tmp_path / "features.svg"
    draw_features(list(uses.values()), fitted.figures, file, "pocket")
    assert file.stat().st_size > 10_000
