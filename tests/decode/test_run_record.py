"""Statistics of new tokens as they are noted, and the numbers of single ones."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sigma0.decode.deepest import DEEPEST, Deepest, DeepestQueue, DeepestRecord
from sigma0.decode.ops import LOGIT_STATS, TORCH, CollapseRule, certainty
from sigma0.decode.repetition import EntropyDrop, Repeated, Repetition
from sigma0.decode.runner import LateRunner
from sigma0.decode.settings import Program
from sigma0.decode.stats import RunRecord, collapse_of, compute_logit_stats
from sigma0.decode.step import take_lines
from sigma0.decode.transfer import PassCounts, PendingTokens
from sigma0.kernels.collapse import Part

CPU = torch.device("cpu")


def ints(*values):
    return np.array(values, dtype=np.int64)


def record(batch=2, new=3, loops=4):
    return RunRecord.empty(batch, new, loops, CPU)


def test_nothing_is_known_of_tokens_that_are_not_there():
    own = record()
    assert own.loops.shape == (2, 3, 4, 8) and own.loops.isnan().all() and own.device == CPU
    assert own.fates.shape == (2, 3, 4) and not own.fates.any() and own.fates.dtype == torch.int8
    assert own.logit_stats.shape == (2, 3, len(LOGIT_STATS)) and own.logit_stats.isnan().all()
    assert own.deepest.shape == (2, 3, len(DEEPEST)) and own.deepest.isnan().all()
    assert own.first_position == 0 and not own.drops_rows and own.pending_logits is own.of_deepest is None
    for inference in (True, False):
        with torch.inference_mode(inference):
            made = record()
            made.put_logit_stats(torch.zeros(1, 8), torch.tensor([0]), torch.tensor([5]), 5)
            held = [made.loops, made.logit_stats, made.collapse.lengths]
        assert not any(each.is_inference() for each in held)


def test_room_doubles_and_keeps_what_is_there():
    own = record()
    own.put_logit_stats(torch.full((1, 8), 2.0), torch.tensor([1]), torch.tensor([0]), 0)
    for last, room in ((2, 3), (3, 6), (20, 21)):
        own.put_logit_stats(torch.full((1, 8), 3.0), torch.tensor([0]), torch.tensor([last]), last)
        assert own.logit_stats.shape[1] == own.loops.shape[1] == own.fates.shape[1] == room
        assert own.logit_stats[0, last].tolist() == [3.0] * 8 and own.logit_stats[1, 0].tolist() == [2.0] * 8
    assert own.logit_stats[1, 1:].isnan().all() and own.collapse.lengths.tolist() == [0, 0]


def test_a_depth_makes_room_for_its_token():
    own = record()
    for index, room in ((2, 3), (3, 6), (6, 12)):
        own.note_depths(ints(1), ints(index), ints(2))
        assert own.loops.shape[1] == own.logit_stats.shape[1] == room


def test_logits_are_worked_out_in_order_and_once(monkeypatch):
    generator, ids = torch.Generator().manual_seed(3), [[5, 5, 5, 7], [1, 2, 3, 4]]
    logits = torch.randn(4, 2, 11, generator=generator)
    own, told = record(2, 1), [Repetition(), Repetition()]
    for index in range(4):
        for row in range(2):
            told[row].append(ids[row][index])
        own.note_tokens(logits[index], ints(0, 1), ints(index, index), ints(*[row[index] for row in ids]), told, TORCH)
    found = own.logit_stats
    assert found.shape[1] >= 4 and own.logit_stats is found
    for row in range(2):
        again, drop = Repetition(), EntropyDrop()
        for index in range(4):
            again.append(ids[row][index])
            entropy, margin = (float(part) for part in certainty(logits[index, row][None]))
            expected = collapse_of(entropy, margin, again.at(-1), drop, CollapseRule())
            np.testing.assert_allclose(found[row, index].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert found[:, 4:].isnan().all()


def test_logits_are_kept_up_to_a_number_of_rows():
    for batch, most in ((1, 64), (2, 64), (100, 100)):
        own, told = record(batch, 1), [Repetition() for _ in range(batch)]
        for index in range(-(-most // batch)):
            for each in told:
                each.append(index)
            assert len(own._noted_logits) == index
            sequences = np.arange(batch)
            own.note_tokens(torch.zeros(batch, 3), sequences, np.full(batch, index), np.full(batch, index), told, TORCH)
        assert own._noted_logits == [] and own._logit_rows == 0


def test_numbers_of_a_token():
    rule = CollapseRule(drop=Part(0.0, 4.0, 0.2), margin=Part(0.0, 1.0, 0.2))
    repeated = Repeated(0.5, 3, 0.25, 0.75, 50)
    drop = EntropyDrop()
    told = collapse_of(1.0, 0.5, repeated, drop, rule)
    assert told[:7] == (1.0, 0.5, 0.0, 0.5, 3, 0.25, 0.75)
    assert told[7] == pytest.approx(repeated.proximity(rule, 0.0, 0.5))
    for _ in range(8):
        drop.take(1.0)
    entropy, margin, fell, *_, proximity = collapse_of(0.5, math.nan, repeated, drop, rule)
    assert entropy == 0.5 and math.isnan(margin) and fell == pytest.approx(0.5 / math.sqrt(0.05))
    assert proximity == pytest.approx(repeated.proximity(rule, fell, 0.0))
    assert collapse_of(math.nan, math.nan, repeated, drop, rule)[2] == 0.0
    table = compute_logit_stats(torch.zeros(2, 4), [repeated] * 2, [EntropyDrop(), EntropyDrop()])
    assert table.shape == (2, 8) and table.dtype == np.float32
    assert table[0, :2].tolist() == [np.float32(math.log(4)), 0.0]


def test_depths_are_noted_only_where_tokens_run_no_further():
    own = record()
    own.note_read(ints(0, 1), 2, ints(1, 2))
    assert own._ran.tolist() == [[4, 4, 4]] * 2 and own._known.tolist() == [3, 3]
    own.drops_rows, own.first_position = True, 1
    own.note_read(ints(1), 2, ints(2))
    assert own._ran.tolist() == [[4, 4, 4], [4, 2, 4]] and own._known.tolist() == [3, 2]
    own.note_depths(ints(0), ints(4), ints(3))
    assert own._ran.shape == (2, 6) and own._ran[0, 4] == 3 and own._ran[1, 3:].tolist() == [4, 4, 4]


def read_by_sum(states, token_ids):
    """A reader whose numbers tell which state and id they are of."""
    assert len(states) <= 64
    numbers = torch.stack([states.sum(-1), token_ids.float(), states[:, 0], torch.ones(len(states))], dim=-1)
    return numbers


def test_states_that_wait_are_read_many_at_once():
    own = DeepestRecord(read_by_sum, 2)
    own.note_prompt(torch.tensor([[10.0, 0.0], [20.0, 0.0]]))
    own.note_ids(ints(0, 1), ints(5, 6))
    own.note_ids(ints(1), ints(8))
    own.add(torch.tensor([[1.0, 2.0]]), ints(1), ints(1))
    table = own.table(3, CPU)
    assert table[0].nan_to_num(-1).tolist() == [[10, 5, 10, 1], [-1] * 4, [-1] * 4]
    assert table[1].nan_to_num(-1).tolist() == [[20, 6, 20, 1], [3, 8, 1, 1], [-1] * 4]
    # of each the newest counts
    own.add(torch.tensor([[4.0, 4.0]]), ints(1), ints(1))
    assert own.table(2, CPU)[1, 1].tolist() == [8, 8, 4, 1]


def test_a_prompt_is_read_once_every_sequence_has_a_token():
    own = DeepestRecord(read_by_sum, 2)
    own.note_prompt(torch.ones(2, 1))
    own.note_ids(ints(0), ints(5))
    assert own.table(1, CPU).isnan().all()
    own.note_ids(ints(1), ints(5))
    assert own.table(1, CPU).isfinite().all()


def test_a_queue_is_read_as_it_fills():
    own, sizes = DeepestRecord(lambda states, ids: sizes.append(len(ids)) or read_by_sum(states, ids), 1), []
    for index in range(64):
        own.note_ids(ints(0), ints(index))
        assert sizes == []
        own.add(torch.ones(1, 1), ints(0), ints(index))
    assert sizes == [64]
    queue = DeepestQueue(lambda states, ids: sizes.append(len(ids)) or read_by_sum(states, ids))
    queue.add(torch.ones(129, 1), list(range(129)), list(range(129)))
    where, numbers = queue.take()
    assert sizes[1:] == [64, 64, 1] and where == list(range(129)) and numbers[:, 1].tolist() == list(range(129))
    assert len(queue) == 0


def test_numbers_that_are_not_known_are_none():
    assert Deepest.of([1.0, 2.0, 3.0, 1.0]) == Deepest(1.0, 2.0, 3.0, True)
    assert Deepest.of([math.nan] * 4) == Deepest() == (None, None, None, None)


@pytest.mark.parametrize(
    "program, heads",
    [
        (Program(), 5), (Program(verify=True), 5), (Program(reads_logits=True), 7),
        (Program(reads_logits=True, verify=True), 12),
    ],
)  # fmt: skip
def test_counts_of_a_step_are_in_its_last_line(program, heads):
    lines = np.zeros((3, 9), dtype=np.int64)
    lines[2, :5] = 11, 7, 5, 3, 2
    counts = PassCounts()
    told, counted = take_lines(lines, program, counts)
    assert len(told) == 2 and counted[:5].tolist() == [11, 7, 5, 3, 2]
    assert counts == PassCounts(passes=1, rows=11, head_rows=heads)
    lines[2, :5] = 0
    take_lines(lines, program, counts)
    assert (counts.passes, counts.rows) == (1, 11)


@pytest.mark.parametrize(
    "live, sequences, under_way, bound",
    [(0, 0, 0, 0), (0, 3, 1, 0), (1, 1, 0, 1), (1, 1, 1, 2), (3, 1, 0, 4), (3, 1, 1, 4), (3, 2, 1, 8), (8, 4, 0, 8),
     (8, 1, 1, 12), (9, 3, 1, 12)],
)  # fmt: skip
def test_rows_of_a_coming_step_are_bounded(live, sequences, under_way, bound):
    runner = object.__new__(LateRunner)
    runner.lanes = SimpleNamespace(count=12)
    runner._under_way = [None] * under_way
    runner.expect(live, sequences)
    assert runner._bound() == bound


def test_pending_tokens_are_chosen_and_joined():
    tokens = PendingTokens(ints(1, 2, 3), ints(4, 5, 6), ints(7, 8, 9), ints(10, 11, 12))
    last = tokens.select(ints(2, 0))
    assert [part.tolist() for part in vars(last).values()] == [[3, 1], [6, 4], [9, 7], [12, 10]]
    both = last.concatenate(tokens.select(ints(1)))
    assert [part.tolist() for part in vars(both).values()] == [[3, 1, 2], [6, 4, 5], [9, 7, 8], [12, 10, 11]]
    assert PassCounts() == PassCounts(0, 0, 0, 0, 0)
