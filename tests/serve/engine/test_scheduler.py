"""Scheduler: admission, prefill chunks and preemption."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.serve.engine.block_pool import BlockPool
from sigma0.serve.engine.scheduler import Scheduler, SequenceEntry


def entry(key, length):
    return SequenceEntry(key, list(range(key * 1000, key * 1000 + length)), length, length - 1)


def scheduler(blocks=10, size=4, running=3, waiting=8, rows=16):
    return Scheduler(BlockPool(blocks, size), running, waiting, rows)


def test_first_come_first_admitted_as_far_as_slots_and_blocks_go():
    queue = scheduler(blocks=9)
    entries = [entry(key, length) for key, length in enumerate((7, 30, 3))]
    for sequence in entries:
        queue.add(sequence)
    # the second does not fit, and the third does not overtake it
    assert queue.admit() == entries[:1] and list(queue.waiting) == entries[1:]
    assert len(entries[0].blocks) == 2
    queue.remove(entries[0])
    assert queue.admit() == entries[1:2]


def test_slots_are_handed_out_once():
    queue = scheduler(blocks=100, running=3)
    for key in range(5):
        queue.add(entry(key, 2))
    assert sorted(sequence.slot for sequence in queue.admit()) == [0, 1, 2]
    assert len(queue.waiting) == 2 and queue.admit() == []


def test_a_full_queue_says_so():
    queue = scheduler(waiting=2, running=1)
    for key in range(2):
        queue.add(entry(key, 2))
    assert not queue.is_full, "one of them can begin at once"
    queue.add(entry(2, 2))
    assert queue.is_full
    queue.admit()
    assert queue.is_full


def test_prefills_share_the_rows_that_decoding_leaves():
    queue = scheduler(blocks=100, rows=16)
    long, short = entry(0, 60), entry(1, 8)
    for sequence in (long, short):
        queue.add(sequence)
    queue.admit()
    chunks = {chunk.entry.key: (chunk.start, chunk.stop) for chunk in queue.prefill_chunks(6)}
    assert chunks == {1: (0, 5), 0: (0, 5)}, "ten rows, half of them each"
    chunks = {chunk.entry.key: (chunk.start, chunk.stop) for chunk in queue.prefill_chunks(0)}
    assert chunks == {1: (5, 8), 0: (5, 18)}, "what the short one leaves goes to the long one"
    assert queue.prefill_chunks(16) == [] and queue.prefill_chunks(40) == []


def test_short_prompts_that_keep_coming_do_not_starve_a_long_one():
    queue = scheduler(blocks=100, rows=1)
    long = entry(0, 50)
    queue.add(long)
    for key in range(1, 100):
        if len(queue.waiting) < 3:
            queue.add(entry(key, 5))
        queue.admit()
        assert sum(chunk.stop - chunk.start for chunk in queue.prefill_chunks(0)) == 1
        for sequence in list(queue.running.values()):
            if sequence is not long and sequence.entered == sequence.prefill_end:
                queue.remove(sequence)
    assert long.entered == 50


def test_the_last_one_admitted_is_preempted():
    queue = scheduler(blocks=6, size=2, running=3)
    first, second = entry(0, 4), entry(1, 4)
    for sequence in (first, second):
        queue.add(sequence)
    queue.admit()
    assert queue.allocate(first, 8) == []
    assert queue.allocate(first, 9) == [second]
    assert second.blocks == [] and second.slot == -1 and second.preemptions == 1
    assert list(queue.waiting) == [second] and len(first.blocks) == 5
    # no other is left to preempt
    assert queue.allocate(first, 12) == [] and len(first.blocks) == 6
    assert queue.allocate(first, 13) == [first]


def test_registered_blocks_are_found_by_the_next():
    queue = scheduler(blocks=20, size=2)
    first, second = entry(0, 7), SequenceEntry(1, [*range(7), 50, 51], 9, 8)
    queue.add(first)
    queue.admit()
    queue.register(first, 3)
    queue.register(first, 6)
    blocks = first.blocks[:3]
    queue.remove(first)
    queue.add(second)
    queue.admit()
    assert second.blocks[:3] == blocks and second.entered == second.cached == 6


def test_the_last_position_is_never_cached():
    queue = scheduler(blocks=20, size=2)
    first, again = entry(0, 6), entry(0, 6)
    queue.add(first)
    queue.admit()
    queue.register(first, 6)
    again.key = 1
    queue.add(again)
    queue.admit()
    assert again.entered == 4


@pytest.mark.parametrize("name", ["max_running", "max_waiting", "pass_rows"])
def test_bad_limits_are_named(name):
    limits = {"max_running": 1, "max_waiting": 1, "pass_rows": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Scheduler(BlockPool(1, 1), **limits)


def test_it_needs_no_torch():
    code = "import sys; import sigma0.serve.engine.scheduler; print('torch' in sys.modules)"
    # the package itself imports torch; the module must not by itself
    stub = "import sys, types; p = types.ModuleType('sigma0'); p.__path__ = ['sigma0']; sys.modules['sigma0'] = p; "
    found = subprocess.run([sys.executable, "-c", stub + code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(6, 14), st.integers(1, 4), st.data())
def test_all_work_ends_and_no_block_is_lost(lengths, blocks, running, data):
    """Sequences that prefill, then decode up to ten tokens; a preempted one starts over."""
    queue = scheduler(blocks=blocks, size=4, running=running, waiting=len(lengths), rows=8)
    entries = [entry(key, min(length, 4 * blocks - 10)) for key, length in enumerate(lengths)]
    written = dict.fromkeys(range(len(entries)), 0)
    for sequence in entries:
        queue.add(sequence)
    for _ in range(2000):
        queue.admit()
        assert sum(len(sequence.blocks) for sequence in queue.running.values()) >= queue.pool.used
        rows = sum(chunk.stop - chunk.start for chunk in queue.prefill_chunks(0))
        assert rows <= 8
        for sequence in list(queue.running.values()):
            if sequence.key not in queue.running or sequence.entered < sequence.prefill_end:
                continue
            queue.allocate(sequence, sequence.prefill_end + 1)
            if sequence.key in queue.running:
                sequence.prefill_end = sequence.entered = sequence.prefill_end + 1
                written[sequence.key] += 1
                if written[sequence.key] >= 10:
                    queue.remove(sequence)
        if not queue.running and not queue.waiting:
            break
    assert set(written.values()) == {10}
    assert queue.pool.used == 0
