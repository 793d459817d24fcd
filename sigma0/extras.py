"""A missing optional library as an error of one line."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Turn a failed import into a ValueError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'sigma0-lm[{name}]'") from error
