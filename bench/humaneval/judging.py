"""How a completion fares: run with its problem's check in the sandbox, and nowhere else."""

import math
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from pydantic import TypeAdapter, ValidationError

from sigma0.bench.core.rows import Outcome
from sigma0.bench.humaneval.inside import SOURCE
from sigma0.bench.humaneval.problems import Problem
from sigma0.reason.sandbox.sandbox import LEAST_MEMORY_MB, LONGEST_CODE, RunResult, Sandbox

TIMEOUT_S = 10.0
MEMORY_MB = 512
_TOLD: TypeAdapter[tuple[Outcome, str]] = TypeAdapter(tuple[Outcome, str])


@dataclass(frozen=True)
class Limits:
    """Of the run of one completion, the interpreter's start included.

    Raises:
        ValueError: If a run could not even start within them.
    """

    timeout_s: float = TIMEOUT_S  # Wall clock
    memory_mb: int = MEMORY_MB  # As the sandbox takes it

    def __post_init__(self) -> None:
        # here, ahead of the first sample, and not at the first check, which may be hours later
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"the time of a check must be a number of seconds above 0, got {self.timeout_s}")
        if self.memory_mb < LEAST_MEMORY_MB:
            raise ValueError(f"the memory of a check must be at least {LEAST_MEMORY_MB} MB, got {self.memory_mb}")


@dataclass(frozen=True)
class Judgement:
    """What became of a completion."""

    # `passed`; `syntax`: it does not compile; `wrong`: an assertion of the check failed; `exception`: any other
    # was raised, or the process ended before the check had; `time`: its time was over; `limits`: its memory was,
    # or that of its output or its length
    outcome: Outcome
    detail: str  # In a few words, for people; "" where it passed


def judge(sandbox: Sandbox, problem: Problem, completion: str, limits: Limits | None = None) -> Judgement:
    """Runs prompt, completion (anybody's text) and check in the sandbox.

    Raises:
        SandboxUnavailable: If there is no isolation; nothing is run.
    """
    limits = limits or Limits()
    nonce = token_hex(16)
    plan = {
        "completed": problem.prompt + completion,
        "test": problem.test,
        "entry_point": problem.entry_point,
        "nonce": nonce,
    }
    # in ASCII: a lone surrogate is for the compiler inside to refuse
    program = f"{Path(SOURCE).read_text()}\n\nmain({plan!a})\n"
    if len(program) > LONGEST_CODE:
        return Judgement("limits", f"a program of {len(program)} characters is longer than the sandbox takes")
    return judgement(sandbox.run(program, limits.timeout_s, limits.memory_mb), nonce)


def judgement(result: RunResult, nonce: str) -> Judgement:
    """What a run in the sandbox says; a last line that does not begin with the nonce says nothing."""
    if result.timed_out:
        return Judgement("time", f"not done after {result.seconds:.1f} s")
    if result.cut is not None:
        return Judgement("limits", f"its limit of {result.cut} was reached")
    last = result.stdout.rstrip("\n").rpartition("\n")[2]
    if not result.ok or not last.startswith(nonce):
        return Judgement("exception", f"the process ended before its check had (exit code {result.exit_code})")
    try:
        return Judgement(*_TOLD.validate_json(last.removeprefix(nonce)))
    except ValidationError:
        return Judgement("exception", "the completion wrote a last line of its own")
