"""A canary step by step, without a model: what it observes, follows, changes and ends."""

import pytest
import torch

from sigma0.decode.ops import operations
from sigma0.decode.repetition import TextStats
from sigma0.signals.canary import Actions, Adaptation, CanaryProcessor, CollapseCanary, Tighten, tighten

VOCABULARY = 400


def steps(watch, texts, prompt=(399, 398), scores=None):
    """Feeds texts of equal length through a processor, and gives the scores that each call returned."""
    texts = torch.tensor(texts)
    ids = torch.cat([torch.tensor([prompt] * len(texts)), texts], dim=1)
    flat = torch.zeros(len(texts), VOCABULARY) if scores is None else scores
    return ids, [watch(ids[:, :length], flat.clone()) for length in range(len(prompt), ids.shape[1] + 1)]


def calm(count, start=0):
    return [start + place for place in range(count)]


def looping(count):
    return [1] * count


def test_the_bounds_are_mild_if_nothing_else_is_said():
    assert Adaptation() == Adaptation(
        begin=0.4, penalty=1.3, temperature=1.5, end_bias=5.0, eps_factor=0.5, least_eps=1e-3
    )
    assert Actions() == Actions(softened=0, strongest=0.0, ends_pushed=0)
    assert tighten(0.1, Adaptation(eps_factor=0.25, least_eps=0.03)) == 0.03


def test_it_watches_one_sequence_and_adapts_nothing_if_nothing_else_is_said():
    canary = CollapseCanary()
    watch = canary.processor()
    assert canary.batch_size == 1 and canary.last is None and watch.bounds is None and watch.limit is None
    assert canary.criterion(watch).tau == 0.5 and canary.criterion(watch, 1.0).tau == 1.0
    assert canary.processor(adapt=True).bounds == Adaptation()
    with pytest.raises(ValueError, match="tau"):
        canary.criterion(watch, 1.01)


@pytest.mark.parametrize("shape", [(2,), (2, 5, 1), (3, 5)])
def test_logits_are_a_row_for_each_sequence(shape):
    with pytest.raises(ValueError, match="2 sequences need"):
        CollapseCanary(2).observe(torch.zeros(shape), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 sequences need"):
        CollapseCanary(2).observe(torch.zeros(2, 5), torch.zeros((2, 1), dtype=torch.int64))


def test_an_end_may_have_the_id_0():
    canary = CollapseCanary(eos_token_id=0)
    canary.observe(torch.zeros(1, 4), torch.tensor([2]))
    assert float(canary.run_out(10).end_chance) == 0.25


def test_of_ended_sequences_nothing_is_taken_in():
    canary = CollapseCanary(2)
    logits = torch.zeros(2, 9)
    canary.observe(logits, torch.tensor([1, 2]))
    before = canary.observe(logits, torch.tensor([1, 2]), torch.tensor([False, True]))
    assert canary.tokens.tolist() == [2, 1]
    after = canary.observe(torch.randn(2, 9), torch.tensor([3, 4]), torch.tensor([True, True]))
    assert canary.tokens.tolist() == [2, 1] and torch.equal(after.entropy, before.entropy)


def test_running_out_begins_at_nine_tenths_and_needs_less_than_one_end():
    def status(limit, tokens, eos_logit=-50.0):
        canary = CollapseCanary(eos_token_id=0)
        for _ in range(tokens):
            canary.observe(torch.tensor([[eos_logit, 0.0]]), torch.tensor([1]))
        return canary.run_out(limit)

    assert status(20, 18).running_out.tolist() == [True] and status(20, 17).running_out.tolist() == [False]
    # at even odds one end is expected in two tokens, and half of one in one
    assert status(20, 18, 0.0).running_out.tolist() == [False] and status(20, 19, 0.0).running_out.tolist() == [True]
    # beyond the limit a token is still to come
    assert status(10, 12, 0.0).running_out.tolist() == [True] and status(10, 12, 50.0).running_out.tolist() == [False]
    assert status(1, 1).share.tolist() == [1.0]
    with pytest.raises(ValueError, match="a limit is at least 1"):
        status(0, 1)


def test_a_token_is_observed_once_with_the_scores_that_it_was_sampled_from():
    canary = CollapseCanary()
    watch = canary.processor()
    ids, scores = torch.tensor([[5, 6, 7, 8]]), torch.zeros(1, 9)
    sure = scores.clone()
    sure[0, 7] = 20.0
    assert watch.catch_up(ids[:, :2]) is None
    watch(ids[:, :2], sure)
    assert float(watch.catch_up(ids[:, :3]).margin) == pytest.approx(1.0)
    watch.catch_up(ids[:, :3])
    assert canary.tokens.tolist() == [1]
    watch(ids[:, :3], scores)
    assert float(watch.catch_up(ids).margin) == 0.0 and canary.tokens.tolist() == [2]


@pytest.mark.parametrize(
    "later",
    [
        [[5, 6, 7, 8, 9, 10]],  # two at a time
        [[5, 6]],  # one less
        [[5, 6, 6, 8]],  # another text
        [[5, 6, 7, 8], [5, 6, 7, 8]],  # more sequences
    ],
)
def test_what_does_not_go_on_begins_anew(later):
    canary = CollapseCanary()
    watch = canary.processor()
    steps(watch, [[7]], prompt=(5, 6))
    assert canary.tokens.tolist() == [1]
    watch.catch_up(torch.tensor(later))
    assert canary.tokens.tolist() == [0] and canary.last is None and not watch.over.any()


def test_beams_take_their_readings_ends_and_scores_along():
    canary = CollapseCanary(3, eos_token_id=300)
    watch = canary.processor()
    ids, _ = steps(watch, [looping(40), calm(40), [*calm(39, 50), 300]])
    assert watch.over.tolist() == [False, False, True]
    before, chance = canary.last.proximity.clone(), canary.run_out(100).end_chance
    assert float(before[0]) > 0.5 > float(before[1])
    scores = torch.zeros(3, VOCABULARY)
    scores[0, 7] = 20.0
    watch(ids, scores)
    swapped = torch.cat([ids[[2, 0, 1]], torch.tensor([[9], [1], [9]])], dim=1)
    reading = watch.catch_up(swapped)
    assert watch.over.tolist() == [True, False, False] and canary.tokens.tolist() == [40, 41, 41]
    assert float(reading.proximity[1]) > 0.5 > float(reading.proximity[2])
    assert float(reading.proximity[0]) == float(before[2])
    assert reading.margin[1:].tolist() == pytest.approx([1.0, 0.0])
    assert canary.run_out(100).end_chance.tolist()[0] == chance.tolist()[2]


def test_equal_sequences_keep_their_places():
    canary = CollapseCanary(2)
    watch = canary.processor()
    ids, _ = steps(watch, [calm(3), calm(3)])
    watch.end(torch.tensor([False, True]))
    watch.catch_up(ids)
    assert watch.over.tolist() == [False, True]


def test_texts_are_compared_by_their_last_128_ids():
    canary = CollapseCanary()
    watch = canary.processor()
    ids, _ = steps(watch, [calm(140)])
    for place, goes_on in ((-129, True), (-128, False)):
        other = ids.clone()
        other[0, place] = 350
        watch.catch_up(other)
        assert bool(canary.tokens[0]) is goes_on


@pytest.mark.parametrize("count", [60, 128, 140])
def test_scores_are_softened_by_the_new_ids_alone_and_128_of_them(count):
    canary, bounds = CollapseCanary(2), Adaptation()
    watch = canary.processor(adapt=True)
    scores = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    text = [200 + place for place in range(12)] + looping(count - 12)
    ids, found = steps(watch, [text, calm(count)], scores=scores)
    strength = bounds.strength(float(canary.last.proximity[0]))
    assert 0 < strength < 1
    recent = ids[:1, -min(count, 128) :]
    torch.testing.assert_close(found[-1][:1], bounds.soften(recent, scores[:1], strength))
    assert torch.equal(found[-1][1], scores[1]), "a calm text is left alone"
    assert canary.actions[1] == Actions() and canary.actions[0].softened > 0
    assert (
        canary.actions[0].strongest == pytest.approx(max(strength, canary.actions[0].strongest), abs=1e-6)
        and canary.actions[0].strongest >= strength - 1e-6
    )


def test_an_ended_sequence_is_not_softened():
    canary = CollapseCanary(2)
    watch = canary.processor(adapt=True)
    ids, _ = steps(watch, [looping(60), looping(60)])
    softened = canary.actions[0].softened
    watch.end(torch.tensor([True, False]))
    scores = torch.randn(2, VOCABULARY)
    adapted = watch(torch.cat([ids, ids[:, -1:]], dim=1), scores.clone())
    assert torch.equal(adapted[0], scores[0]) and not torch.equal(adapted[1], scores[1])
    assert [action.softened for action in canary.actions] == [softened, softened + 1]


@pytest.mark.parametrize("tokens, bias", [(17, 0.0), (18, 0.5), (19, 3.0), (20, 5.0), (21, 5.0)])
def test_the_push_to_an_end_grows_over_the_last_tenth(tokens, bias):
    """By a tenth of the bound at nine tenths of the limit, by all of it at the limit."""
    canary = CollapseCanary(eos_token_id=[300, 301])
    watch = canary.processor(adapt=True, limit=20)
    scores = torch.zeros(1, VOCABULARY)
    scores[0, 300:302] = -30.0
    _, found = steps(watch, [calm(tokens)], scores=scores)
    assert found[-1][0, 300:302].tolist() == pytest.approx([bias - 30.0] * 2, abs=1e-4)
    assert torch.equal(found[-1][0, :300], scores[0, :300])
    assert canary.actions[0].ends_pushed == max(0, tokens - 17)


def test_without_a_limit_or_an_end_nothing_is_pushed():
    for ends, limit in ((300, None), (None, 10)):
        canary = CollapseCanary(eos_token_id=ends)
        _, found = steps(canary.processor(adapt=True, limit=limit), [calm(12)])
        assert not found[-1].any() and canary.actions == [Actions()]


def test_a_criterion_fires_at_its_threshold_and_once():
    canary = CollapseCanary(2)
    watch = canary.processor()
    ids, _ = steps(watch, [looping(40), calm(40)])
    criterion = canary.criterion(watch, float(canary.last.proximity[0]))
    assert criterion(ids, None).tolist() == [True, False] and watch.over.tolist() == [True, False]
    assert criterion(ids, None).tolist() == [False, False]


def test_a_criterion_that_has_seen_nothing_ends_nothing():
    canary = CollapseCanary(2)
    criterion = canary.criterion(CanaryProcessor(canary, None, None), 0.01)
    assert criterion(torch.tensor([[1], [2]]), None).tolist() == [False, False]


def proximity(text):
    stats = TextStats(operations("auto", torch.device("cpu")))
    return stats.take([stats.text()] * len(text), text)[-1][-1]


def test_tightening_reaches_as_far_back_as_the_longest_period():
    """128 ids hold a period of 64 twice, and one less does not."""
    text = calm(100, 200) + calm(64) * 2
    bounds = Adaptation(begin=0.0)
    strength = bounds.strength(proximity(text))
    assert strength == bounds.strength(proximity(text[-128:])) > bounds.strength(proximity(text[-127:]))
    scores = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    adapted = Tighten(0, bounds)(torch.tensor([text]), scores)
    torch.testing.assert_close(adapted, bounds.soften(torch.tensor([text[-128:]]), scores, strength))


def test_tightening_penalises_128_ids():
    scores = torch.ones(1, VOCABULARY)
    adapted = Tighten(0)(torch.tensor([[7] * 30 + [350] + [351] + looping(127)]), scores)[0]
    assert float(adapted[1]) == float(adapted[351]) < float(adapted[350]) == float(adapted[2])
