"""Lanes: a token lives in one place, and its stage says what is left of its way."""

import pytest
import torch

from sigma0.decode.lanes import NO_DRAFT, Lanes

DEPTH, SEQUENCES, WIDTH = 3, 2, 4
IDLE, HELD, SUSPENDED = 6, 24, 12
STAGE, CACHE_POSITION, POSITION, DRAFT, READ_AT, FLAGS = range(6)


@pytest.fixture
def lanes():
    return Lanes(SEQUENCES, DEPTH, torch.zeros(0, WIDTH))


def put(lanes, *tokens):
    """Tokens by sequence, cache position and stage."""
    for sequence, position, stage in tokens:
        where = lanes.lane_of(torch.tensor([sequence]), torch.tensor([position]))
        hidden = torch.full((1, WIDTH), float(10 * sequence + position))
        lanes.enter(where, hidden, torch.tensor([position]), torch.tensor([position - sequence]), stage)


def stages(lanes):
    return lanes.table[:, STAGE].tolist()


def test_lanes_are_idle_at_first(lanes):
    assert (lanes.idle, lanes.held, lanes.count, lanes.width) == (IDLE, HELD, 6, WIDTH)
    assert lanes.table.tolist() == [[IDLE, 0, 0, NO_DRAFT, 0, 0]] * 7 and NO_DRAFT == -1
    assert lanes.gate.tolist() == [[1.0, 0.0]] * 7 and lanes.rows() is None
    assert lanes.hidden.shape == (7, WIDTH) and not lanes.hidden.any()
    # a sequence's lanes follow each other in a ring; behind nobody's comes nobody's
    assert lanes.next.tolist() == [1, 2, 0, 4, 5, 3, 6]
    behind = torch.tensor([2, 7, 9, 5, 3, 1]) * lanes.kept + lanes.offset
    assert behind.tolist() == [0, 8, 10, NO_DRAFT, 0, 0]
    assert Lanes(1, 2, torch.zeros(0, 5), 3).width == 3


def test_a_token_that_enters_begins_anew(lanes):
    lanes.table[:] = 7
    lanes.gate[:] = 0.5
    state = lanes.watch()
    state.counts[:] = 3
    put(lanes, (1, 4, 0))
    assert lanes.table[4].tolist() == [0, 4, 3, NO_DRAFT, 7, 0] and lanes.hidden[4].tolist() == [14.0] * WIDTH
    assert lanes.gate[4].tolist() == [1.0, 0.0] and not state.counts[4].any()
    assert lanes.table[3].tolist() == [7] * 6 and state.counts[3].tolist() == [3] * 4


def test_tokens_in_flight_come_deepest_first(lanes):
    put(lanes, (0, 3, 1), (0, 2, DEPTH + 2), (1, 5, 0), (1, 4, 2))
    rows = lanes.rows()
    assert rows.loops.tolist() == [2, 2, 1, 0] and rows.lanes.tolist() == [2, 4, 0, 5]
    assert rows.sequences.tolist() == [0, 1, 0, 1] and rows.cache_positions.tolist() == [2, 4, 3, 5]
    assert rows.positions.tolist() == [2, 3, 3, 4] and len(rows) == 4
    assert rows.hidden[:, 0].tolist() == [2.0, 14.0, 3.0, 15.0]
    assert lanes.stages().tolist() == [1, IDLE, DEPTH + 2, IDLE, 2, 0]


def test_suspended_tokens_are_in_flight_and_come_back(lanes):
    put(lanes, (0, 0, 1), (0, 1, DEPTH + 1), (1, 0, 0))
    before = stages(lanes)
    lanes.suspend([0])
    assert stages(lanes) == [SUSPENDED + 1, SUSPENDED + DEPTH + 1, IDLE, 0, IDLE, IDLE, IDLE]
    assert lanes.rows().loops.tolist() == [1, 1, 0]
    # what is suspended already stays so
    lanes.suspend_where(torch.tensor([True, True]))
    assert stages(lanes) == [SUSPENDED + 1, SUSPENDED + DEPTH + 1, IDLE, SUSPENDED, IDLE, IDLE, IDLE]
    lanes.resume()
    assert stages(lanes) == before
    lanes.suspend_where(torch.tensor([False, True]))
    assert stages(lanes) == [1, DEPTH + 1, IDLE, SUSPENDED, IDLE, IDLE, IDLE]


def test_tokens_that_are_held_are_not_suspended(lanes):
    put(lanes, (0, 0, 0))
    lanes.table[0, STAGE] = HELD
    lanes.resume()
    assert stages(lanes)[0] == HELD
    assert lanes.rows().loops.tolist() == [0]


def test_tokens_that_were_not_read_only_fill_their_planes(lanes):
    put(lanes, (0, 0, 0), (0, 1, DEPTH - 1), (1, 0, DEPTH), (1, 1, 2 * DEPTH - 1))
    lanes.stop_decoding()
    assert stages(lanes) == [DEPTH, 2 * DEPTH - 1, IDLE, DEPTH, 2 * DEPTH - 1, IDLE, IDLE]


def test_tokens_are_dropped_from_a_position_on(lanes):
    put(lanes, (0, 3, 0), (0, 4, 1), (0, 5, 2), (1, 3, 0), (1, 4, 1))
    lanes.drop(torch.tensor([4, 5]))
    assert stages(lanes) == [0, IDLE, IDLE, 0, 1, IDLE, IDLE]
    lanes.clear(1)
    assert stages(lanes) == [0, *[IDLE] * 6]
    put(lanes, (1, 0, 0))
    lanes.clear(0)
    assert stages(lanes) == [IDLE, IDLE, IDLE, 0, IDLE, IDLE, IDLE]


def test_paths_are_kept_in_a_ring_of_positions(lanes):
    lanes.remember_paths(2)
    assert lanes.window == 2 * DEPTH and lanes.paths.shape == (SEQUENCES * 6 + 1, DEPTH, WIDTH)
    kept = lanes.paths
    lanes.remember_paths(6)
    assert lanes.paths is kept
    lanes.remember_paths(8)
    assert lanes.window == 8 and lanes.paths.shape == (17, DEPTH, WIDTH)
    assert lanes.path_index(torch.tensor([0, 1, 1]), torch.tensor([7, 8, 17])).tolist() == [7, 8, 9]


def test_masks_allow_everything_at_first(lanes):
    for vocabulary, words in ((32, 1), (33, 2)):
        own = Lanes(1, DEPTH, torch.zeros(0, WIDTH))
        own.remember_masks(vocabulary)
        assert own.masks.tolist() == [[-1] * words] * 4 and own.only.tolist() == [-1] * 4
        assert (own.masks.dtype, own.only.dtype) == (torch.int32, torch.int64)
        kept = own.masks
        own.remember_masks(vocabulary)
        assert own.masks is kept
    probs = lanes.remember_probs(5)
    assert probs.shape == (7, 5) and not probs.any() and lanes.remember_probs(5) is probs


def test_criteria_keep_what_they_know_where_a_vocabulary_comes(lanes):
    lanes.remember_criteria(0)
    kept = lanes.criteria
    kept.numbers[0], kept.best[1] = torch.tensor([2.0, 3.0]), 7
    lanes.remember_criteria(0)
    assert lanes.criteria is kept
    lanes.remember_criteria(5)
    assert lanes.criteria is not kept and lanes.criteria.log_probs.shape == (SEQUENCES + 1, 5)
    assert lanes.criteria.numbers[0].tolist() == [2.0, 3.0] and lanes.criteria.best.tolist() == [-1, 7, -1]
    wide = lanes.criteria
    lanes.remember_criteria(4)
    assert lanes.criteria is wide


def test_what_the_gate_knows_is_told_from_wherever_it_is_kept(lanes):
    lanes.gate[0] = torch.tensor([0.25, 0.75])
    assert lanes.gates() is lanes.gate
    state = lanes.watch()
    assert lanes.gates() is lanes.gate, "not watched yet"
    lanes.watched = True
    state.counts[1, 0], state.gate[1], state.gate[2] = 2, torch.tensor([0.5, 0.125]), 9.0
    assert lanes.gates().tolist() == [[1, 0], [0.5, 0.125], *[[1, 0]] * 5]
    # tokens begin anew where differences were not kept for a while
    assert lanes.watch() is state and state.counts[1, 0] == 2
    lanes.watched = False
    assert lanes.watch() is state and not state.counts.any()


def test_lanes_can_be_written_wherever_they_were_made():
    for inference in (True, False):
        with torch.inference_mode(inference):
            own = Lanes(1, DEPTH, torch.zeros(0, WIDTH))
            own.remember_paths(8)
            own.remember_masks(5)
            own.remember_probs(5)
            own.remember_criteria(5)
            state = own.watch()
        held = [own.table, own.hidden, own.gate, own.next, own.paths, own.masks, own.only, own.probs, state.counts]
        assert not any(each.is_inference() for each in [*held, *own.criteria.tensors()])
