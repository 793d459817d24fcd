"""Answers of a run in a file, so that a run that broke off is repeated from them and goes on where they end.

All else that a strategy does follows from the answers, its settings and its seed: a resumed run ends as one that was
never interrupted. Programs and tests are run again.
"""

import json
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from threading import Lock

from pydantic import TypeAdapter

from sigma0 import jsonl
from sigma0.config import Effort
from sigma0.reason.messages import Completion
from sigma0.reason.trail import Call, Heading, is_heading, read_lines

_COMPLETION: TypeAdapter[Completion] = TypeAdapter(Completion)
_SAME = ("strategy", "problem", "models", "settings")
Key = tuple[str, str, Effort, int]


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
            key: Purpose, model, effort and seed.
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
        found, *lines = read_lines(self._path)
        for name in _SAME:
            known, given = getattr(found, name), getattr(heading, name)
            if json.dumps(known, sort_keys=True) != json.dumps(given, sort_keys=True):
                raise ValueError(
                    f"the memory file {str(self._path)!r} is of another run: {name} {known!r:.80}, not {given!r:.80}"
                )
        for call in lines:
            if isinstance(call, Call) and call.answer is not None:
                key = (call.purpose, call.model, call.effort, call.seed)
                self._known[key].append(_COMPLETION.validate_python(call.answer))
