"""Parity with the published code of Huginn and of the retrofits, whose outputs are in tests/golden."""

import pytest
import torch
from transformers.generation import GenerationMixin

from sigma0 import ExitConfig
from tests.conftest import Golden
from tests.decode.test_conformance import written

NAMES = ("huginn-a", "huginn-m4", "retro-tinyllama", "retro-llama", "retro-olmo")
LAYOUTS = dict(zip(NAMES, ("sandwich", "sandwich", "pre", "pre", "post"), strict=True))
FULL = ExitConfig(mode="full")


@pytest.fixture(scope="session", params=NAMES)
def published(request, tmp_path_factory):
    return Golden(request.param, tmp_path_factory.mktemp(request.param))


def test_the_layout_is_what_the_tensors_show(published):
    assert published.model.config.layout == LAYOUTS[published.name]
    assert "auto_map" not in published.model.config.to_dict(), "what is saved is read by this package's classes"


def test_every_loop_matches(published):
    """And, as nothing depends on the loop's index, fewer loops are the published code with as many."""
    ids, start = published["single.input_ids"], published["single.initial_state"]
    with torch.no_grad():
        outputs = published.model(ids, initial_state=start, exit_config=FULL, output_loop_states=True)
        half = published.model.num_loops // 2
        fewer = published.model(ids, initial_state=start, exit_config=FULL, num_steps=half)
    close(outputs.logits, published["single.logits"])
    close(outputs.loop_states, published["single.state_by_loop"])
    close(outputs.loop_logits, published["single.logits_by_loop"])
    close(fewer.logits, published["single.logits_by_loop"][half - 1])


def test_the_zero_state_and_its_kin_match(published, monkeypatch):
    for mode in ("zero", "embed-init", "skip-adapter"):
        if f"{mode}.logits" in published.tensors:
            monkeypatch.setattr(published.model.config, "initial_state_mode", "random" if mode == "zero" else mode)
            with torch.no_grad():
                close(
                    published.model(published["single.input_ids"], exit_config=FULL).logits, published[f"{mode}.logits"]
                )


def close(result, expected):
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


def greedy(published, index=None, config=FULL):
    """What is written after one prompt, or after all of them in a batch."""
    rows = [published[f"greedy.prompt{item}"].tolist() for item in (range(3) if index is None else [index])]
    return written(published.model, rows, config, 24)


@pytest.mark.grid(fast=7, slow=8)
@pytest.mark.parametrize("index", [0, 1, 2, None])
def test_greedy_tokens_match_one_by_one_and_in_a_batch(published, index):
    expected = published["greedy.new_tokens"]
    assert torch.equal(greedy(published, index).sequences[:, -24:], expected if index is None else expected[[index]])


def test_the_stock_loop_writes_them_too(published, monkeypatch):
    monkeypatch.setattr(type(published.model), "_sample", GenerationMixin._sample)
    assert torch.equal(greedy(published, 1).sequences[:, -24:], published["greedy.new_tokens"][[1]])


@pytest.mark.grid(fast=4, slow=6)
@pytest.mark.parametrize("config", [{"mode": "margin", "theta": 0.3}, {"mode": "converge", "eps": 0.5}])
def test_verify_writes_them(published, config):
    out = greedy(published, 2, ExitConfig(after_exit="verify", **config))
    assert torch.equal(out.sequences[:, -24:], published["greedy.new_tokens"][[2]])
    assert out.loop_passes < published.model.num_loops * 23


def test_transformers_finds_embeddings_and_head(published):
    model = published.model
    assert model.get_input_embeddings() is model.transformer.wte and model.get_output_embeddings() is model.lm_head
    assert (model.lm_head.weight is model.transformer.wte.weight) == model.config.tie_embeddings
