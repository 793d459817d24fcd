"""Curves of a ladder: what is counted as right, at which cost, and what is read off."""

import json
from dataclasses import replace

import pytest

import sigma0
import sigma0.bench.ladder.command as command
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.rows import LadderRow
from sigma0.bench.ladder import measure as study
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.prompts import Prompt
from sigma0.ladder import Always, AnyOf, Entropy, FidelityLadder, Never, Random, Rung, Saturation
from sigma0.ladder.triggers import trigger_to_dict
from sigma0.signals.verdict import DoorPolicy
from tests.bench.core.test_ledger import CONDITIONS
from tests.bench.running import bench, refused
from tests.ladder.conftest import looped, rungs, tokenizer  # noqa: F401

STORY = "Mary went to the park. Leo went to the office."
PROMPTS = [Prompt(f"{STORY} Where is {name}?") for name in ("Mary", "Leo", "Tom")]


FIGURES = ("accuracy", "cost", "seconds")
SHARED = {**CONDITIONS, "time": "now", "above": "large", "above_sha256": "", "exit_config": {}}


def made(**changes):
    """A row, with figures that have no width."""
    figures = {key: dict.fromkeys(("value", "low", "high"), changes.pop(key, 1)) for key in FIGURES}
    rest = dict.fromkeys(("stay", "row_cost", "handed_up", "catch_ups"), 0) | {"unit": "token", "warm_start": False}
    return LadderRow.model_validate({**SHARED, **rest, "family": "one", "policy": {}, **figures, **changes})


@pytest.mark.slow
def test_points_are_what_the_ladder_itself_says(rungs):  # noqa: F811
    settings = [
        study.Setting(study.SMALL, Never()),
        study.Setting("always", Always()),
        study.Setting("random", Random(0.5)),
    ]
    reply = []
    obtained = study.measure(*rungs, PROMPTS, settings, 5, SHARED, lambda: reply.append(1))
    assert len(reply) == 3 * 4
    large, small, always, chance, *lots = obtained
    assert large.family == study.LARGE and large.accuracy.value == large.cost.value == large.seconds.value == 1
    alone = [FidelityLadder([rung], policy=Never()) for rung in rungs]
    texts = [[ladder.generate(prompt.content, max_new_tokens=5) for prompt in PROMPTS] for ladder in alone]
    bytes_read = [sum(item.bytes_read for item in of_one) for of_one in texts]
    assert small.cost.value == pytest.approx(bytes_read[0] / bytes_read[1])
    assert small.accuracy.value == sum(a.text == b.text for a, b in zip(*texts, strict=True)) / 3
    assert small.handed_up == 0 and small.catch_ups == 0
    # all the same text, at the cost of both models' prompts
    assert always.accuracy.value == 1 and always.handed_up == 1
    assert always.cost.value > 1
    assert 0 < chance.handed_up < 1
    # one of the two models for each question: neither runs in vain
    assert [(item.family, item.policy["rate"]) for item in lots] == [(study.LOT, rate) for rate in study.LOTS]
    for item in lots:
        rate = item.policy["rate"]
        assert item.accuracy.value == pytest.approx((1 - rate) * small.accuracy.value + rate)
        assert item.cost.value == pytest.approx((1 - rate) * small.cost.value + rate)


def test_chance_is_drawn_anew_for_every_prompt(rungs):  # noqa: F811
    """A ladder that begins anew draws the same positions anew: whole answers would go up all, or none."""
    half = study.Setting("random", Random(0.5), unit="answer")
    prompts = [Prompt(f"{STORY} Where is {number}?") for number in range(8)]
    point = study.measure(*rungs, prompts, [half], 2, SHARED)[1]
    assert 0.1 < point.handed_up < 0.9


def test_known_answers_decide_where_they_are_known(rungs):  # noqa: F811
    alone = FidelityLadder([rungs[1]], policy=Never())
    answers = [alone.generate(prompt.content, max_new_tokens=4).text for prompt in PROMPTS[:2]]
    known = [replace(PROMPTS[0], answer=answers[0]), replace(PROMPTS[1], answer="nowhere")]
    assert study.measure(*rungs, known, [], 4, SHARED)[0].accuracy.value == 0.5
    with pytest.raises(ValueError, match="some have none"):
        study.measure(*rungs, [known[0], PROMPTS[1]], [], 4, SHARED)


def test_curves_are_read_between_their_points():
    curve = [made(cost=cost, accuracy=right) for cost, right in ((0.6, 0.9), (0.4, 0.8), (0.8, 0.95))]
    assert study.at_cost(curve, 0.5) == pytest.approx(0.85)
    assert study.at_cost(curve, 0.3) is None and study.at_cost([], 0.3) is None


def test_settings_hold_all_baselines():
    for settings in (study.token_settings(DoorPolicy()), study.answer_settings(DoorPolicy())):
        assert {study.SMALL, "random", "entropy", "saturation or entropy"} <= {item.family for item in settings}


def test_a_setting_is_named_by_its_numbers():
    both = AnyOf((Saturation(), Entropy(0.5)))
    assert study.setting_name("both", trigger_to_dict(both)) == "both (above 0.5)"
    assert study.setting_name("all", trigger_to_dict(Always())) == "all"


@pytest.mark.slow
def test_the_command_writes_rows_and_draws_them(tmp_path, ledger):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt.content, "answer": "park"}) + "\n" for prompt in PROMPTS))
    picture = tmp_path / "ladder.png"
    command = ["ladder", "pocket", "pocket-large", "--prompts", prompts, "--unit", "answer", "-n", 2]
    command += ["--max-new-tokens", 3, "--out", ledger, "--picture", picture]
    bench(*command)
    assert picture.read_bytes().startswith(b"\x89PNG")
    (run,) = study.ladder_runs(read_rows(ledger)).values()
    assert len(run) == 1 + len(study.answer_settings(DoorPolicy())) + len(study.LOTS) and {row.n for row in run} == {2}
    assert [row.family for row in study.shown(run)[:2]] == [study.SMALL, study.LARGE]
    assert study.ladder_table(run).count("\n") == 3 + len(study.shown(run))
    assert "no such unit: 'draft'" in refused(*command, "--unit", "draft")


@pytest.mark.exhaustive
def test_the_command_measures_hard_stories_under_another_exit(ledger, monkeypatch):
    monkeypatch.setitem(command.UNITS, "token", lambda doors: [study.Setting(study.SMALL, Never())])
    bench("ladder", "--n", 3, "--exit-config", '{"q": 0.3}', "--out", ledger)
    rows = read_rows(ledger)
    assert [row.part for row in rows] == ["choice"] * (2 + len(study.LOTS)) + ["report"] * (2 + len(study.LOTS))
    assert "calibration split" in rows[0].prompts and "test split" in rows[-1].prompts
    assert rows[0].prompts_sha256 != rows[-1].prompts_sha256 and rows[0].exit_config["q"] == 0.3


def test_costs_are_those_of_passes_and_blocks():
    models = [sigma0.load(name, dtype="float32") for name in ("pocket", "pocket-large")]
    pair = [Rung.local(*model, name) for model, name in zip(models, ("small", "large"), strict=True)]
    prompts = list(micro_world(3, "test", 9, hard=True))
    _, below, *_ = study.measure(*pair, prompts, [study.Setting(study.SMALL, Never())], 24, SHARED)
    alone = [sigma0.generate(*models[0], item.content, max_new_tokens=24) for item in prompts]
    right = [item.text.strip() == prompt.answer for item, prompt in zip(alone, prompts, strict=True)]
    assert below.accuracy.value == sum(right) / len(prompts)
    passes = [sum(item.loop_passes + 6 for item in alone)]
    passes.append(sum(sigma0.generate(*models[1], item.content, max_new_tokens=24).loop_passes + 8 for item in prompts))
    blocks = [sum(p.numel() for p in model.model.layers.parameters()) for model, _ in models]
    assert below.cost.value == pytest.approx(passes[0] * blocks[0] / (passes[1] * blocks[1]))


def test_settings_are_chosen_on_other_questions_than_they_are_reported_on():
    """The cheapest that is right often enough where it is chosen, whatever became of it where it is reported."""
    rows = []
    for part, eager, patient in (("choice", 0.80, 0.92), ("report", 0.95, 0.85)):
        for family, above, right, cost in (
            (study.LARGE, 0, 0.94, 1.0), (study.SMALL, 9, 0.7, 0.3),
            ("entropy", 0.7, eager, 0.4), ("entropy", 0.3, patient, 0.6),
        ):  # fmt: skip
            policy = {"kind": "entropy", "above": above}
            rows.append(made(part=part, family=family, policy=policy, accuracy=right, cost=cost))
    *_, chosen = study.shown(rows)
    assert (chosen.part, chosen.policy["above"], chosen.accuracy.value) == ("report", 0.3, 0.85)
    assert f"chosen on {chosen.n} questions of their own ({chosen.prompts})" in study.ladder_table(rows)
    reported = [item for item in rows if item.part == "report"]
    assert study.shown(reported)[-1].policy["above"] == 0.7
    assert "chosen on these very questions" in study.ladder_table(reported)
