"""What is handed on is not changed any more."""

from tests.frozen import changeable


def test_all_but_these_are_frozen():
    assert changeable("sigma0.ladder") == {
        "Climb",
        "BudgetTracker",
        "RungCost",
        "_Answer",
        "_Unit",
        "Batch",
        "Trail",
        "_Place",
    }
