"""The canary: its readings, memory, and its place in transformers' generate."""

import gc
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, StoppingCriteriaList

from sigma0.decode.ops import TORCH
from sigma0.decode.repetition import TextStats
from sigma0.signals.canary import Adaptation, CollapseCanary, Tighten, tighten
from tests.kernels import definitions

# No text of this model has it.
UNUSED = 1
NAMES = ("entropy", "margin", "entropy_drop", "periodicity", "distinct", "echo")


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(1)  # the second of the two texts below runs in circles, the first does not
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


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
    entropy, margin, drop, periodicity, _, echo, distinct = stats
    expected = dict(zip(NAMES, (entropy, margin, drop, periodicity, distinct, echo), strict=True))
    for name, value in expected.items():
        assert float(getattr(reading, name)[-1]) == pytest.approx(value, rel=1e-3, abs=1e-3), name
    assert reading.proximity.shape == (batch,) and bool(((reading.proximity >= 0) & (reading.proximity <= 1)).all())


@pytest.mark.grid(fast=4, slow=1)
@pytest.mark.parametrize("period", [1, 2, 9, 13, 14, 27, 40, 64])
def test_loops_are_noticed(period):
    """Whatever the logits say: here they are flat."""
    canary, flat = CollapseCanary(), torch.zeros(1, 300)
    spans = {"exact": 0.8, "changed": 0.6}
    rng = np.random.default_rng(period)
    for kind, bar in spans.items():
        if kind == "changed" and period < 8:
            continue
        canary.reset()
        span = rng.permutation(300)[:period]
        for number in range(3 * period + 80):
            if kind == "changed" and number % period == 0:
                changed = int(rng.integers(period))
            token = int(span[number % period])
            if kind == "changed" and number % period == changed:
                token = int(rng.integers(300))
            reading = canary.observe(flat, torch.tensor([token]))
            if number + 1 >= max(3 * period, 40):
                assert float(reading.proximity) > bar, (kind, number)


def test_entropy_and_margin_alone_stay_under_a_half():
    canary = CollapseCanary()
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        logits = torch.zeros(1, 5000)
        logits[0, number] = 50.0 if number > 40 else 0.0
        reading = canary.observe(logits, torch.randint(0, 5000, (1,), generator=generator))
        assert float(reading.proximity) <= 0.5


@pytest.mark.exhaustive
def test_a_long_stream_takes_constant_memory():
    canary, generator = CollapseCanary(eos_token_id=1), torch.Generator().manual_seed(0)
    logits = torch.randn(1, 50, generator=generator)
    ids = torch.randint(0, 50, (3_000, 1), generator=generator)

    def sizes():
        return [tensor.shape for tensor in vars(canary._state).values()]

    before = sizes()
    for row in ids[:200]:
        canary.observe(logits, row)
    tracemalloc.start()
    for row in ids[200:]:
        canary.observe(logits, row)
    # what a collection frees is no growth
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sizes() == before and int(canary.tokens) == 3_000
    assert grown < 100_000


def test_what_does_not_fit_is_refused():
    canary = CollapseCanary(2)
    for logits, ids, message in (
        (torch.zeros(1, 5), torch.zeros(2, dtype=torch.long), "2 sequences need"),
        (torch.zeros(2, 5), torch.zeros(1, dtype=torch.long), "2 sequences need"),
        (torch.zeros(2, 5), torch.zeros(2), "int64"),
    ):
        with pytest.raises(ValueError, match=message):
            canary.observe(logits, ids)
    with pytest.raises(ValueError, match="batch_size"):
        CollapseCanary(0)
    with pytest.raises(ValueError, match="tau"):
        canary.criterion(canary.processor(), tau=0)
    with pytest.raises(ValueError, match="penalty"):
        Adaptation(penalty=0.5)


def generate(llama, watch=None, criterion=None, new=70, prompts=((3, 9, 4), (7, 7, 2)), **kwargs):
    return llama.generate(
        torch.tensor(prompts), attention_mask=torch.ones(len(prompts), 3, dtype=torch.long), max_new_tokens=new,
        do_sample=False, return_dict_in_generate=True, output_logits=True,
        logits_processor=LogitsProcessorList([] if watch is None else [watch]),
        stopping_criteria=StoppingCriteriaList([] if criterion is None else [criterion]), **kwargs,
    )  # fmt: skip


def test_it_watches_any_model_and_changes_nothing(llama):
    canary = CollapseCanary(2)
    plain, watched = generate(llama), generate(llama, canary.processor())
    assert torch.equal(plain.sequences, watched.sequences)
    assert canary.tokens.tolist() == [69, 69]  # the last token is chosen behind the last call
    by_hand = CollapseCanary(2)
    for number in range(69):
        reading = by_hand.observe(plain.logits[number], plain.sequences[:, 3 + number])
    torch.testing.assert_close(canary.last.proximity, reading.proximity)
    torch.testing.assert_close(canary.last.entropy_drop, reading.entropy_drop)


def test_a_criterion_ends_the_sequence_that_loops_and_no_other(llama):
    plain = generate(llama, eos_token_id=UNUSED)
    by_hand, first = CollapseCanary(2), {}
    for number in range(70):
        reading = by_hand.observe(plain.logits[number], plain.sequences[:, 3 + number])
        for row in range(2):
            if float(reading.proximity[row]) >= 0.5:
                first.setdefault(row, number + 1)
    assert list(first) == [1], "choose another seed"
    canary = CollapseCanary(2)
    watch = canary.processor()
    out = generate(llama, watch, canary.criterion(watch, 0.5), eos_token_id=UNUSED)
    assert UNUSED not in out.sequences
    for row in range(2):
        length = first.get(row, 70)
        assert torch.equal(out.sequences[row, 3 : 3 + length], plain.sequences[row, 3 : 3 + length])
        assert out.sequences[row, 3 + length :].eq(0).all()


def test_a_run_begins_anew(llama):
    canary = CollapseCanary(2)
    watch = canary.processor()
    generate(llama, watch)
    once = canary.last.proximity.clone()
    generate(llama, watch)
    assert canary.tokens.tolist() == [69, 69]
    torch.testing.assert_close(canary.last.proximity, once)


def loops_in(out, row):
    """Share of the tokens that repeat the one some lag back, at the best lag, over the whole text."""
    ids = out.sequences[row, 3:]
    return max(float((ids[lag:] == ids[:-lag]).float().mean()) for lag in range(1, 40))


def test_adapting_breaks_a_loop_within_its_bounds(llama):
    canary = CollapseCanary(2)
    plain = generate(llama, new=150)
    bounds = Adaptation(penalty=1.8, temperature=1.5)
    adapted = generate(llama, canary.processor(adapt=True, bounds=bounds), new=150)
    softened = [action.softened for action in canary.actions]
    assert sum(softened) > 0 and all(0 <= action.strongest <= 1 for action in canary.actions)
    assert loops_in(adapted, int(np.argmax(softened))) < 0.7 * loops_in(plain, int(np.argmax(softened)))


def test_running_out_has_a_reading_of_its_own():
    canary = CollapseCanary(2, eos_token_id=[1])
    logits = torch.zeros(2, 10)
    logits[0, 1], logits[1, 1] = 9.0, -20.0
    for number in range(95):
        canary.observe(logits, torch.tensor([number % 7 + 2, 3]))
    status = canary.run_out(100)
    assert status.share.tolist() == pytest.approx([0.95, 0.95])
    assert status.running_out.tolist() == [False, True]
    assert canary.run_out(1000).running_out.tolist() == [False, False]
    # from nine tenths of the limit on, and not before
    assert canary.run_out(112).running_out.tolist() == canary.run_out(106).running_out.tolist() == [False, False]
    assert canary.run_out(105).running_out.tolist() == [False, True]
    assert CollapseCanary().run_out(10).end_chance.isnan().all()
    with pytest.raises(ValueError, match="limit"):
        canary.run_out(0)


def test_near_the_limit_the_end_is_pushed(llama):
    canary = CollapseCanary(2, eos_token_id=UNUSED)
    watch = canary.processor(adapt=True, limit=40, bounds=Adaptation(begin=0.99, end_bias=100.0))
    plain = generate(llama, new=40)
    assert UNUSED not in plain.sequences
    out = generate(llama, watch, new=40, eos_token_id=UNUSED)
    assert out.sequences.shape[1] <= 43 and (out.sequences == UNUSED).any()
    assert all(action.ends_pushed >= 1 for action in canary.actions)
    assert out.sequences.shape[1] >= 3 + 36


def test_tightening_is_bounded():
    assert tighten(0.1) == 0.05
    assert tighten(0.0015) == 1e-3
    assert tighten(1e-4) == 1e-4


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


def test_an_ended_sequence_is_not_read_in_its_pads(llama):
    plain = generate(llama, eos_token_id=UNUSED)
    said = plain.sequences[:, 3:].tolist()
    end = next(token for token in said[0] if token not in said[1])
    canary = CollapseCanary(2, eos_token_id=end)
    generate(llama, canary.processor(), eos_token_id=end)
    length = said[0].index(end) + 1
    assert length < 69 and canary.tokens.tolist() == [length, 69]
    alone = CollapseCanary(2)
    for number in range(length):
        reading = alone.observe(plain.logits[number], plain.sequences[:, 3 + number])
    assert float(canary.last.proximity[0]) == float(reading.proximity[0])


def test_reordered_beams_are_followed(llama):
    canary = CollapseCanary(4)
    watch = canary.processor()
    ids = torch.tensor([[3, 9, 4], [7, 7, 2]])
    out = llama.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, num_beams=2,
        eos_token_id=UNUSED, logits_processor=LogitsProcessorList([watch]), return_dict_in_generate=True,
    )  # fmt: skip
    assert out.sequences.shape == (2, 43)
    assert canary.tokens.tolist() == [39] * 4


def test_the_chance_of_an_end_is_an_exponential_mean():
    canary, rng = CollapseCanary(1, eos_token_id=[1, 4]), np.random.default_rng(3)
    mean = None
    for number in range(30):
        logits = 3 * rng.standard_normal((1, 10))
        canary.observe(torch.from_numpy(logits), torch.tensor([number % 10]))
        chances = np.exp(logits[0]) / np.exp(logits[0]).sum()
        chance = chances[1] + chances[4]
        mean = chance if mean is None else mean + 0.05 * (chance - mean)
        assert float(canary.run_out(100).end_chance) == pytest.approx(mean, rel=1e-5)
    assert abs(mean - chance) > 0.01, "the last value would do as well"


def test_an_ended_sequence_is_not_pushed(llama):
    canary = CollapseCanary(2, eos_token_id=UNUSED)
    watch = canary.processor(adapt=True, limit=10, bounds=Adaptation(begin=0.99))
    ids, scores = torch.randint(2, 40, (2, 12), generator=torch.Generator().manual_seed(0)), torch.zeros(2, 40)
    scores[:, UNUSED] = -20.0
    for length in range(1, 11):
        watch(ids[:, :length], scores.clone())
    assert [action.ends_pushed for action in canary.actions] == [1, 1]
    watch.end(torch.tensor([True, False]))
    adapted = watch(ids[:, :11], scores.clone())
    assert [action.ends_pushed for action in canary.actions] == [1, 2]
    assert torch.equal(adapted[0], scores[0]) and float(adapted[1, UNUSED]) > -20.0


@pytest.mark.parametrize("period", [1, 7])
def test_scores_are_tightened_by_the_text_so_far_and_its_last_ids(period):
    """By all of a text as by its last ids, and on those alone; the prompt does not count."""
    rng, bounds = np.random.default_rng(0), Adaptation()
    text = [38, *rng.integers(0, 30, 250).tolist(), *[int(k % period) for k in range(160)]]
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
    for value in good:
        assert getattr(Adaptation(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ValueError, match=name):
            Adaptation(**{name: value})


def test_the_strength_rises_from_its_begin_to_one():
    bounds = Adaptation(begin=0.4)
    assert [bounds.strength(value) for value in (0.0, 0.4, 0.7, 1.0)] == pytest.approx([0.0, 0.0, 0.5, 1.0])
    assert Adaptation(begin=0.0).strength(0.25) == 0.25
