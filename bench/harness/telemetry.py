"""At which loop tokens were read, and what that saved: for a request, and summed over a run."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Reading:
    """Where the tokens of one request were read."""

    depths: tuple[int, ...]  # Loop of each token, from 1
    reasons: tuple[str, ...]  # Why each stopped there, as `sigma0.decode.exits.exit_reason` names it
    truncated: int = 0  # Ids of the prompt that were left out, because the model's context ended


class BatchCost(NamedTuple):
    """What writing a batch took: calls of the block after the prompts, rows in them, rows of reading the prompts."""

    passes: int
    rows: int
    prompt_rows: int


def counts(reading: Reading) -> dict[str, Any]:
    """Tokens by loop and by reason, as plain JSON values."""
    return {
        "tokens": len(reading.depths),
        "by_loop": {str(depth): n for depth, n in sorted(Counter(reading.depths).items())},
        "reasons": dict(sorted(Counter(reading.reasons).items())),
    }


@dataclass
class DepthTally:
    """Readings summed up; the shares are those of `sigma0.signals.savings.Savings`, pooled over batches.

    A written text's first token is read from the prompt, where nothing is skipped: it counts in `by_loop`, and not in
    the shares. A scored text is read like a prompt from end to end: all its tokens count in `mean_depth` and
    `depth_saved`, which are notional there, and no passes are saved.
    """

    total_loops: int  # T
    _readings: list[Reading] = field(default_factory=list)
    # depths of the tokens that count in the shares
    _counted: list[int] = field(default_factory=list)
    # costs of the batches, and tokens after the first of the longest text in each
    _batches: list[tuple[BatchCost, int]] = field(default_factory=list)

    def add(self, reading: Reading, written: bool) -> None:
        """Counts a request, whose tokens the model wrote or which were given and scored."""
        self._readings.append(reading)
        self._counted += reading.depths[1:] if written else reading.depths

    def add_batch(self, readings: Sequence[Reading], cost: BatchCost) -> None:
        """Counts a written batch, its requests included."""
        for reading in readings:
            self.add(reading, written=True)
        self._batches.append((cost, max(len(reading.depths) for reading in readings) - 1))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; shares are None where there was nothing to save."""
        whole = Reading(
            tuple(depth for item in self._readings for depth in item.depths),
            tuple(reason for item in self._readings for reason in item.reasons),
        )
        spent, full = sum(self._counted), self.total_loops * len(self._counted)
        output: dict[str, Any] = {
            "requests": len(self._readings),
            "truncated_requests": sum(item.truncated > 0 for item in self._readings),
            **counts(whole),
            "mean_depth": spent / len(self._counted) if self._counted else None,
            "depth_saved": _saved(spent, full),
        }
        if not self._batches:
            return output
        passes, rows, prompt_rows = (sum(parts) for parts in zip(*(cost for cost, _ in self._batches), strict=True))
        return {
            **output,
            "passes_saved": _saved(passes, self.total_loops * sum(steps for _, steps in self._batches)),
            "rows_saved": _saved(rows, full),
            "batches": len(self._batches),
            "loop_passes": passes,
            "loop_rows": rows,
            "prompt_rows": prompt_rows,
        }


def _saved(spent: int, full: int) -> float | None:
    return 1 - spent / full if full else None


class DepthLog:
    """A file of JSON lines, one for each request.

    Raises:
        ValueError: If the file exists or cannot be made: two runs in one file could not be told apart.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path).expanduser()
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.open("x").close()
            except OSError as error:
                raise ValueError(f"depth_log={path!r} cannot be made: {error.strerror or error}") from error

    def write(self, values: Mapping[str, Any]) -> None:
        """Adds a line."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values, ensure_ascii=False) + "\n")
