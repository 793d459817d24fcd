"""The engine with compiled steps writes what it writes with eager ones."""

import pytest

from sigma0 import ExitConfig
from sigma0.decode import programs
from sigma0.decode.sampling_params import SamplingParams
from sigma0.serve.engine.engine import Engine, EngineLimits
from sigma0.serve.engine.messages import EngineRequest, TokenOutput

RULES = {"finish": ExitConfig(q=0.6), "verify": ExitConfig(q=0.5, after_exit="verify")}


def outputs(pocket, runner, config, sampling):
    model, tokenizer = pocket
    model.runner = runner
    try:
        engine = Engine(model, tokenizer, "pocket", EngineLimits(max_running=3, kv_bytes=2**23), watch=False)
    finally:
        model.runner = "auto"
    for start in (5, 60, 200, 300):
        engine.submit(EngineRequest(tuple(range(start, start + 9)), 10, config, sampling, on_collapse="ignore"))
    tokens = {}
    passes = 0
    while engine.has_work:
        passes += 1
        for key, event in engine.step():
            if isinstance(event, TokenOutput):
                tokens.setdefault(key, []).append((event.id, event.depth))
    return tokens, passes


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.9, seed=3, frequency_penalty=0.5)])
@pytest.mark.parametrize("name", RULES)
def test_two_engines_on_the_programs_of_one_model(pocket, monkeypatch, name, sampling):
    """The second takes the programs of the first, over lanes, blocks and block tables of its own."""
    monkeypatch.setattr(programs, "generate_code", lambda graph, examples: graph)
    eager = outputs(pocket, "eager", RULES[name], sampling)
    assert len(eager[0]) == 4
    assert outputs(pocket, "compile", RULES[name], sampling) == eager
    assert pocket[0]._compiled_programs.programs
    assert outputs(pocket, "compile", RULES[name], sampling) == eager
