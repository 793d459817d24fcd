"""Scheduler: admission, prefill chunks and preemption, pass by pass as the engine drives it; and its exact limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.serve.engine.block_pool import BlockPool, block_hash
from sigma0.serve.engine.scheduler import Scheduler, SequenceEntry
from tests.test_start import loaded


def entry(key, length, **values):
    return SequenceEntry(key, list(range(key * 1000, key * 1000 + length)), length, length - 1, **values)


def scheduler(blocks=10, size=4, running=3, waiting=8, rows=16, segment=None):
    return Scheduler(BlockPool(blocks, size), running, waiting, rows, segment)


def added(queue, *entries):
    for sequence in entries:
        queue.add(sequence)
    return entries


def started(queue, *entries):
    assert added(queue, *entries) == tuple(queue.admit())
    return entries


def scheduled(queue, *entries):
    """The first step of sequences."""
    added(queue, *entries)
    return queue.schedule(0)


def feed(queue, *sequences, token_id=7):
    """A pass has fed an id after all that has entered of each."""
    for sequence in sequences:
        queue.feed(sequence, sequence.entered, token_id)


def test_first_come_first_admitted_as_far_as_slots_and_blocks_go():
    queue = scheduler(blocks=9)
    entries = [*added(queue, *(entry(key, length) for key, length in enumerate((7, 30, 3))))]
    # the second does not fit, and the third does not overtake it
    assert queue.admit() == entries[:1] and list(queue.waiting) == entries[1:]
    assert len(entries[0].blocks) == 2
    queue.remove(entries[0])
    assert queue.admit() == entries[1:2]


@pytest.mark.parametrize("waiting", [0, 2])
def test_a_full_queue_says_so(waiting):
    queue = scheduler(waiting=waiting, running=1)
    for key in range(waiting + 1):
        assert not queue.is_full, "one of them can begin at once"
        queue.add(entry(key, 2))
    assert queue.is_full
    queue.schedule(0)
    assert queue.is_full
    queue.remove(queue.running[0])
    assert not queue.is_full


def test_the_last_one_admitted_is_preempted():
    queue = scheduler(blocks=7, size=2, running=3)
    first, second = started(queue, entry(0, 4), entry(1, 4))
    assert queue.reserve(first, 8) == []
    assert queue.reserve(first, 9) == [(second, 1)]
    assert second.blocks == [] and second.slot == -1 and second.preemptions == 1
    assert list(queue.waiting) == [second] and len(first.blocks) == 5
    # no other is left to preempt
    assert queue.reserve(first, 14) == [] and len(first.blocks) == 7
    assert queue.reserve(first, 15) == [(first, 0)]


@pytest.mark.parametrize(("name", "bound"), [("max_running", 1), ("max_waiting", 0), ("pass_rows", 1)])
def test_bad_limits_are_named(name, bound):
    limits = {"max_running": 1, "max_waiting": 0, "pass_rows": 1, name: bound - 1}
    with pytest.raises(ValueError, match=f"{name} must be at least {bound}, got {bound - 1}"):
        Scheduler(BlockPool(1, 1), **limits)


def test_it_needs_no_torch():
    # the package itself may import torch; the module must not by itself
    stub = "import sys, types; p = types.ModuleType('sigma0'); p.__path__ = ['sigma0']; sys.modules['sigma0'] = p; "
    assert "torch" not in loaded(stub + "import sigma0.serve.engine.scheduler")


def test_a_step_names_what_the_engine_has_to_do():
    queue = scheduler(blocks=10, size=4, running=2, rows=6)
    first, second, third = entry(0, 7), entry(1, 3), entry(2, 5)
    step = scheduled(queue, first, second, third)
    assert step.admitted == (first, second) and step.preempted == ()
    assert step.tables == {0: tuple(first.blocks), 1: tuple(second.blocks)}
    assert sorted(step.wiped) == sorted([*first.blocks, *second.blocks])
    assert {(sequence.key, start, stop) for sequence, start, stop in step.prefill} == {(1, 0, 3), (0, 0, 3)}
    # what is under way takes room from the prompts
    step = queue.schedule(5)
    assert [(sequence.key, start, stop) for sequence, start, stop in step.prefill] == [(0, 3, 4)]
    assert step.admitted == () and step.tables == {} and step.wiped == ()


def test_the_block_of_a_token_is_there_before_the_pass_that_feeds_it():
    queue = scheduler(blocks=10, size=4, running=1)
    sequence = entry(0, 3)
    scheduled(queue, sequence)
    assert sequence.remaining == 0 and len(sequence.blocks) == 1, "position 3 has its block"
    feed(queue, sequence)
    assert sequence.token_ids == [0, 1, 2, 7] and sequence.entered == sequence.prefill_end == 4
    step = queue.schedule(1)
    assert step.tables == {0: tuple(sequence.blocks)} and len(sequence.blocks) == 2, "so has position 4"
    assert step.wiped == (sequence.blocks[1],)


def test_what_was_fed_in_place_of_a_draft_takes_those_behind_along():
    queue = scheduler(blocks=10, size=4, running=1)
    sequence = entry(0, 3)
    scheduled(queue, sequence)
    for token_id in (7, 8, 9):
        feed(queue, sequence, token_id=token_id)
    queue.feed(sequence, 4, 5)
    assert sequence.token_ids == [0, 1, 2, 7, 5] and sequence.entered == 5


def test_blocks_are_found_once_they_are_complete_and_outlast_the_end():
    queue = scheduler(blocks=10, size=2, running=2)
    first, second = entry(0, 6), SequenceEntry(1, [0, 1, 2, 3, 9, 9], 6, 5)
    scheduled(queue, first)
    feed(queue, first)
    queue.register(first, 5)
    queue.remove(first)
    assert queue.pool.used == 0 and not queue.running and queue.pool.cached == 2
    step = scheduled(queue, second)
    assert second.cached == 4 and step.prefill == ((second, 4, 6),)
    assert set(step.wiped) == set(second.blocks[2:]), "what was found is not wiped"


def test_a_preempted_sequence_finds_its_own_blocks_but_those_in_flight():
    queue = scheduler(blocks=4, size=2, running=2)
    sequence = entry(0, 3, window=2)
    scheduled(queue, sequence)
    for _ in range(2):
        feed(queue, sequence)
        queue.register(sequence, sequence.entered - 2)
        queue.schedule(1)
    assert sequence.entered == 5 and sequence.registered == 1
    queue.register(sequence, 4)
    queue.preempt(sequence)
    # positions 3 and 4 may be in flight, so the block of 2 and 3 must be its own
    step = queue.schedule(0)
    assert step.admitted == (sequence,) and sequence.preemptions == 1
    assert sequence.cached == 2 and step.prefill == ((sequence, 2, 5),)


def test_blocks_of_a_sequence_follow_each_other():
    queue = scheduler(blocks=32, size=2, running=2)
    sequences = entry(0, 5), entry(1, 3)
    scheduled(queue, *sequences)
    for _ in range(20):
        feed(queue, *sequences)
        queue.schedule(2)
    for sequence in sequences:
        first = sequence.blocks[0]
        assert len(sequence.blocks) > 10 and sequence.blocks == list(range(first, first + len(sequence.blocks)))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(6, 14), st.integers(1, 4), st.data())
def test_all_work_ends_and_no_block_is_lost(lengths, blocks, running, data):
    """Sequences that prefill, then decode up to ten tokens; a preempted one starts over."""
    queue = scheduler(blocks=blocks, size=4, running=running, waiting=len(lengths), rows=8)
    entries = [entry(key, min(length, 4 * blocks - 10)) for key, length in enumerate(lengths)]
    written = dict.fromkeys(range(len(entries)), 0)
    added(queue, *entries)
    for _ in range(2000):
        step = queue.schedule(0)
        assert sum(len(sequence.blocks) for sequence in queue.running.values()) >= queue.pool.used
        assert sum(stop - start for _, start, stop in step.prefill) <= 8
        decoding = [sequence for sequence in queue.running.values() if not sequence.remaining]
        for sequence in decoding:
            assert len(sequence.blocks) >= queue.pool.blocks_for(sequence.entered + 1)
            written[sequence.key] += 1
            if written[sequence.key] < 10:
                feed(queue, sequence)
            else:
                queue.remove(sequence)
        if not queue.running and not queue.waiting:
            break
    assert set(written.values()) == {10}
    assert queue.pool.used == 0


def test_a_segment_is_of_whole_blocks():
    assert [scheduler(size=4, segment=segment).segment for segment in (None, 4, 8)] == [None, 4, 8]
    for segment in (2, 6, 9):
        with pytest.raises(ValueError, match=f"a segment of {segment} cache positions is no multiple of a block of 4"):
            scheduler(size=4, segment=segment)


def test_slots_begin_at_the_same_distance_from_each_other():
    queue = scheduler(blocks=12, running=3)
    entries = started(queue, *(entry(key, 3) for key in range(3)))
    queue.add(entry(3, 1))
    assert queue.admit() == [], "each is handed out once"
    assert [sequence.slot for sequence in entries] == [0, 1, 2]
    assert [sequence.blocks for sequence in entries] == [[0], [4], [8]]


def test_what_does_not_fit_gives_back_what_it_found():
    queue = scheduler(blocks=4, size=2)
    (first,) = started(queue, entry(0, 3))
    queue.register(first, 2)
    blocks = queue.pool.available
    queue.add(SequenceEntry(1, [0, 1, 5, 6, 7, 8, 9], 7, 6))
    assert queue.admit() == [] and queue.pool.available == blocks


def register(pool, blocks):
    """Registers these blocks of two as those that the sequence 0 begins with; the hash of the last."""
    last_hash = b""
    for place, block in enumerate(blocks):
        assert pool.allocate_run(1, block) == [block]
        last_hash = block_hash(last_hash, [2 * place, 2 * place + 1])
        pool.register(block, last_hash)
    pool.free(blocks)
    return last_hash


def test_new_blocks_follow_the_last_that_was_found():
    queue = scheduler(blocks=10, size=2, running=1)
    last_hash = register(queue.pool, [0, 5])
    (sequence,) = started(queue, entry(0, 7))
    assert sequence.blocks == [0, 5, 6, 7] and sequence.registered == 2 and sequence.last_hash == last_hash
    assert sequence.entered == sequence.cached == 4


@pytest.mark.parametrize("matched, entered", [(0, 0), (1, 0), (2, 4), (3, 4), (4, 8)])
def test_whole_segments_are_found_again_and_one_may_enter_behind_them(matched, entered):
    queue = scheduler(blocks=20, size=2, running=1, segment=4)
    register(queue.pool, list(range(matched)))
    (sequence,) = started(queue, entry(0, 15))
    assert sequence.entered == sequence.cached == entered and sequence.registered == entered // 2
    assert sequence.ready == entered + 4 and sequence.may_enter == 4
    assert queue.pool.used == len(sequence.blocks) == 8
    assert queue.prefill_chunks(0) == [(sequence, entered, entered + 4)]
    assert queue.prefill_chunks(0) == [], "the next waits until this one is encoded"
    sequence.ready += 4
    assert queue.prefill_chunks(0) == [(sequence, entered + 4, min(entered + 8, 15))]


@pytest.mark.parametrize(
    "rows, expected",
    [
        # of ten rows the longer have what the shorter leave, rounded up for the shorter
        (0, {0: 3, 1: 1, 2: 6}),
        (2, {0: 3, 1: 1, 2: 4}),
        (5, {0: 2, 1: 1, 2: 2}),
        # of two rows the first two sequences have one each
        (8, {0: 1, 1: 1}),
        (9, {0: 1}),
        (10, {}),
        (11, {}),
    ],
)
def test_rows_are_shared_from_the_shortest_on(rows, expected):
    queue = scheduler(blocks=100, rows=10)
    started(queue, entry(0, 3), entry(1, 1), entry(2, 60))
    chunks = queue.prefill_chunks(rows)
    assert {sequence.key: stop for sequence, _, stop in chunks} == expected
    assert all(start == 0 for _, start, _ in chunks)


def test_a_block_goes_to_the_sequence_that_runs_before_a_newcomer():
    queue = scheduler(blocks=2, size=2, running=2)
    first, second = entry(0, 1), entry(1, 1)
    scheduled(queue, first)
    queue.add(second)
    assert queue.admit() == []
    queue.feed(first, 1, 7)
    step = queue.schedule(0)
    assert step.tables == {0: (0, 1)} and step.preempted == step.admitted == () and first.entered == 2


def test_of_two_that_lack_a_block_the_later_is_preempted_and_tells_its_slot():
    queue = scheduler(blocks=5, size=2, running=2)
    first, second = started(queue, entry(0, 3), entry(1, 3))
    queue.schedule(0)
    feed(queue, first, second)
    step = queue.schedule(2)
    assert step.preempted == ((second, 1),) and step.tables == {0: tuple(first.blocks)} and len(first.blocks) == 3
    assert (second.slot, second.blocks) == (-1, [])
    assert list(queue.waiting) == [second] and queue.pool.used == 3


@pytest.mark.parametrize(
    "values, cacheable",
    [
        ({"window": 1}, 4),
        ({"window": 3}, 2),
        ({"window": 5}, 0),
        ({"window": 9}, 0),
        ({"window": 1, "exact": 3}, 3),
        ({"window": 3, "exact": 3}, 2),
        ({"window": 1, "exact": 0}, 0),
    ],
)
def test_what_is_in_flight_is_not_found_again(values, cacheable):
    queue = scheduler()
    (sequence,) = started(queue, entry(0, 5, **values))
    queue.schedule(0)
    queue.preempt(sequence)
    assert sequence.cacheable == cacheable and sequence.preemptions == 1


def test_a_prompt_that_has_not_entered_stays_as_cacheable_as_it_was():
    queue = scheduler(rows=2)
    (sequence,) = started(queue, entry(0, 5, window=5))
    queue.schedule(0)
    queue.preempt(sequence)
    assert sequence.cacheable == 4 and queue.schedule(0).prefill == ((sequence, 0, 2),)


def test_one_that_waits_can_be_removed():
    queue = scheduler(running=1)
    started(queue, entry(0, 2))
    (waiting,) = added(queue, entry(1, 2))
    queue.remove(waiting)
    assert not queue.waiting and list(queue.running) == [0]
