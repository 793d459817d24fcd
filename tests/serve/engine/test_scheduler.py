"""Scheduler: admission, prefill chunks and preemption, pass by pass as the engine drives it, without a model."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.serve.engine.block_pool import BlockPool
from sigma0.serve.engine.scheduler import ScheduledStep, Scheduler, SequenceEntry, StepOutput


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
    queue = scheduler(blocks=7, size=2, running=3)
    first, second = entry(0, 4), entry(1, 4)
    for sequence in (first, second):
        queue.add(sequence)
    queue.admit()
    assert queue.reserve(first, 8) == []
    assert queue.reserve(first, 9) == [(second, 1)]
    assert second.blocks == [] and second.slot == -1 and second.preemptions == 1
    assert list(queue.waiting) == [second] and len(first.blocks) == 5
    # no other is left to preempt
    assert queue.reserve(first, 14) == [] and len(first.blocks) == 7
    assert queue.reserve(first, 15) == [(first, 0)]


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


@pytest.mark.parametrize(("name", "bound"), [("max_running", 1), ("max_waiting", 0), ("pass_rows", 1)])
def test_bad_limits_are_named(name, bound):
    limits = {"max_running": 1, "max_waiting": 0, "pass_rows": 1, name: bound - 1}
    with pytest.raises(ValueError, match=f"{name} must be at least {bound}, got {bound - 1}"):
        Scheduler(BlockPool(1, 1), **limits)


def test_without_a_queue_only_what_can_start_at_once_is_taken():
    queue = scheduler(waiting=0, running=1)
    assert not queue.is_full
    queue.add(entry(0, 2))
    assert queue.is_full
    queue.schedule(0)
    assert queue.is_full
    queue.update(StepOutput(ended=(0,)))
    assert not queue.is_full


def test_nothing_is_scheduled_where_nothing_changes():
    queue = scheduler(blocks=10, size=4, rows=16)
    queue.add(entry(0, 5))
    assert queue.schedule(0).admitted
    queue.update(StepOutput(fed={0: (5, 7)}))
    assert queue.schedule(6) == ScheduledStep()
    queue.update(StepOutput(fed={0: (8, 7)}))
    assert queue.schedule(6).tables, "the token after that lacks a block"


def test_it_needs_no_torch():
    code = "import sys; import sigma0.serve.engine.scheduler; print('torch' in sys.modules)"
    # the package itself imports torch; the module must not by itself
    stub = "import sys, types; p = types.ModuleType('sigma0'); p.__path__ = ['sigma0']; sys.modules['sigma0'] = p; "
    found = subprocess.run([sys.executable, "-c", stub + code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def feed(sequence, token_id=7):
    """What a pass says that has fed an id behind all that has entered."""
    return {sequence.key: (sequence.entered, token_id)}


def test_a_step_names_what_the_engine_has_to_do():
    queue = scheduler(blocks=10, size=4, running=2, rows=6)
    first, second, third = entry(0, 7), entry(1, 3), entry(2, 5)
    for sequence in (first, second, third):
        queue.add(sequence)
    step = queue.schedule(0)
    assert step.admitted == (first, second) and step.preempted == ()
    assert step.tables == {0: tuple(first.blocks), 1: tuple(second.blocks)}
    assert sorted(step.wiped) == sorted([*first.blocks, *second.blocks])
    assert {(chunk.entry.key, chunk.start, chunk.stop) for chunk in step.prefill} == {(1, 0, 3), (0, 0, 3)}
    # what is under way takes room from the prompts
    step = queue.schedule(5)
    assert [(chunk.entry.key, chunk.start, chunk.stop) for chunk in step.prefill] == [(0, 3, 4)]
    assert step.admitted == () and step.tables == {} and step.wiped == ()


def test_the_block_of_a_token_is_there_before_the_pass_that_feeds_it():
    queue = scheduler(blocks=10, size=4, running=1)
    sequence = entry(0, 3)
    queue.add(sequence)
    queue.schedule(0)
    assert sequence.remaining == 0 and len(sequence.blocks) == 1, "position 3 has its block"
    queue.update(StepOutput(fed=feed(sequence)))
    assert sequence.token_ids == [0, 1, 2, 7] and sequence.entered == sequence.prefill_end == 4
    step = queue.schedule(1)
    assert step.tables == {0: tuple(sequence.blocks)} and len(sequence.blocks) == 2, "so has position 4"
    assert step.wiped == (sequence.blocks[1],)


def test_what_was_fed_in_place_of_a_draft_takes_those_behind_along():
    queue = scheduler(blocks=10, size=4, running=1)
    sequence = entry(0, 3)
    queue.add(sequence)
    queue.schedule(0)
    for token_id in (7, 8, 9):
        queue.update(StepOutput(fed=feed(sequence, token_id)))
    queue.update(StepOutput(fed={0: (4, 5)}))
    assert sequence.token_ids == [0, 1, 2, 7, 5] and sequence.entered == 5


def test_blocks_are_found_once_they_are_complete_and_outlast_the_end():
    queue = scheduler(blocks=10, size=2, running=2)
    first, second = entry(0, 6), SequenceEntry(1, [0, 1, 2, 3, 9, 9], 6, 5)
    queue.add(first)
    queue.schedule(0)
    queue.update(StepOutput(fed=feed(first), complete={0: 5}, ended=[0]))
    assert queue.pool.used == 0 and not queue.running and queue.pool.cached == 2
    queue.add(second)
    step = queue.schedule(0)
    assert second.cached == 4 and [(chunk.start, chunk.stop) for chunk in step.prefill] == [(4, 6)]
    assert set(step.wiped) == set(second.blocks[2:]), "what was found is not wiped"


def test_a_preempted_sequence_finds_its_own_blocks_but_those_in_flight():
    queue = scheduler(blocks=4, size=2, running=2)
    sequence, window = entry(0, 3), 2
    sequence.window = window
    queue.add(sequence)
    queue.schedule(0)
    for _ in range(2):
        queue.update(StepOutput(fed=feed(sequence), complete={0: sequence.entered - 1}))
        queue.schedule(1)
    assert sequence.entered == 5 and sequence.registered == 1
    queue.update(StepOutput(complete={0: 4}))
    queue.preempt(sequence)
    # positions 3 and 4 may be in flight, so the block of 2 and 3 must be its own
    step = queue.schedule(0)
    assert step.admitted == (sequence,) and sequence.preemptions == 1
    assert sequence.cached == 2 and [(chunk.start, chunk.stop) for chunk in step.prefill] == [(2, 5)]


def test_only_the_prompt_of_an_inexact_sequence_is_found_again():
    queue = scheduler(blocks=10, size=2, running=2)
    sequence = SequenceEntry(0, list(range(4)), 4, 3, exact=4)
    queue.add(sequence)
    queue.schedule(0)
    for _ in range(4):
        queue.update(StepOutput(fed=feed(sequence)))
        queue.schedule(1)
    queue.preempt(sequence)
    assert sequence.cacheable == 4 and sequence.prefill_end == 8


def test_blocks_of_a_sequence_follow_each_other():
    """Two sequences that grow in turns."""
    queue = scheduler(blocks=32, size=2, running=2)
    sequences = entry(0, 5), entry(1, 3)
    for sequence in sequences:
        queue.add(sequence)
    queue.schedule(0)
    for _ in range(20):
        queue.update(StepOutput(fed={**feed(sequences[0]), **feed(sequences[1])}))
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
    for sequence in entries:
        queue.add(sequence)
    for _ in range(2000):
        step = queue.schedule(0)
        assert sum(len(sequence.blocks) for sequence in queue.running.values()) >= queue.pool.used
        assert sum(chunk.stop - chunk.start for chunk in step.prefill) <= 8
        decoding = [sequence for sequence in queue.running.values() if not sequence.remaining]
        for sequence in decoding:
            assert len(sequence.blocks) >= queue.pool.blocks_for(sequence.entered + 1)
            written[sequence.key] += 1
        ended = [sequence.key for sequence in decoding if written[sequence.key] >= 10]
        fed = {key: position for sequence in decoding for key, position in feed(sequence).items() if key not in ended}
        queue.update(StepOutput(fed, {}, ended))
        if not queue.running and not queue.waiting:
            break
    assert set(written.values()) == {10}
    assert queue.pool.used == 0


def test_new_blocks_follow_those_of_the_prefix_cache():
    queue = scheduler(blocks=20, size=2, running=2)
    first, other = entry(0, 7), entry(1, 3)
    for sequence in (first, other):
        queue.add(sequence)
    queue.admit()
    queue.register(first, 6)
    cached = first.blocks[:3]
    queue.remove(first)
    queue.remove(other)
    second = SequenceEntry(2, [*range(7), 50, 51], 9, 8)
    queue.add(second)
    queue.admit()
    # its slot's own blocks begin elsewhere
    assert second.slot == 1 and second.blocks[:3] == cached
    assert second.blocks[3:] == [cached[-1] + 1 + k for k in range(len(second.blocks) - 3)]
