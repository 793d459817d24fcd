"""A request draws the same tokens in the library, alone or in a batch, and in the engine, preempted or not."""

import pytest
import torch

import sigma0
from sigma0 import ExitConfig
from sigma0.decode.sampling_params import SamplingParams
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest
from tests.serve.engine.spied_worker import KV
from tests.serve.engine.test_engine import drain

NEW, SEED = 20, 7
PROMPT = tuple(range(9, 21))
SAMPLING = SamplingParams(temperature=0.9, top_k=12, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=SEED)


@pytest.fixture(scope="module")
def pocket():
    return sigma0.load("pocket", dtype="float32")


def request(config, prompt=PROMPT, seed=SEED):
    sampling = SamplingParams(**{**vars(SAMPLING), "seed": seed})
    return EngineRequest(prompt, NEW, config, sampling, on_collapse="ignore")


def drawn(model, tokenizer, jobs, **limits):
    """Ids of the first of the requests, and how often any was preempted."""
    model.generation_config.eos_token_id = None
    engine = Engine(model, tokenizer, "pocket", EngineLimits(**{"kv_bytes": KV, **limits}), watch=False)
    keys = [engine.submit(job) for job in jobs]
    events = drain(engine)
    return [token.id for token in events[keys[0]][-1].tokens], engine.status().preemptions, events, keys


@pytest.mark.parametrize(
    "config",
    [
        ExitConfig(q=0.5),
        ExitConfig(mode="margin", theta=0.6),
        ExitConfig(q=0.4, after_exit="verify"),
        ExitConfig(mode="fixed", depth=2, after_exit="verify", redraft=False),
        ExitConfig(q=0.5, after_exit="drop"),
    ],
    ids=lambda config: f"{config.mode}-{config.after_exit}",
)
def test_the_same_tokens_wherever_a_request_runs(pocket, config):
    model, tokenizer = pocket

    def generated(batch):
        torch.manual_seed(SEED)
        others = torch.randint(5, 500, (batch - 1, len(PROMPT)), generator=torch.Generator().manual_seed(batch))
        ids = torch.cat([torch.tensor([PROMPT]), others])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=True, exit_config=config,
            temperature=0.9, top_k=12, top_p=0.95, min_p=0.01, repetition_penalty=1.1, eos_token_id=None,
        )  # fmt: skip
        return out[0, len(PROMPT) :].tolist()

    alone = generated(1)
    assert generated(16) == alone
    assert drawn(model, tokenizer, [request(config)])[0] == alone
    company = [request(config, tuple(range(5 + n, 12 + 2 * n)), n) for n in range(15)]
    assert drawn(model, tokenizer, [request(config), *company], max_running=16)[0] == alone
    # the last one admitted is preempted, so the request comes last
    kv_bytes = model.num_loops * 2 * 128 * 4 * 16 * 6
    _, preemptions, events, keys = drawn(
        model, tokenizer, [*company[:3], request(config)], max_running=4, kv_bytes=kv_bytes, page_size=4
    )
    assert preemptions > 0 and events[keys[-1]][-1].preemptions > 0
    assert [token.id for token in events[keys[-1]][-1].tokens] == alone
