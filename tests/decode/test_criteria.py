"""Huginn's exit criteria: their values by brute force, and the same decisions wherever they are taken."""

import random

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.config import RULE_DEFAULTS
from sigma0.decode import compiled as programs
from sigma0.decode.exits import CRITERIA, REASON_WHEN_MET, Criteria
from sigma0.models.raven_published import _Meter
from tests.decode.captures import called_by
from tests.decode.test_conformance import written
from tests.marks import needs_compiler
from tests.models.raven_reference import Reference, tiny_raven
from tests.reference import settled_model
from tests.serve.engine.test_conformance import check_alone, prompts_of, requests_of, served

NEW = 8
TIE = 1e-5
# That stop some tokens of the small models early, and not all.
DELTAS = {"entropy-diff": 0.1, "latent-diff": 0.5, "cosine": 0.12, "kl": 0.1, "minp-kl": 0.02, "argmax-stability": 1}


def config_of(mode, delta=None, **values):
    delta = DELTAS[mode] if delta is None else delta
    return ExitConfig(mode=mode, **{next(iter(RULE_DEFAULTS[mode])): delta}, **values)


@pytest.mark.parametrize("zero", [False, True])
def test_values_are_their_definitions(zero):
    """All criteria at once, each row its own and at its own loop, against a meter for each row."""
    source, generator = random.Random(5), torch.Generator().manual_seed(5)
    rows, width, vocabulary, loops = 13, 7, 11, 6
    states = torch.randn((loops + 1, rows, width), generator=generator).cumsum(0)
    if zero:
        states[0] = 0.0
    logits = 3 * torch.randn((loops, rows, vocabulary), generator=generator).cumsum(0)
    modes = [source.choice(CRITERIA) for _ in range(rows)]
    deltas = [source.choice([1, 2]) if mode == "argmax-stability" else source.uniform(0.05, 1.5) for mode in modes]
    meters = [_Meter(mode, states[0, row][None, None], vocabulary) for row, mode in enumerate(modes)]
    kept, compared = Criteria(rows, vocabulary, torch.device("cpu")), 0
    for loop in range(loops):
        result = kept.decide(
            CRITERIA,
            torch.tensor([CRITERIA.index(mode) for mode in modes]),
            torch.tensor(deltas, dtype=torch.float32),
            torch.arange(rows),
            torch.full((rows,), loop == 0),
            (states[loop], states[loop + 1]),
            logits[loop],
        )
        for row, (mode, delta) in enumerate(zip(modes, deltas, strict=True)):
            value = meters[row].value(states[loop + 1, row][None, None], logits[loop, row])
            if abs(value - delta) > TIE or mode == "argmax-stability":
                compared += 1
                assert bool(result[row]) == (value >= delta if mode == "argmax-stability" else value < delta)
    assert compared > 60


def test_rows_of_nobody_change_nothing():
    kept = Criteria(2, 5, torch.device("cpu"))
    before = [part[:2].clone() for part in kept.tensors()]
    two = torch.tensor([2, 2])
    kept.decide(
        CRITERIA,
        two,
        torch.ones(2),
        two,
        torch.tensor([True, False]),
        (torch.ones(2, 3), torch.ones(2, 3)),
        torch.rand(2, 5),
    )
    assert all(torch.equal(part[:2], old) for part, old in zip(kept.tensors(), before, strict=True))


def exits_of(model, ids, prompt, config):
    """Where each new token stops in a run of all loops, what it reads there, and how near any decision was to a tie."""
    with torch.no_grad():
        run = model.base_model(ids)
        states, start = run.loop_states[:, 0], run.start_states[0]
        depths, tokens, near = [], [], float("inf")
        for place in range(prompt - 1, ids.shape[1] - 1):
            meter = _Meter(config.mode, start[place][None, None], model.config.vocab_size)
            for loop in range(1, model.num_loops + 1):
                logits = model.read_states(states[loop - 1, place])
                value = meter.value(states[loop - 1, place][None, None], logits)
                if config.mode != "argmax-stability" and value == value:
                    near = min(near, abs(value - config.threshold))
                met = value >= config.threshold if config.mode == "argmax-stability" else value < config.threshold
                if (met and loop >= config.min_loops) or loop == model.num_loops:
                    break
            depths.append(loop)
            tokens.append(int(logits.argmax()))
    return tokens, depths, near


@pytest.mark.parametrize("mode", CRITERIA)
def test_a_run_of_all_loops_decides_the_same(mode):
    model, seen = settled_model(7, total_ut_steps=4), set()
    for seed, delta in enumerate((None, None, 0.3 * DELTAS[mode] if mode != "argmax-stability" else 2)):
        config = config_of(mode, delta, min_loops=1 + seed % 2)
        ids = torch.randint(1, 61, (1, 5 + seed), generator=torch.Generator().manual_seed(seed))
        out = written(model, ids.tolist(), config, NEW)
        tokens, depths, near = exits_of(model, out.sequences, ids.shape[1], config)
        assert near > TIE
        assert out.sequences[0, ids.shape[1] :].tolist() == tokens
        assert out.exit_depths[0].tolist() == depths
        seen |= set(depths)
        expected = {REASON_WHEN_MET[mode] if depth < 4 else None for depth in depths}
        assert {reason for reason in out.exit_reasons[0] if reason != "max_depth"} >= expected - {None}
    assert len(seen) > 1


@pytest.mark.parametrize("mode", CRITERIA)
def test_a_coda_is_read_at_the_loop_of_the_criterion(mode):
    model = tiny_raven("sandwich", 45)
    reference = Reference(model)
    for prompt in ([5, 9, 2], [11], [3, 3, 7, 40, 21]):
        expected = reference.write(prompt, 5, mode, config_of(mode).threshold)
        assert expected.margin > TIE
        out = written(model, [prompt], config_of(mode), 5)
        assert out.sequences[0, len(prompt) :].tolist() == expected.tokens
        assert out.exit_depths[0].tolist() == expected.depths


@pytest.mark.parametrize("mode", CRITERIA)
def test_verify_is_full_depth(mode):
    model, configs = settled_model(9, total_ut_steps=4), (ExitConfig(mode="full"), config_of(mode, after_exit="verify"))
    full, checked = (written(model, [[4, 8, 15, 16]], config, NEW) for config in configs)
    assert torch.equal(full.sequences, checked.sequences)


@pytest.mark.grid(fast=0, slow=1)
@needs_compiler
@pytest.mark.parametrize("after", ["finish", "verify"])
@pytest.mark.parametrize("mode", CRITERIA)
def test_a_step_is_one_graph(mode, after, monkeypatch):
    monkeypatch.setattr(programs, "generate_code", lambda graph, examples: graph)
    model, result = settled_model(11, total_ut_steps=4, num_hidden_layers=1), []
    config = config_of(mode, after_exit=after)
    for way, runner in (("eager", "eager"), ("captured", "compile")):
        with called_by(way, model) as (asked, _):
            result.append(written(model, [[4, 8, 15], [2, 23]], config, NEW, **asked | {"runner": runner}))
    eager, compiled = result
    assert compiled.runner.name == "compile" and compiled.runner.captured
    assert torch.equal(eager.sequences, compiled.sequences)
    assert torch.equal(eager.exit_depths, compiled.exit_depths)
    assert eager.head_rows == compiled.head_rows


def test_mixed_requests_of_an_engine_are_each_alone_also_after_preemption(pocket, monkeypatch):
    model, tokenizer = pocket
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    configs = [config_of(mode, after_exit=after) for mode in CRITERIA for after in ("finish", "drop")]
    configs.append(ExitConfig(mode="margin", theta=0.5))
    requests = requests_of(prompts_of(13, len(configs), 15), configs, NEW)
    result, engine = served(model, tokenizer, requests, 12, watch=False, together=5)
    assert engine.status().preemptions > 0
    check_alone(model, requests, result)
