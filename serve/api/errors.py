"""Failures in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import asyncio
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from sigma0.errors import reason
from sigma0.serve.api.fields import LONG_NUMBER, UNSUPPORTED, UNSUPPORTED_IN_MESSAGES, UNSUPPORTED_ROLES
from sigma0.serve.engine.messages import Busy, RequestCutOff, RequestFailed, ShuttingDown, Unavailable

logger = logging.getLogger(__name__)
RETRY_AFTER = "1"
# all other statuses are invalid_request_error, a wrong key and an unknown model included, as with OpenAI
TYPES = {
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
# Expected values of a union of types, in place of one error for each of its members.
EXPECTED = {
    "prompt": "must be a string, a list of strings, a list of token ids, or a list of such lists, none of them empty",
    "stop": "must be a string or a list of up to 4 strings, none of them empty",
    "content": "must be a string or a list of text parts",
    "tool_choice": 'must be "none", "auto", "required", a function of the tools, or allowed_tools',
    "ladder": 'must be true, false, "token", "draft" or "answer"',
}
SHOWN = 40


class ErrorDetail(BaseModel):
    """The error of a failed request.

    Attributes:
        message: In a sentence.
        type: Its kind.
        param: The invalid field; None where none is.
        code: Short name of the failure; None where it has none.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is a failure.

    Attributes:
        error: The error.
    """

    error: ErrorDetail


class ApiError(HTTPException):
    """A failure that is sent to the client.

    Args:
        status: Of the HTTP answer.
        message: In a sentence; it may name bad values, but holds no prompt.
        param: The invalid field.
        code: Short name of the failure.
        headers: Of the HTTP answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = TYPES.get(self.status_code, "invalid_request_error")
        param = None if self.param is None else _sendable(self.param)
        return {"error": {"message": _sendable(str(self.detail)), "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body, self.status_code, self.headers)


def _sendable(text: str) -> str:
    """A text without halves of surrogate pairs, which names of unknown fields may hold, and which cannot be encoded."""
    return text.encode(errors="replace").decode()


def busy(error: Busy) -> ApiError:
    """429 with Retry-After: the queue is full."""
    return ApiError(429, str(error) or "the queue is full", code="queue_full", headers={"Retry-After": RETRY_AFTER})


def unavailable(why: str, code: str) -> ApiError:
    """503 with Retry-After: no engine is up, or the server is shutting down."""
    headers = {"Retry-After": RETRY_AFTER}
    if code == "shutting_down":
        headers["Connection"] = "close"
    return ApiError(503, why, code=code, headers=headers)


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """A failure as sent to the client; unexpected ones are logged, without anything that the client sent.

    Args:
        error: The exception.
        request_id: In the log line and in the answer, to match them.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ShuttingDown | RequestCutOff):
        return unavailable(str(error), "shutting_down")
    if isinstance(error, Busy):
        return busy(error)
    if isinstance(error, Unavailable):
        return unavailable(str(error), "unavailable")
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return ApiError(504, "the request took longer than this server allows", code="timeout")
    if isinstance(error, RequestFailed) and error.cause == "GrammarError":
        why = "the answer cannot go on: what it has to be, with the other settings, leaves none of the model's tokens"
        return ApiError(400, f"{why} (request {request_id})", code="invalid_grammar")
    # no message and no values: they may quote a prompt; file, line and source of each frame do not
    frames = "".join(traceback.format_tb(error.__traceback__))
    cause = error.cause if isinstance(error, RequestFailed) else error.__cause__ and type(error.__cause__).__name__
    by = f", by {cause}" if cause else ""
    logger.error("request %s failed: %s%s\n%s", request_id, type(error).__name__, by, frames)
    what = "the request failed" if isinstance(error, RequestFailed) else "internal error"
    return ApiError(500, f"{what} (request {request_id})", code="internal_error")


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The first bad field, in OpenAI's shape.

    Args:
        errors: As pydantic and FastAPI list them.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    path = [part for part in first["loc"] if part != "body"]
    param, field = _name(path)
    if not param:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    if refused := _unsupported(path, field, first):
        return ApiError(400, f"{param}: {refused}", param, "unsupported_parameter")
    if len(path) == 1 and first["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: this server has no such field: leave it out", param, "unknown_parameter")
    about = _about(errors, first)
    # of a union, the member that takes a text says more than those that do not
    texts = [error for error in about if isinstance(error.get("input"), str)]
    bounds = [error for error in texts if error["type"] in ("value_error", "too_long")]
    if bounds and len(about) > 1:
        first = bounds[0]
    why = EXPECTED[field] if field in EXPECTED and len(about) > 1 and not bounds else reason(first)
    why = why.removeprefix("Input ")
    if isinstance(first.get("input"), str) and first["type"] == "too_long":
        # a text is counted as a list would be
        why = f"should have at most {first['ctx']['max_length']} characters"
    value = first.get("input")
    scalar = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= SHOWN)
    # the content of messages is private
    shown = f", got {str(value)[:SHOWN]!r}" if scalar and path[0] not in ("messages", "prompt") else ""
    return ApiError(400, f"{param}: {why}{shown}", param=param)


def _unsupported(path: Sequence[str | int], field: str, error: Any) -> str | None:
    """Why an OpenAI field is not supported; None of any other field."""
    if path[0] != "messages":
        return UNSUPPORTED.get(str(path[0]))
    if field == "role" and error.get("input") in UNSUPPORTED_ROLES:
        return "this server takes tools instead: send the role tool, with tool_call_id"
    return UNSUPPORTED_IN_MESSAGES.get(field)


def _name(path: Sequence[str | int]) -> tuple[str, str]:
    """The path of a field as one string, and its last name; members of unions are left out."""
    depth = {"messages": 6, "tools": 4, "sigma0": 3, "stream_options": 2}.get(str(path[0]), 1) if path else 0
    name, field = "", ""
    for part in path[:depth]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif "[" not in part and part not in ("str", "bool"):
            name += f".{part[:SHOWN]}" if name else part[:SHOWN]
            field = part
        else:
            break
    return name, field


def _about(errors: Sequence[Any], first: Any) -> list[Any]:
    """The errors about the same field as the first."""
    name = _name([part for part in first["loc"] if part != "body"])
    return [error for error in errors if _name([part for part in error["loc"] if part != "body"]) == name]


def install(app: FastAPI) -> None:
    """Makes an app answer every failure in OpenAI's shape."""

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors()).response()

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StarletteHTTPException)
        if error.status_code == 400 and not isinstance(error, ApiError):
            # FastAPI's own, of what json.loads raises beside its own error
            message = f"the body is not valid JSON in UTF-8, is nested too deep, or holds {LONG_NUMBER}"
            error = ApiError(400, message, code="invalid_json")
        elif not isinstance(error, ApiError):
            error = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return error.response()

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(StarletteHTTPException, http)
