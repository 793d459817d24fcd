"""What a step does with the rows that were read, where some of the rows are there to fill up alone."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.decode import step
from sigma0.decode.lanes import STAGE
from sigma0.decode.ops import TORCH
from sigma0.decode.prefill import Prefill
from sigma0.decode.step import Looped, run_prefill, settle
from sigma0.decode.step_batch import Batch
from tests.decode.test_native_runner import VOCABULARY, Model, drawn, table_of
from tests.marks import needs_library

pytestmark = needs_library


def looped(batch, codes):
    """The live rows of a batch behind a loop; of decoding rows, why they stop."""
    lanes = batch.lanes
    rows = lanes.table[:-1, STAGE].sort(stable=True).indices
    rows = rows[lanes.table[rows, STAGE] < lanes.idle]
    table = lanes.table[rows].clone()
    loops = table[:, STAGE] % lanes.depth + 1
    own = codes[: len(rows)]
    return Looped(rows, table, rows // lanes.depth, loops, lanes.hidden[rows], own, own > 0, None)


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_rows_that_only_fill_up_are_as_if_they_were_not_there(seed, sequences, depth, verify):
    generator, twice, wanted, program = drawn(seed, sequences, depth, verify)
    filled, plain = (Batch(Model(), lanes, wanted, program, (), None, 0, TORCH) for lanes in twice)
    own, count = [], sequences * depth
    codes = torch.from_numpy(generator.integers(0, 4, count))
    for batch in (filled, plain):
        own.append(looped(batch, codes))
    read = len(own[0].lanes)
    live = torch.from_numpy(generator.random(read) < 0.6)
    which, token_ids = torch.arange(read), torch.from_numpy(generator.integers(0, VOCABULARY, read))
    # of a row that decodes nothing has to stand, and whatever is said of it changes nothing
    stands = torch.from_numpy(generator.random(read) < 0.5)
    ends = torch.from_numpy(generator.random(read) < 0.2) if generator.random() < 0.5 else None
    some = None if ends is None else ends[live]
    lines = settle(filled, own[0], which, token_ids, stands, ends, live)
    expected = settle(plain, own[1], which[live], token_ids[live], stands[live], some)
    np.testing.assert_array_equal(lines[live], expected)
    assert not lines[~live][:, 0].any()
    assert torch.equal(*map(table_of, twice))
    assert torch.equal(filled.lanes.hidden[:-1], plain.lanes.hidden[:-1])


def test_prefill_by_itself_runs_no_lane():
    _, (lanes, _), wanted, program = drawn(3, 2, 3, False)
    batch = Batch(Model(), lanes, wanted, program, (), None, 0, TORCH)
    seen = []

    def loop(hidden, view):
        seen.append(hidden.clone())
        return hidden + 1

    model = SimpleNamespace(stages=(0, 0), loop=loop, norm=lambda hidden: hidden * 10)
    place = SimpleNamespace(starts=None)
    prefill = Prefill()
    prefill.enter(1, np.arange(2), np.full(2, 3), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    before = batch.lanes.hidden.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "PassRows", lambda *arguments: arguments)
        run_prefill(replace(batch, model=model, placement=place, ops=TORCH), prefill)
    assert [rows.tolist() for rows in seen] == [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]
    (chunk,) = prefill.chunks
    assert chunk.loops == 1 and chunk.hidden.tolist() == [[20.0, 30.0, 40.0], [50.0, 60.0, 70.0]]
    assert torch.equal(batch.lanes.hidden, before)
