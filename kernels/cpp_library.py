"""Functions in C++ for the rows of a pass on a CPU."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sigma0.cpp_compiler import compiler
from sigma0.errors import first_line

# Types of numbers in C++.
ELEMENTS = {torch.float64: "double", torch.float32: "float", torch.bfloat16: "at::BFloat16", torch.float16: "at::Half"}


def can_compile(build: Callable[[], object], failed: str) -> bool:
    """Whether there is a compiler, and a function can be built with it.

    Args:
        build: Builds it.
        failed: What a warning says where it cannot, ahead of what the compiler says.
    """
    if compiler() is None:
        return False
    try:
        build()
    except Exception as error:  # whatever a compiler may say; the caller does without it
        warnings.warn(f"{failed}: {first_line(error)}", stacklevel=3)
        return False
    return True


def load(
    source: str,
    name: str,
    arguments: Sequence[Any],
    definitions: Mapping[str, str | int] | None = None,
    returns: type[Any] | None = None,
) -> Callable[..., Any]:
    """A function of source files in this folder, compiled for this CPU and kept by inductor.

    Args:
        source: Names of the files, each of which may use what stands in those before it.
        name: Of the function.
        arguments: ctypes types of its arguments.
        definitions: What is defined in front of the source.
        returns: Type of its result; None where it returns nothing.
    """
    function: Any = getattr(load_library(source, definitions or {}), name)
    function.argtypes, function.restype = list(arguments), returns
    return function  # type: ignore[no-any-return]


def load_library(source: str, definitions: Mapping[str, str | int]) -> Any:
    """The library of source files, as `load` takes them."""
    from torch._inductor.codecache import CppCodeCache

    lines = [f"#define {key} {value}" for key, value in definitions.items()]
    texts = [Path(__file__).with_name(each).read_text() for each in source.split()]
    return CppCodeCache.load("\n".join([*lines, *texts]))
