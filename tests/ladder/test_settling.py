"""Checks before a run, and the door after it."""

import itertools
from types import SimpleNamespace
from typing import get_args

import pytest

from sigma0.ladder.settling import check_policy, check_settings, final_door, not_tried
from sigma0.ladder.triggers import Always, AnyOf, Never
from sigma0.signals.verdict import Door


def test_the_door_of_a_whole_text():
    for aborted, converges, exhausted in itertools.product((True, False), repeat=3):
        door = final_door(aborted, converges, exhausted)
        # a text that the budget kept down stays marked, whatever its verdict
        assert (door == "abort") == (aborted or (exhausted and not converges))
        assert (door == "converge") == (converges and not aborted)
        assert door in get_args(Door)


def test_a_number_of_tokens_is_at_least_one_texts_are_given_in_lists_and_a_trail_can_hold_a_policy():
    for settings, message in (
        *(((tokens, (), ()), "max_new_tokens") for tokens in (0, -1, 2.5, "3", None)),
        ((1, "end", ()), "stop takes a list of strings, got the string 'end'"),
        ((1, (), "source"), "sources takes a list"),
        ((1, ("end", ""), ()), "must not be empty"),
    ):
        with pytest.raises(ValueError, match=message):
            check_settings(*settings)
    check_settings(1, ("end",), ("source",))
    check_policy(AnyOf((Always(), Never())))
    with pytest.raises(ValueError, match="policy is a SimpleNamespace"):
        check_policy(SimpleNamespace(fires=lambda signs: None))


def test_what_was_not_tried_is_told_once_with_its_limit():
    def line(rung, why, lacking):
        return SimpleNamespace(rung=rung, why=why, lacking=lacking)

    names = ("small", "middle", "large")
    trail = SimpleNamespace(
        decisions=[
            line(1, "margin 0.10", "calls"), line(0, "margin 0.10", "large_tokens"), line(0, "chance", None),
            line(1, "parked", "seconds"), line(0, "chance", "large_tokens"), line(2, "always", "money"),
        ]
    )  # fmt: skip
    assert not_tried(trail, names) == ("large: calls", "large: money", "middle: large_tokens", "middle: seconds")
    assert not_tried(SimpleNamespace(decisions=[line(0, "chance", None)]), names) == ("small: the next step",)
