"""How much of a claim the context has to bear out, in words or by a model."""

import importlib.util

import pytest

from sigma0.signals.grounding.check import check
from sigma0.signals.grounding.support import SpanSupport


def anchored(text, *context, **more):
    (claim,) = check(text, list(context), **more).claims
    return claim.anchored


@pytest.mark.parametrize(
    "text, share",
    [
        # of a claim with a name half of the other words
        ("Bob painted houses, fences, barns.", True),
        ("Bob painted houses, ladders, wagons.", True),
        ("Bob painted wagons, ladders, horses.", False),
        ("Bob sold wagons, fences, horses, barns, ladders.", False),
        # of a plain statement three quarters
        ("The man painted houses and fences.", True),
        ("The man painted houses and wagons.", True),
        ("The man sold houses and wagons.", False),
        ("The man painted wagons.", False),
    ],
)
def test_words_of_a_claim(text, share):
    assert anchored(text, "Bob painted the houses there. The man has fences. These are barns.") is share


def test_words_that_present_a_result_and_numbers_without_words_need_a_result_alone():
    assert anchored("The total value is 42.", "Compute it.", "42")
    assert not anchored("The total value is 42.", "Compute it, 42.")
    assert not anchored("The grand cow is 42.", "Compute it.", "42")
    assert anchored("It is 5.", "It is 5.") and not anchored("It is 5.", "Bob has 5 cows.")
    (claim,) = check("The answer is 42.", ["It ran.", "42"]).claims
    assert claim.anchored and claim.evidence == "42"


@pytest.mark.parametrize("support, borne_out", [(0.5, True), (0.49, False), (1.0, True), (0.0, False)])
def test_half_of_a_models_support_is_enough(support, borne_out):
    class Model:
        def support(self, claim, evidence):
            return support

    assert anchored("Bob painted houses.", "Bob painted houses.", model=Model()) is borne_out
    # where no passage is near there is nothing to ask about
    (claim,) = check("Zed lies in Rome.", ["Nothing."], model=Model()).claims
    assert (claim.anchored, claim.evidence) == (False, None)


@pytest.mark.parametrize(
    "text, denied",
    [
        ("Bob painted houses and fences.", True),
        ("Bob never painted houses and fences.", False),
        # of four words three are the same, or two
        ("Bob painted houses and barns.", True),
        ("Bob sold houses and barns.", False),
    ],
)
def test_a_passage_that_says_nearly_the_same_denies(text, denied):
    others = "Somebody sold barns."
    assert anchored(text, f"Bob never painted houses and fences. {others}") is not denied


@pytest.mark.parametrize("tolerance", [-0.01, 1.0])
def test_a_tolerance_is_a_share(tolerance):
    with pytest.raises(ValueError, match="tolerance"):
        check("x", "y", tolerance=tolerance)
    assert check("x", "y", tolerance=0.0).score is None


@pytest.mark.parametrize("number, within", [(105, True), (106, False), (95, False), (96, True)])
def test_about_is_within_a_twentieth(number, within):
    assert anchored("Bob saw about 100 cows.", f"Bob saw {number} cows.") is within


def test_shares_and_what_lacks_an_anchor():
    result = check("Bob saw 5 cows. Bob saw 6 cows. Bob saw 7 cows. Lovely!", "Bob saw 5 cows.")
    assert result.score == pytest.approx(1 / 3) and [claim.text for claim in result.unanchored] == [
        "Bob saw 6 cows.", "Bob saw 7 cows.",
    ]  # fmt: skip
    assert result.to_dict()["score"] == result.score and result.to_dict()["claims"][0]["kind"] == "number"


class Detector:
    """In the place of a span model, whose weights cannot be had everywhere: marks the words that the context lacks."""

    def predict(self, context, answer, output_format, min_confidence):
        assert output_format == "spans" and min_confidence == 0.7
        spans, start = [], 0
        for word in answer.split():
            start = answer.index(word, start)
            if word.strip(".") not in context[0]:
                spans.append({"start": start, "end": start + len(word), "confidence": 0.9})
        return spans


def test_support_is_the_share_that_is_not_marked_and_a_claim_needs_words_as_well():
    model = SpanSupport(threshold=0.7, detector=Detector())
    assert model.support("Mary went home", "Mary went home early") == 1.0
    assert model.support("Mary flew home", "Mary went home early") == pytest.approx(1 - 4 / 14)
    assert model.support("", "anything") == 1.0
    model = SpanSupport(threshold=0.7, detector=Detector())
    assert check("Mary went to Rome.", "Mary went to Rome.", model=model).score == 1.0
    assert check("Mary went to Rome.", "Rome saw Mary when she went there.", model=model).score == 1.0
    assert check("Mary went to Oslo.", "Mary went to Rome.", model=model).score == 0.0


def test_a_missing_package_and_a_bad_threshold_are_told():
    if importlib.util.find_spec("lettucedetect") is None:
        with pytest.raises(ValueError, match=r"sigma0-lm\[grounding\]"):
            SpanSupport()
    with pytest.raises(ValueError, match="threshold"):
        SpanSupport(threshold=2.0, detector=Detector())
