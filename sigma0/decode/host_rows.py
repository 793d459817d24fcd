"""The calls that keep the books of a step on a CPU (`sigma0.kernels.lane_rows`), told what the tables look like."""

from functools import lru_cache

from sigma0.decode import lanes, settings
from sigma0.decode.ops import LaneRows, Operations

_NAMES = {
    name: getattr(module, name)
    for module, names in (
        (lanes, ("STAGE", "CACHE_POSITION", "POSITION", "DRAFT", "DEPTH", "FLAGS", "TABLE_WIDTH")),
        (lanes, ("NO_DRAFT", "MET_FLAG", "DIVERGED_FLAG")),
        (settings, ("LAST", "MIN_LOOPS", "LEAVES", "VERIFY", "REDRAFT", "LIMIT", "PROMPT", "SETTINGS_WIDTH")),
        (settings, ("NO_LIMIT",)),
    )
    for name in names
}


def host_calls(ops: Operations) -> LaneRows | None:
    """The calls; None on other devices, and without a C++ compiler."""
    return _opened() if ops.host_rows else None


@lru_cache
def _opened() -> LaneRows:
    return LaneRows(_NAMES)
