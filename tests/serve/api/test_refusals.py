"""What is refused, and how: always in OpenAI's shape."""

import json

import httpx
import openai
import pytest
from pydantic import SecretStr, ValidationError

from sigma0.config import ExitConfig
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.protocol import ChatRequest, CompletionRequest
from tests.serve.api.test_chat import ASKED, STORY, lines, post
from tests.serve.conftest import served

KEY = "sk-quite-secret"


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert set(told) == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}
    assert STORY not in answer.text
    return told["error"]


@pytest.mark.parametrize(
    "body, param, told",
    [
        ({"temperature": 2.1}, "temperature", "less than or equal to 2, got '2.1'"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, got '0'"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 5000}, "max_tokens", "at most 4096"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "greater than"),
        ({"n": 0}, "n", "greater than"),
        ({"n": 9}, "n", "at most 8 choices, got 9"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"min_p": 1.1}, "min_p", "less than"),
        ({"top_k": -1}, "top_k", "greater than"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"presence_penalty": 2.1}, "presence_penalty", "less than"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "greater than"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "a string or a list of up to 4 strings"),
        ({"stop": ""}, "stop", "a string or a list of up to 4 strings"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'minimal', 'low', 'medium' or 'high', got 'huge'"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hello"}, "messages", "list"),
        ({"messages": [{"role": "robot", "content": STORY}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a list of text parts"),
        ({"messages": [*ASKED, {"role": "user", "content": 5}]}, "messages[1].content", "a list of text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content",
            "text parts",
        ),
        ({"sigma0": {"depth": 3}}, "sigma0.depth", "not permitted"),
        ({"sigma0": {"exit": {"mode": "qexit", "q": 2}}}, "sigma0.exit.q", "must lie in (0, 1]"),
        ({"sigma0": {"exit": {"mode": "fixed", "depth": 7}}}, "sigma0.exit", "exceeds the model's 6 loops"),
        ({"sigma0": {"exit": {"mode": "margin", "q": 0.5}}}, "sigma0.exit", "q has no effect with exit mode 'margin'"),
        (
            {"sigma0": {"exit": {"mode": "margin", "accel_scale": "steps"}}},
            "sigma0.exit",
            "accel_scale has no effect with exit mode 'margin'",
        ),
        (
            {"sigma0": {"exit": {**ExitConfig(mode="margin", theta=0.9).to_dict(), "q": 0.5}}},
            "sigma0.exit",
            "q has no effect with exit mode 'margin', only with qexit",
        ),
        ({"sigma0": {"exit": {"mod": "full"}}}, "sigma0.exit.mod", "nexpected keyword"),
        ({"sigma0": {"budget": {"calls": -1}}}, "sigma0.budget.calls", "greater than"),
        ({"sigma0": {"budget": {"calls": 1}}}, "sigma0.budget", "needs sigma0.ladder"),
        ({"sigma0": {"budget": {"calls": False}}}, "sigma0.budget", "calls is a number, not false"),
        ({"sigma0": {"trail": True}}, "sigma0.trail", "needs sigma0.ladder"),
        ({"sigma0": {"ladder": "paragraph"}}, "sigma0.ladder", '"draft" or "answer"'),
        ({"sigma0": {"ladder": True}}, "sigma0.ladder", "this server has no ladder; start it with one"),
        ({"sigma0": {"sources": "a text"}}, "sigma0.sources", "list"),
        ({"sigma0": []}, "sigma0", "dictionary"),
        ({"sigma0": {"exit": {"mode": "accel", "patience": 10**30}}}, "sigma0.exit", "a number over"),
    ],
)
def test_bad_fields_are_named(plain, body, param, told):
    error = error_of(post(plain, **body), 400)
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert told in error["message"] and error["message"].startswith(param)


def test_bad_fields_reach_openais_client_as_its_own_error(plain):
    with pytest.raises(openai.BadRequestError) as caught:
        plain.client.chat.completions.create(model="pocket", messages=ASKED, temperature=3)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        plain.client.chat.completions.create(model="gpt-4", messages=ASKED)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"


def test_a_context_that_is_too_long(plain):
    assert error_of(post(plain, max_tokens=2048), 400)["code"] == "context_length_exceeded"
    long = [{"role": "user", "content": "Sara went to the park. " * 500}]
    for more in ({}, {"max_tokens": None}):
        error = error_of(post(plain, messages=long, **more), 400)
        assert error["code"] == "context_length_exceeded" and "2048" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff",
        b"[" * 10000,
        b'{"model": NaN}',
        b'{"model": "pocket", "n": ' + b"9" * 5000,
    ],
)
def test_what_is_no_request_at_all(plain, body):
    headers = {"Content-Type": "application/json"}
    error = error_of(httpx.post(f"{plain.url}/v1/chat/completions", content=body, headers=headers), 400)
    assert error["code"] == "invalid_json" or error["param"] or "JSON object" in error["message"]


def test_an_answer_that_cannot_be_written_counts_once(pocket, monkeypatch):
    def broken(*_):
        raise RuntimeError("no text for an id")

    monkeypatch.setattr("sigma0.serve.api.responses.chat_logprobs", broken)
    with served(pocket) as server:
        assert error_of(post(server, logprobs=True), 500)["code"] == "internal_error"
        text = httpx.get(f"{server.url}/metrics").text
    counted = [line for line in text.splitlines() if line.startswith("sigma0_requests_total")]
    assert counted == ['sigma0_requests_total{kind="chat",status="500"} 1.0']


def test_half_a_character(plain):
    body = json.dumps({"model": "pocket", "messages": [{"role": "user", "content": "\ud800"}]}).encode()
    headers = {"Content-Type": "application/json"}
    error = error_of(httpx.post(f"{plain.url}/v1/chat/completions", content=body, headers=headers), 400)
    assert error["param"] == "messages[0].content"


def test_half_a_character_in_a_name_and_a_name_without_end(plain):
    headers = {"Content-Type": "application/json"}
    for name in ("\ud800", "x" * 10000):
        body = json.dumps({"model": "pocket", "messages": ASKED, "sigma0": {name: 1}}).encode()
        answer = httpx.post(f"{plain.url}/v1/chat/completions", content=body, headers=headers)
        error_of(answer, 400)
        assert len(answer.content) < 500
    for body, status in (({"model": "pocket\ud800"}, 404), ({"model": "pocket", "\ud800": 1}, 400)):
        content = json.dumps({"messages": ASKED, **body}).encode()
        error_of(httpx.post(f"{plain.url}/v1/chat/completions", content=content, headers=headers), status)


def test_what_is_not_there(plain):
    error_of(httpx.get(f"{plain.url}/v1/nothing"), 404)
    error_of(httpx.get(f"{plain.url}/v1/chat/completions"), 405)
    error_of(httpx.get(f"{plain.url}/docs"), 404)


def test_a_failure_fails_one_request_alone(plain, caplog):
    plain.service.fails = RuntimeError(f"broke on {STORY}")
    answer = post(plain)
    error = error_of(answer, 500)
    assert error["type"] == "server_error" and answer.headers["x-request-id"] in error["message"]
    # found again in the log, which says what it was and not what it was about
    assert answer.headers["x-request-id"] in caplog.text and "RequestFailed, by RuntimeError" in caplog.text
    assert STORY not in caplog.text
    plain.service.fails = RuntimeError("broke")
    told = post(plain, stream=True)
    assert told.status_code == 200 and "event: error\n" in told.text and "[DONE]" not in told.text
    assert json.loads(lines(told.text)[-1])["error"]["type"] == "server_error"
    plain.service.fails = RuntimeError("broke")
    with pytest.raises(openai.APIError, match="the request failed"):
        list(plain.client.chat.completions.create(model="pocket", messages=ASKED, stream=True))
    assert post(plain).status_code == 200


def test_what_nobody_foresaw(plain, monkeypatch, caplog):
    def broken(*_):
        raise KeyError(STORY)

    monkeypatch.setattr("sigma0.serve.api.requests.encode", broken)
    answer = post(plain)
    assert error_of(answer, 500)["code"] == "internal_error"
    assert "KeyError" in caplog.text and answer.headers["x-request-id"] in caplog.text and STORY not in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(plain.service, "status", broken)
    error_of(httpx.get(f"{plain.url}/metrics"), 500)


def test_the_key(pocket, caplog):
    caplog.set_level("DEBUG")
    with served(pocket, ServerSettings(api_key=SecretStr(KEY))) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "Basic x"}):
            for path in ("/v1/models", "/v1/sigma0", "/metrics", "/openapi.json", "/v1/nothing", "//health"):
                answer = httpx.get(f"{server.url}{path}", headers=headers)
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/").status_code in (200, 404)
        right = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        assert right.models.list().data[0].id == "pocket"
        with pytest.raises(openai.AuthenticationError):
            right.with_options(api_key="other").models.list()
    assert KEY not in caplog.text and KEY not in repr(ServerSettings(api_key=SecretStr(KEY)))


def test_the_size_of_a_body(pocket):
    with served(pocket, ServerSettings(max_body_bytes=1000)) as server:
        address, headers = f"{server.url}/v1/completions", {"Content-Type": "application/json"}
        body = json.dumps({"model": "pocket", "prompt": "a" * 2000}).encode()
        error_of(httpx.post(address, content=body, headers=headers), 413)
        # without a length beforehand
        error_of(httpx.post(address, content=iter([body[:600], body[600:]]), headers=headers), 413)
        small = json.dumps({"model": "pocket", "prompt": STORY}).encode()
        assert httpx.post(address, content=iter([small]), headers=headers).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{}] * 1000},
        {"messages": [{"role": "user", "content": [{}] * 1000}]},
        {"messages": [{"role": "user", "content": [dict.fromkeys(map(str, range(1000)), 1)]}]},
        {"prompt": [{}] * 1000},
        {"prompt": [[{}] * 1000]},
        {"prompt": [[{}]] * 1000},
        {"prompt": [5] * 1000 + [{}] * 1000},
        {"sigma0": {"sources": [1] * 1000}},
        {"sigma0": dict.fromkeys(map(str, range(1000)), 1)},
        {"sigma0": {"exit": dict.fromkeys(map(str, range(1000)), 1)}},
        {"sigma0": {"budget": dict.fromkeys(map(str, range(1000)), 1)}},
        {"stop": [1] * 1000},
    ],
    ids=lambda body: str(body)[:60],
)
def test_a_body_that_is_wrong_a_thousand_times_is_told_of_once(body):
    """Each complaint takes a kilobyte: one for each member of a list would fill the memory."""
    kind = CompletionRequest if "prompt" in body else ChatRequest
    rest = {"prompt": "a"} if kind is CompletionRequest else {"messages": ASKED}
    with pytest.raises(ValidationError) as found:
        kind.model_validate({"model": "pocket", **rest, **body})
    assert found.value.error_count() < 10


def test_limits_of_a_prompt(pocket):
    with served(pocket, ServerSettings(max_prompt_tokens=5, max_new_tokens=4, max_n=2, max_prompts=2)) as server:
        error = error_of(post(server), 400)
        assert "over this server's limit of 5" in error["message"]
        address = f"{server.url}/v1/completions"
        found = httpx.post(address, json={"model": "pocket", "prompt": [5] * 5, "sigma0": {"exit": {"q": 0.6}}}).json()
        assert found["usage"]["completion_tokens"] == 4
        for body in ({"max_tokens": 5}, {"n": 3}, {"prompt": [[5], [6], [7]]}, {"prompt": [5] * 6}):
            error_of(httpx.post(address, json={"model": "pocket", "prompt": [5], **body}), 400)


SURROGATE = json.loads('"a\\ud800"')


@pytest.mark.parametrize(
    "body, message",
    [
        ({"stop": "a" * 1001}, "stop: should have at most 1000 characters"),
        ({"stop": ["a", "a" * 1001]}, "stop: should have at most 1000 characters"),
        ({"stop": SURROGATE}, "stop: holds half of a surrogate pair"),
        ({"cache_salt": "a" * 1001}, "cache_salt: should have at most 1000 characters"),
        ({"messages": [{"role": "user", "content": SURROGATE}]}, "content: holds half of a surrogate pair"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": SURROGATE}]}]},
            "content: holds half of a surrogate pair",
        ),
        (
            {
                "messages": [
                    *ASKED,
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "a", "function": {"name": "f", "arguments": '{"a": ' + "7" * 5000 + "}"}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "a", "content": "x"},
                ]
            },
            "arguments: holds a whole number of over 4300 digits",
        ),
        ({"guided_json": '{"const": ' + "7" * 5000 + "}"}, "schema holds a whole number of too many digits"),
    ],
)
def test_a_limit_is_named(plain, body, message):
    raw = json.dumps({"model": "pocket", "messages": ASKED, "max_tokens": 4, **body})
    headers = {"Content-Type": "application/json"}
    error = error_of(httpx.post(f"{plain.url}/v1/chat/completions", content=raw, headers=headers), 400)
    assert message in error["message"]


def test_a_body_with_too_long_a_number_says_so(plain):
    raw = '{"model": "pocket", "max_tokens": ' + "7" * 5000 + ', "messages": []}'
    headers = {"Content-Type": "application/json"}
    error = error_of(httpx.post(f"{plain.url}/v1/chat/completions", content=raw, headers=headers), 400)
    assert "a whole number of over 4300 digits" in error["message"]


def test_sources_of_any_length_are_not_read(plain):
    error = error_of(post(plain, sigma0={"sources": ["a " * 10_000, "b " * 10_000]}), 400)
    assert error["param"] == "sigma0.sources" and "at most 32768 characters in all, got 40000" in error["message"]
    error = error_of(post(plain, sigma0={"sources": [""] * 250_000}), 400)
    assert error["param"] == "sigma0.sources" and "at most 64 texts, got 250000" in error["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_n": 0},
        {"max_body_bytes": -1},
        {"request_timeout": 0},
        {"request_timeout": float("inf")},
        {"nonsense": 1},
        {"api_key": ""},
        {"api_key": "a b"},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValidationError):
        ServerSettings(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "accel", "patience": "99999999999999999999999"},
        {"mode": "qexit", "q": "0.5"},
        {"q": True},
        {"min_loops": "2"},
        {"redraft": "yes"},
        {"mode": "fixed", "depth": "2"},
    ],
)
def test_a_number_that_is_written_as_text_is_no_exit_setting(plain, wrong):
    error = error_of(post(plain, sigma0={"exit": wrong}), 400)
    assert error["param"].startswith("sigma0.exit")


def test_a_whole_number_may_be_written_with_a_point(plain):
    answer = post(plain, sigma0={"exit": {"mode": "accel", "eps": 0.5, "patience": 1.0}})
    assert answer.json()["sigma0"]["exit"]["patience"] == 1
