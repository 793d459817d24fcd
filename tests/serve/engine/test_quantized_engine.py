"""The engine over quantised weights writes what the library writes with them."""

import pytest
import torch

import sigma0
from sigma0 import ExitConfig
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, TokenOutput

pytest.importorskip("torchao")


@pytest.mark.parametrize("after", ["finish", "verify"])
def test_requests_side_by_side_are_answered_as_one_by_one(after):
    # in float32, where a row does not depend on how many share its pass
    model, tokenizer = sigma0.load("pocket", device="cpu", dtype="float32", quantization="int8")
    model.generation_config.eos_token_id = None
    config = ExitConfig(mode="margin", theta=0.5, after_exit=after)
    engine = Engine(model, tokenizer, "pocket", EngineLimits(max_running=3, kv_bytes=2**23), watch=False)
    prompts = [tuple(range(start, start + 9)) for start in (5, 60, 200)]
    keys = [engine.submit(EngineRequest(prompt, 8, config, on_collapse="ignore")) for prompt in prompts]
    tokens = {key: [] for key in keys}
    while engine.has_work:
        for key, event in engine.step():
            if isinstance(event, TokenOutput):
                tokens[key].append(event.id)
    for key, prompt in zip(keys, prompts, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=8, exit_config=config)
        assert tokens[key] == alone[0, len(prompt) :].tolist()
