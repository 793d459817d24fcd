"""Running code that a model wrote, and what becomes of it in words."""

from typing import Protocol

from sigma0.reason.desk import Desk
from sigma0.reason.lemma.graph import shortened
from sigma0.reason.lemma.settings import LemmaSettings
from sigma0.reason.sandbox.sandbox import RunResult
from sigma0.reason.trail import Run

# characters of a program's output in reasons
_MESSAGE_SHOWN = 300


class Runner(Protocol):
    """Where strangers' code is run: `sigma0.reason.sandbox.sandbox.Sandbox`."""

    def run(self, code: str, timeout_s: float = 10.0, memory_mb: int = 512) -> RunResult:
        """Runs Python.

        Raises:
            SandboxUnavailable: If there is no isolation, and nothing was run.
        """


def run_written_down(runner: Runner, desk: Desk, settings: LemmaSettings, purpose: str, code: str) -> RunResult:
    """Runs code within the settings' limits, and writes code and result into the trail.

    Raises:
        SandboxUnavailable: If there is no isolation, and nothing was run.
    """
    result = runner.run(code, timeout_s=settings.code_timeout_s, memory_mb=settings.memory_mb)
    desk.trail.add(Run(purpose, code, result.to_dict()))
    return result


def objection_to(result: RunResult, settings: LemmaSettings) -> str | None:
    """Why a run verifies nothing, in words; None where it does.

    At least one assertion must have been reached, and each that was reached must have held, also where the code went on
    regardless.
    """
    broken = result.assertions_run - result.assertions_held
    message = shortened(result.stderr.strip().rpartition("\n")[2], _MESSAGE_SHOWN)
    if result.timed_out:
        return f"the code ran longer than {settings.code_timeout_s:g} s: check fewer cases, or faster"
    if result.cut == "memory":
        return f"the code needed more than {settings.memory_mb} MB of memory"
    if result.cut is not None:
        return f"the code went over the limit of {result.cut}"
    if broken > 0:
        hidden = ", though the code went on" if result.ok else f": {message}" if message else ""
        return f"{broken} of {result.assertions_run} assertions did not hold{hidden}"
    if not result.ok:
        return f"the code ended with exit code {result.exit_code}: {message or 'it gave no reason'}"
    if result.assertions_run == 0:
        return "no assertion was reached when the code was run"
    return None
