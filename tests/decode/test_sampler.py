"""Scores are transformers' own, each row by its own settings; draws depend on nothing but their sequence."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as processors

from sigma0.decode.sampling import OWN_DRAW, distribution, draw, process, uniform
from sigma0.decode.sampling_params import SamplingProgram, SamplingSettings, SequenceSampling, sampling_of

CPU = torch.device("cpu")
TENSORS = ("numbers", "table", "keys", "eos", "words", "biased", "biases")


class OutputPenalty(LogitsProcessor):
    """OpenAI's: logits of an id that occurs c times in the output lose `frequency * c`, and `presence` if c > 0."""

    def __init__(self, prompt, presence, frequency):
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores)
        output_ids = input_ids[:, self.prompt :]
        counts.scatter_add_(1, output_ids, torch.ones_like(output_ids, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


def bias_of(biases):
    return processors.SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in biases})


def prepared(wanted):
    """What transformers would be given for the same."""
    chosen = LogitsProcessorList()
    if wanted.logit_bias:
        chosen.append(bias_of(wanted.logit_bias))
    if wanted.presence_penalty or wanted.frequency_penalty:
        chosen.append(OutputPenalty(wanted.prompt, wanted.presence_penalty, wanted.frequency_penalty))
    if wanted.repetition_penalty != 1.0:
        penalty = wanted.repetition_penalty
        chosen.append(processors.RepetitionPenaltyLogitsProcessor(penalty, torch.tensor([wanted.padding])))
    if wanted.bad_words:
        chosen.append(processors.NoBadWordsLogitsProcessor([list(word) for word in wanted.bad_words]))
    if wanted.min_length:
        chosen.append(processors.MinLengthLogitsProcessor(wanted.min_length, list(wanted.eos)))
    if wanted.temperature != 1.0:
        chosen.append(processors.TemperatureLogitsWarper(wanted.temperature))
    if wanted.top_k:
        chosen.append(processors.TopKLogitsWarper(wanted.top_k))
    if wanted.top_p is not None:
        chosen.append(processors.TopPLogitsWarper(wanted.top_p))
    if wanted.min_p > 0:
        chosen.append(processors.MinPLogitsWarper(wanted.min_p))
    return chosen


@st.composite
def sampled(draw_from, vocabulary, longest):
    """Settings of a sequence, some of them left out."""

    def maybe(values, default):
        return draw_from(st.one_of(st.just(default), values))

    ids = st.integers(0, vocabulary - 1)
    return SequenceSampling(
        draws=draw_from(st.booleans()),
        seed=draw_from(st.integers(-(2**63), 2**63)),
        temperature=maybe(st.floats(0.05, 5.0), 1.0),
        top_k=maybe(st.integers(1, 2 * vocabulary), 0),
        top_p=maybe(st.sampled_from([0.0, 1e-9, 0.3, 0.5, 0.9, 0.999, 1.0]), None),
        min_p=maybe(st.sampled_from([1e-6, 0.1, 0.5, 1.0]), 0.0),
        repetition_penalty=maybe(st.floats(0.2, 3.0), 1.0),
        presence_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        frequency_penalty=maybe(st.floats(-2.0, 2.0), 0.0),
        prompt=draw_from(st.integers(0, longest)),
        padding=draw_from(st.integers(0, longest)),
        min_length=maybe(st.integers(1, 2 * longest), 0),
        eos=tuple(draw_from(st.lists(ids, min_size=1, max_size=3))),
        bad_words=tuple(draw_from(st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=4, unique=True))),
        logit_bias=tuple(draw_from(st.dictionaries(ids, st.floats(-100, 100), max_size=4)).items()),
    )


@st.composite
def cases(draw_from):
    """Settings of S sequences, ids, and K rows of logits with ties and forbidden ids."""
    vocabulary, rows = draw_from(st.sampled_from([2, 7, 596])), draw_from(st.sampled_from([1, 5]))
    longest = 9
    wanted = [draw_from(sampled(vocabulary, longest)) for _ in range(draw_from(st.integers(1, 4)))]
    source = torch.Generator().manual_seed(draw_from(st.integers(0, 2**31)))
    logits = torch.randn(rows, vocabulary, generator=source) * draw_from(st.sampled_from([0.01, 1.0, 30.0]))
    if draw_from(st.booleans()):  # ties
        logits = logits.round()
    if draw_from(st.booleans()):  # what a model itself forbids; never all ids
        forbidden = torch.rand(logits.shape, generator=source) < 0.4
        forbidden[:, int(torch.randint(vocabulary, (1,), generator=source))] = False
        logits = logits.masked_fill(forbidden, -math.inf)
    # few different ids, so that they repeat and complete words
    ids = torch.randint(min(vocabulary, 4), (len(wanted), longest + 3), generator=source)
    sequences = torch.randint(len(wanted), (rows,), generator=source)
    lengths = torch.randint(1, longest + 1, (rows,), generator=source)
    dtype = draw_from(st.sampled_from([torch.float32, torch.bfloat16]))
    return wanted, logits.to(dtype), sequences, ids, lengths


def tables(wanted):
    """One after the other, or at once: the same."""
    rows, at_once = SamplingSettings(len(wanted), CPU), SamplingSettings(len(wanted), CPU)
    for sequence, item in enumerate(wanted):
        rows.set(sequence, item)
    at_once.set(0, *wanted)
    for name in TENSORS:
        assert torch.equal(getattr(rows, name), getattr(at_once, name)), name
    assert rows.program() == at_once.program()
    return rows


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(cases())
def test_scores_are_those_of_transformers(case):
    wanted, logits, sequences, ids, lengths = case
    rows = tables(wanted)
    before = logits.clone()
    scores = process(rows, rows.program(), logits, sequences, ids, lengths)
    assert scores.dtype == torch.float32 and torch.equal(logits, before)
    for row, (sequence, length) in enumerate(zip(sequences.tolist(), lengths.tolist(), strict=True)):
        expected = prepared(wanted[sequence])(ids[sequence, :length][None], logits[row : row + 1].float())[0]
        torch.testing.assert_close(scores[row], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(cases())
def test_settings_are_read_back_from_prepared_processors(case):
    wanted, logits, sequences, ids, lengths = case
    for item in wanted:
        # of these penalties transformers has no processor
        item = replace(item, presence_penalty=0.0, frequency_penalty=0.0)
        (result,) = sampling_of(prepared(item), 1, [item.seed] if item.draws else None, logits.shape[1])
        alone, again = tables([item]), tables([result])
        at = torch.zeros_like(sequences)
        scores = [process(rows, rows.program(), logits, at, ids[:1], lengths) for rows in (alone, again)]
        torch.testing.assert_close(*scores, rtol=0, atol=0, equal_nan=True)
        drawn = [draw(rows, rows.program(), scores[0], at, lengths, OWN_DRAW) for rows in (alone, again)]
        assert torch.equal(*drawn)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_company_changes_neither_scores_nor_draws(case, data):
    wanted, logits, sequences, ids, lengths = case
    rows = tables(wanted)
    scores = process(rows, rows.program(), logits, sequences, ids, lengths)
    drawn = draw(rows, rows.program(), scores, sequences, lengths, OWN_DRAW)
    row = data.draw(st.integers(0, len(logits) - 1))
    alone = SamplingSettings(3, CPU)
    alone.set(2, wanted[int(sequences[row])])
    # in a wider table, whose rest is anything
    wider = torch.randint(0, 2, (3, ids.shape[1] + 5))
    wider[2, : ids.shape[1]] = ids[sequences[row]]
    at, length = torch.tensor([2]), lengths[row : row + 1]
    result = process(alone, alone.program(), logits[row : row + 1], at, wider, length)
    torch.testing.assert_close(result[0], scores[row], rtol=0, atol=0, equal_nan=True)
    assert int(draw(alone, alone.program(), result, at, length, OWN_DRAW)) == int(drawn[row])


def test_greedy_rows_take_the_likeliest_beside_rows_that_draw():
    rows = tables([SequenceSampling(), SequenceSampling(draws=True, seed=1), SequenceSampling(repetition_penalty=9.0)])
    logits = torch.zeros(300, 11)
    logits[:, 4] = 1.0
    sequences, positions = torch.arange(300) % 3, torch.arange(300)
    ids = torch.full((3, 4), 4)
    scores = process(rows, rows.program(), logits, sequences, ids, torch.full((300,), 2))
    drawn = draw(rows, rows.program(), scores, sequences, positions, OWN_DRAW)
    assert (drawn[0::3] == 4).all() and len(drawn[1::3].unique()) > 5 and (drawn[2::3] == 4).all()
    result = distribution(rows, rows.program(), scores, sequences)
    assert torch.equal(result[0], torch.nn.functional.one_hot(torch.tensor(4), 11).float())
    torch.testing.assert_close(result[1], torch.softmax(logits[1], -1))
    assert torch.equal(draw(rows, SamplingProgram(), logits, sequences, positions, OWN_DRAW), logits.argmax(-1))


def test_logits_that_are_not_finite_give_some_id():
    everything = SequenceSampling(
        draws=True, seed=3, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.5, bad_words=((1,), (2, 3)), min_length=9, eos=(0,), logit_bias=((1, 5.0),),
    )  # fmt: skip
    rows = tables([everything, SequenceSampling()])
    logits = torch.zeros(8, 7)
    logits[0] = math.nan
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    logits[3] = math.inf
    logits[4, 2] = math.inf
    logits[5], logits[6, 1] = math.nan, math.nan
    sequences = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    lengths = torch.full((8,), 2)
    scores = process(rows, rows.program(), logits, sequences, torch.tensor([[1, 2, 0], [0, 0, 0]]), lengths)
    drawn = draw(rows, rows.program(), scores, sequences, lengths, OWN_DRAW)
    assert ((drawn >= 0) & (drawn < 7)).all()
    distribution(rows, rows.program(), scores, sequences)


def test_a_row_that_belongs_to_nobody_is_greedy():
    rows = tables([SequenceSampling(draws=True, temperature=9.0, seed=8)] * 2)
    logits = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    nobody, positions = torch.full((50,), 2), torch.arange(50)
    scores = process(rows, rows.program(), logits, nobody, None, positions)
    assert torch.equal(draw(rows, rows.program(), scores, nobody, positions, OWN_DRAW), logits.argmax(-1))


EVERYTHING = [
    SequenceSampling(),
    SequenceSampling(draws=True, seed=1, temperature=0.7, top_k=5, top_p=0.8, min_p=0.05),
    SequenceSampling(draws=True, seed=2, presence_penalty=0.4, repetition_penalty=1.3, bad_words=((3,), (1, 2, 0))),
    SequenceSampling(frequency_penalty=0.2, prompt=2, min_length=6, eos=(1, 4), logit_bias=((5, 3.0), (7, -1.0))),
]


def test_scores_of_some_settings_are_those_of_transformers():
    source = torch.Generator().manual_seed(3)
    rows, ids = tables(EVERYTHING), torch.randint(6, (4, 9), generator=source)
    logits = torch.randn(4, 20, generator=source)
    scores = process(rows, rows.program(), logits, torch.arange(4), ids, torch.tensor([9, 9, 9, 5]))
    for row, length in enumerate((9, 9, 9, 5)):
        expected = prepared(EVERYTHING[row])(ids[row : row + 1, :length], logits[row : row + 1].clone())
        torch.testing.assert_close(scores[row : row + 1], expected, rtol=0, atol=0)


@pytest.mark.slow
def test_the_whole_of_it_compiles_without_a_break_and_reads_nothing():
    rows = tables(EVERYTHING)
    program = rows.program()
    assert all(vars(program).values())

    def step(logits, sequences, ids, lengths, purpose):
        scores = process(rows, program, logits, sequences, ids, lengths)
        uniforms = uniform(rows.keys.index_select(0, sequences), lengths, purpose)
        drawn = draw(rows, program, scores, sequences, lengths, purpose)
        return scores, drawn, distribution(rows, program, scores, sequences), uniforms

    source = torch.Generator().manual_seed(4)
    given = [
        (
            torch.randn(6, 40, generator=source),
            torch.tensor([0, 1, 2, 3, 2, 1]),
            torch.randint(5, (4, 10), generator=source),
            torch.tensor([3, 9, 4, 5, 7, 1]),
            torch.tensor([0, 1, 2, 3, 0, 0]) + turn,
        )
        for turn in range(2)
    ]
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    for arguments in given:
        for result, expected in zip(compiled(*arguments), step(*arguments), strict=True):
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
    on_meta = SamplingSettings(4, CPU)
    for name in TENSORS:
        setattr(on_meta, name, getattr(rows, name).to("meta"))
    # a tensor without values cannot be read
    rows = on_meta
    assert step(*(item.to("meta") for item in given[0]))[1].shape == (6,)


@pytest.mark.slow
def test_the_compiled_sampler_draws_the_same_ids():
    rows = tables(EVERYTHING)
    program = rows.program()

    def step(logits, sequences, ids, lengths):
        scores = process(rows, program, logits, sequences, ids, lengths)
        return draw(rows, program, scores, sequences, lengths, OWN_DRAW)

    source = torch.Generator().manual_seed(4)
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    for _ in range(20):
        logits, ids = torch.randn(8, 596, generator=source), torch.randint(596, (4, 30), generator=source)
        sequences, lengths = torch.arange(8) % 4, torch.randint(1, 30, (8,), generator=source)
        assert torch.equal(compiled(logits, sequences, ids, lengths), step(logits, sequences, ids, lengths))
