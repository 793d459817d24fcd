"""OpenTelemetry: a span for each request, with how long it waited, was read and was written.

Names are those of the semantic conventions for generative AI, and for the times in an engine, which the conventions do
not have, those that vLLM gives them. No span holds anything of a prompt, an answer, a stop string or a key.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from sigma0.errors import needs_extra
from sigma0.serve.api.collector import traces_url
from sigma0.serve.api.requests import ParsedRequest
from sigma0.serve.engine.messages import RequestOutput, Times, TokenOutput

Event = TokenOutput | RequestOutput
# Seconds for a batch of spans to be sent, also when the server ends.
SENDING = 5.0
_OPERATIONS = {"chat": "chat", "completion": "text_completion"}


class Tracing:
    """Makes spans.

    Args:
        provider: An `opentelemetry.sdk.trace.TracerProvider`; shut down by `close`.
        model: Name of the served model.
    """

    def __init__(self, provider: Any, model: str) -> None:
        with needs_extra("otel"):
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("sigma0")

    @staticmethod
    def to(endpoint: str, model: str) -> "Tracing":
        """Sends spans to a collector by OTLP over HTTP, in batches and from a thread.

        Args:
            endpoint: As `traces_url` takes it.
            model: Name of the served model.

        Raises:
            ValueError: For an address that is none, or without the extra `otel`.
        """
        url = traces_url(endpoint)
        with needs_extra("otel"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "sigma0")})
        # `close` shuts it down
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=SENDING)))
        return Tracing(provider, model)

    def begin(self, parsed: ParsedRequest, request_id: str, headers: Mapping[str, str]) -> "RequestSpan":
        """Starts the span of a request.

        Args:
            parsed: The request.
            request_id: Its id.
            headers: Of the request: `traceparent` names the span that it belongs to.
        """
        operation = _OPERATIONS[parsed.kind]
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "sigma0",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "sigma0.request_id": request_id,
                **_asked(parsed),
            },
        )
        error = self._trace.Status(self._trace.StatusCode.ERROR)
        return RequestSpan(span, error)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request.

    Args:
        span: The span.
        error: Status of one that failed.
    """

    def __init__(self, span: Any, error: Any) -> None:
        self._span, self._error = span, error
        self._began = time.monotonic()
        self._first: float | None = None
        self._tokens = 0
        self._ends: list[RequestOutput] = []

    def watch(self, observe: Callable[[int, Event], None]) -> Callable[[int, Event], None]:
        """An observer of the request's events that also calls `observe`."""

        def both(index: int, event: Event) -> None:
            if isinstance(event, RequestOutput):
                self._ends.append(event)
            else:
                self._tokens += 1
                if self._first is None:
                    self._first = time.monotonic() - self._began
            observe(index, event)

        return both

    def close(self, failure: Exception | None) -> None:
        """Ends the span.

        Args:
            failure: The exception that ended the request; None where it finished, or its client disconnected.
        """
        span, now = self._span, time.monotonic() - self._began
        attributes: dict[str, Any] = {
            "gen_ai.usage.output_tokens": sum(len(end.tokens) for end in self._ends) if self._ends else self._tokens,
            "gen_ai.latency.e2e": now,
        }
        if self._first is not None:
            attributes["gen_ai.latency.time_to_first_token"] = self._first
        if self._ends:
            attributes |= _told(self._ends)
        span.set_attributes(attributes)
        if failure is not None:
            # its message may quote a prompt
            span.set_attribute("error.type", type(failure).__name__)
            span.set_status(self._error)
        span.end()


def _asked(parsed: ParsedRequest) -> dict[str, Any]:
    request = parsed.choices[0].request
    sampling = request.sampling
    prompts = {choice.prompt: len(choice.request.prompt_ids) for choice in parsed.choices}
    asked: dict[str, Any] = {
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.choice.count": len(parsed.choices),
        "gen_ai.request.stream": parsed.stream,
        "gen_ai.usage.input_tokens": sum(prompts.values()),
        "sigma0.exit.mode": parsed.exit_config.mode,
        "sigma0.exit.after_exit": parsed.exit_config.after_exit,
    }
    if sampling.seed is not None:
        asked["gen_ai.request.seed"] = sampling.seed
    if parsed.effort is not None:
        asked["sigma0.reasoning_effort"] = parsed.effort
    return asked


def _told(ends: list[RequestOutput]) -> dict[str, Any]:
    """What is known of choices that are over; of times the longest, since choices run beside one another."""
    depths = [token.depth for end in ends for token in end.tokens]
    output: dict[str, Any] = {
        "gen_ai.response.finish_reasons": [end.finish_reason for end in ends],
        "sigma0.passes": sum(end.passes for end in ends),
        "sigma0.rows": sum(end.rows for end in ends),
        "sigma0.preemptions": sum(end.preemptions for end in ends),
    }
    if depths:
        output["sigma0.mean_depth"] = sum(depths) / len(depths)
    times = [end.times for end in ends if end.times is not None]
    if times:
        queue, prefill, decode = (max(item[place] for item in times) for place in range(len(Times._fields)))
        output |= {
            "gen_ai.latency.time_in_queue": queue,
            "gen_ai.latency.time_in_model_prefill": prefill,
            "gen_ai.latency.time_in_model_decode": decode,
        }
    return output
