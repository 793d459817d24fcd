"""Evidence: features of answers against their definition, told once more in plain Python."""

import math
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.signals.evidence import FEATURES, SIGNS, evidence_of
from sigma0.signals.tokens import Token

SHARES = st.floats(0, 1)
NATS = st.floats(0, 20)


@st.composite
def tokens(draw):
    return Token(
        id=1, text="", depth=draw(st.integers(1, 6)),
        reason=draw(st.sampled_from(["confident", "max_depth", "threshold_met"])),
        fate=draw(st.sampled_from([None, "contract", "spiral", "diverge"])), proximity=draw(SHARES),
        margin=draw(SHARES), entropy=draw(NATS), deepest_surprise=draw(NATS), deepest_entropy=draw(NATS),
        deepest_margin=draw(SHARES), deepest_agrees=draw(st.booleans()),
    )  # fmt: skip


def by_hand(answer, loops):
    signs = {
        "entropy": [token.entropy for token in answer],
        "doubt": [1 - token.margin for token in answer],
        "depth": [token.depth / loops for token in answer],
        "unmet": [token.reason == "max_depth" for token in answer],
        "proximity": [token.proximity for token in answer],
        "spiral": [token.fate == "spiral" for token in answer],
        "diverge": [token.fate == "diverge" for token in answer],
        "deepest_surprise": [token.deepest_surprise for token in answer],
        "deepest_entropy": [token.deepest_entropy for token in answer],
        "deepest_doubt": [1 - token.deepest_margin for token in answer],
        "deepest_differs": [not token.deepest_agrees for token in answer],
        "entropy_rise": [max(0.0, token.deepest_entropy - token.entropy) for token in answer],
    }
    assert tuple(signs) == SIGNS
    result = {}
    for name, values in signs.items():
        ranked = sorted(map(float, values), reverse=True)
        result[f"mean_{name}"], result[f"most_{name}"] = mean(ranked), ranked[0]
        result[f"worst_{name}"] = mean(ranked[: max(1, round(len(ranked) / 10))])
    return result


@given(st.lists(tokens(), min_size=1, max_size=40), st.none() | SHARES)
def test_features_are_their_definition(answer, grounded):
    output = dict(zip(FEATURES, evidence_of(answer, 6, grounded).tolist(), strict=True))
    expected = {
        **by_hand(answer, 6), "length": len(answer), "ungrounded": 0.0 if grounded is None else 1 - grounded,
    }  # fmt: skip
    assert output.keys() == expected.keys()
    for name, value in expected.items():
        assert output[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@given(st.lists(tokens(), min_size=1, max_size=12), st.data())
def test_what_is_not_known_of_one_token_is_not_known_of_the_answer(answer, data):
    place = data.draw(st.integers(0, len(answer) - 1))
    blank = Token(1, "", 2, "confident", proximity=0.0, fate="contract")
    output = dict(zip(FEATURES, evidence_of([*answer[:place], blank, *answer[place:]], 6, None), strict=True))
    for name, value in output.items():
        unknown = any(sign in name for sign in ("entropy", "doubt", "deepest"))
        assert math.isnan(value) == unknown, name


def test_no_tokens_are_no_evidence():
    with pytest.raises(ValueError, match="without tokens"):
        evidence_of([], 4, None)
    assert np.isnan(evidence_of([Token(1, "", 1, "forced")], 4, None)).any()
