"""Steps in two calls on a CPU, against those in torch, whose operations other devices run."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sigma0
from sigma0.decode import settings as columns
from sigma0.decode.attention import Placement
from sigma0.decode.lanes import CACHE_POSITION, DEPTH, DRAFT, FLAGS, POSITION, STAGE, Lanes
from sigma0.decode.ops import MODES, CpuStepState, EndWeights, LaneTables, operations
from sigma0.decode.runner import EagerRunner
from sigma0.decode.runners import NativeRunner
from sigma0.decode.settings import NO_LIMIT, Program, SequenceSettings
from sigma0.decode.step import EMITTED, FED, read, sample_greedy
from sigma0.decode.transfer import PassCounts
from tests.marks import needs_library

pytestmark = needs_library
WIDTH, WINDOW, VOCABULARY, LONGEST = 3, 24, 5, 64


class Model:
    """Embeds an id as a row that tells id and position; a loop turns states, and the head reads three of their sums."""

    stages = (0, 0)
    tells_gate = True
    config = SimpleNamespace(vocab_size=VOCABULARY)
    operations = operations("auto", torch.device("cpu"))
    head = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(7))
    gate_weight = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(8))
    gate_bias = torch.full((1,), -1.0)

    def enter(self, token_ids, positions):
        return torch.stack([token_ids, positions, token_ids - positions], dim=1).float()

    def loop(self, hidden, rows):
        return hidden.roll(1, -1)

    def norm(self, hidden):
        return hidden

    def gate(self, hidden):
        return (hidden @ self.gate_weight.T + self.gate_bias)[:, 0]

    def read(self, hidden, rows=None):
        return hidden @ self.head.T

    def plain_weights(self):
        return EndWeights(gate=self.gate_weight, bias=self.gate_bias) if self.tells_gate else EndWeights()

    def plain_block(self, longest, like):
        return None


class Storage:
    def __init__(self, sequences):
        self.planes = [SimpleNamespace(flat_keys=torch.zeros(1))]
        self.place, self.noted = Placement(LONGEST, sequences * LONGEST + 1), []

    def placement(self, longest):
        return self.place

    def leave(self, sequences, cache_positions, planes):
        self.noted.append((sequences.tolist(), cache_positions.tolist(), planes.tolist()))


class Choice:
    """The likeliest ids, or ids and judgements that were drawn for each token."""

    def __init__(self, seed, is_greedy):
        self.seed, self.is_greedy, self.on_device = seed, is_greedy, True

    def choose(self, batch, looped, which):
        logits = read(batch, looped, which)
        if self.is_greedy:
            token_ids = sample_greedy(batch, logits)
            stands = looped.table[which, DRAFT] == token_ids
            return token_ids, stands, None, logits
        output = [
            np.random.default_rng([self.seed, *row]).random(3)
            for row in torch.stack([looped.lanes, looped.loops], 1)[which].tolist()
        ]
        current = torch.tensor(np.array(output))
        return (current[:, 0] * (VOCABULARY + 1)).long() - 1, current[:, 1] < 0.6, current[:, 2] < 0.3, logits


def sequence_tokens(generator, depth):
    """Cache positions and stages of the tokens in flight of one sequence, the newest first: at most one decodes."""
    stages = []
    loops = int(generator.integers(0, depth))
    newest = int(generator.integers(depth, 3 * depth))
    while loops < depth and len(stages) < depth:
        decodes = not stages and generator.random() < 0.7
        stages.append(loops if decodes else depth + loops)
        loops += int(generator.integers(1, 3))
    return [(newest - after, stage) for after, stage in enumerate(stages)]


def drawn(seed, sequences, depth, verify):
    """Twice the same lanes, with settings and a program."""
    generator = np.random.default_rng(seed)
    lanes = Lanes(sequences, depth, torch.zeros(1, WIDTH))
    wanted = SequenceSettings(sequences, depth, torch.device("cpu"))
    wanted.eos = torch.tensor(generator.integers(-1, VOCABULARY, (sequences, 2)))
    for sequence in range(sequences):
        checked = verify and generator.random() < 0.8
        current = wanted.table[sequence]
        current[columns.LAST] = depth if checked else int(generator.integers(1, depth + 1))
        current[columns.MIN_LOOPS] = int(generator.integers(1, depth + 1))
        current[columns.DROPS_AT_EXIT] = int(not checked and generator.random() < 0.5)
        current[columns.VERIFY], current[columns.REDRAFT] = int(checked), int(generator.random() < 0.5)
        current[columns.LIMIT] = NO_LIMIT if generator.random() < 0.5 else int(generator.integers(depth, 3 * depth))
        current[columns.PROMPT] = int(generator.integers(0, 3 * depth))
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
        redrafts=bool((checked & (wanted.table[:, columns.REDRAFT] > 0)).any()),
        prompts=verify,
        leaves=True,
        paths=True,
    )
    lanes.hidden.copy_(torch.randn(lanes.hidden.shape, generator=torch.Generator().manual_seed(seed)))
    twice = []
    for _ in range(2):
        current = Lanes(sequences, depth, torch.zeros(1, WIDTH))
        current.table.copy_(lanes.table)
        current.hidden.copy_(lanes.hidden)
        current.remember_paths(WINDOW)
        twice.append(current)
    return generator, twice, wanted, program


def table_of(lanes):
    """The table of lanes but for nobody's; of idle lanes nothing but that they are."""
    table = lanes.table[:-1].clone()
    table[table[:, STAGE] == lanes.idle, 1:] = 0
    return table


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_steps_are_those_in_torch(seed, sequences, depth, verify):
    check_steps(seed, sequences, depth, verify)


@pytest.mark.parametrize("seed", range(6))
def test_some_steps_are_those_in_torch(seed):
    check_steps(seed, 4, 5, True)


def check_steps(seed, sequences, depth, verify):
    generator, twice, wanted, program = drawn(seed, sequences, depth, verify)
    rules = {name: bool(generator.random() < 0.4) for name in ("gate", "margin", "forced", "drops", "watch")}
    if rules["forced"]:
        wanted.exits = torch.tensor(generator.integers(1, depth + 1, (sequences, 4)))
    modes = ["none", *(["qexit"] if rules["gate"] else []), *(["converge", "accel", "accel-steps"] * rules["watch"])]
    for current, thresholds in zip(wanted.table, wanted.thresholds, strict=True):
        current[columns.MODE] = MODES.index(modes[int(generator.integers(len(modes)))])
        current[columns.PATIENCE], current[columns.BREAK_AFTER] = generator.integers(1, 3), generator.integers(0, 3)
        thresholds[:] = torch.tensor(generator.random(3))
        if current[columns.MODE] == MODES.index("qexit"):
            thresholds[columns.OWN] = thresholds[columns.Q]
        else:
            thresholds[columns.Q] = torch.inf
        thresholds[columns.THETA] *= 1.0 if rules["margin"] else torch.inf
    program = replace(program, reads_logits=rules["margin"], modes=frozenset(modes) - {"none", "qexit"}, **rules)
    choice = Choice(seed, bool(generator.random() < 0.5) and not rules["forced"])
    model, steps, result = Model(), [], []
    model.tells_gate = bool(generator.random() < 0.5)
    for kind, lanes in zip((EagerRunner, NativeRunner), twice, strict=True):
        storage, counts = Storage(sequences), PassCounts()
        runner = kind(model, lanes, wanted, storage, counts)
        runner.use(program)
        current = (runner.step(LONGEST, choice) for _ in range(3))
        # which rows logits are of is written again by the next step
        steps.append([(step.decoding, step.lines, step.logits) for step in current if step is not None])
        result.append((counts, storage.noted, table_of(lanes)))
    (counts, noted, table), (own_counts, own_noted, own_table) = result
    assert (counts, noted) == (own_counts, own_noted) and torch.equal(table, own_table)
    live = twice[0].table[:-1, STAGE] < twice[0].idle
    torch.testing.assert_close(*(lanes.hidden[:-1][live] for lanes in twice), rtol=1e-6, atol=1e-6)
    if rules["gate"]:
        decoding = twice[0].table[:-1, STAGE] < depth
        torch.testing.assert_close(*(lanes.gates()[:-1][decoding] for lanes in twice), rtol=1e-6, atol=1e-6)
    if rules["watch"]:
        counts, own_counts = (lanes.exit_state.counts[:-1][live] for lanes in twice)
        assert torch.equal(counts, own_counts)
    torch.testing.assert_close(twice[0].paths[:-1], twice[1].paths[:-1], rtol=0, atol=0)
    for in_torch, in_calls in zip(*steps, strict=True):
        assert in_torch[0] == in_calls[0]
        output = [(lines[:, EMITTED] | lines[:, FED]) > 0 for _, lines, _ in (in_torch, in_calls)]
        np.testing.assert_array_equal(in_torch[1][output[0]], in_calls[1][output[1]])
        if output[0].any():
            torch.testing.assert_close(in_torch[2][output[0]], in_calls[2][output[1]])


def cpu_of(lanes):
    wanted = SequenceSettings(2, 3, torch.device("cpu"))
    fixed = lanes.table, lanes.hidden, lanes.gate, None, None
    tables = LaneTables(*fixed, wanted.table, wanted.thresholds, wanted.eos)
    cpu = CpuStepState(tables, lanes.depth)
    cpu.take_tables(tables, 1)
    return cpu, tables


def test_suspended_lanes_are_no_rows():
    lanes = Lanes(2, 3, torch.zeros(1, WIDTH))
    lanes.table[:, STAGE] = torch.tensor([4, 6, 0, 1, 5, 6, 6])
    lanes.suspend([0])
    cpu, _ = cpu_of(lanes)
    assert (cpu.start(), cpu.decoding) == (2, 1)
    rows = cpu.rows(2)
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
        {"given": torch.zeros((1, 4), dtype=torch.int64)},
        {"paths": torch.zeros((12, 3, WIDTH))},
        {"paths": torch.zeros((25, 3, WIDTH + 1))},
    ],
)
def test_memory_of_another_kind_is_refused(replaced):
    cpu, tables = cpu_of(Lanes(2, 3, torch.zeros(1, WIDTH)))
    with pytest.raises(ValueError, match=r"not torch\.|paths are kept"):
        cpu.take_tables(tables._replace(**replaced), 12)


def test_what_a_pass_is_given_is_checked():
    lanes = Lanes(2, 3, torch.zeros(1, WIDTH))
    lanes.table[:, STAGE] = torch.tensor([1, 6, 6, 5, 6, 6, 6])
    cpu, _ = cpu_of(lanes)
    assert cpu.start() == 2
    cpu.take_program(False, False, True, False, False, False, None)
    for gate_logits in (None, torch.zeros(2), torch.zeros(1).double()):
        with pytest.raises(ValueError, match=r"give its logits|gate_logits is torch"):
            cpu.end(torch.zeros(2, WIDTH), gate_logits)
    cpu.take_program(False, False, False, False, False, False, None)
    for raw in (torch.zeros(3, WIDTH), torch.zeros(2, WIDTH + 1), torch.zeros(2, WIDTH).double()):
        with pytest.raises(ValueError, match="a loop leaves"):
            cpu.end(raw)
    cpu.end(torch.zeros(2, WIDTH))
    with pytest.raises(ValueError, match="float32 logits"):
        cpu.lead(torch.zeros(0, VOCABULARY))
    cpu.lead(torch.ones(1, VOCABULARY))
    with pytest.raises(ValueError, match="float32 logits"):
        cpu.commit_greedy(torch.zeros(0, VOCABULARY), True, -1)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="what was chosen"):
        cpu.commit(one, torch.zeros(2, dtype=torch.int64), one.bool(), None)
    with pytest.raises(IndexError, match="no such row"):
        cpu.commit(one + 2, one, one.bool(), None)


def test_a_steady_pass_is_few_calls_of_python(pocket):
    """Of a text of 40 tokens beside one of 8, tokens, statistics and text included."""

    def written(new):
        calls = [0]

        def count(frame, event, argument):
            calls[0] += event == "call"

        sys.setprofile(count)
        try:
            text = sigma0.generate(
                *pocket, "Mary went to the park. Where is Mary?", max_new_tokens=new, eos_token_id=[]
            )
        finally:
            sys.setprofile(None)
        return calls[0], text.loop_passes

    written(40)
    (few, few_passes), (many, passes) = written(8), written(40)
    assert passes > few_passes and (many - few) / (passes - few_passes) <= 80
