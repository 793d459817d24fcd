"""Ids, positions and K/V that a model cannot hold are refused by name, whatever way they come."""

import json
import re
import shutil

import pytest
import torch

import sigma0
from sigma0.checkpoints import CHECKPOINTS
from sigma0.models.limits import check_memory, kv_bytes
from tests.test_cli import refused

IDS = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize(
    "ids, message",
    [
        (torch.tensor([5, 6, 7]), r"\[batch, length\], got shape \(3,\): pass ids\[None\]"),
        (torch.tensor([[[5]]]), r"got shape \(1, 1, 1\): a batch has one row"),
        (torch.zeros((1, 0), dtype=torch.int64), r"the prompt is empty: input_ids have shape \(1, 0\)"),
        (IDS.double(), "must be whole numbers such as int64, got torch.float64"),
        (IDS.bool(), "must be whole numbers such as int64, got torch.bool"),
        (torch.tensor([[5, 10**6]]), "input_ids hold 1000000, outside of the model's vocabulary of"),
        (torch.tensor([[-1, 5]]), "input_ids hold -1, outside of the model's vocabulary of"),
    ],
)
def test_what_is_no_batch_of_ids_is_refused(tiny, ids, message):
    with pytest.raises(ValueError, match=message):
        tiny.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match=message):
        tiny(ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("after", ["finish", "drop", "verify"])
def test_ids_of_any_width_work(tiny, dtype, after):
    settings = {"max_new_tokens": 5, "eos_token_id": None, "exit_config": {"mode": "margin", "after_exit": after}}
    expected = tiny.generate(IDS, **settings)
    got = tiny.generate(IDS.to(dtype), **settings)
    assert got.dtype == torch.int64 and got.tolist() == expected.tolist()
    assert torch.equal(tiny(IDS.to(dtype)).logits, tiny(IDS).logits)


def test_a_text_beyond_the_positions_is_refused(tiny):
    limit = tiny.config.max_position_embeddings
    message = f"a prompt of 3 tokens and {limit} new ones exceed the model's context of {limit}"
    for settings in ({}, {"num_beams": 2, "exit_config": {"mode": "full"}}, {"logits_processor": [lambda _, s: s]}):
        with pytest.raises(ValueError, match=message):
            tiny.generate(IDS, max_new_tokens=limit, **settings)
    with pytest.raises(ValueError, match=f"exceed the model's context of {limit}"):
        tiny.generate(IDS, max_length=limit + 1)
    with pytest.raises(ValueError, match=message):
        tiny.generate(inputs_embeds=tiny.model.embed_tokens(IDS), max_new_tokens=limit)


def test_pads_take_no_position(tiny):
    limit = tiny.config.max_position_embeddings
    padded = torch.nn.functional.pad(IDS, (limit, 0))
    mask = torch.nn.functional.pad(torch.ones_like(IDS), (limit, 0))
    settings = {"max_new_tokens": 2, "eos_token_id": None}
    out = tiny.generate(padded, attention_mask=mask, **settings)
    assert out[:, -2:].tolist() == tiny.generate(IDS, **settings)[:, -2:].tolist()


def test_kv_that_fit_nowhere_are_refused_before_they_are_reserved(tiny):
    size = kv_bytes(tiny, 1, 1, tiny.num_loops)
    cache = tiny.new_cache()
    tiny(IDS, past_key_values=cache)
    assert size == cache.bytes_in_use // 3
    with pytest.raises(ValueError, match=r"K/V of 2 x 1000000000000 tokens would take [\d.e+]+ TB .*--max-new-tokens"):
        check_memory(tiny, 10**12, 2, tiny.num_loops)
    check_memory(tiny, 10, 2, tiny.num_loops)


def test_a_request_is_held_against_memory_and_not_the_model_s_positions(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(CHECKPOINTS / "pocket", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**12}))
    model, tokenizer = sigma0.load(str(folder), device="cpu")
    assert sigma0.generate(model, tokenizer, "Mary went to the park. Where is Mary?").text == " Mary is in the park."
    for generate in (
        lambda: sigma0.generate(model, tokenizer, "Mary went", max_new_tokens=10**11),
        lambda: model.generate(**tokenizer("Mary went", return_tensors="pt"), max_new_tokens=10**11),
    ):
        with pytest.raises(ValueError, match=r"would take 614.4 TB \(6 loops, 6.144 kB a token\)"):
            generate()
    said = refused("generate", "Mary went", "--model", str(folder), "--max-new-tokens", str(10**11))
    assert "lower max_new_tokens (--max-new-tokens)" in said


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"mode": "nosuch"}, "exit_config: mode: Input should be 'full'"),
        ({"mode": "fixed", "depth": 99}, "depth=99 exceeds the model's 6 loops"),
        ("margin", "exit_config must be an ExitConfig or a mapping, got str"),
    ],
)
def test_a_mistaken_exit_setting_is_one_line_everywhere(pocket, wrong, message):
    model, tokenizer = pocket
    ids = tokenizer("Mary went", return_tensors="pt")
    for way in (
        lambda: sigma0.generate(model, tokenizer, "Mary went", exit_config=wrong),
        lambda: sigma0.stream(model, tokenizer, "Mary went", exit_config=wrong),
        lambda: model.generate(**ids, max_new_tokens=2, exit_config=wrong),
        lambda: model(**ids, exit_config=wrong),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            way()
        assert "\n" not in str(caught.value)
