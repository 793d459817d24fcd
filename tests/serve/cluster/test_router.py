"""Which engine takes the next job: chats come back, the rest is spread, and full or lost engines are passed over."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.serve.cluster.router import NOTHING, EngineReport, Fleet, SessionTable
from sigma0.serve.engine.block_pool import root_hash
from sigma0.serve.engine.messages import Busy, Unavailable

IDS = st.lists(st.integers(0, 3), max_size=6)


def report(name, running=2, capacity=4, **status):
    return EngineReport(name, running, capacity, replace(NOTHING, **status))


def fleet(*names, **limits):
    made = Fleet()
    made.update([report(name, **limits) for name in names])
    return made


@given(st.lists(IDS, max_size=12), IDS)
def test_the_longest_earlier_prompt_that_a_prompt_begins_with_is_found(earlier, ids):
    table = SessionTable()
    for place, item in enumerate(earlier):
        table.note(item, f"e{place}")
    fitting = [(len(item), place) for place, item in enumerate(earlier) if ids[: len(item)] == item]
    assert table.find(ids) == (f"e{max(fitting)[1]}" if fitting else None)


@given(st.lists(IDS, min_size=1, max_size=30), st.integers(1, 4))
def test_the_prompts_not_seen_for_longest_are_forgotten(prompts, limit):
    table, kept = SessionTable(limit), []
    for prompt in prompts:
        table.note(prompt, "e")
        kept = [*(item for item in kept if item != prompt), prompt][-limit:]
    for prompt in prompts:
        assert (table.find(prompt) is not None) == any(prompt[: len(item)] == item for item in kept)


def test_a_chat_comes_back_to_where_its_own_salt_was_read():
    table = SessionTable()
    table.note([1, 2], "bare")
    for salt in ("x", "y"):
        table.note([1, 2], salt, root_hash(salt))
    assert [table.find([1, 2, 3], root_hash(salt)) for salt in (None, "x", "y", "z")] == ["bare", "x", "y", None]


def test_a_table_without_room():
    with pytest.raises(ValueError, match="at least one prompt, got 0"):
        SessionTable(0)


def test_new_chats_take_turns_and_old_ones_come_back():
    engines = fleet("a", "b")
    first = [engines.take([place, 7, 7]) for place in range(4)]
    assert sorted(first) == ["a", "a", "b", "b"] and first[0] != first[1]
    for engine in first:
        engines.give(engine)
    assert [engines.take([place, 7, 7, 8, 9]) for place in (2, 0)] == [first[2], first[0]]
    assert engines.open == 2


def test_a_chat_leaves_an_engine_that_would_let_it_wait():
    engines = fleet("a", "b", running=1)
    home = engines.take([1, 2])
    other = {"a": "b", "b": "a"}[home]
    assert engines.take([1, 2, 3]) == other, "its engine is at work, and another one is not"
    assert engines.take([1, 2, 3, 4]) == other, "both are: it goes back to where it was last"


def test_a_full_fleet_is_busy_and_an_empty_one_unavailable():
    engines = fleet("a", "b", running=1, capacity=2)
    taken = [engines.take([place]) for place in range(4)]
    with pytest.raises(Busy, match="4 requests"):
        engines.take([9])
    engines.give(taken[0])
    assert engines.take([9]) == taken[0]
    with pytest.raises(Unavailable, match="no engine is up"):
        Fleet().take([1])
    assert engines.is_up and not Fleet().is_up


def test_a_lost_engine_is_passed_over_until_it_reports_again():
    engines = fleet("a", "b")
    home = engines.take([1, 2])
    engines.lose(home)
    other = engines.take([1, 2, 3])
    assert other != home
    engines.give(home)
    engines.update([report(home)])
    assert engines.take([4]) == home


def test_a_job_that_came_to_another_engine_counts_there():
    engines = fleet("a", "b", running=4)
    meant = engines.take([1, 2])
    other = {"a": "b", "b": "a"}[meant]
    engines.move([1, 2], meant, other)
    assert engines.open == 1 and engines.take([1, 2, 3]) == other
    engines.give(other)
    engines.give(other)
    assert engines.open == 0
    with pytest.raises(AssertionError):
        engines.give(other)


def test_what_was_done_counts_also_of_engines_that_are_gone():
    engines = Fleet()
    engines.update([report("a", tokens=5, passes=9, waiting=2, blocks_total=8), report("b", tokens=7, blocks_total=8)])
    assert engines.status() == replace(NOTHING, tokens=12, passes=9, waiting=2, blocks_total=16)
    engines.update([report("b", tokens=8, blocks_total=8)])
    assert engines.status() == replace(NOTHING, tokens=13, passes=9, blocks_total=8)
    assert set(engines.engines()) == {"b"}
