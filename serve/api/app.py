"""ASGI app: OpenAI's protocol over a service."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.middleware import Middleware
from starlette.staticfiles import StaticFiles

from sigma0.commands.telemetry import TelemetryLog
from sigma0.serve.api import errors
from sigma0.serve.api.access import BodyLimit, KeyCheck, ServerSettings, ShutdownSignal
from sigma0.serve.api.description import Served, describe
from sigma0.serve.api.errors import as_api_error
from sigma0.serve.api.handlers import RequestHandler
from sigma0.serve.api.hosts import HostCheck
from sigma0.serve.api.info import PAGE, failure_responses, info_router
from sigma0.serve.api.large import LargeBodies, turn_is_over
from sigma0.serve.api.metrics import Metrics
from sigma0.serve.api.middleware import RequestIdMiddleware
from sigma0.serve.api.pools import BoundedPool
from sigma0.serve.api.protocol import ChatRequest, CompletionRequest
from sigma0.serve.api.requests import ParsedRequest, RequestParser
from sigma0.serve.api.structured import GrammarChecks
from sigma0.serve.api.tracing import Tracing
from sigma0.serve.engine.messages import Service

if TYPE_CHECKING:
    from sigma0.ladder import FidelityLadder

_FAILURES = failure_responses(400, 401, 404, 408, 413, 429, 500, 503, 504)
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with stream=true its chunks as server-sent events.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
    **_FAILURES,
}


def create_app(
    service: Service,
    settings: ServerSettings,
    ladder: "FidelityLadder | None" = None,
    telemetry: TelemetryLog | None = None,
) -> FastAPI:
    """The server's app, for uvicorn or any other ASGI server.

    Args:
        service: The engine; it is drained when the app shuts down.
        settings: Limits and the API key.
        ladder: Answers requests with `sigma0.ladder`, and with `SIGMA0_ROUTING=1` those whose verdict says escalate.
        telemetry: Log with a line for each choice of a request; closed by the caller.

    Returns:
        The app. `sigma0.serve.api.app.drain` finishes its requests ahead of its shutdown.
    """
    metrics = Metrics(service)
    ladder_runner = None
    if ladder is not None:
        from sigma0.serve.api.ladder import LadderRunner

        ladder_runner = LadderRunner(ladder, int(service.model.num_loops), service.name)
    parser = RequestParser(service, settings, ladder_runner)
    handler = RequestHandler(service, settings, ladder_runner, metrics)
    handler.telemetry = telemetry
    if settings.otlp_endpoint is not None:
        handler.tracing = Tracing.to(settings.otlp_endpoint, service.name)
    # two threads: large bodies come one at a time, so that the other thread stays free for small ones
    parsing_pool, ending = BoundedPool("parsing", 2, settings.max_parsing), ShutdownSignal()
    grammars = GrammarChecks(service, settings.max_parsing)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await drain(app)
        parsing_pool.close()
        grammars.close()
        await handler.close()
        if ladder_runner is not None:
            ladder_runner.close()

    middleware = [Middleware(RequestIdMiddleware), Middleware(HostCheck, allowed=settings.allowed_hosts)]
    if keys := settings.keys:
        middleware.append(Middleware(KeyCheck, keys=keys))
    limit, seconds = settings.max_body_bytes, settings.body_timeout
    middleware.append(Middleware(BodyLimit, limit=limit, seconds=seconds, ending=ending))
    middleware.append(Middleware(LargeBodies))
    # FastAPI's documentation pages load scripts from other hosts; /openapi.json stays
    app = FastAPI(title="sigma0", docs_url=None, redoc_url=None, lifespan=lifespan, middleware=middleware)
    app.state.handler, app.state.service, app.state.ending = handler, service, ending
    errors.install(app)
    app.mount("/page", StaticFiles(directory=PAGE))
    app.include_router(info_router(service, parser, ladder_runner, metrics, handler, int(time.time())))

    async def answer(request: Request, body: ChatRequest | CompletionRequest) -> Response:
        kind = "chat" if isinstance(body, ChatRequest) else "completion"
        try:
            # before tokenization, which a flood of requests would keep busy too
            with handler.room():
                parsed: ParsedRequest = await parsing_pool.run(parser.parse, body)
                turn_is_over(request.scope)
                if parsed.grammar is not None and parsed.structured is not None:
                    least = min(choice.request.max_new_tokens for choice in parsed.choices)
                    await grammars.check(parsed.structured, parsed.grammar, least)
            return await handler.handle(request, parsed)
        except Exception as error:
            failure = as_api_error(error, str(request.state.request_id))
            metrics.requests.labels(kind, str(failure.status_code)).inc()
            raise failure from error

    @app.post("/v1/chat/completions", response_model=None, responses=_STREAMED)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answers a chat."""
        return await answer(request, body)

    @app.post("/v1/completions", response_model=None, responses=_STREAMED)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continues texts."""
        return await answer(request, body)

    describe(app, Served(service, settings, ladder_runner))
    return app


def stop_taking(app: FastAPI) -> None:
    """Refuses further requests (503), also those whose body is incomplete; may be called from any thread.

    Args:
        app: As `create_app` returned it.
    """
    handler: RequestHandler = app.state.handler
    handler.draining = True
    ending: ShutdownSignal = app.state.ending
    ending.begin()


async def drain(app: FastAPI) -> None:
    """Refuses further requests (503), and returns once those that were taken are answered.

    Args:
        app: As `create_app` returned it.
    """
    stop_taking(app)
    service: Service = app.state.service
    await service.drain()
