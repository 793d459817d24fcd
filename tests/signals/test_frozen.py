"""What is handed on is not changed any more."""

import pytest

from tests.frozen import changeable

LADDER = {"Climb", "BudgetTracker", "RungCost", "_Answer", "_Unit", "Batch", "Trail", "_Place"}
KNOWN = {"signals": {"Actions", "_Pending"}, "calibrate": set(), "ladder": LADDER}


@pytest.mark.parametrize("folder", KNOWN)
def test_all_but_these_are_frozen(folder):
    assert changeable(f"sigma0.{folder}") == KNOWN[folder]
