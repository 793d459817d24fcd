"""Bodies that are nearly right, and that are not: no answer is a 5xx, and every refusal names its field.

The corpus holds valid bodies of all kinds and a few that broke servers; what is sent are mutations of their bytes and
of their values. `FAST` and `SLOW` bound the number of requests.
"""

import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import hypothesis
import pytest
from fastapi.testclient import TestClient
from hypothesis import strategies as st

from sigma0.ladder import Always, FidelityLadder
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from sigma0.serve.api.errors import ErrorBody
from tests.serve.conftest import two_rungs
from tests.serve.engine.spied_worker import SpiedService

FAST, SLOW = 500, 10_000
CORPUS = {path.name: path.read_bytes() for path in sorted(Path(__file__).with_name("corpus").iterdir())}
PATHS = ("/v1/chat/completions", "/v1/completions")
HOST = "http://localhost"
# Refusals of a whole body, or of more than one field.
WITHOUT_FIELD = {
    "invalid_json",
    "context_length_exceeded",
    "invalid_grammar",
    "body_too_large",
    "the body must be a JSON object, sent with Content-Type: application/json",
}
MARK = "@@"
# As they stand in JSON text; some are none, and most fit somewhere.
PLAIN = ("null", "null", "1", "2", "0.5", "1.0", "true", "false", '"a"', '["a"]', "[]", "{}")
HOSTILE = (
    *("null", "true", "false", "0", "-1", "1e400", "-0.0", "NaN", "-Infinity", "1e-320", "2147483648"),
    *("9" * 400, "-9223372036854775809", '""', '"\\ud800"', '"\\u0000"', '"\\udc00\\ud800"', '"<|im_end|>"'),
    *("[]", "{}", "[null]", '{"": {"": 0}}', "[" * 3000 + "]" * 3000, '{"a":' * 2000 + "0" + "}" * 2000),
    *('"' + "x" * 5000 + '"', "[" + "1," * 3000 + "1]", "[" + '"a",' * 3000 + '"a"]', '{"type": "object"}'),
    *('{"$ref": "#"}', '"("', '"[a-z]{1000000}"', '{"mode": "fixed", "depth": 1000000}', '"start: start start"'),
)
# Without them nothing else is looked at; the other strategy changes them too.
KEPT = ("model", "messages")
NAMES = ("", "sigma0", "stream", "n", "logit_bias", "tools", "x" * 300, "\ud800", "messages[0]", "__class__", "prompt")


@st.composite
def changed_values(draw):
    """A valid body in which some values are others, or gone, or stand under another name."""
    name = draw(st.sampled_from([name for name in CORPUS if name.endswith(".json")]))
    body = json.loads(CORPUS[name])
    hostile = []
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        places = [place for place in _places(body) if place[1] not in KEPT]
        if not places:
            # all the rest is gone
            break
        parent, key = draw(st.sampled_from(places))
        act = draw(st.sampled_from(["replace", "replace", "replace", "drop", "rename", "wrap"]))
        if act == "replace":
            hostile.append(draw(st.sampled_from(draw(st.sampled_from([PLAIN, HOSTILE])))))
            parent[key] = f"{MARK}{len(hostile) - 1}{MARK}"
        elif act == "wrap":
            parent[key] = [parent[key]]
        else:
            value = parent.pop(key)
            if act == "rename" and isinstance(parent, dict):
                parent[draw(st.sampled_from(NAMES))] = value
    text = json.dumps(body)
    for number, value in enumerate(hostile):
        text = text.replace(f'"{MARK}{number}{MARK}"', value)
    return name, text.encode()


def _places(value):
    """Every place inside of a value: what holds it, and under which key."""
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


@st.composite
def changed_bytes(draw):
    """A body of which some bytes are others, gone, or there twice."""
    name = draw(st.sampled_from(list(CORPUS)))
    body = bytearray(CORPUS[name])
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 4]))):
        start = draw(st.integers(0, len(body)))
        stop = min(len(body), start + draw(st.integers(0, 12)))
        new = draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b'"', b"{", b"]", b"\\", b"\xff", b"\x00", b"1e9"]))
        )
        act = draw(st.sampled_from(["replace", "insert", "drop", "twice", "cut"]))
        if act == "cut":
            del body[start:]
        elif act == "insert":
            body[start:start] = new
        else:
            body[start:stop] = {"replace": new, "drop": b"", "twice": bytes(body[start:stop]) * 2}[act]
    return name, bytes(body)


@pytest.fixture(scope="module")
def fuzzed(pocket):
    settings = ServerSettings(max_new_tokens=4, max_n=2, max_body_bytes=20_000)
    ladder = FidelityLadder(two_rungs(pocket), policy=Always())
    with closing(SpiedService(*pocket)) as service, TestClient(create_app(service, settings, ladder), HOST) as client:
        client.service = service
        yield client


def ask(fuzzed, path, body, kind="application/json"):
    answer = fuzzed.post(path, content=body, headers={"content-type": kind})
    return answer.status_code, answer.content


def check(status, body):
    assert 200 <= status < 300 or 400 <= status < 500, (status, body)
    if status < 300:
        if body.startswith(b"data: "):
            assert body.endswith(b"data: [DONE]\n\n") and b"event: error" not in body
        else:
            assert json.loads(body)["choices"]
        return
    error = ErrorBody.model_validate_json(body, strict=True).error
    assert error.message and error.type == ("rate_limit_error" if status == 429 else "invalid_request_error")
    if error.param is None:
        assert error.code in WITHOUT_FIELD or error.message in WITHOUT_FIELD, error
    elif error.code not in ("model_not_found", "context_length_exceeded"):
        assert error.message.startswith(f"{error.param}:"), error


def send(fuzzed, count):
    seen = Counter()

    @hypothesis.settings(max_examples=count, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(
        st.one_of(*[changed_values()] * 4, changed_bytes()),
        st.sampled_from([None] * 8 + [*PATHS]),
        st.sampled_from(["application/json"] * 40 + ["text/plain"]),
    )
    def one(named, path, kind):
        name, body = named
        current = PATHS[1] if b'"prompt"' in body or name.startswith("completion") else PATHS[0]
        status, answer = ask(fuzzed, path or current, body, kind)
        seen[status] += 1
        check(status, answer)

    one()
    return seen


def test_the_corpus_itself(fuzzed):
    for name, body in CORPUS.items():
        path = PATHS[0] if b'"messages"' in body else PATHS[1]
        status, answer = ask(fuzzed, path, body)
        check(status, answer)
        # the last of two values counts, and JSON may be UTF-16
        is_taken = name.endswith(".json") or name in ("raw-twice.bin", "raw-utf16.bin")
        assert (status == 200) == is_taken, (name, answer)


@pytest.mark.slow
@pytest.mark.parametrize("count", [FAST, pytest.param(SLOW, marks=pytest.mark.exhaustive)])
def test_whatever_is_sent(fuzzed, count):
    body = CORPUS["chat-plain.json"]
    before = ask(fuzzed, PATHS[0], body)[1]
    seen = send(fuzzed, count)
    # of both enough that neither is tested by name alone
    assert seen[200] > count / 20 and seen[400] > count / 20, seen
    after = ask(fuzzed, PATHS[0], body)[1]
    assert [json.loads(item)["choices"] for item in (before, after)] == [json.loads(after)["choices"]] * 2
    status = fuzzed.service.status()
    assert fuzzed.service.is_up and fuzzed.app.state.handler.open == 0
    assert status.running == status.waiting == status.blocks_used == 0
