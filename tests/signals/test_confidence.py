"""A stored confidence: its formula, what is out of calibration, and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.signals.answer import judge_answer
from sigma0.signals.confidence import ConfidenceModel, new_share, pair_codes
from sigma0.signals.evidence import FEATURES
from sigma0.signals.tokens import Token
from sigma0.signals.verdict import DoorPolicy, aggregate, door, explain, of_token
from tests.calibrated import FIGURES
from tests.ranges import check_range

FITTED = {
    "features": ("mean_entropy", "mean_deepest_surprise"),
    "weights": (0.5, 1.25),
    "bias": -4.0,
    "most": (2.0, 3.0),
    "longest": 12,
    "pairs": tuple(sorted(pair_codes([1, 2, 3, 1, 5]))),
    "most_new": 0.25,
    "deciles": tuple(k / 10 for k in range(1, 10)),
    **FIGURES,
}
MODEL = ConfidenceModel(**FITTED)


def evidence(**known):
    result = np.zeros(len(FEATURES))
    for name, value in known.items():
        result[FEATURES.index(name)] = value
    return result


@given(st.floats(0, 30), st.floats(0, 30))
def test_confidence_is_its_formula(entropy, surprise):
    doubt = 0.5 * math.log(entropy + 1e-4) + 1.25 * math.log(surprise + 1e-4) + 4.0
    output = MODEL.confidence(evidence(mean_entropy=entropy, mean_deepest_surprise=surprise))
    assert output == pytest.approx(1 / (1 + math.exp(doubt)), rel=1e-9)


def test_what_is_not_known_gives_none_and_a_doubt_without_bounds_nearly_nothing():
    assert MODEL.confidence(evidence(mean_entropy=math.nan)) is None
    # but a feature that is not read may be unknown
    assert MODEL.confidence(evidence(length=math.nan)) is not None
    sure = ConfidenceModel(**{**FITTED, "weights": (100.0, 100.0)})
    assert sure.confidence(evidence(mean_entropy=1e9, mean_deepest_surprise=1e9)) == pytest.approx(math.exp(-700))


@pytest.mark.parametrize(
    "known, prompt_ids, why",
    [
        ({}, [1, 2, 3], None),
        ({}, [], None),
        ({}, [7], None),
        # one new pair of four is allowed, two are not
        ({}, [9, 1, 2, 3, 1], None),
        ({}, [9, 1, 2, 3, 9], "50% of the prompt's pairs of words are new"),
        ({"mean_entropy": 2.0}, [1, 2], None),
        ({"mean_entropy": 2.01}, [1, 2], "mean_entropy of 2.01 is beyond the 2 of the calibration"),
        ({"length": 12}, [1, 2], None),
        ({"length": 13}, [1, 2], "its 13 tokens are beyond the 12"),
        ({"most_entropy": 99.0}, [1, 2], None),
    ],
)
def test_what_is_out_of_calibration(known, prompt_ids, why):
    output = MODEL.strangeness(evidence(**known), prompt_ids)
    assert output is None if why is None else why in output
    plain = ConfidenceModel(**{**FITTED, "pairs": None})
    assert plain.strangeness(evidence(), [99, 98, 97]) is None, "without pairs no prompt is strange"


def test_shares_of_new_pairs():
    assert pair_codes([1, 2, 3]) == [2**24 + 2, 2 * 2**24 + 3] and pair_codes([1]) == []
    known = frozenset(pair_codes([4, 5, 6]))
    assert new_share([4, 5, 6, 4], known) == pytest.approx(1 / 3)
    assert new_share([5, 4], known) == 1.0 and new_share([5], known) == 0.0


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"features": ("mood", "mean_entropy")}, "reads 'mood'"),
        ({"weights": (1.0,)}, "1 weights"),
        ({"weights": (1.0, -1.0)}, "weights.1"),
        ({"features": (), "weights": (), "most": ()}, "at least one"),
        ({"deciles": (0.1,) * 8}, "nine rising"),
        ({"deciles": tuple(k / 10 for k in range(9, 0, -1))}, "nine rising"),
        ({"bias": math.nan}, "bias"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_bad_models_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ConfidenceModel.parse({**FITTED, **wrong})


def token(entropy=0.01, surprise=0.01, reason="confident", **more):
    return Token(
        1, "", 2, reason, proximity=0.1, margin=0.9, entropy=entropy, deepest_surprise=surprise, deepest_entropy=0.01,
        deepest_margin=0.9, deepest_agrees=True, **more,
    )  # fmt: skip


def test_the_confidence_of_an_answer_with_and_without_a_model():
    answer = [token(0.1), token(0.5), token(None, reason="forced")]
    verdict = judge_answer(answer, 4, DoorPolicy(), None, False, None, [1, 2])
    assert verdict.confidence == pytest.approx(math.exp(-0.3))
    assert verdict == aggregate(
        [of_token(item.reason, item.depth, item.fate, item.proximity, item.entropy) for item in answer]
    )
    for unknown in ([*answer, token(None)], [token(None, None, reason="forced")]):
        assert judge_answer(unknown, 4, DoorPolicy(), None, False, None, []).confidence is None
    answer = [token(0.1, 0.2), token(0.5, 0.4), token(9.0, 9.0, reason="forced")]
    verdict = judge_answer(answer, 4, DoorPolicy(), None, False, MODEL, [1, 2, 3])
    assert verdict.confidence == MODEL.confidence(evidence(mean_entropy=0.3, mean_deepest_surprise=0.3))
    assert verdict.reason == "confident" and ConfidenceModel.parse(MODEL.to_dict()) == MODEL
    forced = [token(None, None, reason="forced")]
    assert judge_answer(forced, 4, DoorPolicy(), None, False, MODEL, [1, 2]).confidence is None


def test_out_of_calibration_shuts_the_door_and_says_so():
    policy = DoorPolicy(min_confidence=0.5)
    known, strange = ([1, 2, 3], [9, 8, 7])
    assert door(judge_answer([token()], 4, policy, None, False, MODEL, known), policy) == "converge"
    verdict = judge_answer([token()], 4, policy, None, False, MODEL, strange)
    assert verdict.reason == "out_of_calibration" and door(verdict, policy) == "escalate"
    assert "unlike what its confidence was calibrated on" in explain(verdict, policy)
    # a text that broke off keeps that as its reason
    assert judge_answer([token()], 4, policy, None, True, MODEL, strange).reason == "collapse"
    # and the reason of a part is that of the whole
    for reason in ("confident", "max_depth"):
        assert aggregate([verdict, of_token(reason, 2, "contract", 0.0, 0.0)]).reason == "out_of_calibration"


def test_the_beginning_of_an_answer_has_no_calibrated_confidence():
    answer = [token()] * 3
    whole = judge_answer(answer, 4, DoorPolicy(), None, False, MODEL, [1, 2], cut=False)
    cut = judge_answer(answer, 4, DoorPolicy(), None, False, MODEL, [1, 2], cut=True)
    assert whole.confidence is not None and cut == whole.model_copy(update={"confidence": None})
    assert door(cut, DoorPolicy(min_confidence=0.0)) == "escalate"
    # as long as the longest of the calibration, which may have been cut there
    long = judge_answer([token()] * 12, 4, DoorPolicy(), None, False, MODEL, [1, 2], cut=True)
    assert long.confidence is not None
    # the score without a calibration is of the tokens that there are
    assert judge_answer(answer, 4, DoorPolicy(), None, False, None, [1, 2], cut=True).confidence is not None


def test_numbers_and_names_of_a_strangers_file_are_bounded():
    for wrong in ({"longest": 10**400}, {"features": ("x" * 10**6, "mean_entropy")}, {"deciles": (0.5,) * 10**5}):
        with pytest.raises(ValueError, match=r"longest|confidence_model") as caught:
            ConfidenceModel.parse({**FITTED, **wrong})
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("longest", (1, 2**24 - 1), (0, 2**24)),
        ("answers", (1,), (0,)),
        ("pairs", ((0,), (), None), ((-1,),)),
        ("most", ((0.0, 0.0),), ((-0.1, 1.0), (1.0, math.inf))),
        ("weights", ((0.0, 0.0),), ((1.0, math.inf),)),
        *((name, (0.0, 1.0), (-0.1, 1.1)) for name in ("most_new", "brier", "calibration_error")),
        ("auroc", (0.0, 1.0, None), (-0.1, 1.1)),
        ("deciles", ((0.5,) * 9,), ((0.5,) * 10, (0.5,) * 8 + (1.1,))),
        ("bias", (-9.0,), (math.inf,)),
    ],
)
def test_fields_lie_in_their_range(name, good, bad):
    check_range(ConfidenceModel, name, good, bad, **FITTED)
