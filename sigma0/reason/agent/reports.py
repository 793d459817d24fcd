"""What a run of a repository's tests says: which passed, which failed, and a signature that equal states share."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Protocol

from sigma0.reason.sandbox.sandbox import RunResult

SUMMARY_CHARS = 4000
LISTED_TESTS = 30
_SUMMARY = re.compile(r"^=+ short test summary info =+$", re.MULTILINE)
_DETAILS = re.compile(r"^=+ (?:ERRORS|FAILURES) =+$", re.MULTILINE)
_DETAILS_END = re.compile(r"^=+ (?:PASSES|warnings summary.*|short test summary info) =+$", re.MULTILINE)
# the brackets of a parametrised test may hold " - " as well; what follows them is a message
_NAMED = re.compile(r"(?P<test>[^\[]*?::[^\[]*?\[.*?\]|.+?)(?: - .*)?")
_FOLDERS = re.compile(r"(?:/[\w.+-]+)+/")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


class CommandRunner(Protocol):
    """Whatever runs a command where it can do no harm, as `Sandbox` does."""

    def run_command(
        self, command: Sequence[str], folder: Path, timeout_s: float = 60.0, memory_mb: int = 1024
    ) -> RunResult:
        """Runs a command in a private copy of a folder.

        Raises:
            SandboxUnavailable: If there is no isolation, and nothing was run.
        """


@dataclass(frozen=True)
class TestReport:
    """What a run of the tests said."""

    # the name is not one of a test
    __test__: ClassVar[bool] = False

    passed: frozenset[str]  # Names of tests that passed, with set-up and teardown
    failed: frozenset[str]  # Of those that failed
    errors: frozenset[str]  # Of tests, and of files of tests, that could not be run or torn down
    ok: bool  # Whether the command ended with exit code 0 and none of them failed
    # Equal where all outcomes are. Where no names can be read it is drawn from the exit code and the output,
    # numbers and folders left out
    signature: str
    summary: str  # For the model, bounded

    @property
    def failing(self) -> frozenset[str]:
        """All that failed, in either way."""
        return self.failed | self.errors

    @property
    def named(self) -> bool:
        """Whether the output names tests."""
        return bool(self.passed or self.failed or self.errors)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "passed": sorted(self.passed),
            "failed": sorted(self.failed),
            "errors": sorted(self.errors),
            "ok": self.ok,
            "signature": self.signature,
            "summary": self.summary,
        }


def read_report(result: RunResult, summary_chars: int = SUMMARY_CHARS) -> TestReport:
    """Reads what a run of tests printed.

    Names are read from the summary at the end of pytest's output alone, since what tests print themselves may look
    like one. A run that was ended from outside has none.

    Args:
        result: Of the run.
        summary_chars: Of the summary at most.
    """
    ended_by_itself = result.exit_code is not None and not result.timed_out and result.cut is None
    outcomes = _outcomes(result.stdout) if ended_by_itself else {}
    errors = frozenset(outcomes.get("ERROR", ()))
    failed = frozenset(outcomes.get("FAILED", ())) - errors
    passed = frozenset(outcomes.get("PASSED", ())) - errors - failed
    return TestReport(
        passed=passed,
        failed=failed,
        errors=errors,
        ok=result.ok and not failed and not errors,
        signature=_signature(result, passed, failed, errors),
        summary=_summary(result, passed, failed, errors)[:summary_chars],
    )


def _outcomes(output: str) -> dict[str, set[str]]:
    headings = list(_SUMMARY.finditer(output))
    outcomes: dict[str, set[str]] = {}
    if not headings:
        return outcomes
    for line in output[headings[-1].end() :].splitlines():
        outcome, _, rest = line.partition(" ")
        if outcome == "PASSED" and rest:
            outcomes.setdefault(outcome, set()).add(rest)
        elif outcome in ("FAILED", "ERROR") and rest:
            match = _NAMED.fullmatch(rest)
            outcomes.setdefault(outcome, set()).add(match["test"] if match else rest)
    return outcomes


def _signature(result: RunResult, *outcomes: frozenset[str]) -> str:
    if any(outcomes):
        text = "\n\n".join("\n".join(sorted(names)) for names in outcomes)
    elif result.timed_out or result.exit_code is None:
        # how far the output came is chance
        return "timed out" if result.timed_out else f"ended: {result.cut}"
    else:
        output = _FOLDERS.sub("/", f"{result.stdout}\n{result.stderr}")
        text = f"exit {result.exit_code}\n{_NUMBERS.sub('#', output)}"
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _summary(result: RunResult, passed: frozenset[str], failed: frozenset[str], errors: frozenset[str]) -> str:
    if result.timed_out:
        head = f"The tests did not end: they were stopped after {result.seconds:.0f} seconds."
    elif result.cut is not None:
        head = f"The tests were stopped: they went over the limit of {result.cut}."
    elif passed or failed or errors:
        head = f"{len(passed)} passed, {len(failed)} failed, {len(errors)} in error (exit code {result.exit_code})."
    else:
        head = f"The tests ended with exit code {result.exit_code}."
    failing = sorted(failed | errors)
    lines = [head, *(f"FAILING {name}" for name in failing[:LISTED_TESTS])]
    if len(failing) > LISTED_TESTS:
        lines.append(f"and {len(failing) - LISTED_TESTS} more")
    return "\n".join([*lines, _details(result)]).strip()


def _details(result: RunResult) -> str:
    """Tracebacks, from their heading on; of other tools the end of what they printed."""
    start = _DETAILS.search(result.stdout)
    if start is None:
        return "" if result.ok else f"{result.stdout[-SUMMARY_CHARS // 2 :]}\n{result.stderr[-SUMMARY_CHARS // 2 :]}"
    end = _DETAILS_END.search(result.stdout, start.end())
    return result.stdout[start.start() : end.start() if end else None]
