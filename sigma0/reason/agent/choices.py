"""Actions as a choice among few: for small models that were taught them, which cannot write code.

    the question   Failing: test_sums.py::test_add. sums.py: def add(a, b): return a - b. Act?
    the replies    {"action": "edit", "path": "sums.py", "old": "def add(a, b): return a - b", "new": ...}, ...

An edit changes one operator of a line that returns something, in the file that was read last.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from sigma0.decode.grammar.bounds import OWN_TOKENS
from sigma0.reason.agent.actions import AnyAction, EditFile, Finish, ReadFile, RunTests, StartOver
from sigma0.reason.agent.reports import TestReport

# What takes the place of what.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("+", "-", "*", "//"),
    ("<", ">", "<=", ">="),
    ("==", "!="),
    ("[0]", "[-1]"),
    ("min", "max"),
    ("sum", "len"),
    (" 0", " 1"),
)
ACT = "Act?"
_OPERATOR = re.compile(r"\[(?:0|-1)\]|//|[=!<>]=|[-+*<>]|\b(?:min|max|sum|len)\b| [01]\b")
_RETURN = re.compile(r"\breturn ")
SHOWN_TESTS = 4


def edits_of(path: str, text: str) -> Iterator[EditFile]:
    """The edits of a file: one operator of a line that stands there once, by another of its group."""
    for line in text.split("\n"):
        begins = _RETURN.search(line)
        if begins is None or text.count(line) > 1:
            continue
        for operator in _OPERATOR.finditer(line, begins.end()):
            group = next(group for group in GROUPS if operator[0] in group)
            for other in group:
                if other != operator[0]:
                    changed = line[: operator.start()] + other + line[operator.end() :]
                    yield EditFile(action="edit", path=path, old=line, new=changed)


def question(report: TestReport | None, paths: Sequence[str], shown: tuple[str, str] | None) -> str:
    """What a model is shown.

    Args:
        report: Of the tests; None if a file was changed since they ran.
        paths: Files that may be changed.
        shown: Path and text of the file that was read last; None before the first.
    """
    failing = [] if report is None else sorted(report.failing)[:SHOWN_TESTS]
    status = "Not tested." if report is None else "All pass." if report.ok else f"Failing: {', '.join(failing)}."
    if shown is None:
        return f"{status} Files: {', '.join(paths)}. {ACT}"
    lines = [line for line in shown[1].split("\n") if line.strip()]
    return f"{status} {shown[0]}: {'. '.join(lines)}. {ACT}"


def actions(
    paths: Sequence[str], shown: tuple[str, str] | None, barred: Collection[EditFile] = (), warned: bool = False
) -> list[AnyAction]:
    """What a model may choose from.

    Args:
        paths: Files that may be changed.
        shown: As `question` takes it.
        barred: Edits that led nowhere, and are not to be made again.
        warned: Whether only what changes or tests is left.
    """
    reads: list[AnyAction] = [] if warned else [ReadFile(action="read", path=path) for path in paths]
    edits = [] if shown is None else [edit for edit in edits_of(*shown) if edit not in barred]
    return [*reads, *edits, RunTests(action="run_tests"), StartOver(action="start_over"), Finish(action="finish")]


def written(action: AnyAction) -> str:
    """An action as a model writes it."""
    fields: Mapping[str, object] = action.model_dump(exclude_defaults=True)
    return json.dumps(fields)


def choice_grammar(allowed: Sequence[AnyAction]) -> str:
    """That a reply is one of some actions, in Lark's notation, in tokens that may hold more than their beginning."""
    return f"{OWN_TOKENS}start: " + " | ".join(json.dumps(written(action)) for action in allowed)
