"""The canary: its readings, memory, and its place in transformers' generate."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, StoppingCriteriaList

from sigma0.decode.ops import TORCH, operations
from sigma0.decode.repetition import TextStats
from sigma0.signals.canary import Actions, Adaptation, CanaryProcessor, CollapseCanary, Tighten, tighten
from tests.kernels import definitions
from tests.ranges import check_range
from tests.reference import tiny_llama

# No text of this model has it.
UNUSED = 1
NAMES = ("entropy", "margin", "entropy_drop", "periodicity", "echo", "distinct")


@pytest.fixture(scope="module")
def llama():
    # with this seed the second of the two texts below runs in circles, and the first does not
    return tiny_llama(1, 40, intermediate_size=32, num_hidden_layers=1)


@pytest.mark.exhaustive
@settings(max_examples=25, deadline=None)
@given(st.integers(2, 20), st.integers(1, 150), st.integers(1, 3), st.integers(0, 2**16))
def test_readings_are_the_definitions_for_each_sequence(vocabulary, tokens, batch, seed):
    rng = np.random.default_rng(seed)
    canary, ids, entropies = CollapseCanary(batch), [[] for _ in range(batch)], [[] for _ in range(batch)]
    for _ in range(tokens):
        logits = rng.standard_normal((batch, vocabulary)).astype(np.float32)
        chosen = rng.integers(0, vocabulary, batch)
        reading = canary.observe(torch.from_numpy(logits), torch.from_numpy(chosen))
        for row in range(batch):
            stats, _, ids[row] = definitions.collapse(logits[row], ids[row], int(chosen[row]), entropies[row])
            entropies[row].append(stats[0])
    for name, value in zip(NAMES, (*stats[:4], *stats[5:]), strict=True):
        assert float(getattr(reading, name)[-1]) == pytest.approx(value, rel=1e-3, abs=1e-3), name
    assert reading.proximity.shape == (batch,) and bool(((reading.proximity >= 0) & (reading.proximity <= 1)).all())


@pytest.mark.grid(fast=4, slow=1)
@pytest.mark.parametrize("period", [1, 2, 9, 13, 14, 27, 40, 64])
def test_loops_are_noticed(period):
    """Whatever the logits say: here they are flat."""
    canary, flat = CollapseCanary(), torch.zeros(1, 300)
    rng = np.random.default_rng(period)
    # a span that comes again as it was, and one of which a token changes each time
    for changes, bar in ((False, 0.8), (True, 0.6))[: 1 + (period >= 8)]:
        canary.reset()
        span, changed = rng.permutation(300)[:period], None
        for number in range(3 * period + 80):
            if changes and number % period == 0:
                changed = int(rng.integers(period))
            token = int(rng.integers(300) if number % period == changed else span[number % period])
            reading = canary.observe(flat, torch.tensor([token]))
            if number + 1 >= max(3 * period, 40):
                assert float(reading.proximity) > bar, (changes, number)


def watched(batch=1, ends=None, **settings):
    canary = CollapseCanary(batch, eos_token_id=ends)
    return canary, canary.processor(**settings)


def generate(llama, watch=None, criterion=None, **kwargs):
    ids = torch.tensor([[3, 9, 4], [7, 7, 2]])
    return llama.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=70, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
        logits_processor=LogitsProcessorList([] if watch is None else [watch]),
        stopping_criteria=StoppingCriteriaList([] if criterion is None else [criterion]), **kwargs,
    )  # fmt: skip


def by_hand(plain, length):
    """What a canary reads that is shown the tokens of a text one by one."""
    canary = CollapseCanary(2)
    for number in range(length):
        yield canary.observe(plain.logits[number], plain.sequences[:, 3 + number])


def test_it_watches_any_model_and_changes_nothing(llama):
    canary = CollapseCanary(2)
    plain, seen = generate(llama), generate(llama, canary.processor())
    assert torch.equal(plain.sequences, seen.sequences)
    assert canary.tokens.tolist() == [69, 69]  # the last token is chosen after the last call
    *_, reading = by_hand(plain, 69)
    torch.testing.assert_close(canary.last.proximity, reading.proximity)
    torch.testing.assert_close(canary.last.entropy_drop, reading.entropy_drop)


def test_a_criterion_ends_the_sequence_that_loops_and_no_other(llama):
    plain = generate(llama, eos_token_id=UNUSED)
    first = {}
    for number, reading in enumerate(by_hand(plain, 70), start=1):
        for row in range(2):
            if float(reading.proximity[row]) >= 0.5:
                first.setdefault(row, number)
    assert list(first) == [1], "choose another seed"
    canary, watch = watched(2)
    out = generate(llama, watch, canary.criterion(watch, 0.5), eos_token_id=UNUSED)
    assert UNUSED not in out.sequences
    for row in range(2):
        length = first.get(row, 70)
        assert torch.equal(out.sequences[row, 3 : 3 + length], plain.sequences[row, 3 : 3 + length])
        assert out.sequences[row, 3 + length :].eq(0).all()


def test_what_a_broken_model_says_is_forgotten():
    """Logits that are no numbers are told as unknown, and blind the canary to nothing."""
    calm, loops = CollapseCanary(2), torch.tensor([5, 5])
    logits = torch.randn(2, 60, generator=torch.Generator().manual_seed(0))
    for number in range(100):
        said = logits.clone()
        if number in (3, 50):
            said[0], said[1, 7] = torch.nan, torch.inf
        reading = calm.observe(said, loops)
        assert reading.proximity.isfinite().all()
        assert reading.entropy.isnan().all() == (number in (3, 50))
    assert (reading.proximity > 0.8).all() and reading.entropy_drop.isfinite().all()


def test_reordered_beams_are_followed(llama):
    canary, watch = watched(4)
    out = generate(llama, watch, num_beams=2, eos_token_id=UNUSED)
    assert out.sequences.shape == (2, 73) and canary.tokens.tolist() == [69] * 4


def test_the_chance_of_an_end_is_an_exponential_mean():
    canary, rng = CollapseCanary(1, eos_token_id=[1, 4]), np.random.default_rng(3)
    mean, sizes = None, [tensor.shape for tensor in vars(canary._state).values()]
    for number in range(30):
        logits = 3 * rng.standard_normal((1, 10))
        canary.observe(torch.from_numpy(logits), torch.tensor([number % 10]))
        chances = np.exp(logits[0]) / np.exp(logits[0]).sum()
        chance = chances[1] + chances[4]
        mean = chance if mean is None else mean + 0.05 * (chance - mean)
        assert float(canary.run_out(100).end_chance) == pytest.approx(mean, rel=1e-5)
    assert abs(mean - chance) > 0.01, "the last value would do as well"
    assert [tensor.shape for tensor in vars(canary._state).values()] == sizes, "a stream takes constant memory"


def test_scores_are_tightened_by_the_text_so_far_and_its_last_ids():
    """By all of a text as by its last ids, and on those alone; the prompt does not count."""
    rng, bounds = np.random.default_rng(0), Adaptation()
    text = [38, *rng.integers(0, 30, 250).tolist(), *[k % 7 for k in range(160)]]
    ids = torch.tensor([[39] * 5 + text, [39] * 5 + rng.integers(0, 30, len(text)).tolist()])
    scores = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    stats = TextStats(TORCH)
    strength = bounds.strength(stats.take([stats.text()] * len(text), text)[-1][-1])
    assert 0.2 < strength <= 1
    penalised = scores[0].clone()
    for token in set(text[-128:]):
        factor = 1 + strength * 0.3
        penalised[token] = scores[0, token] * factor if scores[0, token] < 0 else scores[0, token] / factor
    before = scores.clone()
    adapted = Tighten(5)(ids, scores)
    torch.testing.assert_close(adapted[0], penalised / (1 + strength * 0.5))
    assert torch.equal(adapted[1], scores[1]) and torch.equal(scores, before), "a text without circles is left alone"
    assert torch.equal(Tighten(ids.shape[1])(ids, scores), scores), "without new ids nothing is known"


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("begin", (0.0, 0.99), (-0.01, 1.0)),
        ("penalty", (1.0,), (0.99,)),
        ("temperature", (1.0,), (0.99,)),
        ("end_bias", (0.0,), (-0.01,)),
        ("eps_factor", (0.01, 1.0), (0.0, 1.01)),
        ("least_eps", (1e-09,), (0.0,)),
    ],
)
def test_bounds_lie_in_their_range(name, good, bad):
    check_range(Adaptation, name, good, bad)


def test_the_strength_rises_from_its_begin_to_one_and_entropy_alone_stays_under_a_half():
    bounds = Adaptation(begin=0.4)
    assert [bounds.strength(value) for value in (0.0, 0.4, 0.7, 1.0)] == pytest.approx([0.0, 0.0, 0.5, 1.0])
    assert Adaptation(begin=0.0).strength(0.25) == 0.25
    canary = CollapseCanary()
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        logits = torch.zeros(1, 5000)
        logits[0, number] = 50.0 if number > 40 else 0.0
        reading = canary.observe(logits, torch.randint(0, 5000, (1,), generator=generator))
        assert float(reading.proximity) <= 0.5


def test_what_does_not_fit_is_refused():
    canary, ids = CollapseCanary(2), torch.zeros(2, dtype=torch.int64)
    for logits in (torch.zeros(1, 5), torch.zeros(2), torch.zeros(2, 5, 1), torch.zeros(3, 5)):
        with pytest.raises(ValueError, match="2 sequences need"):
            canary.observe(logits, ids)
    for wrong, message in ((ids[:1], "2 sequences need"), (ids[:, None], "2 sequences need"), (ids.float(), "int64")):
        with pytest.raises(ValueError, match=message):
            canary.observe(torch.zeros(2, 5), wrong)
    with pytest.raises(ValueError, match="batch_size"):
        CollapseCanary(0)
    for tau in (0, 1.01):
        with pytest.raises(ValueError, match="tau"):
            canary.criterion(canary.processor(), tau=tau)


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


def test_nothing_is_adapted_if_nothing_else_is_said_and_the_bounds_are_mild():
    assert Adaptation() == Adaptation(
        begin=0.4, penalty=1.3, temperature=1.5, end_bias=5.0, eps_factor=0.5, least_eps=1e-3
    )
    assert Actions() == Actions(softened=0, strongest=0.0, ends_pushed=0)
    assert tighten(0.1, Adaptation(eps_factor=0.25, least_eps=0.03)) == 0.03
    assert (tighten(0.1), tighten(1e-4)) == (0.05, 1e-4), "what is smaller already stays"
    canary, watch = watched()
    assert canary.batch_size == 1 and canary.last is None and watch.bounds is None and watch.limit is None
    assert canary.criterion(watch).tau == 0.5 and canary.criterion(watch, 1.0).tau == 1.0
    assert canary.processor(adapt=True).bounds == Adaptation()


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
    assert status(1, 1).share.tolist() == [1.0] and CollapseCanary().run_out(10).end_chance.isnan().all()
    with pytest.raises(ValueError, match="a limit is at least 1"):
        status(0, 1)


def test_a_token_is_observed_once_with_the_scores_that_it_was_sampled_from():
    canary, watch = watched()
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
    canary, watch = watched()
    steps(watch, [[7]], prompt=(5, 6))
    assert canary.tokens.tolist() == [1]
    watch.catch_up(torch.tensor(later))
    assert canary.tokens.tolist() == [0] and canary.last is None and not watch.over.any()


def test_beams_take_their_readings_ends_and_scores_along():
    canary, watch = watched(3, 300)
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


def test_texts_are_compared_by_their_last_128_ids_and_equal_ones_keep_their_places():
    canary, watch = watched()
    ids, _ = steps(watch, [calm(140)])
    for place, goes_on in ((-129, True), (-128, False)):
        other = ids.clone()
        other[0, place] = 350
        watch.catch_up(other)
        assert bool(canary.tokens[0]) is goes_on
    _, watch = watched(2)
    ids, _ = steps(watch, [calm(3), calm(3)])
    watch.end(torch.tensor([False, True]))
    watch.catch_up(ids)
    assert watch.over.tolist() == [False, True]


@pytest.mark.parametrize("count", [60, 128, 140])
def test_scores_are_softened_by_the_new_ids_alone_and_128_of_them(count):
    canary, watch = watched(2, adapt=True)
    bounds = Adaptation()
    scores = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    text = [200 + place for place in range(12)] + looping(count - 12)
    ids, result = steps(watch, [text, calm(count)], scores=scores)
    strength = bounds.strength(float(canary.last.proximity[0]))
    assert 0 < strength < 1
    recent = ids[:1, -min(count, 128) :]
    torch.testing.assert_close(result[-1][:1], bounds.soften(recent, scores[:1], strength))
    assert torch.equal(result[-1][1], scores[1]), "a calm text is left alone"
    assert canary.actions[1] == Actions() and canary.actions[0].softened > 0
    assert canary.actions[0].strongest >= strength - 1e-6


@pytest.mark.parametrize("tokens, bias", [(17, 0.0), (18, 0.5), (19, 3.0), (20, 5.0), (21, 5.0)])
def test_the_push_to_an_end_grows_over_the_last_tenth(tokens, bias):
    """By a tenth of the bound at nine tenths of the limit, by all of it at the limit."""
    canary, watch = watched(1, [300, 301], adapt=True, limit=20)
    scores = torch.zeros(1, VOCABULARY)
    scores[0, 300:302] = -30.0
    _, result = steps(watch, [calm(tokens)], scores=scores)
    assert result[-1][0, 300:302].tolist() == pytest.approx([bias - 30.0] * 2, abs=1e-4)
    assert torch.equal(result[-1][0, :300], scores[0, :300])
    assert canary.actions[0].ends_pushed == max(0, tokens - 17)


def test_without_a_limit_or_an_end_nothing_is_pushed():
    for ends, limit in ((300, None), (None, 10)):
        canary, watch = watched(1, ends, adapt=True, limit=limit)
        _, result = steps(watch, [calm(12)])
        assert not result[-1].any() and canary.actions == [Actions()]


def test_a_criterion_fires_at_its_threshold_and_once_and_ends_nothing_unseen():
    canary, watch = watched(2)
    ids, _ = steps(watch, [looping(40), calm(40)])
    criterion = canary.criterion(watch, float(canary.last.proximity[0]))
    assert criterion(ids, None).tolist() == [True, False] and watch.over.tolist() == [True, False]
    assert criterion(ids, None).tolist() == [False, False]
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


def test_an_ended_sequence_is_neither_softened_nor_pushed():
    canary, watch = watched(2, 300, adapt=True, limit=60)
    scores = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    ids, _ = steps(watch, [looping(60), looping(60)], scores=scores)
    before = canary.actions[0]
    watch.end(torch.tensor([True, False]))
    adapted = watch(torch.cat([ids, ids[:, -1:]], dim=1), scores.clone())
    assert torch.equal(adapted[0], scores[0]) and not torch.equal(adapted[1], scores[1])
    ended, other = canary.actions
    assert ended == before and (other.softened, other.ends_pushed) == (before.softened + 1, before.ends_pushed + 1)
