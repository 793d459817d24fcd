"""What `/openapi.json` says is what the server does, whatever it is sent."""

import copy
from collections import Counter
from contextlib import closing

import pytest

pytest.importorskip("schemathesis")

import hypothesis
import jsonschema_rs
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from sigma0.config import ExitConfig
from sigma0.ladder import Always, FidelityLadder
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from tests.serve.api.test_refusals import WRONG
from tests.serve.conftest import two_rungs
from tests.serve.engine.spied_worker import SpiedService

pytestmark = pytest.mark.slow

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/v1/sigma0", "/health")
PATHS += ("/metrics", "/slots")


def lasting(app):
    """The app without its beginning and end, which schemathesis runs through with every request."""

    async def only_requests(scope, receive, send):
        if scope["type"] == "http":
            await app(scope, receive, send)
            return
        for output in ("startup", "shutdown"):
            assert (await receive())["type"] == f"lifespan.{output}"
            await send({"type": f"lifespan.{output}.complete"})

    return only_requests


# what the formats of texts stand for, of which the description has the names alone
for name, texts in {
    "regular-expression": st.from_regex(r"\A[a-c]{1,3}(x|y)?\Z"),
    "grammar": st.sampled_from(['start: "a" | "b"', 'root ::= "a" "b"?']),
    "json-schema": st.sampled_from(['{"type": "boolean"}', "{}", "true", '{"enum": ["a", 1]}']),
}.items():
    schemathesis.openapi.format(name, texts)
SETTINGS = ServerSettings(max_new_tokens=3, max_n=2, allowed_hosts=("testserver",))


def described(app):
    schema = schemathesis.openapi.from_asgi("/openapi.json", lasting(app))
    # texts out of the source code are put in without regard to formats
    schema.config.analysis.constants.enabled = False
    return schema


@pytest.fixture(scope="module")
def untooled(pocket):
    """Under a template without tools: that a choice names one of the tools given is nothing that a schema can say."""
    model, tokenizer = pocket[0], copy.deepcopy(pocket[1])
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    return model, tokenizer


@pytest.fixture(scope="module")
def description(untooled):
    with closing(SpiedService(*untooled)) as service:
        yield described(create_app(service, SETTINGS))


@pytest.fixture(scope="module")
def with_ladder(untooled):
    with closing(SpiedService(*untooled)) as service:
        yield described(create_app(service, SETTINGS, FidelityLadder(two_rungs(untooled), policy=Always())))


def test_every_route_is_described(description):
    assert set(description.raw_schema["paths"]) == set(PATHS)
    output = description.raw_schema["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(output) == {"200", "400", "401", "404", "408", "413", "421", "429", "500", "503", "504"}


def is_limited(case, answer):
    """Whether a request is refused by a limit that the description has no word for, but the answer has a name for.

    They are: the tokens of a context and of the shortest answer, an echo in a stream, what a ladder or a grammar
    cannot, and which objects are JSON Schemas that can be followed.
    """
    if answer.status_code != 400:
        return False
    code, body = answer.json()["error"]["code"], case.body
    if code != "invalid_grammar":
        alone = ("not_with_a_ladder", "not_with_a_grammar", "not_in_a_stream")
        return code in ("context_length_exceeded", "max_tokens_too_small", *alone)
    schemas = (body.get("guided_json"), (body.get("structured_outputs") or {}).get("json"))
    return any(isinstance(schema, dict) for schema in schemas) or body["response_format"]["type"] == "json_schema"


def check(description, path, mode, examples):
    """Sends what fits the description, or what does not; all of schemathesis's checks hold."""
    operation = description[path]["POST" if path.endswith("completions") else "GET"]
    counts = Counter()

    @hypothesis.settings(max_examples=examples, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case):
        if case.path_parameters and not counts:
            case.path_parameters["name"] = "pocket"
        answer = case.call()
        counts[answer.status_code] += 1
        limited = mode is GenerationMode.POSITIVE and is_limited(case, answer)
        case.validate_response(answer, excluded_checks=[positive_data_acceptance] if limited else [])

    send()
    return counts


@pytest.mark.parametrize("path", PATHS)
def test_what_fits_the_description_is_answered_as_described(description, path):
    counts = check(description, path, GenerationMode.POSITIVE, 25 if path.endswith("completions") else 5)
    # nothing but named limits refuses anything
    assert counts[200] >= 0.9 * counts.total() or path.endswith("{name}"), counts
    assert counts[200]


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("path", PATHS[:2])
def test_what_does_not_fit_is_refused_as_described(description, path):
    counts = check(description, path, GenerationMode.NEGATIVE, 25)
    assert set(counts) <= {400, 404} and counts[400] > 10, counts


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("path", PATHS[:2])
def test_so_with_a_ladder(with_ladder, path):
    counts = check(with_ladder, path, GenerationMode.POSITIVE, 15)
    assert counts[200] >= 10, counts


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("server", ["description", "with_ladder"])
def test_many_of_both(request, server, mode, path):
    counts = check(request.getfixturevalue(server), path, mode, 300)
    assert set(counts) <= {200, 400, 404} and counts.total() >= 200, counts


CHAT = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
TEXT = {"model": "pocket", "prompt": "Hi", "max_tokens": 1}
# a schema has no word for half of a surrogate pair, nor for an echo in a stream
REFUSED = [
    {**(TEXT if "prompt" in body else CHAT), **body}
    for _, body in WRONG
    if "ud800" not in ascii(body) and not body.get("echo")
]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.grid(fast=0, slow=12)
@pytest.mark.parametrize(
    "body, fits",
    [
        (CHAT, True),
        ({**CHAT, "model": "gpt-4"}, False),
        ({**CHAT, "top_logprobs": 1, "logprobs": True}, True),
        ({**CHAT, "sigma0": {"ladder": False, "trail": False, "budget": None}}, True),
        ({**CHAT, "sigma0": {"ladder": False, "budget": {}}}, False),
        ({**CHAT, "sigma0": {"exit": {"mode": "fixed"}}}, False),
        ({**CHAT, "sigma0": {"exit": {"mode": "fixed", "depth": 6}}}, True),
        ({**CHAT, "sigma0": {"exit": {"depth": 2}}}, False),
        ({**CHAT, "sigma0": {"exit": {"q": 0}}}, False),
        ({**CHAT, "sigma0": {"exit": {"q": None}}}, True),
        ({**CHAT, "sigma0": {"exit": {"mode": "margin", "theta": None, "q": None, "accel_scale": None}}}, True),
        ({**CHAT, "sigma0": {"exit": {"mode": "accel", "eps": None, "patience": None, "accel_scale": None}}}, True),
        ({**CHAT, "sigma0": {"exit": {"mode": "accel", "accel_scale": "steps"}}}, True),
        ({**CHAT, "sigma0": {"exit": {"mode": "fixed", "depth": None}}}, False),
        ({**CHAT, "sigma0": {"exit": ExitConfig(mode="margin", theta=0.9).to_dict()}}, True),
        ({**CHAT, "max_tokens": 4}, False),
        ({**CHAT, "n": 3}, False),
        ({**CHAT, "tools": []}, True),
        ({**CHAT, "tool_choice": "auto"}, True),
        ({**CHAT, "tool_choice": "required"}, False),
        ({**CHAT, "messages": [{"role": "assistant", "content": "a", "tool_calls": []}]}, True),
        ({**CHAT, "messages": [{"role": "assistant", "tool_calls": [CALL]}]}, False),
        ({**CHAT, "messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}, False),
        ({**CHAT, "messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]}, False),
        *[
            ({**CHAT, "logit_bias": {str(number): 1}}, number < 744)
            for number in (0, 9, 10, 99, 100, 589, 743, 744, 1000)
        ],
        ({**CHAT, "response_format": {"type": "json_object"}, "max_tokens": 2}, True),
        ({**CHAT, "guided_regex": "a", "guided_choice": ["a"]}, False),
        ({**CHAT, "guided_regex": "a", "guided_choice": None, "response_format": {"type": "text"}}, True),
        ({**CHAT, "guided_regex": "a", "structured_outputs": {"json_object": False}}, True),
        ({**CHAT, "guided_regex": "a", "structured_outputs": {"json_object": True}}, False),
        ({**CHAT, "structured_outputs": {"regex": "a", "json_object": True}}, False),
        ({**CHAT, "guided_choice": ["a"], "structured_outputs": {}}, True),
        ({**CHAT, "stream_options": {"include_usage": True}, "stream": True}, True),
        (TEXT, True),
        ({**TEXT, "echo": True, "max_tokens": 0}, True),
        ({**TEXT, "prompt": [743]}, True),
        ({**TEXT, "best_of": 2}, False),
        ({**TEXT, "best_of": 2, "n": 2}, True),
        *((body, False) for body in REFUSED),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_description_and_the_server_agree(description, body, fits):
    name, path = ("ChatRequest", "chat/completions") if "messages" in body else ("CompletionRequest", "completions")
    schema = {"$ref": f"#/components/schemas/{name}", "components": description.raw_schema["components"]}
    assert jsonschema_rs.validator_for(schema).is_valid(body) == fits
    answer = description[f"/v1/{path}"]["POST"].Case(body=body, media_type="application/json").call()
    assert (answer.status_code == 200) == fits and answer.status_code in (200, 400, 404), answer.text


def test_a_ladder_is_described_where_there_is_one(with_ladder):
    options = with_ladder.raw_schema["components"]["schemas"]["Sigma0Options"]
    assert options["properties"]["trail"]["type"] == "boolean" and len(options["properties"]["ladder"]["anyOf"]) == 3
    assert "calls" in options["properties"]["budget"]["anyOf"][0]["properties"]
    fits = jsonschema_rs.validator_for({**options, "components": with_ladder.raw_schema["components"]}).is_valid
    assert fits({"ladder": "token", "trail": True, "budget": {"calls": 1}}) and fits({"on_collapse": "stop"})
    assert not fits({"trail": True}) and not fits({"ladder": True, "on_collapse": "stop"})
