"""The serving engine over the kernels: paged attention, exits and readings as in plain torch."""

import numpy as np
import pytest

import sigma0
from sigma0 import ExitConfig
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestOutput
from tests.kernels.interpreted.conftest import DEVICE
from tests.reference import settled_model

CONFIGS = (ExitConfig(q=0.5), ExitConfig(q=0.5, after_exit="drop"), ExitConfig(mode="margin", theta=0.3))


@pytest.mark.slow
def test_the_kernels_tell_what_torch_tells():
    tokenizer = sigma0.load("pocket")[1]
    model = settled_model(3, vocab_size=len(tokenizer), total_ut_steps=4).to(DEVICE)
    model.generation_config.eos_token_id = None
    told, surprises = [], []
    for backend in ("torch", "triton"):
        model.backend = backend
        engine = Engine(model, tokenizer, "tiny", EngineLimits(page_size=16), watch=True)
        assert model.operations.backend == backend
        for number, config in enumerate(CONFIGS):
            ids = np.random.default_rng(number).integers(5, 60, 6 + number).tolist()
            engine.submit(EngineRequest(tuple(ids), 4, config))
        ends = {}
        while engine.has_work:
            ends |= {key: event for key, event in engine.step() if isinstance(event, RequestOutput)}
        told.append(
            {
                key: [(token.id, token.depth, token.reason, token.fate, token.deepest_agrees) for token in end.tokens]
                for key, end in ends.items()
            }
        )
        surprises.append([token.deepest_surprise for key in sorted(ends) for token in ends[key].tokens])
    assert told[0] == told[1] and len(told[0]) == len(CONFIGS)
    np.testing.assert_allclose(*surprises, rtol=1e-3, atol=1e-4)
