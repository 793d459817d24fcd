"""Models with a prelude and a coda in the engine: as in the library alone, whatever runs beside them and however often
they are preempted."""

import random

import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode.planes import BlockShape
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestOutput
from tests.models.raven_reference import SHAPES, tiny_raven

NEW = 12
RULES = (
    ExitConfig(mode="margin", theta=0.1),
    ExitConfig(mode="converge", eps=0.6),
    ExitConfig(mode="margin", theta=0.1, after_exit="verify"),
    ExitConfig(mode="converge", eps=0.6, after_exit="verify", redraft=False),
    ExitConfig(mode="margin", theta=0.1, after_exit="drop"),
    ExitConfig(mode="full"),
    ExitConfig(mode="fixed", depth=2),
)


@pytest.fixture(scope="module", params=SHAPES)
def model(request, pocket):
    return tiny_raven(request.param, 23, vocab_size=pocket[0].config.vocab_size)


def alone(model, prompt, config):
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW,
        do_sample=False,
        exit_config=config,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    return list(zip(out.sequences[0, len(prompt) :].tolist(), out.exit_depths[0].tolist(), strict=True))


def served(engine, requests):
    keys = [engine.submit(request) for request in requests]
    found = {}
    while engine.has_work:
        for key, event in engine.step():
            if isinstance(event, RequestOutput):
                found[key] = [(token.id, token.depth) for token in event.tokens]
    return [found[key] for key in keys]


def prompts_of(seed, count, vocabulary):
    source = random.Random(seed)
    return [[source.randrange(5, vocabulary) for _ in range(source.randint(1, 20))] for _ in range(count)]


@pytest.fixture(autouse=True)
def endless(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)


@pytest.mark.grid(fast=0, slow=1)
def test_recomputed_codas_are_read_in_order(model, pocket):
    """Exits of an answer that differ are recomputed over all that lies before them, whatever loop that was read at."""
    rules = [
        ExitConfig(mode="kl", delta=0.1),
        ExitConfig(mode="minp-kl", delta=0.02),
        ExitConfig(mode="latent-diff", delta=0.5, after_exit="drop"),
        ExitConfig(mode="argmax-stability", stable=1),
    ]
    size = BlockShape.of(model, 4).bytes_with(model.dtype)
    limits = EngineLimits(max_running=6, page_size=4, pass_rows=8, kv_bytes=9 * size)
    engine = Engine(model, pocket[1], "raven", limits, watch=False)
    source = random.Random(4)
    prompts = [[source.randrange(5, model.config.vocab_size) for _ in range(source.randint(1, 6))] for _ in range(24)]
    configs = [rules[index % len(rules)] for index in range(len(prompts))]
    pairs = list(zip(prompts, configs, strict=True))
    found = served(
        engine, [EngineRequest(tuple(prompt), NEW, config, on_collapse="ignore") for prompt, config in pairs]
    )
    assert engine.status().preemptions > 6
    assert found == [alone(model, prompt, config) for prompt, config in pairs]


@pytest.mark.grid(fast=0, slow=1)
def test_blocks_found_again_are_those_of_full_depth(model, pocket):
    """The second request's prompt holds the first one's answer, whose codas were read at its exits."""
    engine = Engine(model, pocket[1], "raven", EngineLimits(page_size=4, kv_bytes=2**24), watch=False)
    (prompt,) = prompts_of(3, 1, model.config.vocab_size)
    prompt = (prompt * 20)[:18]
    (first,) = served(engine, [EngineRequest(tuple(prompt), NEW, RULES[0], on_collapse="ignore")])
    longer = [*prompt, *(token for token, _ in first), 7, 8]
    for rule in RULES:
        (found,) = served(engine, [EngineRequest(tuple(longer), NEW, rule, on_collapse="ignore")])
        assert found == alone(model, longer, rule)
    assert engine.status().blocks_cached >= 4
