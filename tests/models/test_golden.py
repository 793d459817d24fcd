"""Parity with the published Ouro code, whose outputs are in tests/golden."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation import GenerationMixin

from sigma0 import DepthCache, ExitConfig
from tests.decode.test_conformance import written
from tests.reference import finish_rows

THRESHOLDS = (0.3, 0.5, 0.7, 1.0)
NEW = 24


def relative(value, reference):
    return float((value - reference).abs().max() / reference.abs().max())


def prompts(golden):
    ids, mask = golden["padded.input_ids"], golden["padded.attention_mask"]
    return [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_loop_matches(golden, attention):
    model = AutoModelForCausalLM.from_pretrained(golden.folder, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        outputs = model(golden["single.input_ids"], output_loop_states=True)
    assert relative(outputs.loop_states, golden["single.hidden_by_loop"]) < 1e-5
    assert relative(outputs.gate_logits, golden["single.gate_logit_by_loop"]) < 1e-5
    assert relative(outputs.loop_logits, golden["single.logits_by_loop"]) < 1e-5


@pytest.mark.parametrize("q", [0.3, 0.5, 0.7, 0.9])
def test_selected_logits_match(golden, q):
    with torch.no_grad():
        outputs = golden.model(golden["single.input_ids"], exit_config=ExitConfig(q=q))
    assert relative(outputs.logits, golden[f"single.logits_q{q}"]) < 1e-5
    by_loop = golden["single.logits_by_loop"]
    index = (outputs.exit_depths - 1)[None, :, :, None].expand(1, -1, -1, by_loop.shape[-1])
    assert relative(outputs.logits, by_loop.gather(0, index)[0]) < 1e-5


@pytest.fixture(params=["ours", "stock"])
def decoder(request, monkeypatch, golden):
    """Our decoder, or transformers' own token loop calling our forward."""
    if request.param == "stock":
        monkeypatch.setattr(type(golden.model), "_sample", GenerationMixin._sample)
    return request.param


def generate(model, rows, q, decoder):
    """New tokens, depths and the cache; in the stock loop depths are read off each forward."""
    cache = DepthCache(model.config.num_hidden_layers, model.config.total_ut_steps)
    cache.trace = []
    outputs = written(model, rows, ExitConfig(q=q), NEW, use_cache=True, past_key_values=cache)
    assert outputs.past_key_values is cache
    assert cache.length == outputs.sequences.shape[1] - 1
    depths = torch.stack([depths for depths, *_ in cache.trace], 1) if decoder == "stock" else outputs.exit_depths
    return outputs.sequences[:, -NEW:], depths, cache


@pytest.mark.parametrize("q", THRESHOLDS)
def test_padded_batch_matches(golden, decoder, q):
    model, rows = golden.model, prompts(golden)
    tokens, depths, cache = generate(model, rows, q, decoder)
    assert torch.equal(tokens, golden[f"padded.greedy_new_tokens_q{q}"])
    assert torch.equal(depths, golden[f"padded.greedy_exit_depth_q{q}"])
    total = model.config.total_ut_steps
    assert cache.counts.prompt_rows == total * sum(map(len, rows))
    later = depths[:, 1:]
    # ours lets each sequence run ahead; in lockstep every token waits for the deepest of the batch
    expected = int(later.sum(1).max()) if decoder == "ours" else int(later.max(0).values.sum())
    assert cache.counts.passes == expected
    if decoder == "ours":
        assert cache.counts.rows == sum(finish_rows(row, total) for row in depths.tolist())


@pytest.mark.parametrize("q", THRESHOLDS)
def test_one_by_one_matches(golden, decoder, q):
    model = golden.model
    for row, ids in enumerate(prompts(golden)):
        tokens, depths, cache = generate(model, [ids], q, decoder)
        assert torch.equal(tokens[0], golden[f"padded.greedy_new_tokens_q{q}"][row])
        assert torch.equal(depths[0], golden[f"padded.greedy_exit_depth_q{q}"][row])
        assert cache.counts.passes == int(depths[0, 1:].sum())
        assert cache.counts.rows == finish_rows(depths[0].tolist(), model.config.total_ut_steps)


def test_config_use_cache_is_ignored(golden):
    assert golden.model.config.use_cache is False
    outputs = written(golden.model, prompts(golden)[:1], None, 4)
    assert isinstance(outputs.past_key_values, DepthCache)
