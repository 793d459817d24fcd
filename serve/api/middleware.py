"""The outermost layer: a name for every request, and an answer where nothing else had one."""

import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sigma0.serve.api.errors import as_api_error


class RequestIdMiddleware:
    """Names requests (`x-request-id`), and answers 500 for a failure that nothing inside foresaw.

    A request that has its name (`request_id` in the scope's state) keeps it.

    Args:
        app: What is asked behind it.
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
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:
            # the request alone fails: it is logged and told, and the server goes on
            told = as_api_error(error, request_id)
            if started:
                raise ConnectionAbortedError(f"request {request_id} broke off") from None
            await told.response()(scope, receive, named)
