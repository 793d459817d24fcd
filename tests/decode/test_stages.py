"""Raven in our decoder: `finish` as its definition says, `verify` as full depth, alone and in company."""

import random

import pytest
import torch

from sigma0 import ExitConfig
from tests.decode.test_conformance import written
from tests.models.raven_reference import SHAPES, Reference, tiny_raven

NEW = 7
TIE = 1e-5
FULL = ExitConfig(mode="full")
# Rules that stop some tokens early in the tiny models, and not all.
RULES = (("margin", 0.05), ("margin", 0.2), ("converge", 0.5), ("converge", 0.8))


def rule(mode, threshold, after="finish", **values):
    name = "theta" if mode == "margin" else "eps"
    return ExitConfig(mode=mode, after_exit=after, **{name: threshold}, **values)


def generate(model, rows, config, **asked):
    return written(model, rows, config, NEW, **asked), max(map(len, rows))


def drawn(seed, count, longest=12):
    source = random.Random(seed)
    return [[source.randrange(1, 53) for _ in range(source.randint(1, longest))] for _ in range(count)]


def test_drawn_states_belong_to_seed_and_position():
    model = tiny_raven("pre", 11, init_scale=1.0, init_values={"std": 0.5})
    first = model.transformer.start(torch.zeros(1, 3, 32), torch.tensor([[4, 5, 6]]))
    again = model.transformer.start(torch.zeros(2, 32), torch.tensor([6, 4]))
    assert torch.equal(first[0, [2, 0]], again)
    model.config.state_seed = 1
    assert not torch.equal(model.transformer.start(torch.zeros(2, 32), torch.tensor([6, 4])), again)
    many = model.transformer.start(torch.zeros(4000, 32), torch.arange(4000))
    # of a normal distribution cut at three standard deviations
    assert float(many.abs().max()) <= 1.5
    assert float(many.std()) == pytest.approx(0.4933, rel=0.01)
    assert abs(float(many.mean())) < 0.005


def whole_text(reference, ids, mode, threshold):
    """Logits of every position, each read by the rule after those before it were."""
    with torch.no_grad():
        states = reference.model.transformer(torch.tensor([ids])).loop_states[:, 0]
        depths, logits, out = [], [], type("Out", (), {"margin": float("inf")})()
        for length in range(1, len(ids) + 1):
            depth, row = reference._stop(out, states[:, :length], depths, mode, threshold, 1)
            depths.append(depth)
            logits.append(row)
    return torch.stack(logits), depths, out.margin


@pytest.mark.parametrize(("mode", "threshold"), RULES)
@pytest.mark.parametrize("layout", SHAPES)
def test_a_whole_text_is_read_position_by_position(layout, mode, threshold):
    model, ids = tiny_raven(layout, 13), drawn(13, 1, 9)[0] + drawn(14, 1, 9)[0]
    logits, depths, margin = whole_text(Reference(model), ids, mode, threshold)
    assert margin > TIE
    with torch.no_grad():
        out = model(torch.tensor([ids]), exit_config=rule(mode, threshold))
    assert out.exit_depths[0].tolist() == depths
    assert torch.allclose(out.logits[0].double(), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", SHAPES)
def test_a_second_turn_sees_codas_as_they_were_read(layout):
    """The first turn's new tokens keep what their exits left; the next prompt is read at loop T."""
    model = tiny_raven(layout, 17)
    reference, first, second = Reference(model), drawn(17, 1)[0], drawn(18, 1)[0]
    config, cache = rule("margin", 0.1), model.new_cache()
    once, width = generate(model, [first], config, past_key_values=cache)
    turn = once.sequences[0].tolist()
    out, _ = generate(model, [turn + second], config, past_key_values=cache)
    expected = reference.write(first, NEW, "margin", 0.1)
    assert turn[width:] == expected.tokens
    # the last new token of the first turn was never fed, so it belongs to the second prompt
    depths = [model.num_loops] * (len(first) - 1) + expected.depths + [model.num_loops] * len(second)
    ids, tokens = turn + second, []
    again = type(expected)()
    for _ in range(NEW):
        states = reference.model.transformer(torch.tensor([ids])).loop_states[:, 0]
        depth, logits = reference._stop(again, states.detach(), depths, "margin", 0.1, 1)
        depths.append(depth)
        tokens.append(int(logits.argmax()))
        ids.append(tokens[-1])
    assert again.margin > TIE
    assert out.sequences[0, len(turn) + len(second) :].tolist() == tokens


@pytest.mark.parametrize("layout", SHAPES)
def test_a_batch_whose_texts_ended_apart_is_continued(layout):
    """The last id of a text that ended early is run before the next prompt; its coda sees the answer before it."""
    model = tiny_raven(layout, 33)
    rows, cache = drawn(31, 4), model.new_cache()
    endless, width = generate(model, rows, FULL)
    ends = endless.sequences[1:3, width + 1].tolist()
    once, width = generate(model, rows, FULL, past_key_values=cache, eos_token_id=ends)
    answers = once.sequences[:, width:].tolist()
    lengths = [next((n for n, token in enumerate(row, 1) if token in ends), len(row)) for row in answers]
    assert any(1 < current < max(lengths) for current in lengths)
    seen = [
        [0] * (width - len(row)) + [1] * (len(row) + current) + [0] * (len(answers[0]) - current) + [1]
        for row, current in zip(rows, lengths, strict=True)
    ]
    ids = torch.cat([once.sequences, torch.tensor([[5], [6], [9], [10]])], dim=1)
    asked = {"output_logits": True}
    out = written(model, ids.tolist(), FULL, 1, attention_mask=torch.tensor(seen), past_key_values=cache, **asked)
    for index, mask in enumerate(seen):
        fresh = written(model, [ids[index][torch.tensor(mask) > 0].tolist()], FULL, 1, **asked)
        assert torch.allclose(out.logits[0][index], fresh.logits[0][0], atol=1e-4, rtol=0)


def test_verify_does_not_go_on_behind_exits():
    model, prompt = tiny_raven("pre", 19), drawn(19, 1)[0]
    cache = model.new_cache()
    once, _ = generate(model, [prompt], rule("margin", 0.1), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot go on with this cache"):
        generate(model, [[*once.sequences[0].tolist(), 5]], rule("margin", 0.1, "verify"), past_key_values=cache)


@pytest.mark.parametrize("then", [True, False])
def test_verify_does_not_go_on_behind_an_early_reading(then):
    """Whether or not full depth came between: prompts read what earlier readings left of a coda."""
    model, prompt = tiny_raven("pre", 19), torch.tensor(drawn(19, 1))
    cache, early = model.new_cache(), rule("converge", 0.99)
    read = model(prompt, past_key_values=cache, exit_config=early, logits_to_keep=1)
    assert read.exit_depths[0, -1] < model.num_loops
    if then:
        model(prompt[:, :1], past_key_values=cache, exit_config=FULL)
    with pytest.raises(ValueError, match="cannot go on with this cache"):
        model(prompt[:, :3], past_key_values=cache, exit_config=rule("margin", 0.1, "verify"))


@pytest.mark.parametrize("layout", SHAPES)
def test_verify_goes_on_behind_full_depth(layout):
    """Whole turns, and single tokens of the stock loop; the planes of full depth are those of a fresh prompt."""
    model = tiny_raven(layout, 21)
    reference, first, second = Reference(model), drawn(21, 1)[0], drawn(22, 1)[0]
    cache, checked = model.new_cache(), rule("margin", 0.1, "verify")
    once, _ = generate(model, [first], FULL, past_key_values=cache)
    more = torch.tensor([[7]])
    # the last token that was written is not in the cache as yet
    model(once.sequences[:, -1:], past_key_values=cache, exit_config=FULL)
    model(more, past_key_values=cache, exit_config=FULL)
    text = [*once.sequences[0].tolist(), 7, *second]
    out, width = generate(model, [text], checked, past_key_values=cache)
    assert out.sequences[0, width:].tolist() == reference.full_depth(text, NEW).tokens
    fresh = model.new_cache()
    model(out.sequences[:, : cache.length], past_key_values=fresh, exit_config=FULL)
    for ours, theirs in zip(cache.planes, fresh.planes, strict=True):
        for held, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert torch.allclose(held[-1, :, :, : len(text) - 1], expected[-1, :, :, : len(text) - 1], atol=1e-4)


@pytest.mark.parametrize(
    ("other", "layers"),
    [("pre", {"n_layers_in_coda": 1}), ("pre", {"n_layers_in_prelude": 2}), ("sandwich", {"mean_recurrence": 3})],
)
def test_a_cache_of_other_stages_is_refused(other, layers):
    model, prompt = tiny_raven("pre", 3), torch.tensor(drawn(3, 1))
    message = "past_key_values was made for .*, this model has 2 layers, 4 loops, 1 layers of prelude and 2 of coda: "
    cache = tiny_raven(other, 3, **layers).new_cache()
    with pytest.raises(ValueError, match=message):
        model(prompt, past_key_values=cache)
    with pytest.raises(ValueError, match=message):
        model.generate(prompt, past_key_values=cache, max_new_tokens=2)


@pytest.mark.parametrize("layout", SHAPES)
def test_readable_states_are_those_of_a_token_behind_full_depth(layout):
    model, ids = tiny_raven(layout, 25), drawn(25, 1)[0] + drawn(26, 1)[0]
    reference = Reference(model)
    with torch.no_grad():
        states = reference.model.transformer(torch.tensor([ids])).loop_states
        readable = model.readable(states.float())
        for loop in range(model.num_loops):
            for place in range(len(ids)):
                expected = reference.read(states[:, 0, : place + 1], [model.num_loops] * place + [loop + 1])
                result = model.head(readable[loop, 0, place][None])[0].double()
                assert torch.allclose(result, expected, atol=1e-4, rtol=0)
