"""A runner without isolation for code that the tests themselves wrote, and a model that plays a script."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from threading import Lock

from sigma0.reason.chat import ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.lemma import ALGSolver
from sigma0.reason.sandbox.inside import SOURCE
from sigma0.reason.sandbox.sandbox import RunResult
from sigma0.reason.trail import Trail

DRIVER = """
import ast, atexit, builtins, json, sys
counts, (source, code, counted) = [0, 0], sys.argv[1:]
inside = {"__name__": "inside", "__file__": source}
exec(open(source).read(), inside)
setattr(builtins, inside["_COUNTS"], counts)
atexit.register(lambda: open(counted, "w").write(json.dumps(counts)))
exec(compile(inside["counted"](ast.parse(code)), "code", "exec"), {"__name__": "__main__"})
"""


class SubprocessRunner:
    """Runs scripted code as it is, with assertions counted."""

    def __init__(self):
        self.ran = []

    def run(self, code, timeout_s=10.0, memory_mb=512):
        self.ran.append(code)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            counts = Path(folder, "counts.json")
            command = [sys.executable, "-I", "-S", "-c", DRIVER, SOURCE, code, str(counts)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=folder)
            except subprocess.TimeoutExpired:
                return RunResult(False, "", "", None, True, 0, time.monotonic() - began)
            run, held = json.loads(counts.read_text())
        seconds = time.monotonic() - began
        return RunResult(
            done.returncode == 0, done.stdout, done.stderr, done.returncode, False, run, seconds, assertions_held=held
        )


def plan(*blocks):
    """A plan out of (id, depends, statement) with an optional type."""
    lines = []
    for lemma_id, depends, statement, *kind in blocks:
        lines += [f"LEMMA {lemma_id}", f"TYPE: {kind[0] if kind else 'computational'}", f"STATEMENT: {statement}"]
        lines += [f"DEPENDS: {depends or 'none'}", "VERIFY: run it", ""]
    return "\n".join(lines)


def fenced(code):
    return f"Here it is:\n```python\n{code}\n```\n"


class Script:
    """Plays a model: what it says to each kind of question, in order, the last one again and again.

    Keys are "plan", "restructure", "guess", and, with a lemma's id after it, "prove", "object", "judge" and "code".
    """

    SIGNS = (
        ("plan", "Split the problem"),
        ("restructure", "new, easier lemmas"),
        ("guess", "Give your best answer"),
        ("judge", "Does the proof stand?"),
        ("object", "Try to refute"),
        ("code", "Write a short Python program"),
        ("prove", "Prove or work out this step"),
    )

    def __init__(self, said):
        self.said = said
        self.calls = []
        self.counts = Counter()
        self._alone = Lock()

    def __call__(self, messages, **_):
        text = "\n".join(message["content"] for message in messages)
        kind = next(kind for kind, sign in self.SIGNS if sign in text)
        step = re.search(r"^Step (\w+):$", text, re.MULTILINE)
        key = f"{kind} {step[1]}" if step else kind
        replies = self.said.get(key, {"judge": "SOUND", "object": "no objection", "guess": "no idea"}.get(kind))
        assert replies is not None, f"the script has nothing to say to {key!r}"
        replies = [replies] if not isinstance(replies, list) else replies
        with self._alone:
            self.calls.append((key, text))
            number = self.counts[key]
            self.counts[key] += 1
        return replies[min(number, len(replies) - 1)]

    def texts(self, key):
        return [text for asked, text in self.calls if asked == key]


def solve(problem, said, runner=None, above=None, limits=None, graph=None, **settings):
    script = Script(said)
    trail = Trail()
    solver = ALGSolver(
        ScriptedChat(script),
        runner or SubprocessRunner(),
        above=None if above is None else ScriptedChat(above, name="larger"),
        settings=settings,
        desk=Desk(trail, limits, seed=7),
    )
    return solver.solve(problem, graph), trail, script


def whats(trail):
    return [decision.what for decision in trail.decisions]
