"""Processors and criteria that would answer differently when asked twice, found out and refused by name."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from sigma0.decoding import ROW_WISE_CRITERIA, ROW_WISE_PROCESSORS

_DEPTH = 4


class StateGuard:
    """Watches what is not known to keep nothing between calls.

    Args:
        items: Logits processors and stopping criteria.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        known = ROW_WISE_PROCESSORS + ROW_WISE_CRITERIA
        self._watched = {type(item) for item in items if type(item) not in known}

    @contextmanager
    def watching(self, item: Any) -> Iterator[None]:
        """Runs a call of `item`.

        Raises:
            ValueError: If the call changed what the item holds.
        """
        if type(item) not in self._watched:
            yield
            return
        before = _print_of(vars(item), _DEPTH)
        yield
        if _print_of(vars(item), _DEPTH) != before:
            raise ValueError(
                f"{type(item).__name__} keeps state between calls, but after_exit='verify' asks it twice about a "
                "token: leave it out, or use after_exit='finish'"
            )


def _print_of(value: Any, depth: int) -> object:
    """Something that differs once a value, or what it holds, was changed."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, str | int | float | bool | bytes | None):
        return value
    if depth and isinstance(value, dict):
        return tuple((repr(key), _print_of(each, depth - 1)) for key, each in value.items())
    if depth and isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(_print_of(each, depth - 1) for each in value)
    return id(value)
