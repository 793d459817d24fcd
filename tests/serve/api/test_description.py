"""What `/openapi.json` says is what the server does, whatever it is sent."""

import pytest

pytest.importorskip("schemathesis")

import hypothesis
import jsonschema_rs
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance, status_code_conformance

from sigma0.config import ExitConfig
from sigma0.ladder import FidelityLadder, Rung
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from tests.serve.engine.spied_worker import SpiedService

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/sigma0",
    "/health",
    "/metrics",
    "/slots",
)


def lasting(app):
    """The app without its beginning and end, which schemathesis runs through with every request."""

    async def only_requests(scope, receive, send):
        if scope["type"] == "http":
            await app(scope, receive, send)
            return
        for told in ("startup", "shutdown"):
            assert (await receive())["type"] == f"lifespan.{told}"
            await send({"type": f"lifespan.{told}.complete"})

    return only_requests


@pytest.fixture(scope="module")
def description(pocket):
    app = create_app(SpiedService(*pocket), ServerSettings(max_new_tokens=3, max_n=2, allowed_hosts=("testserver",)))
    return schemathesis.openapi.from_asgi("/openapi.json", lasting(app))


def test_every_route_is_described(description):
    assert set(description.raw_schema["paths"]) == set(PATHS)
    told = description.raw_schema["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(told) == {"200", "400", "401", "404", "408", "413", "421", "429", "500", "503", "504"}


def error_code(answer):
    return answer.json()["error"]["code"] if answer.status_code >= 400 else None


@pytest.mark.parametrize("path", PATHS)
def test_nothing_that_is_sent_breaks_it_or_is_answered_otherwise_than_described(description, path):
    method = "POST" if path.endswith("completions") else "GET"
    operation = description[path][method]
    counts = {}

    @hypothesis.settings(
        max_examples=25 if method == "POST" else 5,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def send(case):
        if case.path_parameters and not counts:
            case.path_parameters["name"] = "pocket"
        answer = case.call()
        counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
        checks = [not_a_server_error, status_code_conformance]
        # what fits the description is answered: it has no word for tokens, of which a context holds so many, nor for
        # which texts are regular expressions, schemas or grammars
        if method == "POST" and error_code(answer) not in ("context_length_exceeded", "invalid_grammar"):
            checks.append(positive_data_acceptance)
        case.validate_response(answer, checks=checks)

    send()
    assert counts.get(200), counts


CHAT = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
TEXT = {"model": "pocket", "prompt": "Hi", "max_tokens": 1}

ALL_FIELDS = ExitConfig(mode="margin", theta=0.9).to_dict()


@pytest.mark.parametrize(
    "body, fits",
    [
        (CHAT, True),
        ({**CHAT, "model": "gpt-4"}, False),
        ({**CHAT, "top_logprobs": 1}, False),
        ({**CHAT, "top_logprobs": 1, "logprobs": True}, True),
        ({**CHAT, "top_logprobs": 0}, True),
        ({**CHAT, "sigma0": {"trail": True}}, False),
        ({**CHAT, "sigma0": {"ladder": True}}, False),
        ({**CHAT, "sigma0": {"ladder": False, "trail": False, "budget": None}}, True),
        ({**CHAT, "sigma0": {"budget": {"calls": 1}}}, False),
        ({**CHAT, "sigma0": {"exit": {"mode": "fixed"}}}, False),
        ({**CHAT, "sigma0": {"exit": {"mode": "fixed", "depth": 7}}}, False),
        ({**CHAT, "sigma0": {"exit": {"mode": "fixed", "depth": 6}}}, True),
        ({**CHAT, "sigma0": {"exit": {"depth": 2}}}, False),
        ({**CHAT, "sigma0": {"exit": {"q": 0}}}, False),
        ({**CHAT, "sigma0": {"exit": {"q": None}}}, True),
        ({**CHAT, "sigma0": {"exit": {"mode": "margin", "theta": None, "q": None, "accel_scale": None}}}, True),
        ({**CHAT, "sigma0": {"exit": {"mode": "accel", "eps": None, "patience": None, "accel_scale": None}}}, True),
        ({**CHAT, "sigma0": {"exit": {"mode": "accel", "accel_scale": "steps"}}}, True),
        ({**CHAT, "sigma0": {"exit": {"mode": "margin", "accel_scale": "steps"}}}, False),
        ({**CHAT, "sigma0": {"exit": {"mode": "fixed", "depth": None}}}, False),
        ({**CHAT, "sigma0": {"exit": {**ALL_FIELDS, "q": 0.5}}}, False),
        ({**CHAT, "sigma0": {"exit": ALL_FIELDS}}, True),
        ({**CHAT, "max_tokens": 4}, False),
        ({**CHAT, "n": 3}, False),
        ({**CHAT, "tools": []}, True),
        ({**CHAT, "tools": [{}]}, False),
        ({**CHAT, "guided_json": {}}, True),
        ({**CHAT, "guided_json": []}, False),
        ({**CHAT, "guided_xml": {}}, False),
        ({**CHAT, "response_format": {"type": "json_object"}}, True),
        ({**CHAT, "response_format": {"type": "json_schema"}}, False),
        ({**CHAT, "stream_options": {"include_usage": True}}, False),
        ({**CHAT, "stream_options": {"include_usage": True}, "stream": True}, True),
        ({**CHAT, "cache_salt": ""}, False),
        (TEXT, True),
        ({**TEXT, "echo": True}, False),
        ({**TEXT, "echo": False}, True),
        ({**TEXT, "prompt": ""}, False),
        ({**TEXT, "prompt": []}, False),
        ({**TEXT, "prompt": ["Hi", ""]}, False),
        ({**TEXT, "prompt": [[]]}, False),
        ({**TEXT, "prompt": [595]}, True),
        ({**TEXT, "prompt": [596]}, False),
        ({**TEXT, "best_of": 2}, False),
        ({**TEXT, "best_of": 2, "n": 2}, True),
        ({**TEXT, "best_of": 1, "n": 2}, False),
    ],
    ids=str,
)
def test_the_description_and_the_server_agree(description, body, fits):
    name, path = ("ChatRequest", "chat/completions") if "messages" in body else ("CompletionRequest", "completions")
    schema = {"$ref": f"#/components/schemas/{name}", "components": description.raw_schema["components"]}
    assert jsonschema_rs.validator_for(schema).is_valid(body) == fits
    answer = description[f"/v1/{path}"]["POST"].Case(body=body, media_type="application/json").call()
    assert (answer.status_code == 200) == fits and answer.status_code in (200, 400, 404), answer.text


def test_a_ladder_is_described_where_there_is_one(pocket):
    service = SpiedService(*pocket)
    ladder = FidelityLadder([Rung.local(*pocket, "pocket"), Rung.local(*pocket, "above")])
    try:
        options = create_app(service, ServerSettings(), ladder).openapi()["components"]["schemas"]["Sigma0Options"]
    finally:
        service.close()
    assert options["properties"]["trail"]["type"] == "boolean" and len(options["properties"]["ladder"]["anyOf"]) == 3
    assert "calls" in options["properties"]["budget"]["anyOf"][0]["properties"]
