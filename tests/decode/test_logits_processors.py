"""Which prepared processors settings can stand for, and which need the host."""

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from sigma0.decode.sampling_params import sampling_of

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
