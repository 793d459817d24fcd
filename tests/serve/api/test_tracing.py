"""Spans of requests: what they say, what they do not say, and that nothing of them is imported unasked."""

import http.server
import subprocess
import sys
import threading
from unittest import mock

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import ValidationError

from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.collector import traces_url
from sigma0.serve.api.tracing import Tracing
from sigma0.serve.engine.messages import Busy
from tests.serve.api.test_chat import ASKED, SAID, post
from tests.serve.api.test_load import until
from tests.serve.conftest import served

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def traced(pocket):
    """A server whose spans come into a list."""
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
    end, first, queue, prefill, decode = (
        output.pop(f"gen_ai.latency.{name}")
        for name in (
            "e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode",
        )
    )  # fmt: skip
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
    body = {"model": "pocket", "prompt": ["Mary went", "John went to"], "n": 2, "max_tokens": 3}
    assert httpx.post(f"{traced.url}/v1/completions", json=body, timeout=60).status_code == 200
    (span,) = traced.spans()
    output = span.attributes
    lengths = {ticket.request.prompt_ids: len(ticket.request.prompt_ids) for ticket in traced.service.tickets}
    assert span.name == "text_completion pocket" and output["gen_ai.request.choice.count"] == 4
    assert output["gen_ai.usage.input_tokens"] == sum(lengths.values())
    assert output["gen_ai.usage.output_tokens"] == 12
    assert output["gen_ai.response.finish_reasons"] == ("length",) * 4


def test_the_client_names_the_trace(traced):
    body = {"model": "pocket", "messages": ASKED, "max_tokens": 2}
    for headers in ({"traceparent": PARENT}, {"traceparent": "nonsense"}, {}):
        url = f"{traced.url}/v1/chat/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
    named, *others = traced.spans()
    assert f"{named.context.trace_id:032x}" == TRACE and f"{named.parent.span_id:016x}" == PARENT.split("-")[2]
    assert [item.parent for item in others] == [None, None] and len(others) == 2


@pytest.mark.cpu(3)
def test_what_fails_who_finds_no_room_and_who_leaves(traced, monkeypatch):
    assert post(traced, temperature=-1).status_code == 400, "which was never begun"
    traced.service.held.fails = ValueError("Sara is secret")
    assert post(traced).status_code == 500
    body = {"model": "pocket", "messages": ASKED, "max_tokens": 20, "stream": True}
    traced.service.held.tokens = threading.Semaphore(2)
    with httpx.stream("POST", f"{traced.url}/v1/chat/completions", json=body, timeout=60) as answer:
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

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        with served(pocket, ServerSettings(otlp_endpoint=endpoint)) as server:
            assert post(server).status_code == 200
        # the server's end sends what waited
        ((path, body),) = got
        collector.shutdown()
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
    program = (
        "import sys\n"
        "from sigma0.serve.api.app import create_app\n"
        "from sigma0.serve.api.access import ServerSettings\n"
        "ServerSettings()\n"
        "loaded = [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]\n"
        "sys.exit(str(loaded) if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
