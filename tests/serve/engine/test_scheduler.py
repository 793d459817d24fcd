"""Admission, prompt rows, and who gives way."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.serve.engine.block_pool import PagePool
from sigma0.serve.engine.scheduler import Entry, Scheduler


def entry(key, length):
    return Entry(key, list(range(key * 1000, key * 1000 + length)), length, length - 1)


def scheduler(pages=10, size=4, running=3, waiting=8, rows=16):
    return Scheduler(PagePool(pages, size), running, waiting, rows)


def test_first_come_first_admitted_as_far_as_slots_and_pages_go():
    plan = scheduler(pages=9)
    entries = [entry(key, length) for key, length in enumerate((7, 30, 3))]
    for each in entries:
        plan.add(each)
    # the second does not fit, and the third does not overtake it
    assert plan.admit() == entries[:1] and list(plan.waiting) == entries[1:]
    assert len(entries[0].pages) == 2
    plan.remove(entries[0])
    assert plan.admit() == entries[1:2]


def test_slots_are_handed_out_once():
    plan = scheduler(pages=100, running=3)
    for key in range(5):
        plan.add(entry(key, 2))
    assert sorted(each.slot for each in plan.admit()) == [0, 1, 2]
    assert len(plan.waiting) == 2 and plan.admit() == []


def test_a_full_queue_says_so():
    plan = scheduler(waiting=2, running=1)
    for key in range(2):
        plan.add(entry(key, 2))
    assert not plan.is_full, "one of them can begin at once"
    plan.add(entry(2, 2))
    assert plan.is_full
    plan.admit()
    assert plan.is_full


def test_reading_texts_share_what_decoding_leaves():
    plan = scheduler(pages=100, rows=16)
    long, short = entry(0, 60), entry(1, 8)
    for each in (long, short):
        plan.add(each)
    plan.admit()
    told = {each.entry.key: (each.start, each.stop) for each in plan.stretches(6)}
    assert told == {1: (0, 5), 0: (0, 5)}, "ten rows, half of them each"
    told = {each.entry.key: (each.start, each.stop) for each in plan.stretches(0)}
    assert told == {1: (5, 8), 0: (5, 18)}, "what the short one leaves goes to the long one"
    assert plan.stretches(16) == [] and plan.stretches(40) == []


def test_short_texts_that_keep_coming_do_not_hold_a_long_one_up():
    plan = scheduler(pages=100, rows=1)
    long = entry(0, 50)
    plan.add(long)
    for key in range(1, 100):
        if len(plan.waiting) < 3:
            plan.add(entry(key, 5))
        plan.admit()
        assert sum(each.stop - each.start for each in plan.stretches(0)) == 1
        for each in list(plan.running.values()):
            if each is not long and each.read == each.goal:
                plan.remove(each)
    assert long.read == 50


def test_the_last_one_admitted_gives_way():
    plan = scheduler(pages=6, size=2, running=3)
    first, second = entry(0, 4), entry(1, 4)
    for each in (first, second):
        plan.add(each)
    plan.admit()
    assert plan.make_room(first, 8) == []
    assert plan.make_room(first, 9) == [second]
    assert second.pages == [] and second.slot == -1 and second.preemptions == 1
    assert list(plan.waiting) == [second] and len(first.pages) == 5
    # nobody else is left to give way
    assert plan.make_room(first, 12) == [] and len(first.pages) == 6
    assert plan.make_room(first, 13) == [first]


def test_what_is_complete_is_found_by_the_next():
    plan = scheduler(pages=20, size=2)
    first, second = entry(0, 7), Entry(1, [*range(7), 50, 51], 9, 8)
    plan.add(first)
    plan.admit()
    plan.complete(first, 3)
    plan.complete(first, 6)
    pages = first.pages[:3]
    plan.remove(first)
    plan.add(second)
    plan.admit()
    assert second.pages[:3] == pages and second.read == second.cached == 6


def test_the_last_position_is_never_found():
    plan = scheduler(pages=20, size=2)
    first, again = entry(0, 6), entry(0, 6)
    plan.add(first)
    plan.admit()
    plan.complete(first, 6)
    again.key = 1
    plan.add(again)
    plan.admit()
    assert again.read == 4


@pytest.mark.parametrize("name", ["max_running", "max_waiting", "pass_rows"])
def test_bad_limits_are_named(name):
    limits = {"max_running": 1, "max_waiting": 1, "pass_rows": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Scheduler(PagePool(1, 1), **limits)


def test_it_needs_no_torch():
    code = "import sys; import sigma0.serve.engine.scheduler; print('torch' in sys.modules)"
    # the package itself imports torch; the module must not by itself
    stub = "import sys, types; p = types.ModuleType('sigma0'); p.__path__ = ['sigma0']; sys.modules['sigma0'] = p; "
    found = subprocess.run([sys.executable, "-c", stub + code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(6, 14), st.integers(1, 4), st.data())
def test_all_work_ends_and_no_page_is_lost(lengths, pages, running, data):
    """Texts that read, then write up to ten tokens; whoever is put back begins anew."""
    plan = scheduler(pages=pages, size=4, running=running, waiting=len(lengths), rows=8)
    entries = [entry(key, min(length, 4 * pages - 10)) for key, length in enumerate(lengths)]
    written = dict.fromkeys(range(len(entries)), 0)
    for each in entries:
        plan.add(each)
    for _ in range(2000):
        plan.admit()
        assert sum(len(each.pages) for each in plan.running.values()) >= plan.pool.used
        rows = sum(each.stop - each.start for each in plan.stretches(0))
        assert rows <= 8
        for each in list(plan.running.values()):
            if each.key not in plan.running or each.read < each.goal:
                continue
            plan.make_room(each, each.goal + 1)
            if each.key in plan.running:
                each.goal = each.read = each.goal + 1
                written[each.key] += 1
                if written[each.key] >= 10:
                    plan.remove(each)
        if not plan.running and not plan.waiting:
            break
    assert set(written.values()) == {10}
    assert plan.pool.used == 0
