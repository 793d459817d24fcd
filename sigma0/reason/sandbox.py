"""Running strangers' code where it can do no harm."""

from dataclasses import asdict, dataclass
from typing import Any


class SandboxUnavailable(RuntimeError):
    """No isolation passed the start-up probe, so nothing was run."""


@dataclass(frozen=True)
class RunResult:
    """What became of a run.

    Attributes:
        ok: Whether it ended by itself with exit code 0.
        stdout: What it printed, cut at the limit.
        stderr: Likewise.
        exit_code: None where it was ended from outside.
        timed_out: Whether its time was over.
        assertions_run: Assertions reached while it ran, save those whose test is a bare constant.
        seconds: Wall clock.
        assertions_held: How many of them came out true; fewer were reached in vain, also if the code hid that.
        cut: The limit that ended it beside time: "output" or "memory"; None where none did.
    """

    ok: bool
    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool
    assertions_run: int
    seconds: float
    assertions_held: int = 0
    cut: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)
