"""Scheduler: the exact limits of blocks, rows, segments and what may be found again."""

import pytest

from sigma0.serve.engine.block_pool import BlockPool, block_hash
from sigma0.serve.engine.scheduler import PrefillChunk, ScheduledStep, Scheduler, SequenceEntry, StepOutput


def entry(key, length, **values):
    return SequenceEntry(key, list(range(key * 1000, key * 1000 + length)), length, length - 1, **values)


def scheduler(blocks=10, size=4, running=3, rows=16, segment=None):
    return Scheduler(BlockPool(blocks, size), running, 8, rows, segment)


def started(queue, *entries):
    for sequence in entries:
        queue.add(sequence)
    assert queue.admit() == list(entries)
    return entries


def test_a_new_sequence_has_nothing_yet():
    assert entry(1, 2) == SequenceEntry(
        key=1, token_ids=[1000, 1001], prefill_end=2, cacheable=1, exact=None, window=1, entered=0, slot=-1, blocks=[],
        registered=0, last_hash=b"", cached=0, preemptions=0, root=b"", ready=None,
    )  # fmt: skip
    assert entry(1, 2, root=b"salt").last_hash == b"salt"


def test_what_may_enter_ends_with_the_prompt_and_with_what_is_ready():
    assert (entry(0, 9, entered=2).remaining, entry(0, 9, entered=2).may_enter) == (7, 7)
    assert entry(0, 9, entered=2, ready=4).may_enter == 2
    assert entry(0, 9, entered=4, ready=4).may_enter == 0
    assert entry(0, 9, entered=8, ready=12).may_enter == 1


@pytest.mark.parametrize("segment, fits", [(None, True), (4, True), (8, True), (2, False), (6, False), (9, False)])
def test_a_segment_is_of_whole_blocks(segment, fits):
    if fits:
        assert scheduler(size=4, segment=segment).segment == segment
    else:
        with pytest.raises(ValueError, match=f"a segment of {segment} cache positions is no multiple of a block of 4"):
            scheduler(size=4, segment=segment)


def test_slots_begin_at_the_same_distance_from_each_other():
    queue = scheduler(blocks=12, running=3)
    entries = started(queue, *(entry(key, 3) for key in range(3)))
    assert [sequence.slot for sequence in entries] == [0, 1, 2]
    assert [sequence.blocks for sequence in entries] == [[0], [4], [8]]


@pytest.mark.parametrize("length, admitted", [(7, True), (8, False)])
def test_one_block_is_spared_for_each_that_runs(length, admitted):
    queue = scheduler(blocks=4, size=4)
    started(queue, entry(0, 3))
    second = entry(1, length)
    queue.add(second)
    # with the token that is fed next, eight positions are two blocks and nine are three
    assert queue.admit() == ([second] if admitted else [])
    assert queue.pool.available == (1 if admitted else 3)


def test_what_does_not_fit_gives_back_what_it_found():
    queue = scheduler(blocks=4, size=2)
    (first,) = started(queue, entry(0, 3))
    queue.register(first, 2)
    blocks = queue.pool.available
    queue.add(SequenceEntry(1, [0, 1, 5, 6, 7, 8, 9], 7, 6))
    assert queue.admit() == [] and queue.pool.available == blocks


def test_new_blocks_follow_the_last_that_was_found():
    queue = scheduler(blocks=10, size=2, running=1)
    found, last_hash = [0, 5], b""
    for place, block in enumerate(found):
        assert queue.pool.allocate_run(1, block) == [block]
        last_hash = block_hash(last_hash, [2 * place, 2 * place + 1])
        queue.pool.register(block, last_hash)
    queue.pool.free(found)
    (sequence,) = started(queue, entry(0, 7))
    assert sequence.blocks == [0, 5, 6, 7] and sequence.registered == 2 and sequence.last_hash == last_hash
    assert sequence.entered == sequence.cached == 4


def segmented(length, matched):
    """A sequence whose first blocks of two are registered, where segments are of four positions."""
    queue, last_hash = scheduler(blocks=20, size=2, running=1, segment=4), b""
    for place in range(matched):
        (block,) = queue.pool.allocate_run(1)
        last_hash = block_hash(last_hash, [2 * place, 2 * place + 1])
        queue.pool.register(block, last_hash)
    queue.pool.free(list(range(matched)))
    (sequence,) = started(queue, entry(0, length))
    return queue, sequence


@pytest.mark.parametrize("matched, entered", [(0, 0), (1, 0), (2, 4), (3, 4), (4, 8)])
def test_whole_segments_are_found_again_and_one_may_enter_behind_them(matched, entered):
    queue, sequence = segmented(15, matched)
    assert sequence.entered == sequence.cached == entered and sequence.registered == entered // 2
    assert sequence.ready == entered + 4 and sequence.may_enter == 4
    assert queue.pool.used == len(sequence.blocks) == 8
    assert queue.prefill_chunks(0) == [PrefillChunk(sequence, entered, entered + 4)]
    assert queue.prefill_chunks(0) == [], "the next waits until this one is encoded"
    sequence.ready += 4
    assert queue.prefill_chunks(0) == [PrefillChunk(sequence, entered + 4, min(entered + 8, 15))]


def test_without_segments_all_may_enter():
    (sequence,) = started(scheduler(), entry(0, 9))
    assert sequence.ready is None and sequence.may_enter == 9


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
    assert {chunk.entry.key: chunk.stop for chunk in chunks} == expected
    assert all(chunk.start == 0 for chunk in chunks)


def test_a_prefill_goes_on_where_nobody_waits():
    queue = scheduler(blocks=100, rows=4)
    (sequence,) = started(queue, entry(0, 9))
    assert [queue.schedule(0).prefill for _ in range(4)] == [
        (PrefillChunk(sequence, 0, 4),), (PrefillChunk(sequence, 4, 8),), (PrefillChunk(sequence, 8, 9),), (),
    ]  # fmt: skip


def test_a_table_that_was_extended_between_passes_is_told():
    queue = scheduler(blocks=10, size=4)
    (sequence,) = started(queue, entry(0, 3))
    assert queue.schedule(0).tables == {0: (0,)} and queue.schedule(0) == ScheduledStep()
    assert queue.reserve(sequence, 4) == [] and queue.schedule(0) == ScheduledStep(), "it had as many"
    assert queue.reserve(sequence, 5) == []
    step = queue.schedule(0)
    assert step.tables == {0: (0, 1)} and step.wiped == (1,)
    assert queue.schedule(0) == ScheduledStep()


def test_a_block_goes_to_the_sequence_that_runs_before_a_newcomer():
    queue = scheduler(blocks=2, size=2, running=2)
    first, second = entry(0, 1), entry(1, 1)
    queue.add(first)
    queue.schedule(0)
    queue.add(second)
    assert queue.admit() == []
    queue.update(StepOutput(fed={0: (1, 7)}))
    step = queue.schedule(0)
    assert step.tables == {0: (0, 1)} and step.preempted == step.admitted == () and first.entered == 2


def test_of_two_that_lack_a_block_the_later_is_preempted_and_tells_its_slot():
    queue = scheduler(blocks=5, size=2, running=2)
    first, second = started(queue, entry(0, 3), entry(1, 3))
    queue.schedule(0)
    queue.update(StepOutput(fed={0: (3, 7), 1: (3, 7)}))
    step = queue.schedule(2)
    assert step.preempted == ((second, 1),) and step.tables == {0: tuple(first.blocks)} and len(first.blocks) == 3
    assert (second.slot, second.blocks, second.entered, second.registered) == (-1, [], 0, 0)
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
    assert sequence.cacheable == 4 and queue.schedule(0).prefill == (PrefillChunk(sequence, 0, 2),)


def test_full_blocks_are_registered_once_and_in_a_chain():
    queue = scheduler(size=2)
    (sequence,) = started(queue, entry(0, 7))
    for positions, registered in ((1, 0), (2, 1), (5, 2), (5, 2), (6, 3)):
        queue.register(sequence, positions)
        assert sequence.registered == registered
    chain = b""
    for first in (0, 2, 4):
        chain = block_hash(chain, [first, first + 1])
    assert sequence.last_hash == chain
    queue.remove(sequence)
    assert sequence.last_hash == b"" and queue.pool.cached == 3


def test_one_that_waits_can_be_removed():
    queue = scheduler(running=1)
    started(queue, entry(0, 2))
    waiting = entry(1, 2)
    queue.add(waiting)
    queue.remove(waiting)
    assert not queue.waiting and list(queue.running) == [0]
