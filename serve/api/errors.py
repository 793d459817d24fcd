"""Failures in the shape that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`."""

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
from sigma0.serve.api.fields import UNSUPPORTED, UNSUPPORTED_IN_MESSAGES, UNSUPPORTED_ROLES
from sigma0.serve.engine.messages import Busy, RequestCutOff, RequestFailed, ShuttingDown, Unavailable

logger = logging.getLogger(__name__)
RETRY_AFTER = "1"
# of all others it is invalid_request_error, a wrong key and an unknown model included, as OpenAI has it
TYPES = {
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
# What a union of types asks for, in place of one complaint for each of its members.
EXPECTED = {
    "prompt": "must be a string, a list of strings, a list of token ids, or a list of such lists, none of them empty",
    "stop": "must be a string or a list of up to 4 strings, none of them empty",
    "content": "must be a string or a list of text parts",
    "ladder": 'must be true, false, "token", "draft" or "answer"',
}
SHOWN = 40


class ErrorDetail(BaseModel):
    """What went wrong.

    Attributes:
        message: In a sentence.
        type: Its kind.
        param: The field that is to blame; None where none is.
        code: Its short name; None where it has none.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is a failure.

    Attributes:
        error: What went wrong.
    """

    error: ErrorDetail


class ApiError(HTTPException):
    """A failure that the client is told of.

    Args:
        status: Of the HTTP answer.
        message: In a sentence; it may name bad values, but holds no prompt.
        param: The field that is to blame.
        code: Its short name.
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
        """The JSON object that tells it."""
        kind = TYPES.get(self.status_code, "invalid_request_error")
        param = None if self.param is None else _sendable(self.param)
        return {"error": {"message": _sendable(str(self.detail)), "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP answer that tells it."""
        return JSONResponse(self.body, self.status_code, self.headers)


def _sendable(text: str) -> str:
    """A text without halves of surrogate pairs, which names of unknown fields may hold, and no encoding has."""
    return text.encode(errors="replace").decode()


def busy(error: Busy) -> ApiError:
    """A refusal for the queue, with the wish to come back."""
    return ApiError(429, str(error) or "the queue is full", code="queue_full", headers={"Retry-After": RETRY_AFTER})


def unavailable(why: str, code: str) -> ApiError:
    """A refusal for want of an engine, or of the will to go on, with the wish to come back."""
    headers = {"Retry-After": RETRY_AFTER}
    if code == "shutting_down":
        headers["Connection"] = "close"
    return ApiError(503, why, code=code, headers=headers)


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """What the client is told of a failure; what was not foreseen is logged, without anything the client sent.

    Args:
        error: What was raised.
        request_id: Stands in the log and in the answer, so that one finds the other.
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
    # no message and no values: they may quote a prompt; file, line and source of each frame do not
    frames = "".join(traceback.format_tb(error.__traceback__))
    cause = f", by {type(error.__cause__).__name__}" if error.__cause__ else ""
    logger.error("request %s failed: %s%s\n%s", request_id, type(error).__name__, cause, frames)
    what = "the job failed" if isinstance(error, RequestFailed) else "internal error"
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
    why = EXPECTED[field] if field in EXPECTED and len(_about(errors, first)) > 1 else reason(first)
    why = why.removeprefix("Input ")
    value = first.get("input")
    scalar = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= SHOWN)
    # what a message says is nobody's business but the model's
    shown = f", got {str(value)[:SHOWN]!r}" if scalar and path[0] not in ("messages", "prompt") else ""
    return ApiError(400, f"{param}: {why}{shown}", param=param)


def _unsupported(path: Sequence[str | int], field: str, error: Any) -> str | None:
    """Why a field of OpenAI's cannot be taken; None of any other."""
    if path[0] != "messages":
        return UNSUPPORTED.get(str(path[0]))
    if field == "role" and error.get("input") in UNSUPPORTED_ROLES:
        return "this server calls no tools, and has no turns of theirs"
    return UNSUPPORTED_IN_MESSAGES.get(field)


def _name(path: Sequence[str | int]) -> tuple[str, str]:
    """The path of a field as one string, and its last name; members of unions are left out."""
    depth = {"messages": 5, "sigma0": 3, "stream_options": 2}.get(str(path[0]), 1) if path else 0
    told, field = "", ""
    for part in path[:depth]:
        if isinstance(part, int):
            told += f"[{part}]"
        elif "[" not in part and part not in ("str", "bool"):
            told += f".{part[:SHOWN]}" if told else part[:SHOWN]
            field = part
        else:
            break
    return told, field


def _about(errors: Sequence[Any], first: Any) -> list[Any]:
    """The complaints about the same field as the first."""
    name = _name([part for part in first["loc"] if part != "body"])
    return [each for each in errors if _name([part for part in each["loc"] if part != "body"]) == name]


def install(app: FastAPI) -> None:
    """Tells every failure of an app in OpenAI's shape."""

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors()).response()

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StarletteHTTPException)
        if not isinstance(error, ApiError):
            error = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return error.response()

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(StarletteHTTPException, http)
