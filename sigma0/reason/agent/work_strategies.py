"""Ways to go about a failing repository, each with its own instructions, effort and opening."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from sigma0.config import Effort
from sigma0.reason.agent.reports import TestReport
from sigma0.reason.agent.workspace import Workspace, WorkspaceFault

Opening = Literal["traceback", "specification", "functions", "folders"]
MAX_OPENED = 4
_PYTHON_FILE = re.compile(r"[\w./+-]+\.py\b")
_DEFINITION = re.compile(r"^\s*(?:async def|def|class) .*$", re.MULTILINE)
_DOCUMENT = re.compile(r"(?:readme|changes|changelog|docs?/).*", re.IGNORECASE)
EFFORTS: tuple[Effort, ...] = ("minimal", "low", "medium", "high")


@dataclass(frozen=True)
class WorkStrategy:
    """A way to go about it."""

    name: str  # In trails
    instructions: str  # To the model
    effort: Effort  # Of each question
    # What the loop shows before the first step: files of the traceback, tests and documents, signatures of all
    # functions, or all paths
    opening: Opening


STRATEGIES = (
    WorkStrategy(
        "trace",
        "Trace the failing test back to its cause. Begin at the last line of the traceback, and go up one call at a "
        "time until you stand where the first wrong value is made. Change that place, not the one where it shows.",
        "low",
        "traceback",
    ),
    WorkStrategy(
        "rewrite",
        "Take the tests and the documents for the specification. Write down what the failing function has to do, case "
        "by case. Then replace its whole body by one that you write anew; do not repair the old one.",
        "medium",
        "specification",
    ),
    WorkStrategy(
        "smallest-changes",
        "Change one line at a time, and run the tests after each change. If no more tests pass than before, take the "
        "change back before the next one. Halve the suspect lines with each try.",
        "low",
        "traceback",
    ),
    WorkStrategy(
        "work-by-hand",
        "Take the shortest failing test alone. Reduce it to the fewest values that still go wrong, and work through "
        "the code with them by hand, one line at a time, writing down every value. The first line whose value is not "
        "what the test needs is the one to change.",
        "high",
        "specification",
    ),
    WorkStrategy(
        "follow-a-model",
        "Look for a function in this repository that does something similar and works. Compare it with the failing "
        "one part by part, and make the failing one follow it.",
        "medium",
        "functions",
    ),
    WorkStrategy(
        "suspect-the-surroundings",
        "Suppose that the function you looked at is right. Look for the fault around it: imports, constants, default "
        "arguments, shared state, the callers, files that are read, and the order in which things happen.",
        "medium",
        "folders",
    ),
)


def next_strategy(strategies: Sequence[WorkStrategy], tried: Sequence[str]) -> WorkStrategy:
    """The first strategy that was not tried; where all were, the one tried longest ago.

    Args:
        strategies: In the order of preference, at least two.
        tried: Names in the order in which they were tried; the last is the one to leave.
    """
    last_tried = {name: place for place, name in enumerate(tried)}
    return min(strategies, key=lambda strategy: last_tried.get(strategy.name, -1))


def raised(effort: Effort) -> Effort:
    """The next higher effort, or the highest."""
    return EFFORTS[min(EFFORTS.index(effort) + 1, len(EFFORTS) - 1)]


def opening_of(strategy: WorkStrategy, workspace: Workspace, report: TestReport, max_chars: int) -> str:
    """What a strategy shows first, cut at a limit.

    Args:
        strategy: Whose.
        workspace: As it is now.
        report: The last one of its tests.
        max_chars: At most.
    """
    paths = sorted(workspace.files())
    if strategy.opening == "folders":
        return "\n".join(["The files are:", *paths])[:max_chars]
    if strategy.opening == "functions":
        shown = [_signatures(workspace, path) for path in paths if path.endswith(".py")]
        return "\n".join(filter(None, shown))[:max_chars]
    named = _named(report, paths)
    tests = [path for path in named if workspace.is_protected(path)]
    if strategy.opening == "specification":
        chosen = tests + [path for path in paths if _DOCUMENT.fullmatch(path)]
    else:
        chosen = [path for path in named if path not in tests] + _imported(workspace, tests, paths)
    room = max_chars // max(1, min(len(chosen), MAX_OPENED))
    return "\n\n".join(_shown(workspace, path)[:room] for path in dict.fromkeys(chosen[:MAX_OPENED]))


def _named(report: TestReport, paths: Sequence[str]) -> list[str]:
    """Files that tests and tracebacks name, those named last first: there it went wrong."""
    mentioned = _PYTHON_FILE.findall(report.summary)
    known = {path: path for path in paths}
    named = [known.get(name) or _by_ending(name, paths) for name in reversed(mentioned)]
    return list(dict.fromkeys(path for path in named if path))


def _by_ending(name: str, paths: Sequence[str]) -> str | None:
    """The file that an absolute name from a private copy means."""
    return next((path for path in paths if name.endswith(f"/{path}")), None)


def _imported(workspace: Workspace, tests: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Files that tests import by name; a wrong value leaves no trace of where it was made."""
    words = set()
    for test in tests[:MAX_OPENED]:
        words |= set(re.findall(r"\w+", " ".join(re.findall(r"^\s*(?:from|import) .*$", _text(workspace, test), re.M))))
    return [path for path in paths if PurePosixPath(path).stem in words and not workspace.is_protected(path)]


def _signatures(workspace: Workspace, path: str) -> str:
    signatures = _DEFINITION.findall(_text(workspace, path))
    return "\n".join([f"{path}:", *signatures]) if signatures else ""


def _shown(workspace: Workspace, path: str) -> str:
    return f"{path}:\n{_text(workspace, path)}"


def _text(workspace: Workspace, path: str) -> str:
    try:
        return workspace.text(path)
    except WorkspaceFault as fault:
        # too large, or no text: the model gets this error instead
        return str(fault)
