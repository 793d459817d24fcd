"""Shifts: what is said to be kept."""

import numpy as np
import pytest

from sigma0.bench.verdict.shifts import MIXES, ShiftRow, not_kept
from sigma0.bench.verdict.tables import kept_sentence
from sigma0.calibrate.bootstrap import share
from sigma0.calibrate.doors import Judged, check_policy
from sigma0.signals.verdict import DoorPolicy


def row(name, opened, wrong):
    right = np.arange(1000) >= wrong
    judged = Judged(np.where(np.arange(1000) < opened, 1.0, 0.0), np.zeros(1000, dtype=bool), right)
    return ShiftRow(name, check_policy(judged, DoorPolicy()), share(0, 1000))


@pytest.mark.parametrize(
    "opened, wrong, kept", [(1000, 20, "yes"), (1000, 90, "no"), (1000, 50, "open"), (0, 9, "yes")]
)
def test_a_risk_is_kept_or_broken_only_beyond_its_interval(opened, wrong, kept):
    assert row("a", opened, wrong).kept(0.05) == kept


def test_the_broken_ones_are_named():
    rows = [row("calm", 1000, 20), row("storm", 1000, 90)]
    assert not_kept(rows, 0.05) == ["storm"] and not_kept(rows, 0.2) == []


def test_the_mixes_are_what_they_are_called():
    drawn = {name: draw(6, 2) for name, draw in MIXES.items()}
    assert all(len(prompts) == 6 and isinstance(prompts[1].content, list) for prompts in drawn.values())
    assert all(each.answer.startswith(("Yes", "No")) for each in drawn["yes or no alone"])
    plain = {name: [str(each.content) for each in prompts] for name, prompts in drawn.items()}
    assert all(" old" in text for text in plain["ages alone"])
    assert min(map(len, plain["longest stories"])) > max(map(len, plain["short stories"])) / 2


def test_the_sentence_says_so_plainly():
    class Report:
        allowed = 0.05
        shifts = (row("calm", 1000, 20), row("storm", 1000, 90))

    assert kept_sentence({"pocket": Report()}) == "**The stated risk is not kept** under: pocket: storm."
