"""Readings of given texts against one text, one loop and one token at a time."""

from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sigma0.calibrate.teacher_forcing
from sigma0.calibrate.teacher_forcing import ForcedText, divergence, groups_of, join_readings, read_forced, read_grids
from sigma0.config import ExitConfig
from tests.marks import slow
from tests.models.raven_reference import Reference, tiny_raven
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
    result = read(model, texts)
    exact = deepcopy(model).double()
    place = 0
    for number, text in enumerate(texts):
        with torch.no_grad():
            output = exact.model(input_ids=torch.tensor([text.ids]), use_cache=False)
            logits = exact.lm_head(output.loop_states[:, 0])  # [T, S, V]
        for position in range(len(text.ids) - 1):
            chances = torch.softmax(logits[:, position], -1)
            top = chances.argmax(-1).tolist()
            assert result.text[place] == number
            assert result.is_new[place] == (position >= len(text.ids) - 1 - text.new)
            assert result.same[:, place].tolist() == [entry == top[-1] for entry in top]
            expected = [float((chances[-1] * (chances[-1] / entry).log()).sum()) for entry in chances]
            assert result.kl[:, place] == pytest.approx(expected, abs=1e-5)
            assert result.oracle[place] == 1 + top.index(top[-1])
            assert result.settled[place] == 1 + max(t for t, entry in enumerate([None, *top]) if entry != top[-1])
            for name, config in CONFIGS.items():
                states, gates = output.loop_states[:, 0, position], output.gate_logits[:, 0, position]
                choice = decide(config, states, gates, logits[:, position], 4)
                depth = 2 if name == "two" else choice.depth
                assert result.exits[name][place] == depth or choice.margin < 1e-5
            place += 1
    assert place == len(result.text)
    for depths in result.exits.values():
        at = depths - 1, np.arange(place)
        assert (result.same_at(depths) == result.same[at]).all() and (result.kl_at(depths) == result.kl[at]).all()


@pytest.mark.parametrize("loop, factor", [(1, float("nan")), (3, float("inf")), (4, -float("inf"))])
def test_a_loop_that_is_not_finite_is_an_error(texts, loop, factor):
    broken = tiny_model(seed=3, total_ut_steps=4)
    calls = []

    def logits_of(states):
        calls.append(None)
        return broken.lm_head(states) * (factor if len(calls) == loop else 1.0)

    broken.head = logits_of
    with pytest.raises(ValueError, match=rf"logits of loop {loop} are not finite.*float32 is too narrow"):
        read(broken, texts)


@pytest.mark.parametrize("most", [8, 40, 2**13])
def test_groups_read_apart_are_what_they_are_together(model, texts, monkeypatch, most):
    monkeypatch.setattr(sigma0.calibrate.teacher_forcing, "_TOKENS", most)
    whole = read(model, texts)
    joined = join_readings([read(model, group) for group in groups_of(texts)])
    assert sum(len(group) for group in groups_of(texts)) == len(texts)
    for name in ("text", "is_new", "same", "kl"):
        assert getattr(whole, name).tobytes() == getattr(joined, name).tobytes(), name
    assert all((whole.exits[name] == joined.exits[name]).all() for name in CONFIGS)


def test_bad_texts_are_refused(model):
    assert ForcedText((1, 2), 1).new == 1 and ForcedText((1, 2, 3), 2).new == 2
    for ids, new in (((1, 2, 3), 3), ((1, 2, 3), 0), ((1, 2, 3), -1), ((1,), 1)):
        with pytest.raises(ValueError, match=f"{new} new tokens of a text of {len(ids)}"):
            ForcedText(ids, new)
    with pytest.raises(ValueError, match="no text"):
        read_forced(model, {}, [])


def test_divergence_of_ruled_out_tokens():
    full = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert divergence(full, torch.tensor([[0.25, 0.5, 0.25]]).log()).item() == pytest.approx(0.5 * np.log(2))
    assert divergence(full, torch.tensor([[0.0, 0.5, 0.5]]).log()).item() == np.inf
    # never below nothing, though rounded probabilities sum to a little more than 1
    assert divergence(full, full).item() == divergence(full, full + 1e-3).item() == 0.0


LOOPS, IDS, CHOICES = 4, 50, 5
_RNG = np.random.default_rng(0)
# What is read of each id at each loop, and by which margin.
TOP = _RNG.integers(0, CHOICES, (LOOPS, IDS))
MARGIN = _RNG.integers(1, 9, (LOOPS, IDS)) / 10
RULES = tiny_model(seed=1, total_ut_steps=LOOPS)
TEXTS = [
    ForcedText(tuple(_RNG.integers(0, IDS, length).tolist()), new) for length, new in ((2, 1), (9, 3), (7, 6), (5, 2))
]


class Tabled:
    """A looped model of states that say their id and their loop."""

    device = torch.device("cpu")

    def __init__(self, vocabulary=CHOICES, coda=False):
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.coda = coda
        self.rows = []

    def run_texts(self, ids):
        loops = 100.0 * torch.arange(1, LOOPS + 1)[:, None, None, None]
        return SimpleNamespace(
            loop_states=ids[None, :, :, None].float() + loops, gate_logits=None,
            start_states=torch.zeros(*ids.shape, 1),
        )  # fmt: skip

    def readable(self, states):
        return states + 1000.0 if self.coda else states

    def head(self, states):
        assert not self.coda or (states >= 1000).all()
        self.rows.append(len(states))
        loops, ids = ((states[..., 0] % 1000) // 100).long() - 1, (states[..., 0] % 100).long()
        top, margin = torch.from_numpy(TOP)[loops, ids], torch.from_numpy(MARGIN)[loops, ids]
        chances = torch.full((*ids.shape, CHOICES), 1e-9, dtype=torch.float64)
        chances.scatter_(-1, ((top + 1) % CHOICES)[..., None], ((1 - margin) / 2)[..., None])
        return chances.scatter_(-1, top[..., None], ((1 + margin) / 2)[..., None]).log()


def rule(**config):
    return RULES.exit_rule(ExitConfig(**config))


THETAS = (0.95, 0.75, 0.55, 0.35, 0.25, 0.15, 0.05)
MARGINS = [rule(mode="margin", theta=theta) for theta in THETAS]


def first_loop(theta, ids):
    reached = MARGIN[:, ids] >= theta
    return np.where(reached.any(0), reached.argmax(0), LOOPS - 1) + 1


READ = np.concatenate([text.ids[:-1] for text in TEXTS])
NEW = np.concatenate([text.ids[-text.new - 1 : -1] for text in TEXTS])


@pytest.mark.parametrize("coda", [False, True])
def test_a_grid_is_read_as_each_of_its_settings(coda):
    grids = {"margin": MARGINS, "one": MARGINS[2:3], "fixed": [rule(mode="fixed", depth=3)] * 2}
    result = read_grids(Tabled(coda=coda), grids, TEXTS)
    assert result.text.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3]
    assert result.same.tolist() == (TOP[:, NEW] == TOP[-1, NEW]).tolist()
    expected = [first_loop(theta, NEW).tolist() for theta in THETAS]
    assert result.exits["margin"].tolist() == expected and result.exits["one"].tolist() == expected[2:3]
    assert result.exits["fixed"].tolist() == [[3] * 12] * 2
    wanted = [bool(TOP[depth - 1, token] == TOP[-1, token]) for depth, token in zip(expected[3], NEW, strict=True)]
    assert result.same_at(result.exits["margin"][3]).tolist() == wanted


def test_between_settings_that_agree_nothing_is_read():
    model = Tabled()
    read_grids(model, {"margin": MARGINS[:1] * 50}, TEXTS)
    # the argmax of all loops, and the first and the last setting
    assert sum(model.rows) == 3 * LOOPS * len(NEW)


@pytest.mark.parametrize("vocabulary, most", [(2**25, 1), (2**22, 1), (2**21, 2), (2**20, 4)])
def test_logits_of_all_loops_are_held_of_as_many_tokens_as_fit(vocabulary, most):
    """In all 2^24 numbers."""
    model = Tabled(vocabulary)
    whole = read_forced(Tabled(), {}, TEXTS)
    assert read_forced(model, {}, TEXTS).same.tolist() == whole.same.tolist()
    assert max(model.rows) == most and sum(model.rows) == LOOPS * len(READ)


@pytest.mark.parametrize("vocabulary, most", [(2**25, 1), (2**24, 1), (2**23, 2), (2**21, 8), (2**20, 12)])
def test_logits_of_one_loop_are_held_of_as_many_tokens_as_fit(vocabulary, most):
    model, grids = Tabled(vocabulary), {"margin": MARGINS}
    whole, parts = (read_grids(entry, grids, TEXTS) for entry in (Tabled(), model))
    assert whole.exits["margin"].tolist() == parts.exits["margin"].tolist()
    assert whole.same.tolist() == parts.same.tolist() and max(model.rows) == most


@pytest.mark.parametrize(
    "lengths, sizes",
    [
        ([4096, 4096], [2]),
        ([4096, 4097], [1, 1]),
        ([4097, 4096], [1, 1]),
        ([8192, 2], [1, 1]),
        ([9000, 9000], [1, 1]),
        ([2, 9000, 2], [1, 1, 1]),
        ([2730, 2730, 2730, 2], [3, 1]),
        ([2] * 4096, [4096]),
        ([2] * 4097, [4096, 1]),
    ],
)
def test_texts_are_read_together_up_to_8192_tokens_with_their_pads(lengths, sizes):
    texts = [ForcedText((1,) * length, 1) for length in lengths]
    groups = list(groups_of(texts))
    assert [len(group) for group in groups] == sizes and [text for group in groups for text in group] == texts
    if len(texts) < 9:
        done = []
        read_forced(Tabled(), {}, texts, done.append)
        assert done == [sum(sizes[: place + 1]) for place in range(len(sizes))], "told after each group"


@pytest.mark.parametrize("layout", ["sandwich", slow("pre"), slow("post")])
def test_with_a_coda_readings_take_earlier_tokens_at_the_last_loop(layout):
    model = tiny_raven(layout, 101)
    reference, ids = Reference(model), (5, 9, 30, 2, 8, 17)
    result = read_forced(model, {}, [ForcedText(ids, 3)])
    with torch.no_grad():
        states = reference.model.transformer(torch.tensor([ids])).loop_states[:, 0]
        for place in range(len(ids) - 1):
            top = [
                int(reference.read(states[:, : place + 1], [model.num_loops] * place + [loop]).argmax())
                for loop in range(1, model.num_loops + 1)
            ]
            assert result.same[:, place].tolist() == [item == top[-1] for item in top]
