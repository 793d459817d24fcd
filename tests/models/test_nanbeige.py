"""Nanbeige4.2: parity with the published code, whose outputs are in tests/golden; configs, draws, statistics."""

import json
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from sigma0 import ExitConfig
from sigma0.models import NanbeigeConfig, NanbeigeForCausalLM
from sigma0.models.nanbeige_config import UNRELEASED
from tests.conftest import Golden
from tests.decode.test_conformance import written
from tests.decode.test_random_numbers import deviation
from tests.decode.test_verify_law import FIRST, exact_law, joint_law
from tests.marks import exhaustive
from tests.reference import tiny_nanbeige
from tests.test_cli import run

NAMES = ("nanbeige-a", "nanbeige-3")
NEW = 24
FULL = ExitConfig(mode="full")


@pytest.fixture(scope="module", params=NAMES)
def published(request, tmp_path_factory):
    return Golden(request.param, tmp_path_factory.mktemp(request.param))


def close(value, reference):
    torch.testing.assert_close(value, reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_loop_matches(published, attention):
    model = AutoModelForCausalLM.from_pretrained(published.folder, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        outputs = model(published["single.input_ids"], output_loop_states=True)
    assert type(model) is NanbeigeForCausalLM and not model.has_gate and outputs.gate_logits is None
    close(outputs.logits, published["single.logits"])
    close(outputs.loop_states, published["single.state_by_loop"])
    close(outputs.loop_logits, published["single.logits_by_loop"])


def test_any_number_of_loops_and_the_norm_before_the_head_alone(published):
    ids = published["single.input_ids"]
    for loops in range(1, published.model.num_loops + 1):
        for skip, kind in ((False, "single"), (True, "skip_norm")):
            model = AutoModelForCausalLM.from_pretrained(
                published.folder, dtype=torch.float32, num_loops=loops, skip_loop_final_norm=skip
            )
            assert model.num_loops == loops
            with torch.no_grad():
                outputs, base = model(ids, output_loop_states=True), model.model(ids)
            close(outputs.loop_logits, published[f"{kind}.logits_by_loop"][:loops])
            close(outputs.logits, outputs.loop_logits[-1])
            close(model.lm_head(base.last_hidden_state), outputs.logits)
            if skip:
                close(outputs.loop_states[0], published["single.unnormed_state_by_loop"][0])


def prompts(published):
    return [published[f"greedy.prompt{index}"].tolist() for index in range(3)]


def test_greedy_tokens_match_one_by_one_and_in_a_batch(published):
    total, expected = published.model.num_loops, published["greedy.new_tokens"]
    for row, prompt in enumerate(prompts(published)):
        alone = written(published.model, [prompt], FULL, NEW)
        assert torch.equal(alone.sequences[0, len(prompt) :], expected[row])
        assert (alone.exit_depths == total).all() and alone.loop_passes == total * (NEW - 1)
    together = written(published.model, prompts(published), FULL, NEW)
    assert torch.equal(together.sequences[:, -NEW:], expected)
    assert together.loop_passes == total * (NEW - 1) and together.exit_reasons[0] == ["fixed"] * NEW


def test_verify_writes_the_published_tokens(published):
    for config in (
        ExitConfig(mode="fixed", depth=1, after_exit="verify"),
        ExitConfig(mode="margin", theta=0.02, after_exit="verify"),
    ):
        obtained = written(published.model, prompts(published), config, NEW)
        assert torch.equal(obtained.sequences[:, -NEW:], published["greedy.new_tokens"])
        assert obtained.accepted[:, 1:].any() and not obtained.accepted.all(), (
            "the test needs drafts that stand and that fall"
        )


def test_a_rule_that_reads_a_gate_is_refused():
    model = tiny_nanbeige(0)
    assert model.resolve_exit_config(None) == FULL
    with pytest.raises(ValueError, match="'qexit' reads a gate, which nanbeige models do not have: use margin"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, exit_config={"q": 0.5})


def test_round_trip(published, tmp_path):
    published.model.save_pretrained(tmp_path)
    config, theta = AutoConfig.from_pretrained(tmp_path), json.loads((published.folder / "config.json").read_text())
    assert type(config) is NanbeigeConfig and config.head_dim == published.model.config.head_dim
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": theta["rope_theta"]}
    obtained = written(published.load(tmp_path), prompts(published), FULL, NEW)
    assert torch.equal(obtained.sequences[:, -NEW:], published["greedy.new_tokens"])


def test_weights_of_a_loss_say_how_many_loops_there_are(tmp_path):
    model = tiny_nanbeige(0, num_loops=2, loop_loss_weights=[0.1, 0.2, 0.3])
    assert model.num_loops == model.config.num_loops == 4
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_loops == 4
    assert tiny_nanbeige(0, num_loops=5, loop_loss_weights=[]).num_loops == 5


@pytest.mark.parametrize("name", [*UNRELEASED, "emb_split_num", "ngram_vocab_size_ratio", "ngram_insert_all_layers"])
def test_what_was_never_released_is_refused_by_name(name, tmp_path):
    for off in (None, False, 0, []):
        NanbeigeConfig(**{name: off})
    value = [0] if name == "insert_ngram_layer_idx" else True
    message = rf"^[^\n]*{name}={re.escape(repr(value))} would [a-zA-Z /-]+, which no released Nanbeige4.2 does"
    with pytest.raises(StrictDataclassError) as error:
        NanbeigeConfig(**{name: value})
    assert re.search(message, str(error.value.__cause__))


@pytest.mark.parametrize("draws", [4_000, exhaustive(20_000)])
def test_drawn_texts_follow_the_law_of_full_depth(draws):
    model = tiny_nanbeige(5, vocab_size=6, hidden_size=16, num_hidden_layers=1)
    law, counts = exact_law(model), joint_law(model, FIRST, draws)
    assert abs(deviation(*(torch.tensor([item[text] for text in law]) for item in (counts, law)))) < 4


@pytest.mark.parametrize("skip", [False, True])
def test_statistics_are_those_of_the_states_and_no_gate_ever_leaves(skip):
    model = tiny_nanbeige(10, num_loops=4, skip_loop_final_norm=skip)
    config = ExitConfig(mode="converge", eps=0.6)
    out = written(model, [[5, 30, 12, 44]], config, 12, output_statistics=True)
    with torch.no_grad():
        states = model(out.sequences[:, :-1], exit_config=FULL, output_loop_states=True).loop_states[:, 0, -12:]
    change = (states[1:] - states[:-1]).norm(dim=-1) / states[:-1].norm(dim=-1)  # [T - 1, new]
    obtained = out.loop_statistics[0, :, 1:, 0].T
    ran = ~obtained.isnan()
    assert int(ran.sum()) > 20
    torch.testing.assert_close(obtained[ran], change[ran], rtol=1e-3, atol=1e-5)
    assert float(out.loop_statistics[0, :, :, 7].nan_to_num().abs().max()) == 0.0


def test_gradients_and_the_loss_of_the_last_loop():
    model = tiny_nanbeige(6, skip_loop_final_norm=True)
    ids = torch.tensor([[5, 6, 7, 8, 9], [12, 13, 14, 15, 16]])
    outputs = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)
    outputs.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_the_published_shape_is_told_as_far_as_it_is_known():
    result = run("size", "nanbeige4.2-3b")
    assert result.exit_code == 0 and "22 layers x 2 loops, 8 K/V heads of 128" in result.stdout
    # what its config says is told as assumed, as long as it was not read
    for name in ("vocab_size", "intermediate_size", "max_position_embeddings"):
        assert name in result.stderr
    assert "assumed of nanbeige4.2-3b, not read" in result.stderr
