"""Runs whose course is given: every token stops, stands or falls where the trace says."""

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.bench.core.replay import Trace, replaying
from sigma0.bench.lossless.measure import step
from tests.reference import tiny_model

T = 5


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=4, total_ut_steps=T, num_hidden_layers=1)


def run(model, config, new=8, ids=((9, 10, 11),)):
    ids = torch.tensor(ids)
    settings = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "max_new_tokens": new}
    return model.generate(ids, attention_mask=torch.ones_like(ids), exit_config=config, **settings)


def test_depths_are_taken_token_by_token(model):
    exits = (4, 1, 3, 1, 5, 2)
    with replaying(model, Trace(T, exits, prompt=2)):
        one = run(model, ExitConfig())
        two = run(model, ExitConfig(), ids=((9, 10, 11), (20, 21, 22)))
    assert one.exit_depths[0].tolist() == [2, *exits, exits[0]]
    assert one.loop_passes == sum(exits) + exits[0]
    assert two.exit_depths.tolist() == [[2, *exits, exits[0]], [2, *(exits * 3)[7:14]]]
    again = run(model, ExitConfig(mode="full"))
    assert (again.exit_depths == T).all(), "the model's own rule is back"


@pytest.mark.parametrize("redraft", [False, True])
def test_proposals_stand_and_fall_where_the_trace_says(model, redraft):
    exits, settled = (1, 2, 1, 4, 5, 1, 3), (1, 3, 5, 2, 5, 4, 3)
    with replaying(model, Trace(T, exits, settled)):
        result = run(model, ExitConfig(after_exit="verify", redraft=redraft))
    stands = [True] + [early >= right or (redraft and right < T) for early, right in zip(exits, settled, strict=True)]
    assert result.accepted[0].tolist() == stands
    passes = 0
    for early, right in list(zip(exits, settled, strict=True))[:-1]:
        path = torch.tensor([1] * (right - 1) + [2] * (T - right + 1)).numpy()
        verified, _, redrafted = step(path, early)
        passes += redrafted if redraft else verified
    assert result.loop_passes == passes + T


def test_a_trace_fits_another_number_of_loops():
    assert Trace(8, (1, 2, 4, 5, 8), (8, 7, 3, 1, 2)).scaled(4) == Trace(4, (1, 1, 2, 3, 4), (4, 4, 2, 1, 1))
    # Proposals at 3 and 7 that settle a loop later would be right in half as many loops; they stay wrong.
    assert Trace(8, (3, 7, 1), (4, 8, 1), 5).scaled(4) == Trace(4, (2, 3, 1), (3, 4, 1), 3)
    assert Trace(8, (3,), (4,)).scaled(1) == Trace(1, (1,), (1,))


def test_bad_traces_are_named(model):
    for bad, message in (
        ((3, ()), "one token"),
        ((3, (1, 2), (1,)), "2 exits, but 1 settled"),
        ((3, (4,)), "loop 4"),
        ((3, (1,), (0,)), "loop 0"),
        ((3, (1,), (), 9), "loop 9"),
    ):
        with pytest.raises(ValueError, match=message):
            Trace(*bad)
    with pytest.raises(ValueError, match="3 loops, the model has 5"), replaying(model, Trace(3, (1,))):
        pass
