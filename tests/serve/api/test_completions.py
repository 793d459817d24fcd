"""Completions: texts and ids, one and several."""

import json

import httpx
import pytest
from openai.types import Completion

import sigma0
from tests.serve.api.test_chat import STORY, lines

SAID = " Sara is in the bedroom."


def post(server, **body):
    body = {"model": "pocket", "prompt": STORY, "max_tokens": 20, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)


def test_a_response_is_what_openai_says_it_is(plain, pocket):
    raw = post(plain).json()
    found = Completion.model_validate(raw, strict=True)
    assert found.choices[0].text == SAID and found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens == 7 and found.usage.prompt_tokens == len(pocket[1](STORY)["input_ids"])
    assert raw["object"] == "text_completion" and raw["sigma0"]["choices"][0]["door"] == "converge"
    assert plain.client.completions.create(model="pocket", prompt=STORY).choices[0].text == SAID


def test_a_stream(plain):
    told = lines(post(plain, stream=True, stream_options={"include_usage": True}).text)
    assert told.pop() == "[DONE]"
    found = [json.loads(line) for line in told]
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 7
    assert "".join(each["choices"][0]["text"] for each in found[:-1]) == SAID
    assert [len(each["sigma0"]["choices"][0]["tokens"]) for each in found[:-1]] == [1] * 7 + [0]
    for each in found[:-1]:
        assert set(each["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    stream = plain.client.completions.create(model="pocket", prompt=STORY, stream=True)
    assert "".join(each.choices[0].text for each in stream) == SAID


def test_sixteen_tokens_where_no_number_is_given(plain):
    body = {"model": "pocket", "prompt": "Once upon"}
    assert httpx.post(f"{plain.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16


def test_texts_and_ids_alone_and_in_lists(plain, pocket):
    ids = pocket[1](STORY)["input_ids"]
    for prompt in (STORY, [STORY], ids, [ids]):
        (choice,) = post(plain, prompt=prompt).json()["choices"]
        assert choice["text"] == SAID
    several = post(plain, prompt=[STORY, "Once upon"], n=2, max_tokens=7).json()
    assert [each["index"] for each in several["choices"]] == [0, 1, 2, 3]
    other = sigma0.generate(*pocket, "Once upon", max_new_tokens=7)
    assert [each["text"] for each in several["choices"]] == [SAID, SAID, other.text, other.text]
    assert several["usage"]["prompt_tokens"] == len(ids) + other.prompt_tokens
    assert several["usage"]["completion_tokens"] == 28


def test_logprobs(plain):
    told = post(plain, logprobs=2, stop=" bedroom").json()["choices"][0]
    assert told["text"] == " Sara is in the"
    logprobs = told["logprobs"]
    assert logprobs["tokens"] == [" Sara", " is", " in", " the", " bedroom"]
    assert logprobs["text_offset"] == [0, 5, 8, 11, 15]
    assert [list(each)[-1] for each in logprobs["top_logprobs"]] == logprobs["tokens"]
    assert [max(each.values()) for each in logprobs["top_logprobs"]] == logprobs["token_logprobs"]
    assert all(len(each) == 2 for each in logprobs["top_logprobs"])
    assert post(plain, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] is None
    streamed = [json.loads(line) for line in lines(post(plain, logprobs=2, stop=" bedroom", stream=True).text)[:-1]]
    pieces = [each["choices"][0]["logprobs"] for each in streamed if each["choices"][0]["logprobs"]]
    assert [each["text_offset"][0] for each in pieces] == logprobs["text_offset"]


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [1, "a"], [True], [-1], [596], [[1], [10**12]], 5, None, [""], ["a", ""]]
)
def test_what_is_no_prompt(plain, prompt):
    answer = post(plain, prompt=prompt)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


def test_echo_is_refused_in_words(plain):
    answer = post(plain, echo=True)
    assert answer.status_code == 400 and "does not send the prompt back" in answer.json()["error"]["message"]
    assert post(plain, echo=False).status_code == 200


@pytest.mark.parametrize("after", ["finish", "verify"])
def test_a_temperature_next_to_nothing_takes_the_likeliest(plain, after):
    """Logits that it would divide up to infinity leave nothing to draw from."""
    exit_setting = {"q": 0.5, "after_exit": after}
    asked = {"model": "pocket", "prompt": STORY, "max_tokens": 6, "extra_body": {"sigma0": {"exit": exit_setting}}}
    texts = {plain.client.completions.create(**asked, temperature=each).choices[0].text for each in (0, 1e-40, 1e-7)}
    assert len(texts) == 1
