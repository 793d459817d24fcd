"""Sampling of sequences: what is refused, what lies in the tables, what is computed, and what needs the host."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from sigma0.decode.logits import Alternative, logprobs_of
from sigma0.decode.sampling import process
from sigma0.decode.sampling_params import (
    SamplingParams,
    SamplingProgram,
    SamplingSettings,
    SequenceSampling,
    check_logit_bias,
    sampling_of,
)

CPU = torch.device("cpu")
PLAIN = [1.0, -1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("temperature", [1e-9, 5.0], [0.0, -1.0, math.nan]),
        ("top_k", [0, 1], [-1]),
        ("top_p", [None, 0.0, 1.0], [-0.01, 1.01]),
        ("min_p", [0.0, 1.0], [-0.01, 1.01]),
        ("repetition_penalty", [1e-9, 2.0], [0.0, -1.0]),
        ("bad_words", [(), ((0,),), ((1, 0), (2,))], [((),), ((-1,),), ((0, -1),)]),
        ("logit_bias", [(), ((0, -1.5), (1, 2.0))], [((-1, 1.0),), ((1, math.inf),), ((1, 1.0), (1, 1.0))]),
    ],
)
def test_values_that_transformers_refuses(name, good, bad):
    for value in good:
        assert getattr(SequenceSampling(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ValueError, match=f"{name} has to be"):
            SequenceSampling(**{name: value})


def test_by_default_the_likeliest_id_is_taken():
    plain = SequenceSampling()
    assert (plain.draws, plain.seed, plain.prompt, plain.padding, plain.min_length) == (False, 0, 0, 0, 0)
    settings = SamplingSettings(2, CPU)
    settings.set(0, plain, plain)
    assert settings.numbers.tolist() == [PLAIN] * 3 and not settings.table.any()
    assert settings.program() == SamplingProgram() and settings.program().is_greedy
    logits = torch.randn(2, 9)
    assert process(settings, settings.program(), logits, torch.tensor([0, 2]), None, torch.tensor([1, 1])) is logits
    assert [tuple(item.shape) for item in settings.tensors] == [
        (3, 6), (3, 5), (3, 2), (3, 1), (3, 1, 1), (3, 1), (3, 1),
    ]  # fmt: skip


FULL = SamplingParams(
    temperature=0.5, top_p=0.75, top_k=3, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.25,
    frequency_penalty=-0.5, logit_bias=((2, 1.0),),
)  # fmt: skip


def test_sampling_of_a_request():
    current = {
        "repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": -0.5, "prompt": 4,
        "logit_bias": ((2, 1.0),),
    }  # fmt: skip
    assert SequenceSampling.of(FULL, 9, 4) == SequenceSampling(
        draws=True, seed=9, temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, **current
    )
    assert SequenceSampling.of(replace(FULL, temperature=0.0), 9, 4) == SequenceSampling(**current)
    assert SequenceSampling.of(replace(FULL, top_p=1.0)).top_p is None
    drawn = SequenceSampling.of(SamplingParams(temperature=1.0))
    assert drawn == SequenceSampling(draws=True) and SequenceSampling.of(SamplingParams()) == SequenceSampling()
    assert SamplingParams() == SamplingParams(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, (), None)


def test_tables_of_sequences_keep_nothing_of_earlier_ones():
    settings = SamplingSettings(3, CPU)
    one = replace(SequenceSampling.of(FULL, 9, 4), padding=1, min_length=6, eos=(7, 8), bad_words=((1,), (2, 3, 4)))
    two = SequenceSampling(draws=True, seed=5, eos=(3,), bad_words=((6, 5),), logit_bias=((0, 2.0), (1, -1.0)))
    settings.set(1, one, two)
    # what is set anew keeps nothing, and the tables stay as wide
    before = [item.shape for item in settings.tensors]
    settings.set(1, SequenceSampling(eos=(1,), bad_words=((9,),), logit_bias=((4, 0.5),)))
    assert [item.shape for item in settings.tensors] == before
    assert settings.eos[1].tolist() == [1, -1] and settings.words[1].tolist() == [[-1, -1, 9], [-1, -1, -1]]
    assert settings.biased[1].tolist() == [4, -1]
    assert settings.numbers[1].tolist() == PLAIN and settings.numbers[2].tolist() == PLAIN
    settings.clear(2)
    assert settings.program() == SamplingProgram(bad_words=True, bias=True)
    assert all(torch.equal(item[2], item[3]) for item in settings.tensors)
    settings.reset()
    assert all(torch.equal(item[row], item[3]) for item in settings.tensors for row in range(3))
    assert settings.program().is_greedy


def test_lists_of_ids_widen_one_by_one():
    settings = SamplingSettings(1, CPU)
    settings.set(0, SequenceSampling(bad_words=((1,), (2,))))
    assert settings.words.tolist()[0] == [[1], [2]]
    settings.set(0, SequenceSampling(bad_words=((1, 2, 3),)))
    assert settings.words.tolist()[0] == [[1, 2, 3], [-1, -1, -1]]
    kept = settings.tensors
    settings.set(0, SequenceSampling(bad_words=((4,), (5, 6)), eos=(1,), logit_bias=((1, 1.0),)))
    assert all(item is old for item, old in zip(settings.tensors, kept, strict=True))
    assert settings.words.tolist() == [[[-1, -1, 4], [-1, 5, 6]], [[-1, -1, -1]] * 2]


@pytest.mark.parametrize(
    "wanted, expected",
    [
        ({"draws": True}, {"draws": True}),
        ({"presence_penalty": -0.5}, {"output_penalties": True}),
        ({"frequency_penalty": 0.5}, {"output_penalties": True}),
        ({"repetition_penalty": 0.5}, {"repetition": True}),
        ({"bad_words": ((1,),)}, {"bad_words": True}),
        ({"logit_bias": ((1, 0.5),)}, {"bias": True}),
        ({"min_length": 3}, {}),
        ({"eos": (1,)}, {}),
        ({"min_length": 3, "eos": (1,)}, {"min_length": True}),
        ({"temperature": 0.5}, {"temperature": True}),
        ({"top_p": 1.0}, {"top_p": True}),
        ({"min_p": 0.01}, {"min_p": True}),
        *[({"top_k": k}, {"top_k": most}) for k, most in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16))],
        ({"prompt": 3, "padding": 2, "seed": 4}, {}),
    ],
)
def test_what_sampling_has_to_compute(wanted, expected):
    settings = SamplingSettings(2, CPU)
    settings.set(1, SequenceSampling(**wanted))
    assert settings.program() == SamplingProgram(**expected)
    assert settings.program().is_greedy == (not expected)
    reads = {"output_penalties", "repetition", "bad_words"}
    assert settings.program().reads_ids == bool(reads & set(expected))


def test_a_bias_is_of_an_id_of_the_head():
    assert check_logit_bias({0: 1, 9: -2.5}, 10) == ((0, 1.0), (9, -2.5)) and check_logit_bias({}, 10) == ()
    for bad in (10, -1, "1", True, 1.0):
        with pytest.raises(ValueError, match="ids from 0 to 9"):
            check_logit_bias({bad: 1.0}, 10)
    for bad in (True, "1", math.inf, math.nan, None):
        with pytest.raises(ValueError, match="finite numbers"):
            check_logit_bias({1: bad}, 10)


def test_log_probabilities_of_a_token_and_of_the_likeliest():
    logits = torch.tensor([0.5, 2.0, -1.0, torch.finfo(torch.float32).min])
    expected = torch.log_softmax(logits.double(), -1)
    output, best = logprobs_of(logits, 2, 2)
    assert output == pytest.approx(float(expected[2])) and [item.id for item in best] == [1, 0]
    assert [item.logprob for item in best] == pytest.approx(expected[[1, 0]].tolist())
    # no more than there are, and none that may not follow
    assert [item.id for item in logprobs_of(logits, 0, 9)[1]] == [1, 0, 2] and logprobs_of(logits, 0, 0)[1] == ()
    assert isinstance(best[0], Alternative)
    logits[0] = -math.inf
    assert [item.id for item in logprobs_of(logits, 1, 4)[1]] == [1, 2]
    half = logprobs_of(torch.tensor([3.0, 3.5], dtype=torch.bfloat16), 1, 1)[0]
    assert half == pytest.approx(-math.log1p(math.exp(-0.5)), abs=1e-6)


TEMPERATURE = processors.TemperatureLogitsWarper(0.5)
TOP_K = processors.TopKLogitsWarper(5)
REPETITION = processors.RepetitionPenaltyLogitsProcessor(1.2)


class Other(processors.TemperatureLogitsWarper):
    pass


def test_every_part_is_read():
    items = [
        processors.SequenceBiasLogitsProcessor({(4,): 1.5, (0,): -2.0}),
        processors.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([0, 2])),
        # a word that is an end itself is allowed
        processors.NoBadWordsLogitsProcessor([[1], [2, 3], [7]], 7),
        processors.MinLengthLogitsProcessor(4, 7),
        processors.MinNewTokensLengthLogitsProcessor(3, 5, 7),
        TEMPERATURE,
        TOP_K,
        processors.TopPLogitsWarper(0.9),
        processors.MinPLogitsWarper(0.1),
    ]
    first, second = sampling_of(LogitsProcessorList(items), 2, [11, 12], 20)
    assert (first.draws, first.seed, first.temperature, first.top_k, first.top_p, first.min_p) == (
        True, 11, 0.5, 5, 0.9, 0.1,
    )  # fmt: skip
    assert (first.repetition_penalty, first.padding, second.padding, second.seed) == (1.2, 0, 2, 12)
    assert (first.bad_words, first.min_length, first.eos) == (((1,), (2, 3)), 8, (7,))
    assert first.logit_bias == second.logit_bias == ((4, 1.5), (0, -2.0))


def test_nothing_is_greedy():
    assert [item.draws for item in sampling_of(LogitsProcessorList(), 3)] == [False] * 3
    assert [item.seed for item in sampling_of(LogitsProcessorList(), 2, [5, 6])] == [5, 6]


def test_a_number_of_ignored_ids_holds_for_all():
    items = LogitsProcessorList([processors.RepetitionPenaltyLogitsProcessor(1.2, 4)])
    assert [item.padding for item in sampling_of(items, 2)] == [4, 4]


@pytest.mark.parametrize(
    "items",
    [
        [TOP_K, TEMPERATURE],
        [TEMPERATURE, REPETITION],
        [TEMPERATURE, TEMPERATURE],
        [Other(0.5)],
        [processors.TypicalLogitsWarper(0.5)],
        [REPETITION, lambda ids, scores: scores],
        [processors.SequenceBiasLogitsProcessor([[[1, 2], -1.0]])],
        [processors.SequenceBiasLogitsProcessor([[[1], -1.0], [[99], 1.0]])],
        [processors.SequenceBiasLogitsProcessor([[[1], float("-inf")]])],
        [processors.TopKLogitsWarper(5, filter_value=-1e9)],
        [processors.TopPLogitsWarper(0.5, min_tokens_to_keep=2)],
        [processors.MinPLogitsWarper(0.5, min_tokens_to_keep=2)],
        [processors.TopKLogitsWarper(5, min_tokens_to_keep=2)],
        [processors.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([0, 1, 2]))],
        [processors.NoBadWordsLogitsProcessor([[1], [99]])],
        [processors.MinLengthLogitsProcessor(3, 7), processors.MinNewTokensLengthLogitsProcessor(3, 5, 8)],
    ],
)
def test_anything_else_needs_the_host(items):
    assert sampling_of(LogitsProcessorList(items), 2, vocabulary=20) is None
