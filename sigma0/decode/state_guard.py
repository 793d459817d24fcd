"""Detects logits processors and stopping criteria that keep state between calls, and refuses them by name."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor

from sigma0.decode.host_stepped import ROW_WISE_CRITERIA, ROW_WISE_PROCESSORS

_DEPTH = 6
_PLAIN = (str, int, float, complex, bool, bytes, type(None), np.generic)


class StateGuard:
    """Watches processors and criteria that are not known to be stateless.

    State is seen in attributes, slots, containers, arrays, tensors and a function's closure, some levels deep; inside a
    compiled object it is not.

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
        before = _fingerprint(item, _DEPTH)
        yield
        if _fingerprint(item, _DEPTH) != before:
            name = getattr(item, "__name__", type(item).__name__)
            raise ValueError(
                f"{name} keeps state between calls, but after_exit='verify' asks it more than once about a token: "
                "leave it out, or use after_exit='finish'"
            )


def _fingerprint(value: Any, depth: int) -> object:
    """Something that differs once a value, or what it holds, was changed."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        # a tensor made in inference mode counts no versions
        return (
            (id(value), value.detach().cpu().numpy().tobytes()) if value.is_inference() else (id(value), value._version)
        )
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if not depth:
        return id(value)
    if isinstance(value, Mapping):
        return tuple((repr(key), _fingerprint(item, depth - 1)) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return type(value), tuple(_fingerprint(item, depth - 1) for item in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(repr, value))
    return id(value), tuple(_fingerprint(item, depth - 1) for item in _held_by(value))


def _held_by(value: Any) -> Iterator[Any]:
    """What an object or a function holds."""
    if isinstance(value, type):
        return
    if isinstance(value, MethodType):
        yield value.__self__
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a variable that has no value yet
                yield None
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)
