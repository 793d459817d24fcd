"""Where two reports or rows differ, but for what depends on the machine and the moment."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sigma0.bench.core.ledger import parse_row
from sigma0.bench.core.rows import AnyRow

# sums of float32 in another order, on another processor; a single other token or answer shows far above it
TOLERANCE = 2e-4
# characters of a value that is told
_LENGTH = 40
# what a run says of itself, not of the model
OF_THE_RUN = frozenset({"device", "commit", "time", "seconds", "threads", "versions"})
# times, speeds, memory in use, and everything worked out from them
_TIMED = re.compile(r"second|speed|time|tokens_per_|peak|bandwidth|rounds|_ms$|^ms_|ideal|concurrent|kv_memory|cost_s")
# digests that the report's provenance holds
_DIGESTS = frozenset({"settings_sha256", "model_sha256"})
# what was asked of a model, in place of what it answered
_ASKED = (
    "benchmark", "model", "above", "prompts_sha256", "n", "dtype", "batch_size", "max_new_tokens", "total_loops",
    "stride", "quantization", "kv", "mode", "settings", "after_exit", "policy", "family", "part", "unit", "stay",
    "warm_start", "exit_config", "way", "seed", "codec", "bits", "group", "segment", "context",
    "dtype_of_floats", "runner",
)  # fmt: skip


def differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Every place where two values of plain JSON, committed and found, differ, as `place: before, now`.

    Numbers are the same within `TOLERANCE`, relative for those over 1. `OF_THE_RUN` is left out.
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


def untimed(line: str) -> dict[str, Any]:
    """A printed row as plain JSON values that the same weights give again anywhere."""
    fields = parse_row(line).model_dump(mode="json")
    return {
        name: value for name, value in fields.items() if not _TIMED.search(name) and name not in OF_THE_RUN | _DIGESTS
    }


def committed(result: Sequence[Mapping[str, Any]], ledger: Sequence[AnyRow]) -> list[dict[str, Any] | None]:
    """For each row found, as `untimed` gives it, the newest of its run and setting in a ledger; None without one."""
    newest = {}
    for row in ledger:
        plain = untimed(row.model_dump_json())
        newest[_identity(plain)] = plain
    return [newest.get(_identity(item)) for item in result]


def _identity(row: Mapping[str, Any]) -> str:
    return repr([row.get(name) for name in _ASKED])
