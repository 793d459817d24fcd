"""Verdicts at the very limits of a policy, and what they are called there."""

import math

import pytest

from sigma0.signals.verdict import (
    DoorPolicy,
    ReasonVerdict,
    aggregate,
    digits,
    explain,
    objections,
    of_token,
    with_confidence,
)


def part(reason="confident", proximity=0.0, grounded=None, stable=None, confidence=0.5, converged=True, depth=2.0):
    return ReasonVerdict(
        converged=converged, depth=depth, proximity=proximity, grounded=grounded, stable=stable, reason=reason,
        confidence=confidence,
    )  # fmt: skip


def test_the_policy_if_nothing_else_is_said():
    assert DoorPolicy() == DoorPolicy(
        min_confidence=0.9, tau_c=0.5, tau_g=0.5, require_grounding=False, patience=2, spiral_share=0.25,
        saturated_share=0.1, rule="confidence",
    )  # fmt: skip


@pytest.mark.parametrize(
    "share, text",
    [
        (0.9, "0.90"), (0.994, "0.99"), (0.996, "0.996"), (0.9994, "0.999"), (0.9996, "0.9996"), (0.99994, "0.9999"),
        (0.99996, "0.99996"), (1.0, "1"), (0.0, "0.00"),
    ],
)  # fmt: skip
def test_a_share_under_1_is_not_written_as_1(share, text):
    assert digits(share) == text


@pytest.mark.parametrize(
    "verdict, reasons",
    [
        (part(confidence=0.9), []),
        (part(confidence=0.8999), ["its confidence is 0.90, under 0.90"]),
        (part(confidence=None), ["its confidence is not known"]),
        (part("divergence", confidence=1.0), ["its reason is divergence"]),
        (part("out_of_calibration", confidence=1.0), ["it is unlike what its confidence was calibrated on"]),
        (part(proximity=0.5, confidence=1.0), ["its proximity to collapse is 0.50, not under 0.50"]),
        (part(grounded=0.5, confidence=1.0), ["its groundedness is 0.50, not over 0.50"]),
        (part(grounded=0.51, confidence=1.0), []),
    ],
)
def test_objections_are_told_in_words(verdict, reasons):
    assert objections(verdict, DoorPolicy()) == reasons
    told = "; ".join(reasons)
    sure = None if verdict.confidence is None else digits(verdict.confidence)
    plain = f"converge: confidence {sure}, read at 2.00 loops on average."
    assert explain(verdict) == (f"escalate: {told}." if reasons else plain)
    assert explain(verdict, budget_left=False) == (f"abort: {told}." if reasons else plain)


@pytest.mark.parametrize(
    "verdict, reasons",
    [
        (part(stable="contract", confidence=None), []),
        (part("out_of_calibration", stable="contract", confidence=0.0), []),
        (part(stable="spiral", converged=None), ["whether it converged is not known", "its fate is spiral"]),
        (
            part("max_depth", converged=False),
            ["its reason is max_depth", "it did not converge", "its fate is not known"],
        ),
    ],
)
def test_objections_to_a_certificate(verdict, reasons):
    policy = DoorPolicy(rule="certificate")
    assert objections(verdict, policy) == reasons
    plain = "converge: its exit rule was met by itself and its steps contract, read at 2.00 loops on average."
    assert explain(verdict, policy) == (f"escalate: {'; '.join(reasons)}." if reasons else plain)


def test_grounding_that_is_asked_for_must_be_known():
    asked = DoorPolicy(require_grounding=True, min_confidence=0.5)
    assert objections(part(), asked) == ["its groundedness is not known"]
    assert objections(part(grounded=0.6), asked) == []


def test_a_text_collapses_at_the_threshold():
    assert (
        aggregate([part(proximity=0.49)]).reason == "confident"
        and aggregate([part(proximity=0.5)]).reason == "collapse"
    )
    assert aggregate([part("collapse"), part()]).reason == "collapse"
    assert aggregate([part("divergence"), part("collapse", proximity=0.9)]).reason == "divergence"


@pytest.mark.parametrize(
    "parts, grounded, reason",
    [
        ([part()], 0.5, "ungrounded"),
        ([part()], 0.51, "confident"),
        ([part("ungrounded"), part()], None, "ungrounded"),
        ([part("ungrounded", grounded=0.9), part()], None, "confident"),
        ([part("ungrounded", grounded=0.9)], None, None),
        ([part("max_depth")] * 2, 0.1, "max_depth"),
        ([part("out_of_calibration"), part("max_depth")], 0.1, "out_of_calibration"),
        ([part("confident"), part("fixed_point"), part("fixed_point")], None, "fixed_point"),
        ([part("confident"), part("fixed_point")], None, "confident"),
        ([part(None), part("confident")], None, "confident"),
        ([part(None)], None, None),
        ([part("forced")], None, "forced"),
        ([part("forced")] * 9 + [part("max_depth")], None, "max_depth"),
    ],
)
def test_the_reason_of_a_text(parts, grounded, reason):
    assert aggregate(parts, grounded=grounded).reason == reason


def test_a_policy_may_ask_for_no_grounding():
    assert aggregate([part()], DoorPolicy(tau_g=None), grounded=0.0).reason == "confident"


def test_what_is_told_of_the_whole():
    whole = aggregate([part(depth=1.0, grounded=0.9), part(depth=4.0, proximity=0.25, grounded=0.75)])
    assert (whole.depth, whole.proximity, whole.grounded) == (2.5, 0.25, 0.75)
    assert whole.confidence == pytest.approx(0.5)
    assert aggregate([part("forced", confidence=None)]).confidence is None
    assert aggregate([part(confidence=None), part()]).confidence is None
    assert aggregate([part(confidence=0.0), part()]).confidence == 0.0
    assert aggregate([part(confidence=0.25), part(confidence=1.0)]).confidence == pytest.approx(0.5)


@pytest.mark.parametrize(
    "known, converged",
    [([], None), ([True], True), ([True, False], False), ([True, True, False], True), ([False], False)],
)
def test_where_the_reason_says_nothing_of_loops_the_tokens_do(known, converged):
    parts = [part(converged=each) for each in known] + [part(converged=None)]
    assert aggregate(parts, grounded=0.0).converged is converged
    assert aggregate([part(None, converged=True)]).converged is None


def test_a_strange_answer_keeps_the_reason_of_a_text_that_broke_off():
    for reason in ("collapse", "divergence", "confident", None):
        kept = reason if reason in ("collapse", "divergence") else "out_of_calibration"
        assert with_confidence(part(reason), 0.25, True).reason == kept
        plain = with_confidence(part(reason), 0.25, False)
        assert plain == part(reason, confidence=0.25)


def test_a_tokens_confidence_is_that_of_its_entropy():
    assert of_token("confident", 3, "spiral", 0.25).confidence is None
    assert of_token("confident", 3, "spiral", 0.25, 0.0).confidence == 1.0
    found = of_token("max_depth", 3, "spiral", 0.25, 0.5)
    assert (found.converged, found.depth, found.proximity, found.grounded) == (False, 3, 0.25, None)
    assert (found.stable, found.reason, found.confidence) == ("spiral", "max_depth", math.exp(-0.5))
