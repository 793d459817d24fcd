"""The adapter of a span model, with a detector in its place: no weights of one can be had everywhere."""

import importlib.util

import pytest

from sigma0.signals.grounding.check import check
from sigma0.signals.grounding.support import SpanSupport


class Detector:
    """Marks the words that the context lacks."""

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
