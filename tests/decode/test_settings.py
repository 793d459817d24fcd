"""Settings of sequences as tables, and what a pass over them has to compute."""

import math

import pytest
import torch

from sigma0 import ExitConfig, FateConfig
from sigma0.decode.exits import ExitRule, ScriptedExits
from sigma0.decode.kv_store import BlockShape, PagedPlanes
from sigma0.decode.ops import MODES, TORCH
from sigma0.decode.planes import LayerPlanes
from sigma0.decode.sampling_params import SamplingSettings, SequenceSampling
from sigma0.decode.settings import NO_LIMIT, Program, SequenceExit, SequenceSettings
from sigma0.decode.stats import RunRecord

CPU = torch.device("cpu")


def rule(loops=4, inner_break=False, fates=None, **config):
    return ExitRule(ExitConfig(**config), loops, inner_break, fates)


QEXIT = SequenceExit(rule(q=0.25, min_loops=2), prompt=7)


def test_a_line_of_the_table():
    settings = SequenceSettings(3, 4, CPU)
    settings.set_exit(range(3), QEXIT)
    # last, min_loops, leaves, verify, redraft, limit, prompt, mode, patience, break_after, criterion
    assert settings.table.tolist() == [[4, 2, 0, 0, 1, NO_LIMIT, 7, MODES.index("qexit"), 2, 0, -1]] * 3
    assert settings.thresholds.tolist() == [[0.25, 0.25, math.inf]] * 3
    assert NO_LIMIT == 2**62 and settings.eos.tolist() == [[-1]] * 3


def test_a_limit_stays_where_the_rule_changes():
    settings = SequenceSettings(3, 4, CPU)
    settings.set_ends([1], [5, 6], 9)
    settings.set_exit([1, 2], QEXIT)
    assert settings.table[:, 5].tolist() == [NO_LIMIT, 9, NO_LIMIT] and settings.table[:, 6].tolist() == [0, 7, 7]
    settings.set_ends([1], [], None)
    assert settings.table[1, 5] == NO_LIMIT


def test_ends_of_sequences_are_as_many_as_any_has():
    settings = SequenceSettings(3, 4, CPU)
    settings.set_ends([0], [5], 1)
    assert settings.eos.tolist() == [[5], [-1], [-1]]
    settings.set_ends([1, 2], [6, 7, 8], 2)
    assert settings.eos.tolist() == [[5, -1, -1], [6, 7, 8], [6, 7, 8]]
    kept = settings.eos
    settings.set_ends([1], [9], 2)
    settings.set_ends([0], [3, 4, 5], 2)
    assert settings.eos is kept, "what is wide enough stays in its place"
    assert settings.eos.tolist() == [[3, 4, 5], [9, -1, -1], [6, 7, 8]]


@pytest.mark.parametrize("inference", [True, False])
def test_tables_planes_and_records_can_be_written_wherever_they_were_made(inference):
    with torch.inference_mode(inference):
        settings, sampling = SequenceSettings(1, 4, CPU), SamplingSettings(1, CPU)
        made = [settings.table, settings.thresholds, settings.eos, *sampling.tensors]
        layer = LayerPlanes(torch.zeros(2, 0, 3), 2, 1, 4)
        paged = PagedPlanes(BlockShape(1, 4, 2, 3, 5), 2, torch.float32, CPU)
        made += [layer.flat_keys, layer.flat_values, paged.table]
        record = RunRecord(1, 1, 4, CPU, TORCH)
        for _ in range(3):
            record.note_tokens(torch.zeros(1, 8), [0], [5])
        made += [record.loops, record.fates]
        sampling.set(0, SequenceSampling(eos=(1, 2), bad_words=((1, 2), (3,)), logit_bias=((1, 1.0), (2, 1.0))))
    assert not any(entry.is_inference() for entry in (*made, *sampling.tensors))


def test_limits_of_fates_are_those_of_the_last_rule():
    settings = SequenceSettings(2, 4, CPU)
    assert (settings.growth, settings.spiral) == (0.1, 1.0)
    settings.set_exit([0], SequenceExit(rule(fates=FateConfig(growth=0.5, spiral=90.0))))
    assert (settings.growth, settings.spiral) == (0.5, pytest.approx(math.pi / 2))


def test_given_exits_of_a_sequence_begin_where_its_stride_says():
    exits, settled = ScriptedExits((1, 2, 3), (4, 5, 6), stride=2).tensors(3)
    assert exits.tolist() == [[1, 2, 3], [3, 1, 2], [2, 3, 1]]
    assert settled.tolist() == [[4, 5, 6], [6, 4, 5], [5, 6, 4]]
    exits, settled = ScriptedExits((1, 2)).tensors(2)
    assert exits.tolist() == [[1, 2], [1, 2]] and settled is None


def test_given_exits_are_written_where_they_were():
    settings, current = SequenceSettings(2, 4, CPU), rule(q=0.5)
    current.script = ScriptedExits((1, 2), (2, 3))
    settings.set_exit([0, 1], SequenceExit(current, verify=True))
    exits, settled = settings.exits, settings.settled
    assert exits.tolist() == [[1, 2], [1, 2]] and settled.tolist() == [[2, 3], [2, 3]]
    assert settings.program().forced
    settings.clear(0)
    assert settings.exits is exits
    settings.clear(1)
    assert settings.exits is settings.settled is None and not settings.program().forced
    current.script = ScriptedExits((3, 4), (4, 4))
    settings.set_exit([0, 1], SequenceExit(current, verify=True))
    assert settings.exits is exits and settings.settled is settled and exits.tolist() == [[3, 4], [3, 4]]
    current.script = ScriptedExits((1, 2, 3))
    settings.set_exit([0, 1], SequenceExit(current))
    assert settings.exits is not exits and settings.exits.shape == (2, 3) and settings.settled is None
    settings.reset()
    assert settings.exits is None and settings.program() == Program()


def program_of(*wanted, depth=4, **how):
    settings = SequenceSettings(len(wanted) + 1, depth, CPU)
    for sequence, entry in enumerate(wanted):
        settings.set_exit([sequence], entry)
    return settings.program(**how)


MARGIN = SequenceExit(rule(mode="margin"))
VERIFIED = SequenceExit(rule(), verify=True)
LATE = SequenceExit(rule(redraft=False), verify=True)


@pytest.mark.parametrize(
    "wanted, expected",
    [
        ([], {}),
        ([SequenceExit(rule(mode="full"))], {}),
        ([SequenceExit(rule(q=1.0))], {}),
        ([QEXIT], {"gate": True}),
        ([MARGIN], {"margin": True, "reads_logits": True}),
        ([SequenceExit(rule(mode="converge"))], {"modes": frozenset({"converge"}), "watch": True}),
        ([SequenceExit(rule(mode="accel")), QEXIT], {"modes": frozenset({"accel"}), "watch": True, "gate": True}),
        ([SequenceExit(rule(mode="kl"))], {"criteria": frozenset({"kl"}), "reads_logits": True}),
        ([SequenceExit(rule(mode="cosine"))], {"criteria": frozenset({"cosine"})}),
        ([SequenceExit(rule(inner_break=True))], {"gate": True, "breaks": True, "watch": True}),
        ([VERIFIED], {"gate": True, "verify": True, "redrafts": True}),
        ([VERIFIED, LATE], {"gate": True, "verify": True, "redrafts": True}),
        ([LATE], {"gate": True, "verify": True}),
        ([VERIFIED, QEXIT], {"gate": True, "verify": True, "mixed": True, "redrafts": True}),
        ([SequenceExit(rule(), drop=True)], {"gate": True, "leaves": True, "drops": True}),
        ([SequenceExit(rule(mode="fixed", depth=3))], {"leaves": True}),
        ([SequenceExit(rule(mode="fixed", depth=4))], {}),
        ([SequenceExit(rule(mode="fixed", depth=3), verify=True)],
         {"verify": True, "redrafts": True}),
        ([SequenceExit(rule(), prompt_in_lanes=True)], {"gate": True, "prompts": True}),
    ],
)  # fmt: skip
def test_a_pass_computes_what_some_sequence_needs(wanted, expected):
    assert program_of(*wanted) == Program(**expected)


@pytest.mark.parametrize("name", ["paths", "draws", "masked"])
def test_a_pass_computes_what_it_is_told_of(name):
    assert program_of(QEXIT, **{name: True}) == Program(gate=True, **{name: True})


PARTS = {
    "gate": True, "modes": frozenset({"accel"}), "watch": True, "breaks": True, "margin": True, "reads_logits": True,
    "forced": True, "criteria": frozenset({"kl"}), "verify": True, "masked": True,
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_what_stops_tokens_is_known_or_looked_at(name):
    known = name not in {"gate", "modes", "reads_logits", "criteria", "breaks", "forced"}
    assert Program(**{name: PARTS[name]}).known == known
