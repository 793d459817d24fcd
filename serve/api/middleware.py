"""ASGI middleware: request ids and a last-resort 500."""

import logging
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sigma0.serve.api.errors import as_api_error

logger = logging.getLogger(__name__)


class RequestIdMiddleware:
    """Adds request ids (`x-request-id`), and answers 500 for exceptions that no inner layer handled.

    An id that is already there (`request_id` in the scope's state) is kept.

    Args:
        app: The next layer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {}).setdefault("request_id", secrets.token_hex(8))
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            try:
                await send(message)
            except (OSError, RuntimeError) as error:
                # a transport that is closed already says so in either
                raise ClientDisconnect from error

        try:
            await self._app(scope, receive, named)
        except ClientDisconnect:
            logger.warning("request %s: its client has left", request_id)
        except Exception as error:
            # only this request fails: the server goes on
            failure = as_api_error(error, request_id)
            if started:
                raise ConnectionAbortedError(f"request {request_id} broke off") from None
            await failure.response()(scope, receive, named)
