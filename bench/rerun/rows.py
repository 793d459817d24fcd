"""Rows of a rerun beside those of the ledger, without what depends on the machine and the moment."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sigma0.bench.core.ledger import AnyRow, parse_row

# times, speeds, memory in use, and everything worked out from them
_TIMED = re.compile(r"second|speed|time|tokens_per_|peak|bandwidth|rounds|_ms$|^ms_|ideal|concurrent|kv_memory|cost_s")
# the run, and digests that the report's provenance holds
_OF_THE_RUN = frozenset({"commit", "versions", "device", "threads", "settings_sha256", "model_sha256"})


def untimed(line: str) -> dict[str, Any]:
    """A printed row as plain JSON values that the same weights give again anywhere."""
    fields = parse_row(line).model_dump(mode="json")
    return {name: value for name, value in fields.items() if not _TIMED.search(name) and name not in _OF_THE_RUN}


def committed(found: Sequence[Mapping[str, Any]], ledger: Sequence[AnyRow]) -> list[dict[str, Any] | None]:
    """For each row found the ledger's newest of the same run and setting; None where there is none.

    Args:
        found: As `untimed` gives them.
        ledger: All of its rows.
    """
    newest = {}
    for row in ledger:
        plain = untimed(row.model_dump_json())
        newest[_identity(plain)] = plain
    return [newest.get(_identity(each)) for each in found]


# what was asked of a model, in place of what it answered
_ASKED = (
    "benchmark", "model", "above", "prompts_sha256", "n", "dtype", "batch_size", "max_new_tokens", "total_loops",
    "stride", "quantization", "kv", "mode", "settings", "after_exit", "policy", "family", "part", "unit", "stay",
    "warm_start", "exit_config", "way", "seed", "codec", "bits", "group", "segment", "context",
    "dtype_of_floats", "runner",
)  # fmt: skip


def _identity(row: Mapping[str, Any]) -> str:
    return repr([row.get(name) for name in _ASKED])
