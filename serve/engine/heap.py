"""Objects of a process that serves: what was loaded stays."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leaves what is there out of garbage collections, so that one that a large request triggers need not visit it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
