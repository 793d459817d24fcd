"""Repetition counted an id at a time, against the same numbers of whole windows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.decode.repetition import CollapseStop, EntropyDrop, Repeated, Repetition
from sigma0.kernels.collapse import ALPHA, FLOOR, WARM_UP, WINDOW, CollapseRule, Part, repetition_of


@st.composite
def texts(draw):
    """Ids with spans that come back, with and without faults, between others."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    ids = []
    for _ in range(draw(st.integers(1, 3))):
        span = rng.integers(0, draw(st.sampled_from([2, 5, 300])), draw(st.integers(1, 70)))
        part = np.resize(span, draw(st.integers(1, 260)))
        faults = rng.random(len(part)) < draw(st.sampled_from([0.0, 0.05]))
        ids += np.where(faults, rng.integers(0, 300, len(part)), part).tolist()
    return ids


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(texts(), st.integers(1, 9))
def test_counts_are_those_of_the_whole_window(ids, together):
    text, ring, rings = Repetition(), np.zeros(WINDOW, dtype=np.int64), []
    for number, token_id in enumerate(ids):
        text.append(token_id)
        if number % together == 0:
            text.at(-1)
        ring[number % WINDOW] = token_id
        rings.append(ring.copy())
    expected = repetition_of(torch.from_numpy(np.stack(rings)), torch.arange(1, len(ids) + 1))
    told = [text.at(number) for number in range(len(ids))]
    for place, name in enumerate(("periodicity", "lag", "echo", "distinct")):
        assert [getattr(each, name) for each in told] == expected[place].tolist(), name
    assert text.tokens == len(ids) and told[-1].tokens == len(ids)


def test_the_proximity_of_the_ids_is_that_of_the_kernels_formula_without_logits():
    rng, rule = np.random.default_rng(0), CollapseRule()
    text = Repetition()
    for token_id in [*rng.integers(0, 50, 40), *np.resize(rng.integers(0, 50, 13), 60)]:
        text.append(int(token_id))
    for number in range(text.tokens):
        each = text.at(number)
        settled = min(1.0, max(0.0, (number - 2) / 37))
        parts = (each.periodicity, each.echo * settled, 1 - each.distinct, 0.0, 0.0)
        expected = rule.proximity(*(torch.tensor(part, dtype=torch.float64) for part in parts))
        assert each.proximity(rule) == pytest.approx(float(expected), abs=1e-12)
    assert text.at(-1).proximity(rule) > 0.9


def test_a_drop_is_measured_against_the_entropies_before_it():
    rng = np.random.default_rng(1)
    fold, mean, variance, observed = EntropyDrop(), 0.0, 0.0, 0
    for value in [*rng.normal(2, 0.4, 20), float("nan"), *rng.normal(1, 0.4, 20)]:
        told = fold.take(float(value))
        if not np.isfinite(value):
            assert told == 0.0
            continue
        expected = 0.0 if observed < WARM_UP else (mean - value) / np.sqrt(max(variance, FLOOR))
        assert told == pytest.approx(expected, rel=1e-4, abs=1e-5)
        step = value - mean
        if observed:
            mean, variance = mean + ALPHA * step, (1 - ALPHA) * (variance + ALPHA * step * step)
        else:
            mean = value
        observed += 1


@pytest.mark.parametrize("period", [1, 5, 17, 40])
def test_a_text_is_ended_once_it_has_run_in_circles_for_a_while(period):
    rng, rule = np.random.default_rng(period), CollapseStop()
    text, ended = Repetition(), None
    ids = [*range(100, 130), *np.resize(rng.permutation(60)[:period], 200).tolist()]
    for number, token_id in enumerate(ids):
        text.append(token_id)
        if rule.ends(text):
            ended = number + 1
            break
    assert ended is not None and 30 + period < ended <= 30 + max(3 * period, 40) + 2 * rule.running
    assert ended % rule.every == 0
    last = [text.at(number).proximity(rule.rule) for number in range(ended - rule.running, ended)]
    assert min(last) >= rule.tau


def test_a_text_without_repetition_is_not_ended():
    text, rule = Repetition(), CollapseStop()
    for token_id in np.random.default_rng(0).integers(0, 400, 600).tolist():
        text.append(token_id)
        assert not rule.ends(text)


@pytest.mark.parametrize("tokens, weight", [(1, 0), (3, 0), (4, 1 / 37), (39, 36 / 37), (40, 1), (41, 1), (500, 1)])
def test_the_echo_of_a_short_text_counts_less(tokens, weight):
    """A share of the 4-grams of 40 ids, which are 37."""
    repeated = Repeated(0.0, 0, 1.0, 1.0, tokens)
    assert repeated.echo_weight == weight
    rule = CollapseRule(echo=Part(0.0, 1.0, 0.5))
    assert repeated.proximity(rule) == pytest.approx(weight / 2, abs=1e-12)


def test_ids_alone_tell_of_no_drop_and_no_margin():
    rule = CollapseRule(drop=Part(-2.0, 2.0, 0.2), margin=Part(-1.0, 1.0, 0.1))
    repeated = Repeated(0.0, 0, 0.0, 1.0, 50)
    assert repeated.proximity(rule) == repeated.proximity(rule, 0.0, 0.0) == pytest.approx(0.15)
    assert repeated.proximity(rule, drop=2.0) == pytest.approx(0.25)
    assert repeated.proximity(rule, margin=1.0) == pytest.approx(0.2)
    few = Repeated(0.0, 0, 0.0, 0.25, 50)
    assert few.proximity(CollapseRule(sameness=Part(0.0, 1.0, 0.5))) == pytest.approx(0.375)


@pytest.mark.parametrize("running, every", [(1, 1), (3, 1), (4, 4), (5, 3), (16, 4)])
def test_the_last_few_proximities_decide_at_every_few_ids(running, every):
    ids = [*range(30), *np.resize(np.arange(9), 60).tolist(), *range(100, 130)]
    text, proximities, taus = Repetition(), [], (0.0, 0.3, 0.9)
    for number, token_id in enumerate(ids, start=1):
        text.append(token_id)
        proximities.append(text.at(-1).proximity(CollapseRule()))
        last = proximities[-running:]
        # the least of them is reached, too
        for tau in (*taus, min(last)):
            due = len(last) == running and number % every == 0
            assert CollapseStop(tau, running, every).ends(text) == (due and min(last) >= tau)
    assert max(proximities) > 0.9


def test_a_counted_run_ends_a_text_as_the_proximities_do():
    rule = CollapseStop(running=3, every=4)
    assert [(tokens, high) for tokens in range(1, 9) for high in range(5) if rule.ends_after(tokens, high)] == [
        (4, 3), (4, 4), (8, 3), (8, 4),
    ]  # fmt: skip
    assert (CollapseStop().tau, CollapseStop().running, CollapseStop().every) == (0.9, 16, 4)


def test_shares_are_rounded_to_float32():
    text = Repetition()
    for token_id in [5, 6, 5]:
        text.append(token_id)
    assert text.at(-1).distinct == float(np.float32(2 / 3)) != 2 / 3
    assert (text.at(0).tokens, text.at(2).tokens) == (1, 3)
