"""Readings of a model whose every choice stands in a table: depths, shares and how many tokens are read at once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sigma0.calibrate.teacher_forcing import (
    ForcedText,
    GridReadings,
    LoopReadings,
    check_finite,
    divergence,
    groups_of,
    join_readings,
    read_forced,
    read_grids,
)
from sigma0.config import ExitConfig
from tests.reference import tiny_model

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


def margin_rules():
    return [rule(mode="margin", theta=theta) for theta in (0.95, 0.75, 0.55, 0.35, 0.25, 0.15, 0.05)]


def first_loop(theta, ids):
    reached = MARGIN[:, ids] >= theta
    return np.where(reached.any(0), reached.argmax(0), LOOPS - 1) + 1


READ = np.concatenate([text.ids[:-1] for text in TEXTS])
NEW = np.concatenate([text.ids[-text.new - 1 : -1] for text in TEXTS])


@pytest.mark.parametrize("coda", [False, True])
def test_every_token_is_read_as_its_table_says(coda):
    done = []
    rules = {"half": rule(mode="margin", theta=0.45), "two": rule(mode="fixed", depth=2)}
    found = read_forced(Tabled(coda=coda), rules, TEXTS, done.append)
    same = TOP[:, READ] == TOP[-1, READ]
    assert found.same.tolist() == same.tolist() and done == [4]
    assert found.text.tolist() == [0] + [1] * 8 + [2] * 6 + [3] * 4
    assert found.is_new.tolist() == [True] + [False] * 5 + [True] * 9 + [False] * 2 + [True] * 2
    assert found.exits["half"].tolist() == first_loop(0.45, READ).tolist()
    assert found.exits["two"].tolist() == [2] * 19
    assert not found.kl[-1].any() and (found.kl[~same] > 0).all()


@pytest.mark.parametrize("coda", [False, True])
def test_a_grid_is_read_as_each_of_its_settings(coda):
    grids = {"margin": margin_rules(), "one": margin_rules()[2:3], "fixed": [rule(mode="fixed", depth=3)] * 2}
    found = read_grids(Tabled(coda=coda), grids, TEXTS)
    assert found.text.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3]
    assert found.same.tolist() == (TOP[:, NEW] == TOP[-1, NEW]).tolist()
    expected = [first_loop(theta, NEW).tolist() for theta in (0.95, 0.75, 0.55, 0.35, 0.25, 0.15, 0.05)]
    assert found.exits["margin"].tolist() == expected and found.exits["one"].tolist() == expected[2:3]
    assert found.exits["fixed"].tolist() == [[3] * 12] * 2
    wanted = [bool(TOP[depth - 1, token] == TOP[-1, token]) for depth, token in zip(expected[3], NEW, strict=True)]
    assert found.same_at(found.exits["margin"][3]).tolist() == wanted


def test_between_settings_that_agree_nothing_is_read():
    model = Tabled()
    read_grids(model, {"margin": [rule(mode="margin", theta=0.95)] * 50}, TEXTS)
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
    model, grids = Tabled(vocabulary), {"margin": margin_rules()}
    whole, parts = (read_grids(each, grids, TEXTS) for each in (Tabled(), model))
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


def test_progress_is_told_after_each_group():
    done = []
    texts = [ForcedText((1,) * 4096, 1), ForcedText((2,) * 4096, 1), ForcedText((3, 4), 1)]
    found = read_forced(Tabled(), {}, texts, done.append)
    assert done == [2, 3] and len(found.text) == 2 * 4095 + 1


HAND = LoopReadings(
    text=np.array([0, 0, 1, 1]),
    is_new=np.array([False, True, True, True]),
    same=np.array([[True, False, True, False], [True, True, False, False], [True, True, True, True]]),
    kl=np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.0, 0.0, 0.0, 0.0]], dtype=np.float32),
    exits={"a": np.array([1, 2, 3, 1])},
)


def test_oracles_of_a_table():
    assert HAND.oracle.tolist() == [1, 2, 1, 3] and HAND.settled.tolist() == [1, 2, 3, 3]
    assert HAND.same_at(HAND.exits["a"]).tolist() == [True, True, True, False]
    assert HAND.kl_at(HAND.exits["a"]).tolist() == pytest.approx([0.1, 0.6, 0.0, 0.4])
    grid = GridReadings(HAND.text, HAND.same, {"g": np.array([[3, 3, 3, 3], [1, 1, 2, 3]])})
    assert grid.same_at(grid.exits["g"][1]).tolist() == [True, False, False, True]


def test_texts_that_were_read_apart_are_numbered_on():
    joined = join_readings([HAND, HAND, HAND])
    assert joined.text.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    for name in ("is_new", "same", "kl"):
        assert getattr(joined, name).tolist() == np.concatenate([getattr(HAND, name)] * 3, axis=-1).tolist()
    assert joined.exits["a"].tolist() == [1, 2, 3, 1] * 3 and join_readings([HAND]).text.tolist() == HAND.text.tolist()


def test_a_divergence_is_never_below_nothing():
    """Probabilities that sum to a little more than 1, as rounded ones do."""
    full = torch.tensor([[0.5, 0.5]]).log()
    assert divergence(full, full + 1e-3).item() == 0.0 and divergence(full, full - 1e-3).item() > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_named_with_their_loop(value):
    good = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert check_finite(good, 1) is good
    good[1, 2] = value
    with pytest.raises(ValueError, match=r"loop 3 are not finite.*bfloat16 is too narrow"):
        check_finite(good, 3)


def test_a_text_has_a_prompt_and_a_continuation():
    assert ForcedText((1, 2), 1).new == 1 and ForcedText((1, 2, 3), 2).new == 2
    for ids, new in (((1, 2), 2), ((1,), 1), ((1, 2), 0)):
        with pytest.raises(ValueError, match="new tokens of a text"):
            ForcedText(ids, new)
