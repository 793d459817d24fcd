"""The calls that keep a step's books on a CPU, against the step in torch, whose operations other devices run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.decode import decisions, host_rows, step
from sigma0.decode import settings as columns
from sigma0.decode.lanes import CACHE_POSITION, DEPTH, DRAFT, FLAGS, POSITION, STAGE, Lanes
from sigma0.decode.ops import DIVERGED, MET, TORCH, EndWeights, operations
from sigma0.decode.settings import NO_LIMIT, Program, SequenceSettings
from sigma0.decode.step_batch import Batch
from tests.marks import needs_compiler

pytestmark = needs_compiler
WIDTH, WINDOW, VOCABULARY = 3, 24, 5


class Model:
    """Embeds an id as a row that tells id and position."""

    def enter(self, token_ids, positions):
        return torch.stack([token_ids, positions, token_ids - positions], dim=1).float()

    def plain_weights(self):
        return EndWeights()


def sequence_tokens(generator, depth):
    """Cache positions and stages of the tokens in flight of one sequence, the newest first: at most one decodes."""
    stages = []
    loops = int(generator.integers(0, depth))
    newest = int(generator.integers(depth, 3 * depth))
    while loops < depth and len(stages) < depth:
        decodes = not stages and generator.random() < 0.7
        stages.append(loops if decodes else depth + loops)
        loops += int(generator.integers(1, 3))
    return [(newest - behind, stage) for behind, stage in enumerate(stages)]


def drawn(seed, sequences, depth, verify):
    """Two batches of the same lanes and settings: one whose step is torch's, one whose books are kept by calls."""
    generator = np.random.default_rng(seed)
    lanes = Lanes(sequences, depth, torch.zeros(1, WIDTH))
    wanted = SequenceSettings(sequences, depth, torch.device("cpu"))
    wanted.eos = torch.tensor(generator.integers(-1, VOCABULARY, (sequences, 2)))
    for sequence in range(sequences):
        checked = verify and generator.random() < 0.8
        own = wanted.table[sequence]
        own[columns.LAST] = depth if checked else int(generator.integers(1, depth + 1))
        own[columns.MIN_LOOPS] = int(generator.integers(1, depth + 1))
        own[columns.LEAVES] = int(not checked and generator.random() < 0.5)
        own[columns.VERIFY], own[columns.REDRAFT] = int(checked), int(generator.random() < 0.5)
        own[columns.LIMIT] = NO_LIMIT if generator.random() < 0.5 else int(generator.integers(depth, 3 * depth))
        own[columns.PROMPT] = int(generator.integers(0, 3 * depth))
        tokens = [] if generator.random() < 0.2 else sequence_tokens(generator, depth)
        for position, stage in tokens:
            line = lanes.table[sequence * depth + position % depth]
            line[STAGE], line[CACHE_POSITION], line[POSITION] = stage, position, position - int(sequence > 1)
            line[DRAFT] = int(generator.integers(0, VOCABULARY)) if stage >= depth else -1
            line[DEPTH], line[FLAGS] = int(generator.integers(1, depth + 1)), int(generator.integers(0, 3))
    checked = wanted.table[:, columns.VERIFY] > 0
    verify = bool(checked.any())
    program = Program(
        verify=verify,
        mixed=verify and not bool(checked.all()),
        prompts=verify,
        leaves=True,
        paths=True,
    )
    lanes.hidden.copy_(torch.randn(lanes.hidden.shape, generator=torch.Generator().manual_seed(seed)))
    lanes.remember_paths(WINDOW)
    batches = []
    for ops in (TORCH, operations("auto", torch.device("cpu"))):
        own = Lanes(sequences, depth, torch.zeros(1, WIDTH))
        own.table.copy_(lanes.table)
        own.hidden.copy_(lanes.hidden)
        own.remember_paths(WINDOW)
        books = host_rows.hand_over(None, own, wanted, program, Model()) if ops.host_rows else None
        batches.append(Batch(Model(), own, wanted, program, (), None, 0, ops, books))
    return generator, batches


def looped(monkeypatch, batch, said):
    """The loop of a batch whose block leaves states as they are, and whose rules say what was drawn."""
    live = int((batch.lanes.table[:-1, STAGE] < batch.lanes.idle).sum())
    decoding = int((batch.lanes.table[:-1, STAGE] < batch.lanes.depth).sum())
    monkeypatch.setattr(step, "PassRows", lambda *arguments: None)
    monkeypatch.setattr(step, "_loop_end", lambda batch, raw, *arguments: (raw * 2, None))
    monkeypatch.setattr(step, "ask_rules", lambda *arguments: said(decoding))
    batch.model.stages, batch.model.loop = (0, 0), lambda hidden, view: hidden
    given = replace(batch, program=replace(batch.program, gate=True))
    if batch.books is not None:
        assert (batch.books.start(), batch.books.decoding) == (live, decoding)
    return step.run_loop(given, live, decoding)


def table_of(batch):
    """The table of lanes but for nobody's; of idle lanes nothing but that they are."""
    table = batch.lanes.table[:-1].clone()
    table[table[:, STAGE] == batch.lanes.idle, 1:] = 0
    return table


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_calls_keep_the_books_as_torch_does(seed, sequences, depth, verify):
    generator, batches = drawn(seed, sequences, depth, verify)
    kind, bits = int(generator.integers(0, 4)), generator.integers(0, 2**31)

    def said(decoding):
        own = np.random.default_rng(bits)
        met = torch.tensor(own.random(decoding) < 0.5)
        told = torch.tensor(own.choice([0, MET, DIVERGED], decoding))
        return (
            decisions.Ruled(met),
            decisions.Ruled(None, told),
            decisions.Ruled(met, told),
            decisions.Ruled(None, None, met),
        )[kind]

    with_torch, with_calls = batches
    verify = with_torch.program.verify
    with pytest.MonkeyPatch.context() as patch:
        expected, found = looped(patch, with_torch, said), looped(patch, with_calls, said)
    for name in ("lanes", "table", "sequences", "loops", "hidden", "codes"):
        assert torch.equal(getattr(expected, name), getattr(found, name)), name
    assert torch.equal(with_torch.lanes.table[:-1], with_calls.lanes.table[:-1])
    assert torch.equal(with_torch.lanes.paths[:-1], with_calls.lanes.paths[:-1])

    own = with_torch.settings.table[expected.sequences]
    at_this_loop = (own[:, columns.REDRAFT] > 0) | (expected.loops == depth)
    reads = (own[:, columns.VERIFY] > 0) & at_this_loop & torch.tensor(verify)
    reads[: len(expected.codes)] = expected.codes > 0
    assert torch.equal(found.reads, reads.nonzero()[:, 0])
    if not len(found.reads):
        return

    which = found.reads
    token_ids = torch.tensor(generator.integers(-1, VOCABULARY, len(which)))
    stands = torch.tensor(generator.random(len(which)) < 0.6)
    ends = torch.tensor(generator.random(len(which)) < 0.3) if generator.random() < 0.5 else None
    said, kept = step.settle_in_books(with_calls, which, token_ids, stands, ends)
    if verify:
        lines = step.settle_verified(with_torch, expected, which, token_ids, stands, ends)
        new = which < len(expected.codes)
        says = new | ~stands | (expected.loops[which] >= depth)
    else:
        lines, says = step.settle(with_torch, expected, which, token_ids, ends), torch.ones(len(which)).bool()
    assert torch.equal(torch.from_numpy(said), lines[says])
    assert torch.equal(torch.from_numpy(kept), says.nonzero()[:, 0])
    assert torch.equal(table_of(with_torch), table_of(with_calls))
    live = with_torch.lanes.table[:-1, STAGE] < with_torch.lanes.idle
    assert torch.equal(with_torch.lanes.hidden[:-1][live], with_calls.lanes.hidden[:-1][live])


def test_suspended_lanes_are_no_rows():
    lanes = Lanes(2, 3, torch.zeros(1, WIDTH))
    lanes.table[:, STAGE] = torch.tensor([4, 6, 0, 1, 5, 6, 6])
    lanes.suspend([0])
    wanted = SequenceSettings(2, 3, torch.device("cpu"))
    books = host_rows.hand_over(None, lanes, wanted, Program(), Model())
    assert (books.start(), books.decoding) == (2, 1)
    rows = books.rows(2)
    assert rows.lines[:, STAGE].tolist() == [1, 5]
    assert rows.lanes.tolist() == [3, 4]
    assert (rows.planes.tolist(), rows.loops.tolist()) == ([1, 2], [2, 3])


@pytest.mark.parametrize(
    "replaced",
    [
        {"eos": torch.zeros((2, 1), dtype=torch.int32)},
        {"eos": torch.zeros((1, 1), dtype=torch.int64)},
        {"gate": torch.zeros((7, 2), dtype=torch.float64)},
        {"hidden": torch.zeros((6, WIDTH))},
        {"table": torch.zeros((6, 7), dtype=torch.int64).T},
        {"settings": torch.zeros((2, 3), dtype=torch.int64)},
        {"paths": torch.zeros((12, 3, WIDTH))},
        {"paths": torch.zeros((25, 3, WIDTH + 1))},
    ],
)
def test_memory_of_another_kind_is_refused(replaced):
    lanes = Lanes(2, 3, torch.zeros(1, WIDTH))
    books = host_rows.hand_over(None, lanes, SequenceSettings(2, 3, torch.device("cpu")), Program(), Model())
    with pytest.raises(ValueError, match=r"not torch\.|paths are kept"):
        books.take_tables(books.tables._replace(**replaced), 12)


def test_what_a_pass_is_given_is_checked():
    lanes = Lanes(2, 3, torch.zeros(1, WIDTH))
    lanes.table[:, STAGE] = torch.tensor([1, 6, 6, 5, 6, 6, 6])
    books = host_rows.hand_over(None, lanes, SequenceSettings(2, 3, torch.device("cpu")), Program(), Model())
    assert books.start() == 2
    for raw in (torch.zeros(3, WIDTH), torch.zeros(2, WIDTH + 1), torch.zeros(2, WIDTH).double()):
        with pytest.raises(ValueError, match="a loop leaves"):
            books.end(raw, False, False, True, False, False)
    books.end(torch.zeros(2, WIDTH), False, False, False, False, False)
    with pytest.raises(ValueError, match="what a rule says"):
        books.stop(torch.zeros(2, dtype=torch.bool), None, None, False, False)
    with pytest.raises(ValueError, match="float32 logits"):
        books.lead(torch.zeros(0, VOCABULARY), False, False, False)
    books.stop(torch.ones(1, dtype=torch.bool), None, None, False, False)
    with pytest.raises(ValueError, match="float32 logits"):
        books.settle_best(torch.zeros(0, VOCABULARY), False, -1, False)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="what was chosen"):
        books.settle(one, torch.zeros(2, dtype=torch.int64), one.bool(), None, False)
    with pytest.raises(IndexError, match="no such row"):
        books.settle(one + 2, one, one.bool(), None, False)
