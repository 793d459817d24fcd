"""The eager runner's own books: bounds that hold for a while, what is kept of tokens, and what is held back."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sigma0.decode.attention import CodedPlacement, Placement
from sigma0.decode.lanes import Lanes
from sigma0.decode.ops import TORCH
from sigma0.decode.planes import LayerPlanes
from sigma0.decode.runner import EagerRunner, RunnerChoice, Step
from sigma0.decode.settings import Program, SequenceSettings
from sigma0.decode.transfer import PassCounts

DEPTH = 3


class Storage:
    def __init__(self, coded=None, room=1000):
        self.coded, self.room, self.held, self.noted = coded, room, [], []
        self.planes = [LayerPlanes(torch.zeros(1, 0, 2), DEPTH, 2, 4)]

    def placement(self, longest):
        return Placement(self.room, 2 * self.room + 1, coded=self.coded)

    def hold(self, lanes, busy=()):
        self.held.append(busy)

    def leave(self, sequences, cache_positions, planes):
        self.noted.append(len(sequences))


def runner_over(storage=None, ops=TORCH, stages=(0, 0)):
    model = SimpleNamespace(operations=ops, stages=stages, config=SimpleNamespace(vocab_size=40))
    lanes, settings = Lanes(2, DEPTH, torch.zeros(0, 4)), SequenceSettings(2, DEPTH, torch.device("cpu"))
    return EagerRunner(model, lanes, settings, storage or Storage(), PassCounts())


def test_a_runner_sees_every_step_at_once():
    runner = runner_over()
    assert runner.lag == 0 and runner.chosen == RunnerChoice("eager", "what auto takes", False, False)
    assert runner.program == Program() and not runner.holds


@pytest.mark.parametrize("longest, bound", [(1, 256), (255, 256), (256, 256), (257, 512), (513, 768)])
def test_bounds_on_positions_grow_in_steps(longest, bound):
    assert runner_over().bound_on(longest) == bound


def test_what_a_step_works_on_stays_as_long_as_it_holds():
    storage = Storage()
    runner = runner_over(storage)
    first = runner.batch(10)
    assert first.longest == 256 and runner.batch(256) is first is runner.batch(1)
    wider = runner.batch(257)
    assert wider is not first and wider.longest == 512
    storage.planes = [LayerPlanes(torch.zeros(1, 0, 2), DEPTH, 2, 4)]
    other = runner.batch(10)
    assert other is not wider and other.layers is storage.planes
    runner.use(Program(gate=True))
    assert runner.batch(10) is not other and runner.batch(10).program == Program(gate=True)
    # there are no more positions than there is room for
    assert runner_over(Storage(room=100)).batch(10).longest == 100
    assert runner_over(Storage(room=100)).batch(120).longest == 120


def test_lanes_that_are_live_and_that_wait_for_their_reading():
    runner = runner_over(stages=(1, 0))
    assert runner.live() == (0, 0) and runner.entering() == 0
    runner.lanes.table[:6, 0] = torch.tensor([0, DEPTH - 1, DEPTH, 2 * DEPTH - 1, 2 * DEPTH, 0])
    assert runner.live() == (5, 3) and runner.entering() == 2
    plain = runner_over()
    plain.lanes.table[0, 0] = 0
    assert plain.entering() == 0


def test_what_the_gate_knows_goes_along_where_differences_are_kept():
    runner = runner_over()
    lanes = runner.lanes
    runner.use(Program(gate=True))
    assert not lanes.watched and lanes.exit_state is None
    lanes.table[0, 0], lanes.table[1, 0] = 2, DEPTH + 1
    lanes.gate[0] = torch.tensor([0.25, 0.75])
    runner.use(Program(gate=True, watch=True))
    assert lanes.watched and lanes.exit_state.counts[:, 0].tolist() == [2, 0, 0, 0, 0, 0, 0]
    assert lanes.exit_state.gate[0].tolist() == [0.25, 0.75]
    lanes.exit_state.gate[0] = torch.tensor([0.5, 0.5])
    lanes.exit_state.counts[0, 0] = 3
    runner.use(Program(gate=True, watch=True))
    assert lanes.exit_state.counts[0, 0] == 3
    runner.use(Program(gate=True))
    assert not lanes.watched and lanes.gate[0].tolist() == [0.5, 0.5] and lanes.gate[1].tolist() == [1.0, 0.0]
    for backend in ("triton", "auto"):
        kernel = runner_over(ops=replace(TORCH, backend=backend))
        kernel.use(Program())
        assert kernel.lanes.watched


def test_room_is_made_for_what_a_program_keeps():
    runner = runner_over()
    runner.use(Program(criteria=frozenset({"entropy-diff"})))
    assert runner.lanes.criteria.log_probs.shape[1] == 0 and runner.lanes.masks is None
    runner.use(Program(criteria=frozenset({"minp-kl"}), masked=True))
    assert runner.lanes.criteria.log_probs.shape[1] == 40 and runner.lanes.masks.shape[1] == 2


def test_tokens_are_held_where_planes_are_encoded():
    plain, coded = Storage(), Storage(CodedPlacement(4))
    runner_over(plain).hold({1})
    runner_over(coded).hold({1})
    runner_over(coded).hold()
    assert plain.held == [] and coded.held == [{1}, ()]


def test_logits_of_the_lines_of_a_step():
    lines, read = np.zeros((2, 9), dtype=np.int64), torch.arange(6.0).view(3, 2)
    assert Step(lines, None, 1).logits is None and Step(lines, read, 1).logits is read
    assert Step(lines, read, 1, rows=np.array([2, 0])).logits.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert Step(lines, None, 1, rows=np.array([0])).logits is None
