"""The one-line text of an error: which value is bad, why, and what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from pydantic import ValidationError

# Characters of a bad value that a message quotes at most.
LONGEST = 60
# Errors that no value explains: unknown fields, which may hold anything, and text that is no JSON.
_NO_VALUE = frozenset({"extra_forbidden", "unexpected_keyword_argument", "json_invalid"})
_SECRETS = ("key", "secret", "password")
C = TypeVar("C")


def one_line(error: BaseException) -> str:
    """The text of an error on one line.

    Args:
        error: Of a pydantic error each bad field is named with its value and the reason; the message of any other
            error has its line breaks replaced by spaces.
    """
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    parts = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        text = reason(item) + _got(item)
        parts.append(f"{field}: {text}" if field else text)
    return "; ".join(parts)


def first_line(error: BaseException) -> str:
    """The first line of a library's message, whose further lines give advice for its own users."""
    return str(error).strip().partition("\n")[0]


def reason(item: Any) -> str:
    """Why a field is bad.

    Args:
        item: One entry of pydantic's `ValidationError.errors()`.
    """
    return str(item["msg"]).removeprefix("Value error, ")


def one_line_constructor(settings: type[C]) -> type[C]:
    """Class decorator for a pydantic dataclass: the constructor raises a ValueError of one line.

    Args:
        settings: The dataclass; `settings.stored_as` is its name in the message.
    """
    kind: Any = settings
    construct: Callable[..., None] = kind.__init__

    @wraps(construct)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except ValidationError as error:
            unknown = any(item["type"] == "unexpected_keyword_argument" for item in error.errors())
            names = f"; there are {', '.join(field.name for field in fields(kind))}" if unknown else ""
            raise ValueError(f"{kind.stored_as}: {one_line(error)}{names}") from error

    kind.__init__ = checked
    return settings


def _got(item: Any) -> str:
    """The bad value, if it is short, no secret, and not already part of the reason."""
    value, message = item["input"], item["msg"]
    secret = any(str(part).lower().endswith(_SECRETS) for part in item["loc"])
    if secret or item["type"] in _NO_VALUE or "got" in message.split() or not _is_short(value):
        return ""
    quoted = repr(value)
    return "" if quoted in message or len(quoted) > LONGEST else f", got {quoted}"


def _is_short(value: object) -> bool:
    # before repr: Python refuses to format integers of thousands of digits
    if isinstance(value, str):
        return len(value) <= LONGEST
    return value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 200)


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Turns a failed import into a ValueError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'sigma0-lm[{name}]'") from error
