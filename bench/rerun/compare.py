"""Where two reports differ: numbers beyond rounding, texts, lists of other lengths, keys of one alone."""

import math
from collections.abc import Iterator
from typing import Any

# sums of float32 in another order, on another processor; a single other token or answer shows far above it
TOLERANCE = 2e-4
# characters of a value that is told
_LENGTH = 40
# what a run says of itself, not of the model
OF_THE_RUN = frozenset({"device", "commit", "time", "seconds", "threads", "versions"})


def differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Every place where two values of plain JSON differ, as `place: before, now`.

    Numbers are the same within `TOLERANCE`, relative for those over 1. `OF_THE_RUN` is left out.

    Args:
        before: What is committed.
        now: What was found.
        place: Of both, for what is told.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now} - OF_THE_RUN):
            if key not in before or key not in now:
                yield f"{place}.{key}: only {'now' if key in now else 'before'}"
            else:
                yield from differences(before[key], now[key], f"{place}.{key}")
    elif isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            yield f"{place}: {len(before)} entries, now {len(now)}"
        for number, (old, new) in enumerate(zip(before, now, strict=False)):
            yield from differences(old, new, f"{place}[{number}]")
    elif _is_number(before) and _is_number(now):
        if not math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"{place}: {before}, now {now}"
    elif type(before) is not type(now) or before != now:
        yield f"{place}: {_short(before)}, now {_short(now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
