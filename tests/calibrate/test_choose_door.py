"""A door out of answers made up here: what is fitted, ranked and tested on which of them."""

from dataclasses import replace
from inspect import signature

import numpy as np
import pytest

from sigma0.calibrate.doors import check_policy, judge, passing_policies, rank
from sigma0.calibrate.risk import Answered, _checked, calibrate_doors, choose_door
from sigma0.signals.answer import judge_answer
from sigma0.signals.evidence import evidence_of
from sigma0.signals.tokens import Token
from sigma0.signals.verdict import DoorPolicy, explain

BASE = DoorPolicy(patience=1)


def answers(count, seed, wrong=None, sharp=3.0):
    """Answers of two tokens that are the likelier wrong the more entropy they have."""
    rng = np.random.default_rng(seed)
    entropies = rng.uniform(0.01, 1.0, count)
    right = rng.random(count) > entropies**sharp if wrong is None else np.argsort(-entropies).argsort() >= wrong
    return [
        Answered(
            bool(fits),
            tuple(Token(1, "", 2, "confident", proximity=0.1, margin=0.5, entropy=float(item)) for _ in range(2)),
            None, False, (1, 2), 4,
        )
        for fits, item in zip(right, entropies, strict=True)
    ]  # fmt: skip


def right_of(some):
    return np.array([item.right for item in some])


def test_an_answers_verdict_is_the_librarys_and_a_door_on_entropy_reads_no_fit():
    (answer,) = answers(1, 0)
    model = choose_door(answers(60, 1), answers(90, 2), BASE, 0.3, 0.9).model
    for collapsed in (False, True):
        item = replace(answer, collapsed=collapsed, grounded=0.75)
        for confidence_model in (None, model):
            expected = judge_answer(item.tokens, 4, BASE, 0.75, collapsed, confidence_model, (1, 2))
            assert item.verdict(BASE, confidence_model) == item.verdict(BASE, confidence_model) == expected
        assert np.array_equal(item.evidence, evidence_of(item.tokens, 4, 0.75), equal_nan=True)
    fitting, testing = answers(60, 1), answers(90, 2)
    door = choose_door(fitting, testing, BASE, 0.3, 0.9, fit=False)
    assert door.fitted is None and door.model is None
    judged = judge([item.verdict(BASE, None) for item in fitting], right_of(fitting), BASE)
    assert door.ranked == rank(judged, BASE, 0.3, 0.9, 90)
    assert door.judged.confidence[0] == pytest.approx(np.exp(-testing[0].tokens[0].entropy))


def test_a_fitted_confidence_is_ranked_by_folds_and_tested_as_it_is():
    fitting, testing = answers(60, 1), answers(90, 2)
    door = choose_door(fitting, testing, BASE, 0.3, 0.9)
    assert door.fitted is not None and door.model is door.fitted.model and door.model.answers == 60
    crossed = judge([item.verdict(BASE, door.model) for item in fitting], right_of(fitting), BASE)
    assert door.ranked == rank(replace(crossed, confidence=door.fitted.cross_fitted), BASE, 0.3, 0.9, 90)
    tested = judge([item.verdict(BASE, door.model) for item in testing], right_of(testing), BASE)
    assert (door.passed, door.tested) == passing_policies(tested, door.ranked, 0.3, 0.9) and door.passed
    assert door.judged.confidence.tolist() == tested.confidence.tolist()
    checking = answers(30, 3)
    output = judge([item.verdict(BASE, door.model) for item in checking], right_of(checking), BASE)
    assert _checked(checking, door) == check_policy(output, door.passed[-1])


@pytest.mark.parametrize("tau_g", [0.5, None])
def test_a_certificates_level_is_tested_in_place_of_a_confidence(tau_g):
    rng = np.random.default_rng(4)
    doubts = rng.uniform(0, 1, 400)
    steady = Token(1, "", 2, "confident", fate="contract", margin=0.5, entropy=0.1)
    output = [
        # by what it stands on an answer is wrong the likelier, whatever its confidence says
        Answered(bool(rng.random() > doubt), (replace(steady, proximity=doubt * (tau_g is None)),) * 2,
                 None if tau_g is None else 1 - doubt, False, (1, 2), 4)
        for doubt in doubts.tolist()
    ]  # fmt: skip
    base = replace(BASE, rule="certificate", tau_g=tau_g)
    door = choose_door(output[:200], output[200:], base, 0.3, 0.9)
    chosen = door.passed[-1]
    assert chosen.rule == "certificate" and 0.3 < chosen.tau_c < 0.9
    assert chosen.tau_g is tau_g or chosen.tau_g == pytest.approx(1 - chosen.tau_c)
    levels = [policy.tau_c for policy in door.ranked]
    assert levels == sorted(levels) and door.judged.opened_and_wrong(chosen)[0] > 50  # of 200
    # as the library opens the door for them
    opened = [item for item in output if explain(item.verdict(chosen, door.model), chosen).startswith("converge")]
    check = _checked(output, door)
    assert check.opened.value == len(opened) / 400 and check.right_of_opened.value == np.mean(right_of(opened))
    assert check.right_of_opened.value > 0.7 > right_of(output).mean()
    wobbly = [replace(item, tokens=(replace(steady, proximity=0.1, fate="spiral"),) * 2) for item in output]
    assert choose_door(wobbly[:200], wobbly[200:], base, 0.3, 0.9).passed == []


@pytest.mark.parametrize("wrong, fitted", [(4, False), (5, True), (55, True), (56, False)])
def test_a_fit_takes_five_of_each_kind(wrong, fitted):
    door = choose_door(answers(60, 1, wrong), answers(40, 2), BASE, 0.3, 0.9)
    assert (door.fitted is not None) is fitted


def test_nothing_is_checked_where_nothing_passes_and_the_promise_has_defaults():
    door = choose_door(answers(60, 1), answers(20, 2, wrong=20), BASE, 0.1, 0.9)
    assert door.passed == [] and door.tested == 1 and _checked(answers(5, 3), door) is None
    defaults = {name: item.default for name, item in signature(calibrate_doors).parameters.items()}
    assert (defaults["risk"], defaults["confidence"], defaults["max_new_tokens"]) == (0.05, 0.95, 64)
