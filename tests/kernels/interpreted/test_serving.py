"""The serving engine over the kernels: paged attention, exits and readings as in plain torch."""

import numpy as np
import pytest

import sigma0
from sigma0 import ExitConfig
from sigma0.decode import batch, kernel_step
from sigma0.decode.runner import LateRunner
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestOutput
from tests.kernels.interpreted.conftest import DEVICE
from tests.reference import settled_model

CONFIGS = (ExitConfig(q=0.5), ExitConfig(q=0.5, after_exit="drop"), ExitConfig(mode="margin", theta=0.3))


def whole_steps(monkeypatch):
    """Has steps of Triton's kernels run as they are captured; which bounds on rows there were."""
    bounds, run, open_runner = [], kernel_step.run_step, batch.open_runner

    def counted(*given):
        bounds.append(given[1])
        return run(*given)

    def opened(choice, model, *given):
        if model.backend == "torch":
            return open_runner(choice, model, *given)
        return LateRunner(model, *given[:4], choice, given[4])

    monkeypatch.setattr(kernel_step, "run_step", counted)
    monkeypatch.setattr(batch, "open_runner", opened)
    return bounds


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_the_kernels_tell_what_torch_tells(whole, monkeypatch):
    bounds = whole_steps(monkeypatch) if whole else [1]
    tokenizer = sigma0.load("pocket")[1]
    model = settled_model(3, vocab_size=len(tokenizer), total_ut_steps=4).to(DEVICE)
    model.generation_config.eos_token_id = None
    output, surprises = [], []
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
        output.append(
            {
                key: [(token.id, token.depth, token.reason, token.fate, token.deepest_agrees) for token in end.tokens]
                for key, end in ends.items()
            }
        )
        surprises.append([token.deepest_surprise for key in sorted(ends) for token in ends[key].tokens])
    assert output[0] == output[1] and len(output[0]) == len(CONFIGS)
    assert bounds
    np.testing.assert_allclose(*surprises, rtol=1e-3, atol=1e-4)
