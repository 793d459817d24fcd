"""Chunks of prompts under way: when their rows leave, and when a coda may read them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sigma0.decode.attention import RowIndices
from sigma0.decode.prefill import ALL_FINAL, Chunk, Prefill

CPU = torch.device("cpu")
MODEL = SimpleNamespace(loop=lambda hidden, view: hidden + 1, norm=lambda hidden: hidden * 10)


def ints(*values):
    return np.array(values, dtype=np.int64)


def chunk(sequence, positions, targets, loops=0, reads=None):
    reads = targets if reads is None else reads
    hidden = torch.tensor(positions, dtype=torch.float32)[:, None]
    return Chunk(sequence, ints(*positions), ints(*targets), loops, hidden, ints(*reads))


def under_way(*chunks):
    prefill = Prefill()
    prefill.chunks = list(chunks)
    return prefill


def told(chunks):
    return [(each.sequence, each.positions.tolist()) for each in chunks]


def test_rows_that_run_no_loop_do_not_enter():
    prefill = Prefill()
    assert not prefill and len(prefill) == 0
    prefill.enter(1, ints(4, 5, 6), ints(0, 2, 1), torch.tensor([[4.0], [5.0], [6.0]]))
    prefill.enter(2, ints(0), ints(0), torch.zeros(1, 1))
    (own,) = prefill.chunks
    assert told([own]) == [(1, [5, 6])] and own.targets.tolist() == own.reads.tolist() == [2, 1]
    assert own.hidden.tolist() == [[5.0], [6.0]] and (own.loops, own.final) == (0, ALL_FINAL)
    assert len(prefill) == 2 and prefill.has(1) and not prefill.has(2) and ALL_FINAL == 2**62
    prefill.enter(2, ints(0, 1), ints(3, 3), torch.zeros(2, 1), ints(2, 1), 7)
    assert prefill.chunks[1].reads.tolist() == [2, 1] and prefill.chunks[1].final == 7 and len(prefill) == 4


def test_a_sequence_is_dropped():
    prefill = under_way(chunk(1, [0], [2]), chunk(2, [0], [2]))
    prefill.held = [chunk(2, [3], [2]), chunk(1, [3], [2])]
    prefill.remove(2)
    assert told(prefill.chunks) == [(1, [0])] and told(prefill.held) == [(1, [3])]


def test_rows_follow_those_of_the_lanes():
    prefill = under_way(chunk(3, [4, 5], [2, 2], loops=1), chunk(1, [0], [2]))
    lanes = RowIndices(*(torch.tensor([10 * part]) for part in range(4)))
    rows = prefill.behind(lanes)
    assert rows.sequences.tolist() == [0, 3, 3, 1] and rows.cache_positions.tolist() == [10, 4, 5, 0]
    assert rows.positions.tolist() == [20, 4, 5, 0] and rows.loops.tolist() == [30, 1, 1, 0]
    alone = prefill.chunks[0].rows(CPU)
    assert [part.tolist() for part in vars(alone).values()] == [[3, 3], [4, 5], [4, 5], [1, 1]]


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_loop_runs_lanes_and_chunks_together(lanes):
    prefill = under_way(chunk(3, [4, 5], [2, 2], loops=1), chunk(1, [7], [2]))
    raw = prefill.loop(MODEL, None, torch.full((lanes, 1), 0.5))
    assert raw.tolist() == [[1.5]] * lanes
    assert [each.hidden.flatten().tolist() for each in prefill.chunks] == [[50.0, 60.0], [80.0]]
    assert [each.loops for each in prefill.chunks] == [2, 1]


def test_rows_leave_at_their_targets():
    prefill = under_way(
        chunk(1, [0, 1], [2, 2], loops=2), chunk(2, [0, 1, 2], [2, 3, 1], loops=2), chunk(3, [5], [3], loops=2)
    )
    gone = prefill.leave()
    assert told(gone) == [(1, [0, 1]), (2, [0, 2])] and told(prefill.chunks) == [(2, [1]), (3, [5])]
    assert prefill.chunks[0].hidden.tolist() == [[1.0]] and prefill.leave() == []


def test_a_coda_reads_no_row_before_those_ahead_of_it():
    # position 1 is read at loop 1, and 0 only at loop 2
    prefill = under_way(chunk(1, [0, 1, 2], [2, 2, 2], loops=1, reads=[2, 1, 2]))
    assert prefill.take_read() == [] and told(prefill.held) == [(1, [1])]
    prefill.chunks = [chunk(1, [0, 1, 2], [2, 2, 2], loops=2, reads=[2, 1, 2])]
    (own,) = prefill.take_read()
    assert told([own]) == [(1, [0, 1, 2])] and own.reads.tolist() == [2, 1, 2] and prefill.held == []
    assert own.hidden.flatten().tolist() == [0.0, 1.0, 2.0] and own.targets.tolist() == [2, 2, 2]


def test_rows_of_other_sequences_are_not_waited_for():
    prefill = under_way(chunk(1, [0], [3], loops=1, reads=[3]), chunk(2, [4, 5], [1, 1], loops=1))
    assert told(prefill.take_read()) == [(2, [4, 5])] and prefill.held == []
    prefill = under_way(chunk(2, [4], [1], loops=1), chunk(1, [0], [1], loops=1), chunk(2, [3], [1], loops=1))
    assert told(prefill.take_read()) == [(2, [3, 4]), (1, [0])]


def test_a_row_that_leaves_before_it_is_read_is_not_waited_for():
    prefill = under_way(chunk(1, [0, 1], [1, 2], loops=1, reads=[2, 1]))
    assert told(prefill.take_read()) == [(1, [1])]
    prefill = under_way(chunk(1, [0, 1], [2, 2], loops=1, reads=[2, 1]))
    assert prefill.take_read() == []


def test_deeper_chunks_hold_back_what_lies_behind_their_first_unread_row():
    prefill = under_way(
        chunk(1, [0, 1, 2], [3, 3, 3], loops=2, reads=[2, 3, 3]), chunk(1, [3, 4], [3, 3], loops=1, reads=[1, 3])
    )
    assert told(prefill.take_read()) == [(1, [0])] and told(prefill.held) == [(1, [3])]
