"""Tokens that go up: equal to both models run from scratch at every token, whatever goes up and when."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sigma0
from sigma0 import ExitConfig
from sigma0.ladder import (
    Always,
    AnyOf,
    Entropy,
    FidelityLadder,
    Hysteresis,
    Margin,
    Never,
    Random,
    Rung,
    Saturation,
    Signs,
    replay,
)
from sigma0.ladder.triggers import Parking
from sigma0.signals.verdict import of_token
from tests.models.raven_reference import Reference, Written, tiny_raven

QEXIT = ExitConfig(q=0.4)
SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = [
    "Mary has a hat.",
    "Where is the key that John took?",
    "12 and 7",
    "The coin is in the cup. Where is the coin?",
]


def last_logits(model, ids, config):
    """What a model says after ids, from nothing."""
    extra = {"exit_config": config} if hasattr(model, "num_loops") else {}
    with torch.no_grad():
        return model(torch.tensor([ids]), **extra).logits[0, -1]


def margin_of(logits):
    best = logits.softmax(-1).topk(2).values
    return float(best[0] - best[1])


def from_scratch(models, tokenizer, text, sequence, new, policy, config, hysteresis=None):
    """The slow reference: every model reads the whole text anew for every token."""
    ids, written, parking = tokenizer(text)["input_ids"], [], Parking(hysteresis or Hysteresis())
    for position in range(new):
        rung = parking.start(sequence)
        climbed = False
        while True:
            logits = last_logits(models[rung], ids, config)
            entropy, margin = float(torch.special.entr(logits.softmax(-1)).sum()), margin_of(logits)
            signs = Signs(sequence, position, of_token(None, 0, None, 0.0), entropy, margin)
            if rung + 1 == len(models) or policy.fires(signs) is None:
                break
            rung, climbed = rung + 1, True
        parking.wrote(sequence, rung, climbed, margin)
        ids = [*ids, int(logits.argmax())]
        written.append((ids[-1], rung))
    return written


def ladder_of(models, tokenizer, policy, hysteresis=None):
    """Its rungs are called by their numbers."""
    rungs = [Rung.local(model, tokenizer, str(place)) for place, model in enumerate(models)]
    return FidelityLadder(rungs, policy=policy, hysteresis=hysteresis or Hysteresis())


def told(generation):
    return [(token.id, int(token.rung)) for token in generation.tokens]


def check_from_scratch(models, tokenizer, texts, new, policy, config, hysteresis=None):
    """A ladder writes what its models write from scratch; returns what it wrote."""
    ladder = ladder_of(models, tokenizer, policy, hysteresis)
    result = ladder.generate_batch(texts, max_new_tokens=new, exit_config=config)
    for sequence, (text, generation) in enumerate(zip(texts, result, strict=True)):
        assert told(generation) == from_scratch(models, tokenizer, text, sequence, new, policy, config, hysteresis)
    assert replay(result[0].trail) == []
    return result


@pytest.mark.exhaustive
@SLOW
@given(
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    st.sampled_from([0.1, 0.3, 0.6, 0.9]),
    st.integers(0, 1000),
    st.integers(0, 2),
)
def test_random_hand_ups_equal_both_models_from_scratch(looped, tokenizer, texts, rate, seed, stay):
    check_from_scratch(looped, tokenizer, texts, 9, Random(rate, seed), QEXIT, Hysteresis(stay=stay))


@pytest.mark.parametrize("order", ["looped below", "looped above"])
@pytest.mark.parametrize("policy", [Random(0.4, 3), Margin(0.05), Entropy(5.0)])
def test_models_without_loops_are_rungs_too(looped, plain, tokenizer, order, policy):
    models = [looped[0], plain] if order == "looped below" else [plain, looped[0]]
    check_from_scratch(models, tokenizer, TEXTS, 8, policy, QEXIT)


def test_three_rungs(looped, plain, tokenizer):
    (result,) = check_from_scratch([plain, *looped], tokenizer, TEXTS[1:2], 12, Random(0.5, 8), QEXIT)
    # one draw a token decides at every rung alike
    rungs = [rung for _, rung in told(result)]
    assert set(rungs) == {0, 2} and result.spent.large_tokens == rungs.count(2)


@pytest.mark.parametrize("policy, who", [(Always(), 1), (Never(), 0)])
@pytest.mark.parametrize("after_exit", ["finish", "drop"])
def test_always_and_never_are_one_model_alone(rungs, looped, tokenizer, policy, who, after_exit):
    config = ExitConfig(q=0.4, after_exit=after_exit)
    result = FidelityLadder(rungs, policy=policy).generate(TEXTS[0], max_new_tokens=12, exit_config=config)
    alone = sigma0.generate(looped[who], tokenizer, TEXTS[0], max_new_tokens=12, exit_config=config)
    assert result.text == alone.text and [token.id for token in result.tokens] == [token.id for token in alone.tokens]
    assert [token.depth for token in result.tokens] == [token.depth for token in alone.tokens]
    assert [token.reason for token in result.tokens] == [token.reason for token in alone.tokens]
    cost = result.costs[who]
    assert (cost.passes, cost.tokens) == (alone.loop_passes, 12)
    assert cost.prompt_passes == looped[who].num_loops and cost.rows == alone.loop_rows + alone.prompt_rows
    assert result.costs[1 - who].tokens == 0


def test_drawn_tokens_are_those_of_the_large_model_and_do_not_depend_on_the_company(rungs, looped, tokenizer):
    # with `always` the small model has no part in the draws
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 12, "seed": 5, "max_new_tokens": 10}
    above = FidelityLadder(rungs, policy=Always()).generate(TEXTS[0], exit_config=QEXIT, **settings)
    alone = FidelityLadder(rungs[1:], policy=Never()).generate(TEXTS[0], exit_config=QEXIT, **settings)
    other = FidelityLadder(rungs[1:], policy=Never()).generate(TEXTS[0], exit_config=QEXIT, **{**settings, "seed": 6})
    assert above.text == alone.text != other.text
    settings = {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2, "max_new_tokens": 8}
    never = FidelityLadder(rungs, policy=Never())
    together = never.generate_batch(TEXTS[:3], seed=5, **settings)
    # each row has a seed of its own, the next after that of the row before
    assert [never.generate(text, seed=5 + row, **settings).text for row, text in enumerate(TEXTS[:3])] == [
        generation.text for generation in together
    ]


def test_a_stream_is_the_whole_text(rungs):
    ladder = FidelityLadder(rungs, policy=Random(0.5))
    run = ladder.stream(TEXTS[3], max_new_tokens=7)
    with pytest.raises(ValueError, match="not finished"):
        _ = run.generations
    tokens = [token for step in run for token in step]
    (generation,) = run.generations
    assert tuple(tokens) == generation.tokens and "".join(token.text for token in tokens) == generation.text
    assert generation.text == ladder.generate(TEXTS[3], max_new_tokens=7).text


def test_ends_and_stops(rungs):
    ladder = FidelityLadder(rungs, policy=Random(0.4, 1))
    whole = ladder.generate_batch(TEXTS, max_new_tokens=10)
    assert {generation.stop_reason for generation in whole} == {"length"}
    end = whole[2].tokens[3].id
    with pytest.MonkeyPatch.context() as patch:
        for rung in rungs:
            patch.setattr(rung.model.generation_config, "eos_token_id", end)
        cut = ladder.generate_batch(TEXTS, max_new_tokens=10)
    for long, short in zip(whole, cut, strict=True):
        ids = [token.id for token in long.tokens]
        length = ids.index(end) + 1 if end in ids else 10
        assert [token.id for token in short.tokens] == ids[:length]
        assert short.stop_reason == ("eos" if end in ids else "length")
    word = whole[0].tokens[2].text
    stopped = ladder.generate(TEXTS[0], max_new_tokens=10, stop=[word])
    assert word in stopped.text and len(stopped.tokens) <= 3 and stopped.stop_reason == "stop"


@pytest.mark.parametrize("kind", ["looped", "plain"])
def test_bounded_memory_changes_no_token(looped, plain, tokenizer, kind):
    large = looped[1] if kind == "looped" else plain

    def run(limit):
        rungs = [Rung.local(looped[0], tokenizer, "small"), Rung.local(large, tokenizer, "large", kv_limit=limit)]
        ladder = FidelityLadder(rungs, policy=Random(0.5, 2))
        return ladder.generate(TEXTS[1], max_new_tokens=16, exit_config=QEXIT)

    free, bounded = run(None), run(1)
    assert [(token.id, token.rung) for token in bounded.tokens] == [(token.id, token.rung) for token in free.tokens]
    hand_ups = sum(token.rung == "large" for token in free.tokens)
    assert free.costs[1].refills == 0 and bounded.costs[1].refills == hand_ups - 1 > 0
    assert bounded.costs[1].read > free.costs[1].read


def test_saturation_and_doors(rungs):
    result = FidelityLadder(rungs, policy=AnyOf((Saturation(), Entropy(100.0)))).generate(
        TEXTS[0], max_new_tokens=6, exit_config=ExitConfig(q=0.99)
    )
    saturated = [token.handed_up == "saturated" for token in result.tokens]
    assert any(saturated) and [token.rung == "large" for token in result.tokens] == saturated
    assert result.door in ("abort", "converge") and result.top_rung
    assert not result.low_confidence and result.not_tried == ()


def test_costs_are_what_both_models_did(rungs, looped):
    result = FidelityLadder(rungs, policy=Random(0.5, 2)).generate(TEXTS[1], max_new_tokens=14, exit_config=QEXIT)
    small, large = result.costs
    assert small.tokens + large.tokens == 14 and large.tokens == result.spent.large_tokens > 0
    assert result.spent.loop_passes == small.passes + small.prompt_passes + large.passes + large.prompt_passes
    # the small model reads every token once, one by one after the prompt
    assert small.prompt_passes == looped[0].num_loops
    assert small.passes == sum(
        decision.signs["verdict"]["depth"]
        for decision in result.trail.decisions
        if decision.rung == 0 and decision.position > 0
    )
    for cost, model in zip(result.costs, looped, strict=True):
        block = sum(parameter.numel() * 4 for parameter in model.model.layers.parameters())
        assert cost.block_bytes == block and cost.bytes_read == (cost.passes + cost.prompt_passes) * block
    assert result.bytes_read == small.bytes_read + large.bytes_read
    # what the large one read: up to the last token that it wrote, each id once
    last = max(place for place, token in enumerate(result.tokens) if token.rung == "large")
    prompt = result.spent.catch_up_tokens - last
    assert prompt == len(rungs[0].tokenizer(TEXTS[1])["input_ids"])


@pytest.mark.parametrize("unit", ["token", "answer"])
def test_layers_beside_what_loops_are_costs_too(unit):
    model, tokenizer = sigma0.load("pocket-raven", dtype="float32")
    stages = (model.transformer.prelude, model.transformer.coda)
    prelude, coda = (sum(weight.nbytes for weight in stage.parameters()) for stage in stages)
    rung, text = Rung.local(model, tokenizer, "raven"), "Mary went to the park. Where is Mary?"
    for config in (ExitConfig(mode="full"), ExitConfig(mode="margin", theta=1e-6)):
        (cost,) = FidelityLadder([rung]).generate(text, unit, max_new_tokens=5, exit_config=config).costs
        # read with the prompt, and once for each of the other tokens
        assert cost.tokens == 5 and cost.beside_bytes == 5 * (prelude + coda)
        assert cost.bytes_read == (cost.passes + 16) * cost.block_bytes + cost.beside_bytes
    strided = Rung.local(*sigma0.load("pocket-raven", dtype="float32", stride=2), "strided")
    (twice,) = FidelityLadder([strided]).generate(text, unit, max_new_tokens=1).costs
    assert twice.block_bytes == 2 * cost.block_bytes


def test_a_plain_model_reads_its_prompt_once_and_then_token_by_token(plain, tokenizer):
    result = ladder_of([plain], tokenizer, Never()).generate(TEXTS[1], max_new_tokens=9)
    (cost,), prompt = result.costs, tokenizer(TEXTS[1])["input_ids"]
    assert (cost.prompt_passes, cost.passes, cost.tokens, cost.read) == (1, 8, 9, len(prompt))
    assert (cost.rows, cost.catch_ups) == (len(prompt) + 8, 0)


def test_what_does_not_fit_is_refused(rungs, looped, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.eos_token = next(word for word in sorted(tokenizer.get_vocab()) if word.isalpha())
    for above, asked, message in (
        (rungs[1:], {"exit_config": ExitConfig(after_exit="verify")}, "takes tokens back"),
        (rungs[1:], {"max_new_tokens": 10**6}, "exceed the model's context"),
        (rungs[1:], {"unit": "word"}, "no such unit"),
        (rungs[:1], {}, "a name of its own"),
        ([Rung.endpoint("http://127.0.0.1:1/v1", "m")], {}, "is an endpoint"),
        ([Rung.local(looped[1], other, "other")], {}, "unit='draft' or unit='answer'"),
    ):
        with pytest.raises(ValueError, match=message):
            FidelityLadder([rungs[0], *above]).generate(TEXTS[0], **asked)
    with pytest.raises(TypeError, match="beams"):
        FidelityLadder(rungs).generate(TEXTS[0], beams=3)
    with pytest.raises(ValueError, match="at least one rung"):
        FidelityLadder([])


# A token that a rung with a coda continues leaves its coda's K/V as of its exit. What others wrote is caught up with
# like a prompt: at loop T, but for the last id, which the rung's rule reads.
FULL = ExitConfig(mode="full")


@pytest.fixture(scope="module", params=["sandwich", "pre", "post"])
def raven(request, tokenizer):
    model = tiny_raven(request.param, 91, vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.grid(fast=1, slow=2)
@pytest.mark.parametrize("above", ["llama", "ouro"])
@pytest.mark.parametrize("policy", [Random(0.4, 3), Margin(0.1), Entropy(2.0)])
def test_at_full_depth_a_coda_and_another_are_both_models_from_scratch(raven, looped, plain, tokenizer, policy, above):
    check_from_scratch([raven, plain if above == "llama" else looped[1]], tokenizer, TEXTS, 8, policy, FULL)


def by_rule(models, tokenizer, text, new, policy, eps, hysteresis):
    """The slow reference of a rule: depths of earlier codas are kept by position."""
    below, reference = models[0], Reference(models[0])
    ids, read, written = tokenizer(text)["input_ids"], [], []
    parking, record = Parking(hysteresis), Written()
    for position in range(new):
        rung = parking.start(0)
        climbed = False
        if rung == 0:
            read += [below.num_loops] * (len(ids) - 1 - len(read))
            with torch.no_grad():
                states = reference.model.transformer(torch.tensor([ids])).loop_states[:, 0]
                depth, logits = reference._stop(record, states, read, "converge", eps, 1)
            read.append(depth)
            signs = Signs(0, position, of_token(None, 0, None, 0.0), 0.0, margin_of(logits))
            if policy.fires(signs) is not None:
                rung, climbed = 1, True
        if rung == 1:
            logits = last_logits(models[1], ids, FULL)
        parking.wrote(0, rung, climbed, margin_of(logits))
        ids = [*ids, int(logits.argmax())]
        written.append((ids[-1], rung, depth if rung == 0 else None))
    return written, record.margin


@pytest.mark.grid(fast=1, slow=1)
@pytest.mark.parametrize("stay", [0, 2])
@pytest.mark.parametrize("policy", [Random(0.3, 5), Random(0.6, 1), Never()])
def test_under_a_rule_codas_stay_as_they_were_read(raven, plain, tokenizer, policy, stay):
    config, hysteresis = ExitConfig(mode="converge", eps=0.6), Hysteresis(stay=stay)
    models, depths = [raven, plain], set()
    ladder = ladder_of(models, tokenizer, policy, hysteresis)
    for text in TEXTS:
        # alone: a batch catches up together, so that a parked sequence is read along with the others
        generation = ladder.generate(text, max_new_tokens=9, exit_config=config)
        expected, margin = by_rule(models, tokenizer, text, 9, policy, 0.6, hysteresis)
        assert margin >= 1e-5, "a tie"
        assert told(generation) == [(token, rung) for token, rung, _ in expected]
        for token, (_, _, depth) in zip(generation.tokens, expected, strict=True):
            assert depth is None or token.depth == depth
        depths |= {depth for *_, depth in expected if depth is not None}
    assert len(depths) > 1


@pytest.mark.grid(fast=4, slow=6)
@pytest.mark.parametrize(("policy", "who"), [(Always(), 1), (Never(), 0)])
@pytest.mark.parametrize("after_exit", ["finish", "drop"])
def test_with_a_coda_always_and_never_are_one_model_alone(raven, looped, tokenizer, policy, who, after_exit):
    models, config = [raven, looped[1]], ExitConfig(mode="margin", theta=0.1, after_exit=after_exit)
    result = ladder_of(models, tokenizer, policy).generate(TEXTS[0], max_new_tokens=10, exit_config=config)
    alone = sigma0.generate(models[who], tokenizer, TEXTS[0], max_new_tokens=10, exit_config=config)
    assert [(token.id, token.depth) for token in result.tokens] == [(token.id, token.depth) for token in alone.tokens]
    core = raven.transformer.core_block
    assert result.costs[0].parameters == 32 * 64 + sum(weight.numel() for weight in core.parameters())
    cost = result.costs[who]
    assert (cost.passes, cost.tokens) == (alone.loop_passes, 10)


@pytest.mark.parametrize("unit", ["draft", "answer"])
def test_whole_answers_of_a_coda_go_up_too(raven, looped, tokenizer, unit):
    result = ladder_of([raven, looped[1]], tokenizer, None).generate(
        TEXTS[0], unit=unit, max_new_tokens=6, exit_config=ExitConfig(mode="margin", theta=0.1)
    )
    assert result.text and {cost.name for cost in result.costs} == {"0", "1"}
