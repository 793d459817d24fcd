"""What is refused, and how: always in OpenAI's shape."""

import json
from unittest import mock

import httpx
import openai
import pytest
from pydantic import ValidationError

from sigma0.config import ExitConfig
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.protocol import ChatRequest, CompletionRequest
from tests.serve.api.test_chat import ASKED, STORY, lines, post
from tests.serve.conftest import served

SURROGATE = json.loads('"a\\ud800"')
DIGITS = "7" * 5000


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    output = answer.json()
    assert set(output) == {"error"} and set(output["error"]) == {"message", "type", "param", "code"}
    assert STORY not in answer.text
    return output["error"]


def send(server, body):
    """Bytes as they are; values as JSON of ASCII alone, and a completion where there is a prompt."""
    kind, content = "chat/completions", body
    if not isinstance(body, bytes):
        kind, rest = ("completions", {}) if "prompt" in body else (kind, {"messages": ASKED})
        content = json.dumps({"model": "pocket", "max_tokens": 4, **rest, **body})
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}/v1/{kind}", content=content, headers=headers, timeout=30)


def said(content, role="user"):
    return {"messages": [{"role": role, "content": content}]}


def exits(**setting):
    return {"sigma0": {"exit": setting}}


# values of fields, and below bodies, of which the field that the error names is wrong
VALUES = {
    "cache_salt": ["", 5, ["a"], "x" * 1001],
    "frequency_penalty": [-2.1, 2.1],
    "guided_choice": [[]],
    "guided_json": [[1]],
    "logit_bias": [
        *({token: 1} for token in ("x", "05", "744")),
        *({"5": bias} for bias in (100.5, -101)),
        *([5], dict.fromkeys(map(str, range(301)), 1)),
    ],
    "logprobs": [3],
    "max_completion_tokens": [-1],
    "max_tokens": [0, 1.5, 5000],
    "messages": [[], "hello"],
    "min_p": [1.1, -0.1],
    "n": [0, 9],
    "presence_penalty": [-2.1, 2.1],
    "reasoning_effort": ["huge"],
    "repetition_penalty": [0, 1e-45, 101],
    "response_format": [{"type": "xml"}],
    "seed": [2**63, -(2**63) - 1],
    "sigma0": [[]],
    "stop": [list("abcde"), "", "a" * 1001, ["a", "a" * 1001], SURROGATE],
    "stream": ["yes"],
    "temperature": [2.1, -0.1, "1"],
    "top_k": [-1],
    "top_logprobs": [2],
    "top_p": [0, 1.1],
}
BODIES = {
    "messages[0].role": [said(STORY, "robot")],
    "messages[0].content": [
        {"messages": [{"role": "user"}]},
        *(said(content) for content in (None, 5, SURROGATE, [{"type": "text", "text": SURROGATE}])),
        # what is no text
        said([{"type": "image_url", "image_url": {"url": "data:,"}}]),
        said([{"type": "input_audio", "input_audio": {"data": "", "format": "mp3"}}]),
        said([{"type": "file", "file": {"file_id": "1"}}]),
        said([{"type": "refusal", "refusal": "no"}]),
        said([{"type": "text", "text": STORY, "cache_control": {}}]),
    ],
    "messages[1].content": [{"messages": [*ASKED, {"role": "user", "content": 5}]}],
    "top_logprobs": [{"logprobs": True, "top_logprobs": 21}],
    "stream_options": [{"stream_options": {"include_usage": True}, **stream} for stream in ({}, {"stream": False})],
    "stream_options.include_obfuscation": [{"stream": True, "stream_options": {"include_obfuscation": True}}],
    "prompt": [
        {"prompt": prompt}
        for prompt in (
            *("", [], [[]], [1, "a"], [True], [-1], [744], [5.5, 6], [[1], [10**12]], 5, None, [""], ["a", ""]),
        )
    ],
    "max_tokens": [{"prompt": STORY, "max_tokens": -1}],
    "echo": [{"prompt": STORY, "echo": True, "stream": True}],
    "best_of": [{"prompt": STORY, "n": 2, "best_of": 1}],
    "sigma0.depth": [{"sigma0": {"depth": 3}}],
    "sigma0.on_collapse": [{"sigma0": {"on_collapse": "halt"}}],
    "sigma0.exit": [
        exits(mode="fixed", depth=7),
        exits(mode="margin", q=0.5),
        exits(mode="margin", accel_scale="steps"),
        exits(**ExitConfig(mode="margin", theta=0.9).to_dict() | {"q": 0.5}),
        exits(mode="accel", patience=10**30),
    ],
    # a number that is written as text is none
    "sigma0.exit.patience": [exits(mode="accel", patience="9" * 23)],
    "sigma0.exit.q": [exits(mode="qexit", q=2), exits(mode="qexit", q="0.5"), exits(q=True)],
    "sigma0.exit.min_loops": [exits(min_loops="2")],
    "sigma0.exit.redraft": [exits(redraft="yes")],
    "sigma0.exit.depth": [exits(mode="fixed", depth="2")],
    "sigma0.exit.mod": [exits(mod="full")],
    "sigma0.budget.calls": [{"sigma0": {"budget": {"calls": -1}}}],
    "sigma0.budget": [{"sigma0": {"budget": {"calls": calls}}} for calls in (1, False)],
    "sigma0.trail": [{"sigma0": {"trail": True}}],
    "sigma0.ladder": [{"sigma0": {"ladder": ladder}} for ladder in ("paragraph", True)],
    "sigma0.sources": [{"sigma0": {"sources": "a text"}}],
}


WRONG = [
    *((name, {name: value}) for name, values in VALUES.items() for value in values),
    *((name, body) for name, bodies in BODIES.items() for body in bodies),
]


@pytest.mark.parametrize("param, body", WRONG, ids=lambda value: str(value)[:60])
def test_bad_fields_are_named(plain, param, body):
    error = error_of(send(plain, body), 400)
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert error["message"].startswith(param)


CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": f'{{"a": {DIGITS}}}'}}],
}


@pytest.mark.parametrize(
    "body, output",
    [
        (b'{"model": "pocket", "max_tokens": ' + DIGITS.encode() + b', "messages": []}', "a whole number of over 4300"),
        ({"messages": [*ASKED, CALLED, {"role": "tool", "tool_call_id": "a", "content": "x"}]}, "of over 4300 digits"),
        ({"guided_json": f'{{"const": {DIGITS}}}'}, "schema holds a whole number of too many digits"),
        ({"max_tokens": 5000}, "at most 4096"),
        ({"n": 9}, "at most 8 choices, got 9"),
        ({"stop": SURROGATE}, "stop: holds half of a surrogate pair"),
        ({"logit_bias": {"744": 1}}, "ids from 0 to 743, got 744"),
        ({"temperature": 2.1}, "less than or equal to 2, got '2.1'"),
        ({"reasoning_effort": "huge"}, "'minimal', 'low', 'medium' or 'high', got 'huge'"),
        (exits(mode="fixed", depth=7), "exceeds the model's 6 loops"),
        (exits(mode="margin", q=0.5), "q has no effect with exit mode 'margin'"),
        ({"sigma0": {"budget": {"calls": False}}}, "calls is a number, not false"),
        ({"sigma0": {"ladder": True}}, "this server has no ladder; start it with one"),
        ({"sigma0": {"sources": ["a " * 10_000, "b " * 10_000]}}, "at most 32768 characters in all, got 40000"),
        ({"sigma0": {"sources": [""] * 250_000}}, "at most 64 texts, got 250000"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_limit_is_told(plain, body, output):
    assert output in error_of(send(plain, body), 400)["message"]


def test_openais_client_raises_its_own_errors(plain):
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
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff", b"[" * 10000, b'{"model": NaN}', b'{"n": ' + b"9" * 5000],
    ids=lambda body: body[:20],
)
def test_what_is_no_request_at_all(plain, body):
    error = error_of(send(plain, body), 400)
    assert error["code"] == "invalid_json" or error["param"] or "JSON object" in error["message"]


def test_half_a_character_in_a_name_and_a_name_without_end(plain):
    for name in ("\ud800", "x" * 10000):
        answer = send(plain, {"sigma0": {name: 1}})
        error_of(answer, 400)
        assert len(answer.content) < 500
    error_of(send(plain, {"model": "pocket\ud800"}), 404)
    error_of(send(plain, {"\ud800": 1}), 400)


def test_what_is_not_there(plain):
    for path, status in (("v1/nothing", 404), ("v1/chat/completions", 405), ("docs", 404)):
        error_of(httpx.get(f"{plain.url}/{path}"), status)


def test_an_answer_that_cannot_be_written_counts_once(pocket, monkeypatch):
    broken = mock.Mock(side_effect=RuntimeError("no text for an id"))
    monkeypatch.setattr("sigma0.serve.api.responses.chat_logprobs", broken)
    with served(pocket) as server:
        assert error_of(post(server, logprobs=True), 500)["code"] == "internal_error"
        text = httpx.get(f"{server.url}/metrics").text
    counted = [line for line in text.splitlines() if line.startswith("sigma0_requests_total")]
    assert counted == ['sigma0_requests_total{kind="chat",status="500"} 1.0']


def test_a_failure_fails_one_request_alone(plain, caplog):
    plain.service.held.fails = RuntimeError(f"broke on {STORY}")
    answer = post(plain)
    error = error_of(answer, 500)
    assert error["type"] == "server_error" and answer.headers["x-request-id"] in error["message"]
    # found again in the log, which says what it was and not what it was about
    assert answer.headers["x-request-id"] in caplog.text and "RequestFailed, by RuntimeError" in caplog.text
    assert STORY not in caplog.text
    plain.service.held.fails = RuntimeError("broke")
    output = post(plain, stream=True)
    assert output.status_code == 200 and "event: error\n" in output.text and "[DONE]" not in output.text
    assert json.loads(lines(output.text)[-1])["error"]["type"] == "server_error"
    plain.service.held.fails = RuntimeError("broke")
    with pytest.raises(openai.APIError, match="the request failed"):
        list(plain.client.chat.completions.create(model="pocket", messages=ASKED, stream=True))
    assert post(plain).status_code == 200


def test_what_nobody_foresaw(plain, monkeypatch, caplog):
    broken = mock.Mock(side_effect=KeyError(STORY))
    monkeypatch.setattr("sigma0.serve.api.requests.encode", broken)
    answer = post(plain)
    assert error_of(answer, 500)["code"] == "internal_error"
    assert "KeyError" in caplog.text and answer.headers["x-request-id"] in caplog.text and STORY not in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(plain.service, "status", broken)
    error_of(httpx.get(f"{plain.url}/metrics"), 500)


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
    with pytest.raises(ValidationError) as result:
        kind.model_validate({"model": "pocket", **rest, **body})
    assert result.value.error_count() < 10


def test_limits_of_a_prompt(pocket):
    with served(pocket, ServerSettings(max_prompt_tokens=5, max_new_tokens=4, max_n=2, max_prompts=2)) as server:
        assert "over this server's limit of 5" in error_of(post(server), 400)["message"]
        answer = send(server, {"prompt": [5] * 5, "max_tokens": None, **exits(q=0.6)})
        assert answer.json()["usage"]["total_tokens"] == 9
        for body, output in (
            ({"prompt": [5], "max_tokens": 5}, "at most 4"),
            ({"prompt": [5], "n": 3}, "at most 2 choices, got 3"),
            ({"prompt": [[5], [6], [7]]}, "at most 2 at once, got 3"),
            ({"prompt": [5] * 6}, "limit of 5"),
            ({"prompt": "x" * 141}, "no text of over 140 fits"),
        ):
            assert output in error_of(send(server, body), 400)["message"]


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_n", 0),
        ("max_body_bytes", -1),
        ("request_timeout", 0),
        ("request_timeout", float("inf")),
        ("nonsense", 1),
        ("api_key", ""),
    ],
)
def test_settings_are_checked(name, value):
    with pytest.raises(ValidationError):
        ServerSettings(**{name: value})


def test_whole_numbers_may_be_written_with_a_point(plain):
    answer = send(plain, {"max_tokens": 20.0, "seed": -5.0, **exits(mode="accel", eps=0.5, patience=1.0)})
    assert answer.json()["sigma0"]["exit"]["patience"] == 1
    assert send(plain, {"prompt": [5.0, 6]}).status_code == 200
