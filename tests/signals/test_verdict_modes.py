"""The verdict and its door under every rule and every way of going on after an exit, in the library and the server."""

from dataclasses import replace
from itertools import count, islice

import numpy as np
import pytest
import torch

import sigma0
from sigma0 import ExitConfig
from sigma0.bench.pocket.world import draw
from sigma0.config import exit_for
from sigma0.decode.exits import exit_reason
from sigma0.signals.verdict import VETOES
from tests.reference import setting, settled_model, tiny_model

RULES = {
    "qexit": ExitConfig(q=0.6),
    "margin": ExitConfig(mode="margin", theta=0.9),
    "converge": ExitConfig(mode="converge", eps=0.386),
    "accel": ExitConfig(mode="accel", eps=0.581, patience=1, accel_scale="steps"),
}
MET = {"qexit": "threshold_met", "margin": "confident", "converge": "fixed_point", "accel": "accel_fixed_point"}
MODES = ("qexit", "margin", "converge", "accel", "accel-steps")
UNASKED = (ExitConfig(mode="full"), ExitConfig(mode="full", after_exit="verify"), ExitConfig(mode="fixed", depth=3))
MODELS = (settled_model(seed=1, total_ut_steps=4, num_hidden_layers=1), tiny_model(seed=3, total_ut_steps=5))


def write(model, ids, config, new=1, **kwargs):
    return model.generate(
        ids, max_new_tokens=new, do_sample=False, exit_config=config, return_dict_in_generate=True, **kwargs
    )


def rule_at(mode, threshold, min_loops):
    thresholds = dict.fromkeys(("q", "theta", "eps"), threshold)
    scale = "steps" if mode == "accel-steps" else "states"
    return setting(mode.removesuffix("-steps"), **thresholds, patience=1, min_loops=min_loops, accel_scale=scale)


@pytest.fixture(scope="module")
def easy():
    """Simple questions with their answers."""
    items = (draw("test", 0, index, questions=1).items[0] for index in count())
    return list(islice((item for item in items if item.difficulty == 1), 8))


def answers(pocket, easy, config):
    """Those that are right."""
    written = [sigma0.generate(*pocket, item.prompt, exit_config=config, max_new_tokens=24) for item in easy]
    return [answer for answer, item in zip(written, easy, strict=True) if answer.text.strip() == item.answer]


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("mode", RULES)
def test_verify_opens_the_door_for_easy_answers_about_as_often_as_finish(pocket, easy, mode):
    opened = {}
    for after_exit in ("finish", "verify", "drop"):
        right = answers(pocket, easy, replace(RULES[mode], after_exit=after_exit))
        passed = [answer for answer in right if answer.door == "converge"]
        # the least sure token of an answer may have needed all loops
        assert len(right) >= 7 and MET[mode] in {answer.verdict.reason for answer in passed} <= {MET[mode], "max_depth"}
        opened[after_exit] = len(passed)
    assert opened["finish"] >= 5 and abs(opened["verify"] - opened["finish"]) <= 1, opened
    assert abs(opened["drop"] - opened["finish"]) <= 1, opened


def test_high_effort_opens_the_door_for_easy_answers(pocket, easy):
    high = exit_for("high", pocket[0].resolve_exit_config(None), pocket[0].num_loops)
    right = answers(pocket, easy, high)
    assert sum(answer.door == "converge" for answer in right) >= 5
    assert all(answer.tokens[0].depth == pocket[0].num_loops for answer in right)


@pytest.mark.parametrize("config", UNASKED)
def test_what_asks_no_rule_opens_the_door_by_confidence_and_says_what_the_rule_would_have(pocket, easy, config):
    for answer in answers(pocket, easy[:3], config):
        sure = answer.verdict.confidence >= answer.policy.min_confidence
        assert answer.verdict.converged is None
        assert (answer.door == "converge") == (sure and answer.verdict.reason not in VETOES["confidence"])
        # where loop T itself is less sure than the rule asks, nobody knows
        theta = pocket[0].generation_config.exit_config["theta"]
        assert all((token.would_have_met is None) <= (token.margin < theta) for token in answer.tokens)
    met = [token.would_have_met for answer in answers(pocket, easy[:3], config) for token in answer.tokens]
    assert True in met


@pytest.mark.parametrize("mode", RULES)
def test_the_first_token_is_judged_as_finish_judges_it_on_real_questions(pocket, easy, mode):
    model, tokenizer = pocket
    seen = set()
    for item in easy:
        ids = torch.tensor([tokenizer(item.prompt)["input_ids"]])
        finish, verify = (write(model, ids, replace(RULES[mode], after_exit=after)) for after in ("finish", "verify"))
        assert verify.exit_reasons == finish.exit_reasons
        assert verify.exit_depths.tolist() == [[model.num_loops]]
        seen.add(verify.exit_reasons[0][0])
    assert MET[mode] in seen


def test_a_token_whose_draft_was_overruled_did_not_converge():
    seen = set()
    for redraft in (False, True):
        config = ExitConfig(mode="margin", theta=0.02, after_exit="verify", redraft=redraft)
        for start in range(9, 15):
            out = write(MODELS[0], torch.tensor([[start, 10, 11]]), config, 12, eos_token_id=None)
            for reason, accepted in zip(out.exit_reasons[0], out.accepted[0].tolist(), strict=True):
                assert accepted or reason == "max_depth"
                seen.add((reason, accepted))
    assert seen >= {("confident", True), ("max_depth", False)}


@pytest.mark.slow
def test_a_divergence_of_the_first_token_leaves_it_saturated(monkeypatch):
    model = tiny_model(3, total_ut_steps=8)
    model.generation_config.fate_config = {"growth": 0.0}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm_2.weight.mul_(5)
            layer.post_attention_layernorm_2.weight.mul_(5)
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    reasons = []
    for start in range(3, 40):
        ids = torch.tensor([[start, 9, 2, 7]])
        finish, verify = (write(model, ids, ExitConfig(q=0.99, after_exit=after)) for after in ("finish", "verify"))
        reasons.append((finish.exit_reasons[0][0], verify.exit_reasons[0][0]))
        assert int(verify.exit_depths[0, 0]) == 8
    assert ("divergence", "max_depth") in reasons and not any(verify == "divergence" for _, verify in reasons)


@pytest.mark.grid(fast=1, slow=2)
@pytest.mark.parametrize("mode", MODES)
def test_what_a_rule_would_have_said_is_what_it_says(mode):
    """Under full depth, of the very first token, which has the same states after every setting."""
    seen = set()
    for model in MODELS:
        for threshold in (0.1, 0.4, 0.8):
            config = rule_at(mode, threshold, 1 + int(threshold > 0.5))
            rule = model.exit_rule(config)
            for start in range(9, 15):
                ids = torch.tensor([[start, 10, 11]])
                ruled = write(model, ids, config)
                full = write(model, ids, ExitConfig(mode="full"), output_statistics=True)
                margin = float(full.readings[0, 0, sigma0.decode.ops.LOGIT_STATS.index("margin")])
                would_be_met = rule.would_have_been_met(full.loop_statistics[0, 0].numpy(), margin)
                met = ruled.exit_reasons[0][0] != "max_depth"
                if mode == "margin" and would_be_met is None:
                    assert margin < threshold
                else:
                    assert would_be_met == met
                seen.add(met)
    assert seen == {True, False}


def test_where_no_rule_is_asked_or_there_is_none_another_one_is_watched_or_none(pocket, monkeypatch):
    model = pocket[0]
    assert model.counterfactual_rule(ExitConfig(q=0.5)) is None
    assert model.counterfactual_rule(ExitConfig(mode="fixed", depth=2, after_exit="verify")) is None
    stored = model.counterfactual_rule(ExitConfig(mode="full"))
    assert stored is not None and stored.config == model.resolve_exit_config(None)
    one = np.zeros((1, 8), dtype=np.float32)
    assert stored.needs_logits
    assert (stored.would_have_been_met(one, 0.1), stored.would_have_been_met(one, 1.0)) == (None, True)
    assert exit_reason("full", True) == "fixed"
    monkeypatch.setattr(model.generation_config, "exit_config", {"mode": "fixed", "depth": 4})
    assert model.counterfactual_rule(ExitConfig(mode="full")) is None
    out = sigma0.generate(*pocket, "Mary went to the park. Where is Mary?", max_new_tokens=3)
    assert {token.would_have_met for token in out.tokens} == {None}
    monkeypatch.undo()
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    assert model.counterfactual_rule(ExitConfig(mode="full")) is None
