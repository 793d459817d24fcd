import asyncio

import pytest

import sigma0

pytest.importorskip("inspect_ai", reason="Inspect is not installed: pip install 'sigma0-lm[eval]'")

from inspect_ai import model as ai
from inspect_ai.tool import ToolInfo

pytestmark = pytest.mark.slow

QUESTION = "Mary went to the kitchen. John went to the garden. The cup was taken by Mary. Where is the cup?"
ASKED = [ai.ChatMessageUser(content=QUESTION)]
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def model():
    return ai.get_model("sigma0/pocket", device="cpu", dtype="float32", exit="qexit", q=0.6)


def said(model, messages=ASKED, tools=(), **config):
    """What the provider itself answers, without Inspect's retries."""
    settings = ai.GenerateConfig(**{"max_tokens": 24, **config})
    return asyncio.run(model.api.generate(list(messages), list(tools), "none", settings))


def known(model, **settings):
    opened, messages = model.api.opened, settings.pop("messages", MESSAGES)
    settings = {"exit_config": opened.exit_config, "max_new_tokens": 24, "verdict": True, **settings}
    return sigma0.generate(opened.model, opened.tokenizer, messages, **settings)


def test_an_answer_is_that_of_generate_with_its_verdict(model):
    output, text = said(model, num_choices=1, logprobs=False), known(model)
    assert (output.completion, output.stop_reason) == (text.text, "stop")
    assert (output.usage.input_tokens, output.usage.output_tokens) == (text.prompt_tokens, len(text.tokens))
    reported = output.metadata["sigma0"]
    assert reported["verdict"] == text.verdict.to_dict() and reported["door"] == text.door
    for name in ("mean_depth", "depth_saved", "passes_saved", "rows_saved", "loop_passes", "total_loops"):
        assert reported[name] == getattr(text, name)
    by_loop, by_reason = (sum(reported[name].values()) for name in ("by_loop", "reasons"))
    assert by_loop == by_reason == reported["tokens"] == len(text.tokens)
    assert (reported["effort"], reported["exit_config"]["q"]) == ("medium", 0.6)
    ids = model.api.opened.tokenizer(QUESTION)["input_ids"]
    assert asyncio.run(model.api.count_text_tokens(QUESTION)) == len(ids)


def test_effort_is_depth(model):
    shallow, deep = (said(model, reasoning_effort=effort).metadata["sigma0"] for effort in ("minimal", "high"))
    assert (shallow["exit_config"]["q"], deep["exit_config"]["after_exit"]) == (0.3, "verify")
    assert shallow["mean_depth"] <= said(model).metadata["sigma0"]["mean_depth"]
    with pytest.raises(ValueError, match="minimal, low, medium, high, got 'xhigh'"):
        said(model, reasoning_effort="xhigh")


def test_a_text_is_cut_at_a_stop_string_and_at_its_length(model):
    whole = said(model).completion
    stopped = said(model, stop_seqs=[" in"])
    assert (stopped.completion, stopped.stop_reason) == (whole.split(" in")[0], "stop")
    assert said(model, max_tokens=2).stop_reason == "max_tokens"


def test_sampling_repeats_with_its_seed(model):
    hot = {"temperature": 5.0, "top_k": 50}
    texts = [said(model, seed=seed, **hot).completion for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] == known(model, do_sample=True, seed=1, **hot).text


def test_a_turn_of_the_assistant_is_continued_and_systems_are_heard(model):
    messages = [
        ai.ChatMessageSystem(content="Be short."),
        ai.ChatMessageUser(content=[ai.ContentText(text=QUESTION)]),
        ai.ChatMessageAssistant(content="The cup"),
    ]
    plain = [{"role": "system", "content": "Be short."}, *MESSAGES, {"role": "assistant", "content": "The cup"}]
    assert said(model, messages).completion == known(model, messages=plain).text


def test_a_context_that_is_full_or_fills_up_is_told(model):
    limit = model.api.opened.model.config.max_position_embeddings
    full = said(model, [ai.ChatMessageUser(content="Mary went to the kitchen. " * 600)])
    assert full.stop_reason == "model_length" and f"the context of {limit}" in full.error
    times = (limit - 12) // len(model.api.opened.tokenizer("Mary went to the kitchen. ")["input_ids"])
    nearly = said(model, [ai.ChatMessageUser(content="Mary went to the kitchen. " * times)], max_tokens=900)
    assert nearly.usage.output_tokens < 900 and nearly.stop_reason in ("stop", "model_length")


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"num_choices": 2}, "has no num_choices"),
        ({"logprobs": True}, "has no logprobs"),
        ({"frequency_penalty": 0.5, "num_choices": 1}, "frequency_penalty"),
        ({"tools": [ToolInfo(name="find", description="finds")]}, "calls no tools"),
        ({"messages": [ai.ChatMessageTool(content="done")]}, "got one of 'tool'"),
        ({"messages": [ai.ChatMessageUser(content=[ai.ContentImage(image="data:image/png;base64,")])]}, "got image"),
    ],
)
def test_what_it_cannot_do_is_refused(model, settings, reported):
    with pytest.raises(ValueError, match=reported):
        said(model, **settings)


def test_bad_model_arguments_are_named():
    with pytest.raises(ValueError, match="takes no argument exits"):
        ai.get_model("sigma0/pocket", exits="full")
    with pytest.raises(ValueError, match="has no base_url"):
        ai.get_model("sigma0/pocket", base_url="http://localhost")
