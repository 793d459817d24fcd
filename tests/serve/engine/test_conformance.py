"""The engine as one more way to call a step: mixed requests side by side, each held to its slow reference."""

import random
from functools import cache
from itertools import product

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode.kv_store import BlockShape
from sigma0.decode.sampling_params import SamplingParams
from sigma0.decode.transfer import Landing
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest
from tests.decode.captures import called_by
from tests.decode.test_conformance import AFTER, FAMILIES, TRACED, Case, written
from tests.marks import exhaustive, fast_if, named, needs_compiler, slow


def served(model, tokenizer, requests, blocks, seed=0, watch=True, runner="auto", together=4):
    """What becomes of requests that come one after the other; and the engine."""
    size = BlockShape.of(model, 4).bytes_with(model.dtype)
    limits = EngineLimits(max_running=together, page_size=4, pass_rows=16, kv_bytes=blocks * size)
    model.runner = runner
    engine = Engine(model, tokenizer, "tiny", limits, watch=watch)
    model.runner = "auto"
    rng, waiting, keys, found = random.Random(seed), list(requests), [], {}
    while waiting or engine.has_work:
        while waiting and (rng.random() < 0.4 or not engine.has_work):
            keys.append(engine.submit(waiting.pop(0)))
        found |= dict(engine.step())
    return [found[key] for key in keys], engine


@cache
def mixed(family):
    """A model, ids that end texts, and prompts behind rules of every kind with what is written behind them."""
    model, rows = None, []
    for after in AFTER:
        for seed in range(2 if family == "ouro" else 1):
            case = Case(family, after, seed, model)
            model = case.model
            rows += case.rows
    ends = random.Random(1).sample([step.token for row in rows for step in row.written], 2)
    for row in rows:
        row.end(frozenset(ends))
    return model, ends, rows


def cell(way, family):
    if way in TRACED:
        return (slow if family == "ouro" else exhaustive)(way, family)
    return fast_if((way, family) in (("eager", "ouro"), ("eager", "raven-pre")), way, family)


@pytest.mark.cpu(4)
@needs_compiler
@pytest.mark.parametrize(
    ("way", "family"),
    [cell(*values) for values in product(("eager", "torch", "late", "captured", "compile"), FAMILIES)],
)
@pytest.mark.parametrize("blocks", [200, 8])
def test_requests_are_their_references(pocket, monkeypatch, way, family, blocks):
    model, ends, rows = mixed(family)
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    requests = [EngineRequest(tuple(row.prompt), row.case.new, row.config, on_collapse="ignore") for row in rows]
    with called_by(way, model) as (asked, _):
        found, engine = served(model, pocket[1], requests, blocks, runner=asked["runner"])
        assert engine.runner.captured == (way == "captured")
    preempted = engine.status().preemptions
    assert engine.status().blocks_used == 0 and (preempted == 0 if blocks > 100 else preempted or family != "ouro")
    for number, (row, out) in enumerate(zip(rows, found, strict=True)):
        with named(number, row.config, row.prompt, out):
            assert [(token.id, token.depth) for token in out.tokens] == [(step.token, step.depth) for step in row.steps]
            assert out.passes == row.passes and row.rows in (None, out.rows)


@pytest.mark.cpu(4)
@needs_compiler
@pytest.mark.parametrize("blocks", [200, 8])
@pytest.mark.parametrize("way", ["eager", slow("torch"), slow("late"), slow("captured"), exhaustive("compile")])
def test_a_request_draws_as_generate_does_alone(pocket, monkeypatch, way, blocks):
    """Its seed decides, wherever it runs: beside others, and preempted."""
    model, _, rows = mixed("ouro")
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    draws = {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}
    requests, expected = [], []
    for seed, row in enumerate(rows):
        sampling = SamplingParams(**draws, seed=seed)
        requests.append(EngineRequest(tuple(row.prompt), 9, row.config, sampling, on_collapse="ignore"))
        torch.manual_seed(seed)
        out = written(model, [row.prompt], row.config, 9, do_sample=True, **draws)
        expected.append(list(zip(out.sequences[0, -9:].tolist(), out.exit_depths[0].tolist(), strict=True)))
    with called_by(way, model) as (asked, _):
        found, _ = served(model, pocket[1], requests, blocks, runner=asked["runner"])
    assert [[(token.id, token.depth) for token in out.tokens] for out in found] == expected


def test_a_pass_is_waited_for_once(pocket, monkeypatch):
    model, made, opens = mixed("ouro")[0], [], Landing.__init__
    monkeypatch.setattr(Landing, "__init__", lambda landing, tensor: (made.append(landing), opens(landing, tensor))[1])
    with called_by("captured", model) as (asked, _):
        monkeypatch.setattr(model, "runner", asked["runner"])
        engine = Engine(model, pocket[1], "tiny", EngineLimits(kv_bytes=2**22), watch=False)
        for first in (5, 6, 7):
            engine.submit(EngineRequest((first, 8), 60, ExitConfig(q=0.5), ignore_eos=True, on_collapse="ignore"))
        for _ in range(8):
            engine.step()
        made.clear()
        for _ in range(20):
            engine.step()
        assert engine.status().running == 3 and len(made) == 20


@pytest.mark.slow
@needs_compiler
def test_another_engine_takes_the_programs_of_the_first_and_an_engine_that_was_reset_writes_the_same(pocket):
    model, _, rows = mixed("ouro")
    requests = [EngineRequest(tuple(row.prompt), 9, row.config, on_collapse="ignore") for row in rows[:6]]
    texts, known = [], []
    with called_by("compile", model):
        for _ in range(2):
            found, engine = served(model, pocket[1], requests, 200, runner="compile")
            texts.append([[token.id for token in out.tokens] for out in found])
            known.append(len(model._compiled_programs.programs))
        for request in requests:
            engine.submit(request)
        engine.step()
        engine.reset()
        assert not engine.has_work and engine.status().blocks_used == 0
        keys, found = [engine.submit(request) for request in requests], {}
        while engine.has_work:
            found |= dict(engine.step())
    assert known[0] == known[1] > 0
    assert texts[0] == texts[1] == [[token.id for token in found[key].tokens] for key in keys]
