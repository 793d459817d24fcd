"""Verdicts and doors: every combination of the fields against the rules, told once more in other words."""

import copy
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import GenerationConfig

import sigma0
from sigma0.signals.verdict import (
    CONVERGED,
    DoorPolicy,
    ReasonVerdict,
    aggregate,
    digits,
    door,
    explain,
    mildest,
    objections,
    of_token,
    patience_for,
    with_confidence,
)
from tests.ranges import check_range

REASONS = [
    None, "threshold_met", "fixed_point", "accel_fixed_point", "confident", "fixed", "max_depth", "collapse",
    "divergence", "ungrounded", "out_of_calibration",
]  # fmt: skip
FATES = [None, "contract", "spiral", "diverge"]
SHARES = {"min_confidence": 0.9, "tau_c": 0.5, "tau_g": 0.5, "spiral_share": 0.25, "saturated_share": 0.1}
POLICIES = [
    DoorPolicy(),
    DoorPolicy(require_grounding=True),
    DoorPolicy(tau_c=0.2, tau_g=0.9),
    DoorPolicy(min_confidence=0.5, tau_g=None),
    DoorPolicy(rule="certificate"),
    DoorPolicy(rule="certificate", tau_c=0.2, require_grounding=True),
]


def make(
    converged=True, depth=2.0, proximity=0.0, grounded=None, stable="contract", reason="threshold_met", confidence=0.95
):
    return ReasonVerdict(
        converged=converged, depth=depth, proximity=proximity, grounded=grounded, stable=stable, reason=reason,
        confidence=confidence,
    )  # fmt: skip


@pytest.mark.grid(fast=2, slow=4)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_combination_of_the_fields(policy):
    fields = itertools.product(
        (True, False, None), (0.0, 0.19, 0.2, 0.49, 0.5, 1.0), (None, 0.0, 0.5, 0.51, 0.9, 1.0), FATES, REASONS,
        (None, 0.0, 0.49, 0.5, 0.8999, 0.9, 1.0),
    )  # fmt: skip
    opened = 0
    for converged, proximity, grounded, stable, reason, confidence in fields:
        verdict = make(converged, 2.0, proximity, grounded, stable, reason, confidence)
        sure = confidence is not None and confidence >= policy.min_confidence
        loose = grounded is not None and policy.tau_g is not None and grounded <= policy.tau_g
        grounds = not loose and not (grounded is None and policy.require_grounding)
        veto = reason in ("collapse", "divergence", "ungrounded", "out_of_calibration")
        # what the loops did is told, and decides nothing; under a certificate it is all that decides, and no confidence
        if policy.rule == "certificate":
            sure = converged is True and stable == "contract"
            veto = reason in ("collapse", "divergence", "ungrounded", "max_depth")
        opens = sure and proximity < policy.tau_c and grounds and not veto
        assert door(verdict, policy) == ("converge" if opens else "escalate"), verdict
        assert door(verdict, policy, budget_left=False) == ("converge" if opens else "abort")
        sentence = explain(verdict, policy)
        assert sentence.startswith(door(verdict, policy)) and sentence.endswith(".") and sentence.count(".\n") == 0
        opened += opens
    assert opened


@given(
    st.sampled_from([True, False, None]), st.floats(0, 99), st.floats(0, 1), st.none() | st.floats(0, 1),
    st.sampled_from(FATES), st.sampled_from(REASONS),
)  # fmt: skip
def test_json_and_back(converged, depth, proximity, grounded, stable, reason):
    verdict = make(converged, depth, proximity, grounded, stable, reason)
    assert ReasonVerdict.model_validate_json(verdict.model_dump_json()) == verdict
    assert ReasonVerdict(**verdict.to_dict()) == verdict
    assert set(verdict.to_dict()) == set(ReasonVerdict.model_json_schema()["properties"])


def test_a_fate_is_the_mildest_of_the_last():
    assert mildest([None, None, "diverge", "spiral"], 2) == "spiral"
    assert mildest([None, None, "contract", "diverge", "diverge"], 2) == "diverge"
    assert mildest([None, None, "contract", "diverge"], 2) == "contract"
    assert mildest([None, None, "diverge"], 2) is None
    assert mildest([None, None, "diverge"], 1) == "diverge"
    assert mildest([], 2) is None


def tokens(*kinds):
    """Tokens by reason and fate."""
    return [of_token(reason, 2, fate, 0.1) for reason, fate in kinds]


def test_aggregation():
    good = ("threshold_met", "contract")
    assert aggregate(tokens(*[good] * 9)).stable == "contract"
    assert aggregate(tokens(*[good] * 9, ("threshold_met", "diverge"))).stable == "diverge"
    assert aggregate(tokens(*[good] * 3, ("threshold_met", "spiral"))).stable == "contract"
    assert aggregate(tokens(*[good] * 2, ("threshold_met", "spiral"))).stable == "spiral"
    unknown = ("threshold_met", None)
    assert aggregate(tokens(*[good] * 2, *[unknown] * 9, ("threshold_met", "spiral"))).stable == "spiral"
    assert aggregate(tokens(*[unknown] * 4)).stable is None
    assert aggregate(tokens(*[good] * 9, ("max_depth", "contract"))).reason == "threshold_met"
    assert aggregate(tokens(*[good] * 8, ("max_depth", "contract"))).reason == "max_depth"
    assert aggregate(tokens(*[("fixed", "contract")] * 3)).converged is None
    assert aggregate(tokens(*[("max_depth", None)] * 3)).converged is False
    assert aggregate(tokens(good), grounded=0.2).converged is True
    sure = [of_token("threshold_met", 2, "contract", 0.0, entropy) for entropy in (0.01, 0.03)]
    assert aggregate(sure).confidence == pytest.approx(math.exp(-0.02))
    assert door(aggregate(sure)) == "converge" and door(aggregate([*sure, *tokens(good)])) == "escalate"
    assert aggregate([*sure, *tokens(("forced", None))]).confidence == aggregate(sure).confidence
    assert aggregate([of_token("confident", 2, None, 0.0, math.inf), *sure]).confidence == 0.0
    with pytest.raises(ValueError, match="without tokens"):
        aggregate([])


def test_the_published_schema_is_the_one_in_force():
    published = json.loads(Path(sigma0.__file__).parent.joinpath("signals", "verdict.schema.json").read_text())
    assert published == ReasonVerdict.model_json_schema()


def test_a_stored_policy_is_read_and_checked():
    policy = DoorPolicy(tau_c=0.2, require_grounding=True)
    assert DoorPolicy.parse(policy.to_dict()) == policy == DoorPolicy.parse(policy)
    with pytest.raises(ValueError, match="tau_x"):
        DoorPolicy.parse({"tau_x": 0.2})
    with pytest.raises(ValueError, match="got int"):
        DoorPolicy.parse(3)


def test_a_stored_policy_can_be_printed_and_saved(tmp_path):
    config = GenerationConfig()
    config.door_policy = DoorPolicy(tau_c=0.3)
    assert "0.3" in repr(config) and config == copy.deepcopy(config)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["door_policy"]["tau_c"] == 0.3


@pytest.mark.parametrize(
    "kind, name, good, bad",
    [
        *((DoorPolicy, name, (0.0, 1.0), (-0.01, 1.01, math.nan, math.inf)) for name in SHARES),
        (make, "depth", (0.0, 9.5), (-0.01, math.inf)),
        (make, "proximity", (0.0, 1.0), (-0.01, 1.01)),
        *((make, name, (0.0, 1.0, None), (-0.01, 1.01)) for name in ("grounded", "confidence")),
    ],
)
def test_shares_of_a_policy_and_facts_of_a_verdict_lie_in_their_range(kind, name, good, bad):
    check_range(kind, name, good, bad, ValueError if kind is DoorPolicy else ValidationError)


def test_models_of_few_loops_are_asked_of_fewer():
    # the first two loops have no fate, and a fate is of one loop at least
    assert [patience_for(DoorPolicy(), loops) for loops in range(1, 7)] == [1, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="patience"):
        DoorPolicy(patience=0)
    assert [patience_for(DoorPolicy(patience=9), loops) for loops in (2, 3, 8, 11, 12)] == [1, 1, 6, 9, 9]


@pytest.mark.parametrize(
    "field, value",
    [
        *[("converged", "yes"), ("depth", "3"), ("proximity", True), ("proximity", math.nan), ("stable", 1)],
        *[("stable", "wobbly"), ("reason", "because"), ("mood", "fine")],
    ],
)
def test_what_the_schema_refuses_is_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        ReasonVerdict.model_validate_json(json.dumps({**make().to_dict(), field: value}))


def part(reason="confident", proximity=0.0, grounded=None, stable=None, confidence=0.5, converged=True, depth=2.0):
    return make(converged, depth, proximity, grounded, stable, reason, confidence)


def test_the_policy_if_nothing_else_is_said():
    assert DoorPolicy() == DoorPolicy(**SHARES, require_grounding=False, patience=2, rule="confidence")


def test_a_share_under_1_is_not_written_as_1():
    shares = (0.9, 0.994, 0.996, 0.9994, 0.9996, 0.99994, 0.99996, 1.0, 0.0)
    assert list(map(digits, shares)) == ["0.90", "0.99", "0.996", "0.999", "0.9996", "0.9999", "0.99996", "1", "0.00"]


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
    ],
)
def test_objections_are_told_in_words(verdict, reasons):
    assert objections(verdict, DoorPolicy()) == reasons
    output = "; ".join(reasons)
    plain = "converge: confidence 0.90, read at 2.00 loops on average."
    assert explain(verdict) == (f"escalate: {output}." if reasons else plain)
    assert explain(verdict, budget_left=False) == (f"abort: {output}." if reasons else plain)


def test_objections_to_a_certificate_and_for_want_of_grounding():
    certificate = DoorPolicy(rule="certificate")
    assert objections(part("out_of_calibration", stable="contract", confidence=0.0), certificate) == []
    saturated, unknown = part("max_depth", converged=False), part(stable="spiral", converged=None)
    output = ["its reason is max_depth", "it did not converge", "its fate is not known"]
    assert objections(saturated, certificate) == output
    assert objections(unknown, certificate) == ["whether it converged is not known", "its fate is spiral"]
    plain = "converge: its exit rule was met by itself and its steps contract, read at 2.00 loops on average."
    assert explain(part(stable="contract", confidence=None), certificate) == plain
    asked = DoorPolicy(require_grounding=True, min_confidence=0.5)
    assert objections(part(), asked) == ["its groundedness is not known"]


@pytest.mark.parametrize(
    "parts, grounded, reason",
    [
        ([part(proximity=0.49)], None, "confident"),
        ([part(proximity=0.5)], None, "collapse"),
        ([part("collapse"), part()], None, "collapse"),
        ([part("divergence"), part("collapse", proximity=0.9)], None, "divergence"),
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


def test_the_reason_and_the_figures_of_the_whole_and_of_drafts():
    whole = aggregate([part(depth=1.0, grounded=0.9), part(depth=4.0, proximity=0.25, grounded=0.75)])
    assert (whole.depth, whole.proximity, whole.grounded) == (2.5, 0.25, 0.75)
    assert aggregate([part("forced", confidence=None)]).confidence is None
    assert aggregate([part(confidence=None), part()]).confidence is None
    assert aggregate([part(confidence=0.0), part()]).confidence == 0.0
    assert aggregate([part(confidence=0.25), part(confidence=1.0)]).confidence == pytest.approx(0.5)
    # a policy may ask for no grounding
    assert aggregate([part()], DoorPolicy(tau_g=None), grounded=0.0).reason == "confident"
    anchored, loose = make(grounded=0.9), make(grounded=0.2, reason="ungrounded")
    assert aggregate([anchored, make(grounded=None)]).grounded == 0.9
    assert aggregate([anchored, loose]).grounded == 0.2 and aggregate([anchored, loose]).reason == "ungrounded"
    # looked up as a whole, the whole decides
    assert aggregate([anchored, loose], grounded=1.0).reason == "threshold_met"


@pytest.mark.parametrize(
    "known, converged",
    [([], None), ([True], True), ([True, False], False), ([True, True, False], True), ([False], False)],
)
def test_where_the_reason_says_nothing_of_loops_the_tokens_do(known, converged):
    parts = [part(converged=item) for item in known] + [part(converged=None)]
    assert aggregate(parts, grounded=0.0).converged is converged
    assert aggregate([part(None, converged=True)]).converged is None


def test_a_strange_answer_keeps_the_reason_of_a_text_that_broke_off():
    for reason in ("collapse", "divergence", "confident", None):
        kept = reason if reason in ("collapse", "divergence") else "out_of_calibration"
        assert with_confidence(part(reason), 0.25, True).reason == kept
        assert with_confidence(part(reason), 0.25, False) == part(reason, confidence=0.25)


def test_a_tokens_confidence_is_that_of_its_entropy_and_its_reason_tells_convergence():
    assert of_token("confident", 3, "spiral", 0.25).confidence is None
    assert of_token("confident", 3, "spiral", 0.25, 0.0).confidence == 1.0
    met = {"threshold_met", "fixed_point", "accel_fixed_point", "confident"}
    assert {reason for reason, known in CONVERGED.items() if known} == met
    assert {reason for reason, known in CONVERGED.items() if not known} == {"max_depth", "collapse", "divergence"}
    assert of_token("fixed", 3, None, 0.0).converged is of_token(None, 3, None, 0.0).converged is None
    result = of_token("max_depth", 3, "spiral", 0.25, 0.5)
    assert result == make(False, 3, 0.25, None, "spiral", "max_depth", math.exp(-0.5))
