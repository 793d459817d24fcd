"""Statistics of new tokens as they are noted, and the numbers of single ones."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sigma0.decode.ops import LOGIT_STATS, TORCH, ExitParams
from sigma0.decode.repetition import TextStats
from sigma0.decode.runner import LateRunner
from sigma0.decode.settings import Program
from sigma0.decode.stats import DEEPEST, Deepest, DeepestQueue, PathReader, RunRecord
from sigma0.decode.step import take_lines
from sigma0.decode.transfer import PassCounts, PendingTokens

CPU = torch.device("cpu")


def ints(*values):
    return np.array(values, dtype=np.int64)


def record(batch=2, new=3, loops=4, reader=None):
    return RunRecord(batch, new, loops, CPU, TORCH, reader)


def test_nothing_is_known_of_tokens_that_are_not_there():
    current = record()
    assert current.loops.shape == (2, 3, 4, 8) and current.loops.isnan().all() and current.device == CPU
    assert current.fates.shape == (2, 3, 4) and not current.fates.any() and current.fates.dtype == torch.int8
    assert current.logit_stats.shape == (2, 3, len(LOGIT_STATS)) and current.logit_stats.isnan().all()
    assert current.deepest.shape == (2, 3, len(DEEPEST)) and current.deepest.isnan().all()
    assert current.first_position == 0 and not current.drops_rows and current.pending_logits is None
    for inference in (True, False):
        with torch.inference_mode(inference):
            made = record(new=1)
            for _ in range(3):
                made.note_tokens(torch.zeros(1, 8), [0], [5])
            held = [made.loops, made.fates]
        assert made.loops.shape[1] == 4 and not any(item.is_inference() for item in held)


def test_logits_are_worked_out_in_order_and_room_doubles():
    generator, ids = torch.Generator().manual_seed(3), [[5, 5, 5, 7], [1, 2, 3, 4]]
    logits = torch.randn(4, 2, 11, generator=generator)
    current, rooms = record(2, 1), []
    for index in range(4):
        proximities = current.note_tokens(logits[index], [0, 1], [row[index] for row in ids])
        rooms.append(current.logit_stats.shape[1])
    result = current.logit_stats
    assert rooms == [1, 2, 4, 4] and current.fates.shape == current.loops.shape[:3] == (2, result.shape[1], 4)
    for row in range(2):
        stats = TextStats(TORCH)
        text = stats.text()
        for index in range(4):
            *expected, alone = stats.take([text], [ids[row][index]], logits[index, row][None])
            np.testing.assert_allclose(result[row, index].numpy(), np.array(expected)[:, 0], rtol=1e-5, atol=1e-6)
        assert proximities[row] == alone[0]
    # a sequence that has ended stays after
    current.note_tokens(logits[0, :1], [1], [9])
    assert current.logit_stats[0, 4:].isnan().all() and current.logit_stats[1, 4].isfinite().all()


def test_depths_are_noted_only_where_tokens_run_no_further():
    current = record()
    current.note_read(ints(0, 1), 2, ints(1, 2))
    assert current._ran.tolist() == [[4, 4, 4]] * 2 and current._known.tolist() == [3, 3]
    current.drops_rows, current.first_position = True, 1
    current.note_read(ints(1), 2, ints(2))
    assert current._ran.tolist() == [[4, 4, 4], [4, 2, 4]] and current._known.tolist() == [3, 2]
    current.note_tokens(torch.zeros(1, 8), [0], [5], [3])
    current.note_tokens(torch.zeros(2, 8), [0, 1], [5, 6], [1, 2])
    assert current._ran.tolist() == [[3, 1, 4], [2, 2, 4]] and current._known.tolist() == [2, 1]


def read_by_sum(states, token_ids):
    """A reader whose numbers tell which state and id they are of."""
    assert len(states) <= 64
    numbers = torch.stack([states.sum(-1), token_ids.float(), states[:, 0], torch.ones(len(states))], dim=-1)
    return numbers


def test_the_first_tokens_are_read_from_the_prompt_once_every_sequence_has_one():
    current = record(new=2, reader=read_by_sum)
    states = torch.tensor([[[9.0, 9.0]] * 2, [[10.0, 0.0], [20.0, 0.0]]])  # [T', B, D]
    current.note_prompt(states, 4, PathReader(lambda item: item[:, 0], ExitParams("none", 0.0, 2)))
    current.note_tokens(torch.zeros(1, 8), [0], [5])
    assert current.deepest.isnan().all() and current.first_position == 4
    current.note_tokens(torch.zeros(1, 8), [1], [6])
    assert current.deepest[:, 0].tolist() == [[10, 5, 10, 1], [20, 6, 20, 1]] and current.deepest[:, 1].isnan().all()


def test_a_queue_is_read_as_it_fills():
    sizes = []
    queue = DeepestQueue(lambda states, ids: sizes.append(len(ids)) or read_by_sum(states, ids))
    for index in range(64):
        assert sizes == []
        output = queue.add(torch.ones(1, 1), [index], [index])
    assert sizes == [64] and [where for where, _ in output] == list(range(64)) and not queue.take()
    output = queue.add(torch.ones(129, 1), list(range(129)), list(range(129)))
    assert sizes[1:] == [64, 64, 1] and [numbers[1] for _, numbers in output] == list(range(129))


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
    output, counted = take_lines(lines, program, counts)
    assert len(output) == 2 and counted[:5].tolist() == [11, 7, 5, 3, 2]
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
