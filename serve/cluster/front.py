"""The front of a Ray Serve application: the same app as on one machine, over all replicas. It holds no weights."""

import logging
import re
from typing import Any

from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sigma0.commands.console import quiet_transformers
from sigma0.commands.ladder import open_ladder
from sigma0.models.load import load
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app, drain
from sigma0.serve.cluster.cluster import bind_to_loopback
from sigma0.serve.cluster.service import RayService
from sigma0.serve.cluster.settings import RaySettings

_PLAIN = re.compile(r"[A-Za-z0-9_-]{8,64}")


class Environment(BaseSettings):
    """What need not stand in the application's arguments, which the cluster shows."""

    model_config = SettingsConfigDict(env_prefix="SIGMA0_", extra="ignore", env_ignore_empty=True)

    api_key: SecretStr | None = None


class ProxyRequestId:
    """Calls a request what Serve's proxy calls it, which tells the client so: else it would have two names.

    Args:
        app: What is asked behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        name = Headers(scope=scope).get("x-request-id", "") if scope["type"] == "http" else ""
        if not _PLAIN.fullmatch(name):
            # what a client made up is not for the log
            await self._app(scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "request_id": name}

        async def unnamed(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self._app(scope, receive, unnamed)


class Front:
    """Serve makes one, in a process of its own; `sigma0.serve.cluster.app` wraps it.

    Args:
        engines: The deployment of replicas.
        settings: Of the application.
    """

    def __init__(self, engines: DeploymentHandle, settings: RaySettings) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        quiet_transformers()
        bind_to_loopback()
        # no weights: what they say is the replicas' business
        model, tokenizer = load(settings.model, device="meta")
        self._service = RayService(engines, model, tokenizer, settings)
        self._settings = settings

    def __serve_build_asgi_app__(self) -> Any:
        """The app; Serve runs its lifespan."""
        settings = self._settings
        limits = ServerSettings(
            api_key=settings.api_key or Environment().api_key,
            max_new_tokens=settings.max_new_tokens,
            request_timeout=settings.request_timeout,
            allowed_hosts=settings.allowed_hosts,
            on_collapse=settings.on_collapse,
        )
        ladder = None
        if settings.ladder is not None:
            device = "cpu" if settings.device == "auto" else settings.device
            options = settings.budget, settings.policy, device, settings.dtype, settings.backend
            ladder = open_ladder(settings.ladder, *options)
        self._app = create_app(self._service, limits, ladder)
        return ProxyRequestId(self._app)

    async def drain(self) -> None:
        """Takes no more requests (503), and returns once those that it took are answered."""
        await drain(self._app)
