"""The engine's verdicts are the library's, under every rule and every way of going on behind an exit."""

import pytest

import sigma0
from sigma0 import ExitConfig
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest
from tests.reference import setting
from tests.serve.engine.spied_worker import KV
from tests.serve.engine.test_engine import drain

CONFIGS = tuple(
    setting(mode, q=0.6, theta=0.9, eps=0.4, patience=1, after_exit=after_exit, min_loops=min_loops)
    for mode in ("qexit", "margin", "converge", "accel")
    for after_exit, min_loops in (("finish", 1), ("verify", 1), ("verify", 3), ("drop", 1))
)
UNASKED = (
    ExitConfig(mode="full"),
    ExitConfig(mode="full", after_exit="verify"),
    ExitConfig(mode="fixed", depth=3),
    ExitConfig(mode="fixed", depth=3, after_exit="verify"),
)
OWN = (
    ExitConfig(q=0.6),
    ExitConfig(q=0.97, min_loops=4),
    ExitConfig(mode="margin", theta=0.9),
    ExitConfig(mode="converge", eps=0.35),
    ExitConfig(mode="accel", eps=0.5, patience=1),
    ExitConfig(mode="accel", eps=0.5, patience=1, accel_scale="steps"),
)
PROMPTS = (
    "Sara went to the bedroom. John went to the park. Where is Sara?",
    "The key was taken by Leo. Leo went to the hallway. Hugo went to the barn. Is the key in the barn?",
)


def both(pocket, config):
    """What the library and the engine say, the engine of all prompts at once."""
    model, tokenizer = pocket
    engine = Engine(model, tokenizer, "pocket", EngineLimits(kv_bytes=KV), watch=True)
    keys = []
    for prompt in PROMPTS:
        ids = tuple(tokenizer(prompt)["input_ids"])
        keys.append(engine.submit(EngineRequest(ids, 12, config, context=(prompt,))))
    events = drain(engine)
    alone = [sigma0.generate(*pocket, prompt, exit_config=config, max_new_tokens=12) for prompt in PROMPTS]
    return alone, [events[key][-1] for key in keys]


def name(config):
    return f"{config.mode}-{config.after_exit}-{config.min_loops}-{config.accel_scale}"


@pytest.mark.parametrize("config", CONFIGS + UNASKED, ids=name)
def test_reasons_and_doors_are_the_librarys(pocket, config):
    for alone, done in zip(*both(pocket, config), strict=True):
        assert [token.reason for token in done.tokens] == [token.reason for token in alone.tokens]
        assert (done.door, done.verdict.reason) == (alone.door, alone.verdict.reason)
        assert [token.would_have_met for token in done.tokens] == [token.would_have_met for token in alone.tokens]
        assert [token.deepest_agrees for token in done.tokens] == [token.deepest_agrees for token in alone.tokens]
        for field in ("deepest_surprise", "deepest_entropy", "deepest_margin"):
            told, expected = ([getattr(token, field) for token in each.tokens] for each in (done, alone))
            assert told == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("own", OWN, ids=name)
def test_what_the_models_rule_would_have_said_is_the_librarys(pocket, monkeypatch, own):
    monkeypatch.setattr(pocket[0].generation_config, "exit_config", own)
    seen = set()
    for config in UNASKED:
        for alone, done in zip(*both(pocket, config), strict=True):
            told = [token.would_have_met for token in done.tokens]
            assert told == [token.would_have_met for token in alone.tokens]
            seen |= set(told)
    assert seen >= {True, None}
