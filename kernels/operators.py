"""Operators of torch: a function that compiled graphs call by name, and that is called as it is elsewhere.

Not `torch.library.custom_op`, of which a call takes 20 us longer.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")
_LIBRARY = torch.library.Library("sigma0", "FRAGMENT")  # type: ignore[no-untyped-call]


def row_op(shape: Callable[..., object], writes: Sequence[str] = ()) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function the operator `sigma0::` of its name.

    Args:
        shape: Takes the same arguments; its result has the shape and dtype of the function's.
        writes: Arguments that the function writes to.
    """

    def made(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = function.__name__.lstrip("_")
        schema = torch.library.infer_schema(function, mutates_args=writes)
        _LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"sigma0::{name}", shape, lib=_LIBRARY)
        operator: Callable[_P, _R] = getattr(torch.ops.sigma0, name)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return (operator if torch.compiler.is_compiling() else function)(*args, **kwargs)

        return call

    return made
