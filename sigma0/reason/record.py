"""Answers of a run in a file, so that a run that broke off is repeated from them and goes on where they end.

All else that a strategy does follows from the answers, its settings and its seed: a resumed run ends as one that was
never interrupted. Programs and tests are run again. An answer is given again to the very question that it answered:
where other code asks otherwise, or a test says something else, the model is asked.
"""

import json
import re
from collections import defaultdict, deque
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import TypeAdapter

from sigma0 import jsonl
from sigma0.config import Effort, Messages
from sigma0.reason.messages import Completion
from sigma0.reason.trail import Call, Heading, is_heading, read_lines

_COMPLETION: TypeAdapter[Completion] = TypeAdapter(Completion)
# addresses of objects and durations in the output of tests, which are others whenever these run
_CHANCE = re.compile(r"\b0x[0-9a-fA-F]+|\b\d+\.\d+ ?s\b")
Key = tuple[str, str, Effort, int, str]


def question_digest(messages: Messages, how: Any) -> str:
    """Tells questions apart by their text.

    Args:
        messages: Of the question.
        how: Settings of the answer, or the labels it is one of; JSON values.
    """
    text = _CHANCE.sub("#", json.dumps([messages, how], sort_keys=True))
    return blake2b(text.encode(), digest_size=8).hexdigest()


class Record:
    """The answers of a run, appended to a file as they come.

    Args:
        path: Of the file, which begins with the run's heading and holds its questions, as a trail does.
        heading: Of this run.
        resume: Whether the file's answers are given again; else the file is begun anew.

    Raises:
        ValueError: If the file is to be resumed and cannot be read, or is of another run, naming what differs.
    """

    def __init__(self, path: Path, heading: Heading, resume: bool) -> None:
        self._path = path
        self._alone = Lock()
        self._known: dict[Key, deque[Completion]] = defaultdict(deque)
        first = replace(heading, resumed=False)
        if resume:
            self._read(first)
        else:
            path.write_text(jsonl.dump_line(first), encoding="utf-8")

    def recall(self, key: Key) -> Completion | None:
        """The next answer to a question that the file holds; None where it was not answered.

        Args:
            key: Purpose, model, effort, seed and digest.
        """
        with self._alone:
            known = self._known.get(key)
            return known.popleft() if known else None

    def keep(self, call: Call) -> None:
        """Appends an answered question."""
        with self._alone:
            jsonl.append_line(self._path, jsonl.dump_line(call, default=str))

    def _read(self, heading: Heading) -> None:
        if not self._path.is_file():
            raise ValueError(f"the memory file {str(self._path)!r} cannot be read: there is no such file")
        jsonl.cut_torn_line(self._path, is_heading, "memory of a run")
        result, *lines = read_lines(self._path)
        assert isinstance(result, Heading)  # `read_lines` sees to it
        known, given = _identity(result), _identity(heading)
        for name in {**known, **given}:
            if known.get(name) != given.get(name):
                raise ValueError(
                    f"the memory file {str(self._path)!r} is of another run: {name} {known.get(name)!s:.80}, "
                    f"not {given.get(name)!s:.80}"
                )
        for call in lines:
            if isinstance(call, Call) and call.answer is not None:
                key = (call.purpose, call.model, call.effort, call.seed, call.digest)
                self._known[key].append(_COMPLETION.validate_python(call.answer))


def _identity(heading: Heading) -> dict[str, str]:
    """What two runs that share answers have in common, by its name, as JSON."""
    values = {"strategy": heading.strategy, "problem": heading.problem, "models": heading.models}
    values |= {f"settings: {name}": value for name, value in heading.settings.items()}
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
