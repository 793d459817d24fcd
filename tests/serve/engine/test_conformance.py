"""The engine as one more way to call a step: mixed requests side by side, each held to its slow reference."""

import random
from functools import cache
from itertools import product

import pytest

from sigma0.decode.planes import BlockShape
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest
from tests.decode.captures import called_by
from tests.decode.test_conformance import AFTER, FAMILIES, TRACED, Case
from tests.marks import exhaustive, fast_if, named, needs_compiler, slow

def served(model, tokenizer, requests, blocks, seed=0, watch=True, runner="auto"):
    """What becomes of requests that come one after the other; and the engine."""
    size = BlockShape.of(model, 4).bytes_with(model.dtype)
    limits = EngineLimits(max_running=4, page_size=4, pass_rows=16, kv_bytes=blocks * size)
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
        for seed in range(2):
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
    return fast_if((way, family) in (("eager", "ouro"), ("eager", "raven-pre"), ("late", "nanbeige")), way, family)


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
    assert (engine.status().preemptions > 0) == (blocks < 100) and engine.status().blocks_used == 0
    for number, (row, out) in enumerate(zip(rows, found, strict=True)):
        with named(number, row.config, row.prompt, out):
            assert [(token.id, token.depth) for token in out.tokens] == [(step.token, step.depth) for step in row.steps]
            assert out.passes == row.passes and row.rows in (None, out.rows)
