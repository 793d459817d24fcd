"""Nanbeige4.2: parity with the published code, whose outputs are in tests/golden; configs, files, pipelines."""

import json
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline
from typer.testing import CliRunner

import sigma0
from sigma0 import ExitConfig
from sigma0.checkpoints import CHECKPOINTS
from sigma0.cli import app
from sigma0.models import NanbeigeConfig, NanbeigeForCausalLM, NanbeigeModel
from sigma0.models.nanbeige_config import UNRELEASED
from sigma0.serve.sizing import ModelShape, parameters
from tests.conftest import Golden
from tests.reference import tiny_nanbeige

NAMES = ("nanbeige-a", "nanbeige-3")
NEW = 24
FULL = ExitConfig(mode="full")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}]
TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}[/tools]{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[call]{{ call.function | tojson }}[/call]{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


def greedy(model, rows, **settings):
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    wanted = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True} | settings
    return model.generate(ids, attention_mask=mask, **wanted)


def prompts(published):
    return [published[f"greedy.prompt{index}"].tolist() for index in range(3)]


def test_greedy_tokens_match_one_by_one_and_in_a_batch(published):
    total, expected = published.model.num_loops, published["greedy.new_tokens"]
    for row, prompt in enumerate(prompts(published)):
        alone = greedy(published.model, [prompt])
        assert torch.equal(alone.sequences[0, len(prompt) :], expected[row])
        assert (alone.exit_depths == total).all() and alone.loop_passes == total * (NEW - 1)
    together = greedy(published.model, prompts(published))
    assert torch.equal(together.sequences[:, -NEW:], expected)
    assert together.loop_passes == total * (NEW - 1) and together.exit_reasons[0] == ["fixed"] * NEW


def test_verify_writes_the_published_tokens(published):
    for config in (
        ExitConfig(mode="fixed", depth=1, after_exit="verify"),
        ExitConfig(mode="margin", theta=0.02, after_exit="verify"),
    ):
        found = greedy(published.model, prompts(published), exit_config=config)
        assert torch.equal(found.sequences[:, -NEW:], published["greedy.new_tokens"])
        assert found.accepted[:, 1:].any() and not found.accepted.all(), (
            "the test needs drafts that stand and that fall"
        )


def test_a_rule_that_reads_a_gate_is_refused():
    model = tiny_nanbeige(0)
    assert model.resolve_exit_config(None) == FULL
    with pytest.raises(ValueError, match="'qexit' reads a gate, which nanbeige models do not have: use margin"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, exit_config={"q": 0.5})


def test_round_trip(published, tmp_path):
    published.model.save_pretrained(tmp_path)
    loaded = published.load(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is NanbeigeConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is NanbeigeModel
    assert loaded.config.rope_parameters == {
        "rope_type": "default",
        "rope_theta": json.loads((published.folder / "config.json").read_text())["rope_theta"],
    }
    assert loaded.config.head_dim == published.model.config.head_dim
    found = greedy(loaded, prompts(published))
    assert torch.equal(found.sequences[:, -NEW:], published["greedy.new_tokens"])


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"num_loops": 0}, "num_loops must be at least 1, got 0"),
        ({"num_loops": 10**9}, "num_loops must be at most 4096, got 1000000000"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' changes its frequencies"),
        ({"rope_theta": 0}, "rope_theta must be a finite number above 0"),
        ({"head_dim": 26}, "num_attention_heads * head_dim = 104, but layers.0.self_attn.q_proj.weight has shape"),
        ({"loop_share_kv": True}, "loop_share_kv=True would share K/V between loops"),
        ({"skip_loop_final_norm": "no"}, "'skip_loop_final_norm' expected bool"),
        ({"layer_types": ["sliding_attention"]}, "only full attention is supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "Missing required keys in `rope_parameters`"),
        ({"num_hidden_layers": 1}, "config.json has num_hidden_layers = 1, but the weights have "),
        ({"model_type": "nosuch"}, "model type `nosuch`"),
    ],
)
def test_a_wrong_config_is_one_line(wrong, message, tmp_path, tokenizer_file):
    folder = Golden("nanbeige-a", tmp_path).folder
    (folder / "tokenizer.json").write_text(tokenizer_file)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    result = CliRunner().invoke(app, ["generate", "Mary went", "--model", str(folder)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and message in result.stderr


@pytest.fixture(scope="module")
def tokenizer_file():
    return (CHECKPOINTS / "pocket" / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def spoken(tmp_path_factory, pocket):
    """A random model behind a real tokenizer, with a chat template of its own that knows tools."""
    folder, tokenizer = tmp_path_factory.mktemp("spoken"), pocket[1]
    model = tiny_nanbeige(7, vocab_size=len(tokenizer), max_position_embeddings=512)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return sigma0.load(str(folder), device="cpu", dtype="float32")


def test_pipelines_and_messages(spoken):
    model, tokenizer = spoken
    story, messages = "Mary went to the park.", [{"role": "user", "content": "Where is Mary?"}]
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (result,) = generator(story, max_new_tokens=8, do_sample=False, return_full_text=False)
    assert result["generated_text"] == sigma0.generate(model, tokenizer, story, max_new_tokens=8).text
    (chat,) = generator(messages, max_new_tokens=8, do_sample=False)
    told = sigma0.generate(model, tokenizer, messages, max_new_tokens=8)
    assert chat["generated_text"][-1]["content"] == told.text
    ids = tokenizer("<|im_start|>user\nWhere is Mary?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    expected = model.generate(ids["input_ids"], max_new_tokens=8, do_sample=False)
    assert [token.id for token in told.tokens] == expected[0, ids["input_ids"].shape[1] :].tolist()


def test_a_template_shows_tools_and_their_calls(spoken):
    model, tokenizer = spoken
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "no"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert text.startswith('[tools]{"type": "function", "function": {"name": "weather"')
    assert '[call]{"name": "weather", "arguments": {"city": "Rome"}}[/call]' in text
    assert text.endswith("<|im_start|>tool\nno<|im_end|>\n<|im_start|>assistant\n")
    told = sigma0.generate(model, tokenizer, text, special_tokens=True, max_new_tokens=6)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert [token.id for token in told.tokens] == expected.tolist()


def test_gradients_and_the_loss_of_the_last_loop():
    model = tiny_nanbeige(6, skip_loop_final_norm=True)
    ids = torch.tensor([[5, 6, 7, 8, 9], [12, 13, 14, 15, 16]])
    outputs = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)
    outputs.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("tied", [False, True])
def test_numbers_of_all_weights(tied):
    model = tiny_nanbeige(0, tie_word_embeddings=tied)
    assert parameters(ModelShape.of(model.config)) == sum(each.numel() for each in model.parameters())


def test_the_published_shape_is_told_as_far_as_it_is_known():
    result = CliRunner().invoke(app, ["size", "nanbeige4.2-3b"])
    assert result.exit_code == 0 and "22 layers x 2 loops, 8 K/V heads of 128" in result.stdout
    # what its config says is told as assumed, as long as it was not read
    for name in ("vocab_size", "intermediate_size", "max_position_embeddings"):
        assert name in result.stderr
    assert "assumed of nanbeige4.2-3b, not read" in result.stderr


@pytest.mark.slow
def test_lm_eval_scores_what_the_model_says(spoken):
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance

    model, tokenizer = spoken
    backend = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    asked = [("Mary went to", " the park."), ("Where is", " Mary?")]
    found = backend.loglikelihood([Instance("loglikelihood", {}, each, 0, ("task", 0, 1)) for each in asked])
    for (context, continuation), (score, _) in zip(asked, found, strict=True):
        before = tokenizer(context)["input_ids"]
        ids = torch.tensor([[*before, *tokenizer(continuation, add_special_tokens=False)["input_ids"]]])
        with torch.no_grad():
            chances = model(ids).logits[0].log_softmax(-1)
        picked = chances[len(before) - 1 : -1].gather(1, ids[0, len(before) :, None])
        assert score == pytest.approx(float(picked.sum()), abs=1e-3)
    request = Instance("generate_until", {}, ("Mary went", {"until": ["."], "max_gen_toks": 5, "do_sample": False}), 0)
    (text,) = backend.generate_until([request])
    expected = sigma0.generate(model, tokenizer, "Mary went", max_new_tokens=5).text
    assert text == expected.split(".")[0]
