"""Spans of requests: what they say, what they do not say, and that nothing of them is imported unasked."""

import sys
import threading
from unittest import mock

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import ValidationError
from starlette.responses import Response

from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.collector import traces_url
from sigma0.serve.api.tracing import Tracing
from sigma0.serve.engine.messages import Busy
from tests.serve.api.test_chat import SAID, leaving, post
from tests.serve.api.test_completions import post as complete
from tests.serve.api.test_load import until
from tests.serve.conftest import served, serving
from tests.test_start import loaded

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def traced(pocket):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with served(pocket) as server:
        server.app.state.handler.tracing = Tracing(provider, "pocket")

        def spans():
            until(lambda: server.app.state.handler.open == 0)
            return exporter.get_finished_spans()

        server.spans = spans
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_span(traced, stream):
    body = {"temperature": 0.5, "seed": 4, "stop": ["nowhere"], "reasoning_effort": "low", "stream": stream}
    answer = post(traced, **body)
    (span,) = traced.spans()
    (ticket,) = traced.service.tickets
    assert span.name == "chat pocket" and span.kind == SpanKind.SERVER and span.status.status_code == StatusCode.UNSET
    output = dict(span.attributes)
    times = ("e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    end, first, queue, prefill, decode = (output.pop(f"gen_ai.latency.{name}") for name in times)
    assert end >= first > 0 and queue >= 0 and prefill > 0 and decode > 0
    assert 1 <= output.pop("sigma0.mean_depth") <= 6
    assert output.pop("sigma0.passes") > 0 and output.pop("sigma0.rows") > 0
    assert output.pop("gen_ai.usage.output_tokens") > 1
    asked = {"model": "pocket", "max_tokens": 20, "temperature": 0.5, "top_p": 1.0, "top_k": 0.0, "seed": 4}
    asked |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "choice.count": 1, "stream": stream}
    assert output == {f"gen_ai.request.{name}": value for name, value in asked.items()} | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sigma0",
        "gen_ai.response.model": "pocket",
        "gen_ai.usage.input_tokens": len(ticket.request.prompt_ids),
        "gen_ai.response.finish_reasons": ("stop",),
        "sigma0.request_id": answer.headers["x-request-id"],
        "sigma0.exit.mode": ticket.request.exit_config.mode,
        "sigma0.exit.after_exit": ticket.request.exit_config.after_exit,
        "sigma0.reasoning_effort": "low",
        "sigma0.preemptions": 0,
    }
    # neither the question, nor the answer, nor the stop string
    shown = span.to_json()
    assert not any(word in shown for word in ("Sara", "bedroom", "nowhere", SAID))


def test_a_completion_of_several_choices_is_one_span(traced):
    assert complete(traced, prompt=["Mary went", "John went to"], n=2, max_tokens=3).status_code == 200
    (span,) = traced.spans()
    output = span.attributes
    lengths = {ticket.request.prompt_ids: len(ticket.request.prompt_ids) for ticket in traced.service.tickets}
    assert span.name == "text_completion pocket" and output["gen_ai.request.choice.count"] == 4
    assert output["gen_ai.usage.input_tokens"] == sum(lengths.values())
    assert output["gen_ai.usage.output_tokens"] == 12
    assert output["gen_ai.response.finish_reasons"] == ("length",) * 4


def test_the_client_names_the_trace(traced):
    for headers in ({"traceparent": PARENT}, {"traceparent": "nonsense"}, {}):
        assert post(traced, headers, max_tokens=2).status_code == 200
    named, *others = traced.spans()
    assert f"{named.context.trace_id:032x}" == TRACE and f"{named.parent.span_id:016x}" == PARENT.split("-")[2]
    assert [item.parent for item in others] == [None, None] and len(others) == 2


@pytest.mark.cpu(3)
def test_what_fails_who_finds_no_room_and_who_leaves(traced, monkeypatch):
    assert post(traced, temperature=-1).status_code == 400, "which was never begun"
    traced.service.held.fails = ValueError("Sara is secret")
    assert post(traced).status_code == 500
    traced.service.held.tokens = threading.Semaphore(2)
    with leaving(traced) as answer:
        lines = answer.iter_lines()
        until(lambda: traced.service.status().tokens >= 2)
        while '"depth"' not in next(lines):
            pass
    with monkeypatch.context() as patched:
        patched.setattr(traced.service, "submit", mock.Mock(side_effect=Busy("full")))
        assert post(traced).status_code == 429
    failed, left, refused = traced.spans()
    assert refused.attributes["error.type"] == "Busy"
    assert failed.status.status_code == StatusCode.ERROR and failed.attributes["error.type"] == "RequestFailed"
    assert failed.events == () and "secret" not in failed.to_json()
    assert left.status.status_code == StatusCode.UNSET and "error.type" not in left.attributes
    assert left.attributes["gen_ai.usage.output_tokens"] in (1, 2)
    assert "gen_ai.response.finish_reasons" not in left.attributes


def test_spans_go_to_a_collector_by_http(pocket):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = []

    async def collector(scope, receive, send):
        got.append((scope["path"], (await receive())["body"]))
        await Response()(scope, receive, send)

    with serving(collector, lifespan="off") as url, served(pocket, ServerSettings(otlp_endpoint=url)) as server:
        assert post(server).status_code == 200
    # the server's end sends what waited
    ((path, body),) = got
    sent = ExportTraceServiceRequest.FromString(body).resource_spans[0]
    assert path == "/v1/traces"
    assert [span.name for span in sent.scope_spans[0].spans] == ["chat pocket"]
    assert {item.key: item.value.string_value for item in sent.resource.attributes}["service.name"] == "sigma0"


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector.example/", "https://collector.example/v1/traces"),
        ("http://host/otlp/v1/traces", "http://host/otlp/v1/traces"),
        *((other, None) for other in ("127.0.0.1:4318", "grpc://host:4317", "http://", "file:///tmp/x")),
    ],
)
def test_addresses_of_collectors(endpoint, url):
    if url is not None:
        assert traces_url(endpoint) == url
    else:
        with pytest.raises(ValidationError, match="is no address of an OTLP collector"):
            ServerSettings(otlp_endpoint=endpoint)


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValidationError, match=r"pip install 'sigma0-lm\[otel\]'"):
        ServerSettings(otlp_endpoint="http://127.0.0.1:4318")


@pytest.mark.exhaustive
def test_nothing_of_it_is_imported_where_it_is_off():
    """FastAPI itself may ask whether OpenTelemetry is there; its SDK and exporters are what this server would use."""
    modules = loaded("import sigma0.serve.api.app, sigma0.serve.api.access as access\naccess.ServerSettings()")
    assert not [name for name in modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
