"""Completions: texts and ids, one and several."""

import json

import httpx
import pytest
import torch
from openai.types import Completion

import sigma0
from tests.serve.api.test_chat import STORY, lines

SAID = " Sara is in the bedroom."


def post(server, timeout=60, **body):
    body = {"model": "pocket", "prompt": STORY, "max_tokens": 20, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=timeout)


def test_a_response_is_what_openai_says_it_is(plain, pocket):
    raw = post(plain).json()
    result = Completion.model_validate(raw, strict=True)
    assert result.choices[0].text == SAID and result.choices[0].finish_reason == "stop"
    assert result.usage.completion_tokens == 7 and result.usage.prompt_tokens == len(pocket[1](STORY)["input_ids"])
    assert raw["object"] == "text_completion" and raw["sigma0"]["choices"][0]["door"] == "converge"
    assert plain.client.completions.create(model="pocket", prompt=STORY).choices[0].text == SAID


def test_a_stream(plain):
    output = lines(post(plain, stream=True, stream_options={"include_usage": True}).text)
    assert output.pop() == "[DONE]"
    result = [json.loads(line) for line in output]
    assert result[-1]["choices"] == [] and result[-1]["usage"]["completion_tokens"] == 7
    assert "".join(item["choices"][0]["text"] for item in result[:-1]) == SAID
    assert [len(item["sigma0"]["choices"][0]["tokens"]) for item in result[:-1]] == [1] * 7 + [0]
    for item in result[:-1]:
        assert set(item["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    stream = plain.client.completions.create(model="pocket", prompt=STORY, stream=True)
    assert "".join(item.choices[0].text for item in stream) == SAID


def test_sixteen_tokens_where_no_number_is_given(plain):
    body = {"model": "pocket", "prompt": "in the in the"}
    assert httpx.post(f"{plain.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16


def test_texts_and_ids_alone_and_in_lists(plain, pocket):
    ids = pocket[1](STORY)["input_ids"]
    for prompt in (STORY, [STORY], ids, [ids]):
        (choice,) = post(plain, prompt=prompt).json()["choices"]
        assert choice["text"] == SAID
    several = post(plain, prompt=[STORY, "Once upon"], n=2, max_tokens=7).json()
    assert [item["index"] for item in several["choices"]] == [0, 1, 2, 3]
    other = sigma0.generate(*pocket, "Once upon", max_new_tokens=7)
    assert [item["text"] for item in several["choices"]] == [SAID, SAID, other.text, other.text]
    assert several["usage"]["prompt_tokens"] == len(ids) + other.prompt_tokens
    assert several["usage"]["completion_tokens"] == 2 * (7 + len(other.tokens))


def test_logprobs(plain):
    output = post(plain, logprobs=2, stop=" bedroom").json()["choices"][0]
    assert output["text"] == " Sara is in the"
    logprobs = output["logprobs"]
    assert logprobs["tokens"] == [" Sara", " is", " in", " the", " bedroom"]
    assert logprobs["text_offset"] == [0, 5, 8, 11, 15]
    assert [list(item)[-1] for item in logprobs["top_logprobs"]] == logprobs["tokens"]
    assert [max(item.values()) for item in logprobs["top_logprobs"]] == logprobs["token_logprobs"]
    assert all(len(item) == 2 for item in logprobs["top_logprobs"])
    assert post(plain, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] is None
    streamed = [json.loads(line) for line in lines(post(plain, logprobs=2, stop=" bedroom", stream=True).text)[:-1]]
    pieces = [item["choices"][0]["logprobs"] for item in streamed if item["choices"][0]["logprobs"]]
    assert [item["text_offset"][0] for item in pieces] == logprobs["text_offset"]


def test_the_prompt_is_sent_back(plain, pocket):
    model, tokenizer = pocket
    output = post(plain, prompt=STORY, echo=True, max_tokens=3).json()
    assert output["choices"][0]["text"].startswith(STORY) and output["choices"][0]["logprobs"] is None
    ids = tokenizer(STORY)["input_ids"]
    logits = model(torch.tensor([ids]), exit_config={"mode": "full"}).logits[0, :-1].log_softmax(-1)
    for prompt in (STORY, ids, [ids, ids[:1]]):
        output = post(plain, prompt=prompt, echo=True, max_tokens=0, logprobs=3).json()
        choice = output["choices"][0]
        assert (choice["text"], choice["finish_reason"], output["usage"]["completion_tokens"]) == (STORY, "length", 0)
        first, *rest = choice["logprobs"]["token_logprobs"]
        expected = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert first is None and rest == pytest.approx(expected, abs=1e-4)
        assert choice["logprobs"]["top_logprobs"][0] is None
        best = [max(item.values()) for item in choice["logprobs"]["top_logprobs"][1:]]
        assert best == pytest.approx(logits.max(-1).values.tolist(), abs=1e-4)
        assert "".join(choice["logprobs"]["tokens"]) == STORY
        pieces, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert offsets == [len("".join(pieces[:index])) for index in range(len(ids))]
    with_new = post(plain, prompt=STORY, echo=True, max_tokens=2, logprobs=3).json()["choices"][0]["logprobs"]
    alone = post(plain, prompt=STORY, max_tokens=2, logprobs=3).json()["choices"][0]["logprobs"]
    assert with_new["tokens"][len(ids) :] == alone["tokens"] and len(with_new["text_offset"]) == len(ids) + 2
    assert with_new["text_offset"][-2] == len(STORY)


@pytest.mark.slow
def test_lm_evals_client_scores_as_the_model_does(plain, pocket, tmp_path):
    """The real client of `lm_eval --model local-completions`, beside a plain forward."""
    clients = pytest.importorskip("lm_eval.models.openai_completions", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance

    model, tokenizer = pocket
    tokenizer.save_pretrained(tmp_path)
    texts = [(STORY, " kitchen."), (STORY, " Mary is in the kitchen."), ("The hat is with Tom.", " Where is the hat?")]
    requests = [Instance("loglikelihood", {}, item, index) for index, item in enumerate(texts)]
    given = {"base_url": f"{plain.url}/v1/completions", "model": "pocket", "tokenizer": str(tmp_path), "batch_size": 1}
    for tokenized in (True, False):
        client = clients.LocalCompletionsAPI(**given, tokenizer_backend="huggingface", tokenized_requests=tokenized)
        for (context, rest), (score, greedy) in zip(texts, client.loglikelihood(requests), strict=True):
            ids = tokenizer(context + rest)["input_ids"]
            length = len(tokenizer(context)["input_ids"])
            logits = model(torch.tensor([ids]), exit_config={"mode": "full"}).logits[0, length - 1 : -1].log_softmax(-1)
            new = torch.tensor(ids[length:])
            assert score == pytest.approx(float(logits.gather(1, new[:, None]).sum()), abs=1e-3)
            assert greedy == bool((logits.argmax(-1) == new).all())


@pytest.mark.parametrize("after", ["finish", "verify", "drop"])
def test_an_end_may_be_a_token_like_others(plain, after):
    body = {"max_tokens": 30, "sigma0": {"exit": {"q": 0.5, "after_exit": after}, "on_collapse": "ignore"}}
    short, long = post(plain, **body).json(), post(plain, **body, ignore_eos=True).json()
    assert short["choices"][0]["finish_reason"] == "stop" and short["usage"]["completion_tokens"] < 30
    assert long["choices"][0]["finish_reason"] == "length" and long["usage"]["completion_tokens"] == 30
    assert long["choices"][0]["text"].startswith(short["choices"][0]["text"])
    refused = post(plain, **body, ignore_eos=True, guided_choice=["park"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_with_a_grammar")


@pytest.mark.parametrize("after", ["finish", "verify"])
def test_a_temperature_next_to_nothing_takes_the_likeliest(plain, after):
    """Logits that it would divide up to infinity leave nothing to draw from."""
    exit_setting = {"q": 0.5, "after_exit": after}
    asked = {"model": "pocket", "prompt": STORY, "max_tokens": 6, "extra_body": {"sigma0": {"exit": exit_setting}}}
    texts = {plain.client.completions.create(**asked, temperature=item).choices[0].text for item in (0, 1e-40, 1e-7)}
    assert len(texts) == 1
