"""Ouro as a Hugging Face model: loading, saving, configs, losses, masks, rotary tables."""

import json
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from sigma0 import DepthCache, ExitConfig
from sigma0.models import OuroConfig, OuroForCausalLM
from sigma0.models.ouro_block import rotated
from sigma0.models.rotary_table import RotaryTable
from tests.reference import tiny_model

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]])


@pytest.fixture
def folder(tmp_path, tiny):
    tiny.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder, name="config.json", **changes):
    path = folder / name
    stored = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in stored.items() if value is not ...}))


def test_a_registered_class_beats_auto_map(folder):
    """The published checkpoints name remote code: it is neither run nor asked about."""
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM", "AutoConfig": "x.OuroConfig"})
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is OuroForCausalLM
    model.save_pretrained(folder / "again")
    assert "auto_map" not in json.loads((folder / "again" / "config.json").read_text())


def test_tied_embeddings_round_trip(tmp_path):
    model = tiny_model(seed=3, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)


def test_offloaded_layers_decode_the_same(folder, tmp_path, tiny):
    """accelerate moves the weights of each layer in when it runs: passes must go through the modules."""
    placed = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
    placed |= {"model.early_exit_gate": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=placed, offload_folder=tmp_path / "offload"
    )
    assert model.lm_head.weight.device.type == "meta"
    settings = {"max_new_tokens": 6, "do_sample": False, "exit_config": {"q": 0.5}}
    assert torch.equal(model.generate(IDS, **settings), tiny.generate(IDS, **settings))


def test_pickles_are_refused(folder, tiny):
    (folder / "model.safetensors").unlink()
    torch.save(tiny.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="unpickle"):
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=False)


def test_published_special_ids_are_repaired_with_one_warning(folder, caplog):
    edit(folder, bos_token_id=0, eos_token_id=0, pad_token_id=...)
    stored = {"exit_config": {"q": 0.25}, "_from_model_config": False}
    edit(folder, "generation_config.json", bos_token_id=0, eos_token_id=0, pad_token_id=..., **stored)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    OuroConfig.__post_init__.__globals__["logger"].warning_once.cache_clear()
    model = AutoModelForCausalLM.from_pretrained(folder)
    logger.removeHandler(caplog.handler)
    expected = (1, 2, 0)
    assert model.resolve_exit_config(None) == ExitConfig(q=0.25)
    for settings in (model.config, model.generation_config):
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == expected
    assert sum("using bos 1, eos 2, pad 0" in record.getMessage() for record in caplog.records) == 1


def test_special_ids_are_repaired_without_a_generation_config_and_others_stay(folder):
    (folder / "generation_config.json").unlink()
    edit(folder, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    settings = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, 2, 0)
    for bos, eos, pad in ((3, 0, 0), (0, [2, 5], 0), (0, 0, 7)):
        edit(folder, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
        config = AutoConfig.from_pretrained(folder)
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (bos, eos, pad)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        YARN,
        YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_variants_of_fixed_frequencies(rope, tmp_path):
    model, plain = tiny_model(seed=0, rope_parameters=rope), tiny_model(seed=0)
    settings = {"max_new_tokens": 8, "do_sample": False, "exit_config": {"q": 0.5}}
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = model.generate(IDS, **settings)
    assert torch.equal(loaded.generate(IDS, **settings), tokens)
    with torch.no_grad():
        assert not torch.allclose(model(IDS).logits, plain(IDS).logits)
        again = model(tokens, exit_config={"q": 0.5}).logits[:, 6:-1].argmax(-1)
    assert torch.equal(again, tokens[:, 7:])


def test_old_rope_fields_are_read(folder):
    edit(folder, rope_parameters=..., rope_theta=1e6, rope_scaling=None)
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 1e6


def test_loss_is_the_expected_cross_entropy(tiny):
    """Against float64, from the definition: sum over t of p_t CE_t, not the cross-entropy of averaged logits."""
    labels = IDS.clone()
    labels[0, :3] = -100
    with torch.no_grad():
        outputs = tiny(IDS, labels=labels, output_loop_states=True)
    logits, hazard = outputs.loop_logits.double(), torch.sigmoid(outputs.gate_logits.double())
    total, count = 0.0, 0
    for row in range(2):
        for column in range(6):
            target = int(labels[row, column + 1])
            if target == -100:
                continue
            count += 1
            alive = 1.0
            for loop in range(3):
                weight = alive if loop == 2 else alive * float(hazard[loop, row, column])
                alive -= weight
                total -= weight * float(torch.log_softmax(logits[loop, row, column], -1)[target])
    assert float(outputs.loss) == pytest.approx(total / count, rel=1e-5)
    with torch.no_grad():
        summed = tiny(IDS, labels=labels, num_items_in_batch=2 * count).loss
    assert float(summed) == pytest.approx(total / count / 2, rel=1e-5)


def test_gradients_reach_every_parameter_and_checkpointing_keeps_them():
    plain, saving = tiny_model(seed=6), tiny_model(seed=6)
    saving.gradient_checkpointing_enable()
    for model in (plain, saving):
        model.train()
        model(IDS, labels=IDS).loss.backward()
    for (name, one), other in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert one.grad is not None, name
        assert one.grad.abs().max() > 0, name
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_gradients_through_a_cached_forward():
    """A training loop of one's own, with the cache on by default, and one that continues a text."""
    plain, cached = tiny_model(seed=6), tiny_model(seed=6)
    plain(IDS, use_cache=False, exit_config={"mode": "full"}).logits.square().sum().backward()
    outputs = cached(IDS, exit_config={"mode": "full"})
    outputs.logits.square().sum().backward()
    for (name, one), other in zip(plain.named_parameters(), cached.parameters(), strict=True):
        if "early_exit_gate" not in name:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)
    assert all(layer.keys.grad_fn is None for layer in outputs.past_key_values.layers)
    later = cached(IDS, past_key_values=outputs.past_key_values, exit_config={"mode": "full"}).logits
    later.sum().backward()
    assert not cached(
        IDS[:, :1], past_key_values=outputs.past_key_values, exit_config={"mode": "full"}
    ).logits.requires_grad


def test_loss_gradient_against_finite_differences():
    model = tiny_model(seed=6).double()
    weight = model.model.layers[0].self_attn.q_proj.weight
    model(IDS, labels=IDS).loss.backward()
    step = 2e-3
    for index in ((0, 0), (3, 7)):
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[index] += sign * step
                losses.append(float(model(IDS, labels=IDS).loss))
                weight[index] -= sign * step
        assert float(weight.grad[index]) == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.01, abs=1e-3)


def test_labels_make_no_cache(tiny):
    with torch.no_grad():
        assert tiny(IDS, labels=IDS).past_key_values is None
        assert isinstance(tiny(IDS).past_key_values, DepthCache)
        assert tiny(IDS, use_cache=False).past_key_values is None


@pytest.mark.parametrize("kept", [0, 1, 3, torch.tensor([0, 4])])
def test_logits_to_keep(tiny, kept):
    with torch.no_grad():
        everything = tiny(IDS, exit_config={"q": 0.5}, output_loop_states=True)
        some = tiny(IDS, exit_config={"q": 0.5}, output_loop_states=True, logits_to_keep=kept)
    columns = kept if isinstance(kept, torch.Tensor) else torch.arange(7)[-kept:]
    torch.testing.assert_close(some.logits, everything.logits[:, columns])
    torch.testing.assert_close(some.loop_logits, everything.loop_logits[:, :, columns])
    assert torch.equal(some.exit_depths, everything.exit_depths[:, columns])


def test_hidden_states_and_attentions_of_a_forward(tiny):
    model = tiny_model(seed=0, attn_implementation="eager")
    with torch.no_grad():
        outputs = model(IDS, output_hidden_states=True, output_attentions=True)
    assert len(outputs.attentions) == 6
    assert outputs.attentions[0].shape == (2, 4, 7, 7)
    assert len(outputs.hidden_states) >= 6


def test_a_mask_of_the_wrong_length_is_refused(tiny):
    cache = tiny.new_cache()
    with torch.no_grad():
        tiny(IDS, past_key_values=cache)
        with pytest.raises(ValueError, match=r"shape \(2, 1\).* need \(2, 8\)"):
            tiny(IDS[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 1))
        with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
            tiny(IDS, attention_mask=torch.ones(2, 3), use_cache=False)


def test_float16_and_bfloat16_stay_near_float32(tiny):
    """Error against float32 at most twice that of running all loops in the same dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_model(seed=0).to(dtype)
        with torch.no_grad():
            tokens = tiny.generate(IDS, max_new_tokens=8, do_sample=False, exit_config={"mode": "full"})
            exact = tiny(tokens[:, :-1], exit_config={"mode": "full"}).logits[:, -1].float()
            plain = model(tokens[:, :-1], exit_config={"mode": "full"}).logits[:, -1].float()
            cache = model.new_cache()
            model(tokens[:, :-2], past_key_values=cache, exit_config={"mode": "full"})
            decoded = model(tokens[:, -2:-1], past_key_values=cache, exit_config={"mode": "full"}).logits[:, -1].float()
        assert (decoded - exact).norm() <= 2 * (plain - exact).norm()


@pytest.fixture
def rotary():
    return Qwen3RotaryEmbedding(OuroConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embeddings_looked_up_are_those_of_the_module(rotary, dtype):
    table, like = RotaryTable(rotary), torch.zeros((), dtype=dtype)
    for positions in ([0], [5, 5, 0], [300, 2], [700], [1, 699]):
        rows = torch.tensor(positions)
        cos, sin = rotary(like, rows[:, None])
        sin[..., : sin.shape[-1] // 2].neg_()  # as `rotated` takes it
        for mine, theirs in zip(table.rows(rows, max(positions) + 1, like), (cos, sin), strict=True):
            assert mine.dtype == dtype and torch.equal(mine, theirs)
        heads = torch.randn(len(positions), 3, cos.shape[-1]).to(dtype)
        queries = heads.transpose(0, 1)[None]  # [1, H, R, d]
        expected = apply_rotary_pos_emb(queries, queries, *rotary(like, rows[None]))[0][0].transpose(0, 1)
        turned = rotated(heads, *table.rows(rows, max(positions) + 1, like))
        # rounded once, where the module rounds every product
        rtol = torch.finfo(dtype).eps
        torch.testing.assert_close(turned, expected, rtol=rtol, atol=4 * rtol)


def test_another_dtype_makes_another_rotary_table(rotary):
    table = RotaryTable(rotary)
    with torch.inference_mode():
        table.rows(torch.tensor([3]), 3, torch.zeros(()))
    cos, _ = table.rows(torch.tensor([3]), 3, torch.zeros((), dtype=torch.float16))
    assert cos.dtype == torch.float16 and not cos.is_inference()
