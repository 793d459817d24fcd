"""What `/openapi.json` says is what the server does, whatever it is sent."""

import pytest

pytest.importorskip("schemathesis")

import hypothesis
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance, status_code_conformance

from sigma0.serve.app import create_app
from sigma0.serve.limits import ServerSettings
from tests.serve.spied_service import SpiedService

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/sigma0",
    "/health",
    "/metrics",
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
    assert set(told) == {"200", "400", "401", "404", "413", "421", "429", "500", "503", "504"}


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
        # what fits the description is answered: it has no word for tokens, of which a context holds so many
        if method == "POST" and error_code(answer) != "context_length_exceeded":
            checks.append(positive_data_acceptance)
        case.validate_response(answer, checks=checks)

    send()
    assert counts.get(200), counts
