"""Readings of given texts against one text, one loop and one token at a time."""

from copy import deepcopy

import numpy as np
import pytest
import torch

import sigma0.calibrate.teacher_forcing
from sigma0.calibrate.teacher_forcing import ForcedText, divergence, groups_of, join_readings, read_forced
from sigma0.config import ExitConfig
from tests.reference import decide, tiny_model

CONFIGS = {
    "q": ExitConfig(q=0.6),
    "margin": ExitConfig(mode="margin", theta=0.2),
    "converge": ExitConfig(mode="converge", eps=0.8),
    "accel": ExitConfig(mode="accel", eps=0.9, patience=1),
    "two": ExitConfig(mode="fixed", depth=2),
    "full": ExitConfig(mode="full"),
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=3, total_ut_steps=4)


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(0)
    lengths = [(2, 1), (9, 3), (17, 16), (5, 2)] + [(6, 2)] * 24
    return [
        ForcedText(tuple(torch.randint(1, 61, (length,), generator=generator).tolist()), new) for length, new in lengths
    ]


def read(model, texts):
    return read_forced(model, {name: model.exit_rule(config) for name, config in CONFIGS.items()}, texts)


def test_every_figure_equals_float64_one_token_at_a_time(model, texts):
    found = read(model, texts)
    exact = deepcopy(model).double()
    place = 0
    for number, text in enumerate(texts):
        with torch.no_grad():
            output = exact.model(input_ids=torch.tensor([text.ids]), use_cache=False)
            logits = exact.lm_head(output.loop_states[:, 0])  # [T, S, V]
        for position in range(len(text.ids) - 1):
            chances = torch.softmax(logits[:, position], -1)
            top = chances.argmax(-1).tolist()
            assert found.text[place] == number
            assert found.is_new[place] == (position >= len(text.ids) - 1 - text.new)
            assert found.same[:, place].tolist() == [each == top[-1] for each in top]
            expected = [float((chances[-1] * (chances[-1] / each).log()).sum()) for each in chances]
            assert found.kl[:, place] == pytest.approx(expected, abs=1e-5)
            assert found.oracle[place] == 1 + top.index(top[-1])
            assert found.settled[place] == max([0, *(t for t, each in enumerate(top, start=1) if each != top[-1])]) + 1
            for name, config in CONFIGS.items():
                states, gates = output.loop_states[:, 0, position], output.gate_logits[:, 0, position]
                choice = decide(config, states, gates, logits[:, position], 4)
                depth = 2 if name == "two" else choice.depth
                assert found.exits[name][place] == depth or choice.margin < 1e-5
            place += 1
    assert place == len(found.text)


def test_small_parts_give_the_same(model, texts, monkeypatch):
    whole = read(model, texts)
    monkeypatch.setattr(sigma0.calibrate.teacher_forcing, "_TOKENS", 20)
    monkeypatch.setattr(sigma0.calibrate.teacher_forcing, "_LOGITS", 4 * 61 * 7)
    parts = read(model, texts)
    assert (whole.same == parts.same).all() and (whole.text == parts.text).all()
    assert whole.kl == pytest.approx(parts.kl, abs=1e-5)
    assert all((whole.exits[name] == parts.exits[name]).all() for name in CONFIGS)


def test_figures_at_exits(model, texts):
    found = read(model, texts)
    depths = found.exits["q"]
    assert len(set(depths.tolist())) > 1, "the rule stops at one loop only: the test would not tell"
    rows = range(len(depths))
    assert found.same_at(depths).tolist() == [bool(found.same[depths[k] - 1, k]) for k in rows]
    assert found.kl_at(depths).tolist() == [found.kl[depths[k] - 1, k] for k in rows]
    assert found.same_at(found.oracle).all() and found.same_at(found.settled).all()
    assert (found.oracle <= found.settled).all()
    assert not found.kl_at(found.exits["full"]).any()


def test_divergence_of_ruled_out_tokens():
    full = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert divergence(full, torch.tensor([[0.25, 0.5, 0.25]]).log()).item() == pytest.approx(0.5 * np.log(2))
    assert divergence(full, torch.tensor([[0.0, 0.5, 0.5]]).log()).item() == np.inf
    assert divergence(full, full).item() == 0.0


@pytest.mark.parametrize("loop", [1, 4])
def test_a_loop_that_is_not_finite_is_an_error(texts, loop):
    broken = tiny_model(seed=3, total_ut_steps=4)
    calls = []

    def logits_of(states):
        calls.append(None)
        return broken.lm_head(states) * (float("nan") if len(calls) == loop else 1.0)

    broken.head = logits_of
    with pytest.raises(ValueError, match=rf"logits of loop {loop} are not finite.*float32"):
        read(broken, texts)


def test_bad_texts_are_refused(model):
    for new in (0, 3, -1):
        with pytest.raises(ValueError, match=rf"{new} new tokens of a text of 3"):
            ForcedText((1, 2, 3), new)
    with pytest.raises(ValueError, match="no text"):
        read_forced(model, {}, [])


@pytest.mark.parametrize("most", [8, 40, 2**13])
def test_groups_read_apart_are_what_they_are_together(model, texts, monkeypatch, most):
    monkeypatch.setattr(sigma0.calibrate.teacher_forcing, "_TOKENS", most)
    whole = read(model, texts)
    joined = join_readings([read(model, group) for group in groups_of(texts)])
    assert sum(len(group) for group in groups_of(texts)) == len(texts)
    for name in ("text", "is_new", "same", "kl"):
        assert getattr(whole, name).tobytes() == getattr(joined, name).tobytes(), name
    assert all((whole.exits[name] == joined.exits[name]).all() for name in CONFIGS)
