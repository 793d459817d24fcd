"""Which cases of a test are fast, where its whole grid is not; and what a test needs."""

from contextlib import contextmanager
from typing import Any

import pytest

from sigma0.cpp_compiler import compiler
from sigma0.kernels.native import is_available

needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
needs_library = pytest.mark.skipif(not is_available(), reason="needs the functions in C++, which an install builds")


@contextmanager
def named(*case: Any):
    """Names the case of a loop that an error comes from."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"the case {' '.join(map(str, case))}: {error}") from error


def fast_if(fast: bool, *values: Any, id: str | None = None):
    """A case for `parametrize`, which is slow unless `fast`."""
    return pytest.param(*values, id=id, marks=() if fast else pytest.mark.slow)


def slow(*values: Any, id: str | None = None):
    return fast_if(False, *values, id=id)


def exhaustive(*values: Any, id: str | None = None):
    """A case that repeats at length what faster ones show, which runs before a release and not in CI."""
    return pytest.param(*values, id=id, marks=pytest.mark.exhaustive)
