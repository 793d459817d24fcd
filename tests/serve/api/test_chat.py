"""Chats, told whole and as they come, read by OpenAI's own client."""

import json
from dataclasses import replace

import httpx
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import sigma0
from sigma0.config import ExitConfig
from tests.serve.conftest import served

STORY = "Sara went to the bedroom. John went to the park. Where is Sara?"
ASKED = [{"role": "user", "content": STORY}]
LOST = [{"role": "user", "content": "Once upon"}]
SAID = "Sara is in the bedroom."


def post(server, headers=None, **body):
    body = {"model": "pocket", "messages": ASKED, "max_tokens": 20, **body}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def leaving(server, **body):
    """A stream that its client leaves with the block."""
    body = {"model": "pocket", "messages": ASKED, "max_tokens": 20, "stream": True, **body}
    return httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60)


def lines(text):
    """The values of a stream's events, `[DONE]` included."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def chunks(server, **body):
    output = lines(post(server, stream=True, **body).text)
    assert output.pop() == "[DONE]"
    result = [json.loads(line) for line in output]
    for chunk in result:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return result


def test_a_response_is_what_openai_says_it_is(pocket):
    alone = sigma0.generate(*pocket, ASKED, max_new_tokens=20)
    # a server of its own, which has not read this prompt before
    with served(pocket) as server:
        raw = post(server).json()
    result = ChatCompletion.model_validate(raw, strict=True)
    assert result.choices[0].message.content == alone.text.strip() == SAID
    assert result.choices[0].finish_reason == "stop" and result.object == "chat.completion"
    prompt, new = alone.prompt_tokens, len(alone.tokens)
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    assert result.usage == CompletionUsage(**counts, prompt_tokens_details=None)
    output = raw["sigma0"]
    assert output["exit"] == pocket[0].resolve_exit_config(None).to_dict()
    assert (output["total_loops"], output["reasoning_effort"]) == (6, None)
    (choice,) = output["choices"]
    assert choice["depths"] == [token.depth for token in alone.tokens]
    assert choice["reasons"] == [token.reason for token in alone.tokens]
    assert choice["rungs"] == ["pocket"] * new and choice["depth_saved"] == pytest.approx(alone.depth_saved)
    expected = alone.verdict.to_dict()
    # its readings come from products of other shapes
    assert choice["verdict"] == {**expected, "confidence": pytest.approx(expected["confidence"], abs=1e-5)}
    assert choice["door"] == "converge" and choice["door_text"].startswith("converge: ")
    assert "trail_id" not in choice and "costs" not in choice


def test_a_stream_tells_the_role_each_token_and_the_end(plain):
    whole = post(plain).json()
    result = chunks(plain, stream_options={"include_usage": True})
    first, *tokens, last, used = result
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
    assert all(item["choices"][0]["finish_reason"] is None for item in [first, *tokens])
    assert used["choices"] == [] and used["usage"] == whole["usage"]
    assert all(item["usage"] is None for item in result[:-1]) and all("sigma0" in item for item in result)
    assert "usage" not in chunks(plain)[-1]
    text = "".join(item["choices"][0]["delta"]["content"] for item in tokens)
    assert text == whole["choices"][0]["message"]["content"]
    # a token has an event of its own where the client reads, also one without text, so that its depth is seen
    expected = whole["sigma0"]["choices"][0]
    shown = [item["sigma0"]["choices"][0] for item in tokens]
    assert [[token["depth"] for token in item["tokens"]] for item in shown] == [[item] for item in expected["depths"]]
    assert shown[-1]["tokens"][0]["text"] == "" and shown[-1]["full_passes"] == 6 * len(tokens)
    assert shown[-1]["passes"] == sum(expected["depths"])
    assert set(shown[0]["tokens"][0]) == {
        "id", "text", "depth", "reason", "fate", "proximity", "margin", "entropy", "rung", "handed_up",
    }  # fmt: skip
    end = last["sigma0"]["choices"][0]
    assert {name: end[name] for name in expected} == expected
    count = len(expected["depths"])
    for name in ("deepest_surprises", "deepest_entropies", "deepest_margins"):
        assert len(expected[name]) == count and min(expected[name]) >= 0
    assert len(expected["deepest_agrees"]) == count and set(expected["deepest_agrees"]) <= {True, False}
    assert len({item["id"] for item in result}) == 1


def test_full_depth_says_what_the_models_rule_would_have_said(plain):
    asked = {"sigma0": {"exit": {"mode": "full"}}}
    (whole,) = post(plain, **asked).json()["sigma0"]["choices"]
    # no rule was asked, and the door goes by confidence
    assert whole["door"] == "converge" and whole["verdict"]["converged"] is None
    # None where loop T itself is not as sure as the rule asks
    assert set(whole["would_have_met"]) <= {True, False, None} and True in whole["would_have_met"]
    shown = [item["sigma0"]["choices"][0]["tokens"] for item in chunks(plain, **asked)[1:-1]]
    assert [token.get("would_have_met") for tokens in shown for token in tokens] == whole["would_have_met"]
    (ruled,) = post(plain).json()["sigma0"]["choices"]
    assert set(ruled["would_have_met"]) == {None}


def test_openais_client_reads_both(plain):
    asked = {"model": "pocket", "messages": ASKED, "max_completion_tokens": 20, "max_tokens": 1}
    whole = plain.client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == SAID
    assert whole.sigma0["choices"][0]["door"] == "converge"
    stream = plain.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    result = list(stream)
    assert "".join(item.choices[0].delta.content or "" for item in result if item.choices) == SAID
    assert result[-1].usage.completion_tokens == 7


def test_n_choices_have_seeds_of_their_own(plain):
    asked = {"messages": LOST, "max_tokens": 12, "temperature": 2}
    both = post(plain, **asked, n=3, seed=5).json()
    texts = [item["message"]["content"] for item in both["choices"]]
    assert [item["index"] for item in both["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    alone = [post(plain, **asked, seed=5 + index).json()["choices"][0]["message"]["content"] for index in range(3)]
    assert texts == alone
    assert both["usage"]["prompt_tokens"] == post(plain, **asked).json()["usage"]["prompt_tokens"]
    assert [item["index"] for item in both["sigma0"]["choices"]] == [0, 1, 2]
    streamed = ["", "", ""]
    for chunk in chunks(plain, **asked, n=3, seed=5):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert streamed == texts
    sampled = [job.request.sampling for job in plain.service.tickets[-3:]]
    assert [(item.seed, item.temperature) for item in sampled] == [(5, 2.0), (6, 2.0), (7, 2.0)]


def test_logprobs(plain):
    raw = post(plain, logprobs=True, top_logprobs=3).json()
    ChatCompletion.model_validate(raw, strict=True)
    output = raw["choices"][0]["logprobs"]["content"]
    assert "".join(item["token"] for item in output) == SAID + "<|im_end|>"
    assert bytes(byte for item in output for byte in item["bytes"]).decode() == SAID + "<|im_end|>"
    for item in output:
        top = item["top_logprobs"]
        assert len(top) == 3 and top[0]["token"] == item["token"] and top[0]["logprob"] == item["logprob"] <= 0
        assert [other["logprob"] for other in top] == sorted((other["logprob"] for other in top), reverse=True)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks(plain, logprobs=True, top_logprobs=3)]
    assert [item["content"][0] for item in streamed if item] == output
    assert post(plain, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert post(plain).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "body, said, reason",
    [
        ({"stop": "bedroom"}, "Sara is in the ", "stop"),
        ({"stop": [" in", "bed"]}, "Sara is", "stop"),
        ({"stop": "zzz"}, SAID, "stop"),
        ({"max_tokens": 3}, "Sara is in", "length"),
    ],
)
def test_stop_strings_and_limits_end_the_text(plain, body, said, reason):
    (whole,) = post(plain, **body).json()["choices"]
    assert (whole["message"]["content"], whole["finish_reason"]) == (said, reason)
    result = chunks(plain, **body)
    assert "".join(item["choices"][0]["delta"].get("content", "") for item in result) == said
    assert result[-1]["choices"][0]["finish_reason"] == reason


def test_what_is_asked_for_reaches_the_service(plain, pocket):
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2}
    sampling |= {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    post(plain, **sampling, n=2, seed=-2, max_tokens=2, user="u", cache_salt="mine", sigma0={"sources": ["A source."]})
    first, second = (ticket.request for ticket in plain.service.tickets[-2:])
    assert vars(first.sampling) == {**sampling, "logit_bias": (), "seed": 2**63 - 2}
    assert second == replace(first, sampling=replace(first.sampling, seed=2**63 - 1))
    assert STORY in first.context[0] and first.context[1:] == ("A source.",) and first.cache_salt == "mine"
    post(plain, max_tokens=2)
    default = plain.service.tickets[-1].request
    assert default.sampling.temperature == 0 and default.exit_config == pocket[0].resolve_exit_config(None)


@pytest.mark.parametrize("effort, share", [("minimal", 0.5), ("low", 0.75), ("medium", 1.0), ("high", 1.0)])
def test_effort_sets_the_exit(plain, pocket, effort, share):
    theta = pytest.approx(share * pocket[0].resolve_exit_config(None).theta, abs=1e-6)
    output = post(plain, reasoning_effort=effort).json()["sigma0"]
    assert (output["exit"]["mode"], output["exit"]["theta"], output["reasoning_effort"]) == ("margin", theta, effort)
    used = plain.service.tickets[-1].request.exit_config
    assert (used.mode, used.theta) == ("margin", theta)
    if effort == "high":
        assert (used.after_exit, used.min_loops) == ("verify", 3)
        full = post(plain, sigma0={"exit": {"mode": "full"}}).json()["choices"][0]
        raw = post(plain, reasoning_effort="high").json()
        assert raw["choices"][0] == full and raw["sigma0"]["choices"][0]["door"] == "converge"


def test_a_setting_wins_over_effort(plain):
    asked = {"mode": "fixed", "depth": 2}
    output = post(plain, reasoning_effort="high", sigma0={"exit": asked}).json()["sigma0"]
    assert output["exit"] == ExitConfig(**asked).to_dict() and output["reasoning_effort"] is None
    assert set(output["choices"][0]["depths"]) == {2}


def test_roles_and_parts(plain):
    parts = [{"type": "text", "text": "Sara went to the bedroom."}, {"type": "text", "text": "Where is Sara?"}]
    asked = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Sara is"},
    ]
    said = post(plain, messages=asked).json()["choices"][0]["message"]["content"]
    ids = plain.service.tickets[-1].request.prompt_ids
    read = plain.service.tokenizer.decode(list(ids), skip_special_tokens=False)
    assert read.startswith("<|im_start|>system\nBe short.<|im_end|>")
    # the assistant's turn is not over: it is continued
    assert read.endswith("bedroom.\nWhere is Sara?<|im_end|>\n<|im_start|>assistant\nSara is")
    assert said == " in the bedroom."
