"""Front of a Ray Serve application: the API of one machine over all replicas, without weights."""

import re
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sigma0.commands.console import log_to_stderr
from sigma0.commands.ladder import open_ladder
from sigma0.commands.options import LoadOptions
from sigma0.models.load import load
from sigma0.serve.api.access import Environment, ServerSettings
from sigma0.serve.api.app import create_app, drain
from sigma0.serve.cluster.cluster import bind_to_loopback
from sigma0.serve.cluster.service import RayService
from sigma0.serve.cluster.settings import RaySettings

_PLAIN = re.compile(r"[A-Za-z0-9_-]{8,64}")


class ProxyRequestId:
    """ASGI middleware: takes over the request id that Serve's proxy sends to the client.

    Args:
        app: The next layer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        name = Headers(scope=scope).get("x-request-id", "") if scope["type"] == "http" else ""
        if not _PLAIN.fullmatch(name):
            # an id that a client made up is not logged
            await self._app(scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "request_id": name}

        async def unnamed(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self._app(scope, receive, unnamed)


class Front:
    """Deployment of the API; Serve makes one in its own process, `sigma0.serve.cluster.app` wraps it.

    Args:
        engines: The deployment of replicas.
        settings: Of the application.
    """

    def __init__(self, engines: DeploymentHandle, settings: RaySettings) -> None:
        log_to_stderr()
        bind_to_loopback()
        # without weights: those are in the replicas
        model, tokenizer = load(settings.model, device="meta")
        self._service = RayService(engines, model, tokenizer, settings)
        self._settings = settings

    def __serve_build_asgi_app__(self) -> Any:
        """The ASGI app; Serve runs its lifespan."""
        settings = self._settings
        limits = ServerSettings(
            api_key=settings.api_key or Environment().api_key,
            api_key_file=settings.api_key_file,
            max_new_tokens=settings.max_new_tokens,
            request_timeout=settings.request_timeout,
            allowed_hosts=settings.allowed_hosts,
            otlp_endpoint=settings.otlp_endpoint,
            on_collapse=settings.on_collapse,
            tool_parser=settings.tool_parser,
        )
        ladder = None
        if settings.ladder is not None:
            device = "cpu" if settings.device == "auto" else settings.device
            loaded = LoadOptions(device=device, dtype=settings.dtype, backend=settings.backend)
            ladder = open_ladder(settings.ladder, settings.budget, settings.policy, loaded)
        self._app = create_app(self._service, limits, ladder)
        return ProxyRequestId(self._app)

    async def drain(self) -> None:
        """Refuses further requests (503), and returns once those that were taken are answered."""
        await drain(self._app)
