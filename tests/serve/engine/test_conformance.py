"""The engine as one more way to call a step: mixed requests side by side, each held to its slow reference."""

import random
from functools import cache
from itertools import product
from unittest import mock

import pytest
import torch

import sigma0
from sigma0 import ExitConfig
from sigma0.decode.kv_store import BlockShape
from sigma0.decode.sampling_params import SamplingParams
from sigma0.decode.transfer import AsyncCopy
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest
from tests.decode.captures import called_by
from tests.decode.test_conformance import AFTER, FAMILIES, TRACED, Case, written
from tests.marks import exhaustive, fast_if, named, needs_compiler, slow
from tests.models.raven_reference import SHAPES, tiny_raven
from tests.serve.engine.spied_worker import KV


def requests_of(prompts, configs, new):
    pairs = zip(prompts, configs, strict=True)
    return [EngineRequest(tuple(prompt), new, config, on_collapse="ignore") for prompt, config in pairs]


def check_alone(model, requests, result):
    """Holds what becomes of requests to what `generate` writes of each by itself."""
    for number, (asked, done) in enumerate(zip(requests, result, strict=True)):
        out = written(model, [list(asked.prompt_ids)], asked.exit_config, asked.max_new_tokens)
        with named(number, asked.exit_config):
            assert [token.id for token in done.tokens] == out.sequences[0, len(asked.prompt_ids) :].tolist()
            assert [token.depth for token in done.tokens] == out.exit_depths[0].tolist()


def served(model, tokenizer, requests, blocks, seed=0, watch=True, runner="auto", together=4):
    """What becomes of requests that come one after the other; and the engine."""
    size = BlockShape.of(model, 4).bytes_with(model.dtype)
    limits = EngineLimits(max_running=together, page_size=4, pass_rows=16, kv_bytes=blocks * size)
    model.runner = runner
    engine = Engine(model, tokenizer, "tiny", limits, watch=watch)
    model.runner = "auto"
    rng, waiting, keys, result = random.Random(seed), list(requests), [], {}
    while waiting or engine.has_work:
        while waiting and (rng.random() < 0.4 or not engine.has_work):
            keys.append(engine.submit(waiting.pop(0)))
        result |= dict(engine.step())
    return [result[key] for key in keys], engine


@cache
def mixed(family):
    """A model, ids that end texts, and prompts after rules of every kind with what is written after them."""
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


@pytest.mark.cpu(12)
@needs_compiler
@pytest.mark.parametrize(
    ("way", "family"),
    [cell(*values) for values in product(("eager", "torch", "late", "captured", "compile"), FAMILIES)],
)
@pytest.mark.parametrize("blocks", [200, 8])
def test_requests_are_their_references(pocket, monkeypatch, way, family, blocks):
    model, ends, rows = mixed(family)
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    requests = [request for row in rows for request in requests_of([row.prompt], [row.config], row.case.new)]
    with called_by(way, model) as (asked, _):
        result, engine = served(model, pocket[1], requests, blocks, runner=asked["runner"])
        assert engine.runner.captured == (way == "captured")
    preempted = engine.status().preemptions
    assert engine.status().blocks_used == 0 and (preempted == 0 if blocks > 100 else preempted or family != "ouro")
    for number, (row, out) in enumerate(zip(rows, result, strict=True)):
        with named(number, row.config, row.prompt, out):
            assert [(token.id, token.depth) for token in out.tokens] == [(step.token, step.depth) for step in row.steps]
            assert out.passes == row.passes and row.rows in (None, out.rows)


@pytest.mark.cpu(8)
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
        result, _ = served(model, pocket[1], requests, blocks, runner=asked["runner"])
    assert [[(token.id, token.depth) for token in out.tokens] for out in result] == expected


def test_a_pass_is_waited_for_once(pocket, monkeypatch):
    model, made, opens = mixed("ouro")[0], [], AsyncCopy.__init__
    monkeypatch.setattr(
        AsyncCopy, "__init__", lambda landing, tensor: (made.append(landing), opens(landing, tensor))[1]
    )
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
    requests = requests_of([row.prompt for row in rows[:6]], [row.config for row in rows[:6]], 9)
    texts, known = [], []
    with called_by("compile", model):
        for _ in range(2):
            result, engine = served(model, pocket[1], requests, 200, runner="compile")
            texts.append([[token.id for token in out.tokens] for out in result])
            known.append(len(model._compiled_programs.programs))
        for request in requests:
            engine.submit(request)
        engine.step()
        engine.reset()
        assert not engine.has_work and engine.status().blocks_used == 0
        keys, result = [engine.submit(request) for request in requests], {}
        while engine.has_work:
            result |= dict(engine.step())
    assert known[0] == known[1] > 0
    assert texts[0] == texts[1] == [[token.id for token in result[key].tokens] for key in keys]


@pytest.fixture(params=SHAPES)
def with_coda(request, pocket):
    model = tiny_raven(request.param, 23, vocab_size=pocket[0].config.vocab_size)
    model.generation_config.eos_token_id = None
    return model


def prompts_of(seed, count, longest):
    source = random.Random(seed)
    return [[source.randrange(5, 500) for _ in range(source.randint(1, longest))] for _ in range(count)]


@pytest.mark.grid(fast=0, slow=1)
def test_recomputed_codas_are_read_in_order(with_coda, pocket):
    """Exits of an answer that differ are recomputed over all that lies before them, whatever loop that was read at."""
    rules = [
        ExitConfig(mode="kl", delta=0.1),
        ExitConfig(mode="minp-kl", delta=0.02),
        ExitConfig(mode="latent-diff", delta=0.5, after_exit="drop"),
        ExitConfig(mode="argmax-stability", stable=1),
    ]
    requests = requests_of(prompts_of(4, 24, 6), rules * 6, 12)
    result, engine = served(with_coda, pocket[1], requests, 9, watch=False)
    assert engine.status().preemptions > 6
    check_alone(with_coda, requests, result)


@pytest.mark.grid(fast=0, slow=1)
def test_blocks_found_again_are_those_of_full_depth(with_coda, pocket):
    """A later request's prompt holds the first one's answer, whose codas were read at its exits."""
    early = ExitConfig(mode="margin", theta=0.1)
    prompt = (prompts_of(3, 1, 20)[0] * 20)[:18]
    longer = [*written(with_coda, [prompt], early, 12).sequences[0].tolist(), 7, 8]
    rules = [early] * 3 + [ExitConfig(mode="margin", theta=0.1, after_exit="verify"), ExitConfig(mode="full")]
    requests = requests_of([prompt] * 2 + [longer] * 3, rules, 12)
    result, _ = served(with_coda, pocket[1], requests, 200, watch=False, together=1)
    assert sum(done.cached_tokens for done in result) > 16
    check_alone(with_coda, requests, result)


@pytest.mark.slow
@pytest.mark.parametrize("after", ["finish", "verify"])
def test_over_quantised_weights_requests_side_by_side_are_answered_as_one_by_one(after):
    """In float32, where a row does not depend on how many share its pass."""
    pytest.importorskip("torchao")
    model, tokenizer = sigma0.load("pocket", device="cpu", dtype="float32", quantization="int8")
    model.generation_config.eos_token_id = None
    prompts = [range(start, start + 9) for start in (5, 60, 200)]
    requests = requests_of(prompts, [ExitConfig(mode="margin", theta=0.5, after_exit=after)] * 3, 8)
    check_alone(model, requests, served(model, tokenizer, requests, 100, watch=False)[0])


def test_a_chunk_completes_its_own_positions_and_no_more(pocket):
    """What is complete is registered, and read by others."""
    engine = Engine(*pocket, "pocket", EngineLimits(1, 8, 3, 4, KV))
    run, completed = engine._batch.run, []

    def spied():
        output = run()
        completed.extend(output.complete.values())
        return output

    with mock.patch.object(engine._batch, "run", spied):
        engine.submit(EngineRequest(tuple(range(5, 15)), 1, ExitConfig(mode="full")))
        while engine.has_work:
            engine.step()
    assert completed == [3, 6, 9]


def test_no_draft_stays_where_a_slot_is_freed(pocket):
    batch = Engine(*pocket, "pocket", EngineLimits(2, 8, 64, 4, KV))._batch
    probs = batch.lanes.remember_probs(5).fill_(torch.nan)
    batch.reset()
    assert (probs[:-1] == 0).all()
