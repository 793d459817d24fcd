"""The engine with compiled steps writes what it writes with eager ones."""

import pytest

from sigma0 import ExitConfig
from sigma0.decode import programs
from sigma0.decode.planes import BlockShape
from sigma0.decode.sampling_params import SamplingParams
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestOutput, TokenOutput

RULES = {
    "finish": ExitConfig(q=0.6),
    "verify": ExitConfig(q=0.5, after_exit="verify"),
    "margin": ExitConfig(mode="margin", theta=0.2),
    "margin-drop": ExitConfig(mode="margin", theta=0.2, after_exit="drop"),
    "margin-verify": ExitConfig(mode="margin", theta=0.2, after_exit="verify"),
}


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


@pytest.mark.filterwarnings("error")
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


@pytest.mark.parametrize("after_exit", ["finish", "verify"])
def test_statistics_and_preemptions_are_those_of_eager_steps(pocket, monkeypatch, after_exit):
    """Blocks that are given and taken lie anywhere; a step that is one program leaves what statistics are read from."""
    monkeypatch.setattr(programs, "generate_code", lambda graph, examples: graph)
    model, tokenizer = pocket
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    config = ExitConfig(mode="margin", theta=0.2, after_exit=after_exit)
    finished = {}
    for runner in ("eager", "compile"):
        model.runner = runner
        try:
            shape = BlockShape.of(model, 4)
            limits = EngineLimits(max_running=3, page_size=4, kv_bytes=14 * shape.bytes_with(model.dtype))
            engine = Engine(model, tokenizer, "pocket", limits, watch=True)
        finally:
            model.runner = "auto"
        for start in (5, 60, 200, 300):
            engine.submit(EngineRequest(tuple(range(start, start + 9)), 20, config, on_collapse="ignore"))
        told = finished[runner] = []
        while engine.has_work:
            told += [event for _, event in engine.step() if isinstance(event, RequestOutput)]
    assert sum(each.preemptions for each in finished["eager"])
    for compiled, eager in zip(finished["compile"], finished["eager"], strict=True):
        assert [(token.id, token.depth, token.fate) for token in compiled.tokens] == [
            (token.id, token.depth, token.fate) for token in eager.tokens
        ]
        assert (compiled.preemptions, compiled.passes, compiled.rows) == (eager.preemptions, eager.passes, eager.rows)
        assert compiled.verdict.reason == eager.verdict.reason
        assert [token.entropy for token in compiled.tokens] == pytest.approx(
            [token.entropy for token in eager.tokens], abs=1e-4
        )
