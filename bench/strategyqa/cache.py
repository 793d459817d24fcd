"""Answers that models gave, one JSON line each: a run is resumed from them, and repeated bit for bit."""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from threading import Lock

from pydantic import TypeAdapter

from sigma0.bench.core.lines import alone, append, cut, parsed
from sigma0.config import Messages
from sigma0.reason.messages import ChatModel, ChatSettings, Completion

_COMPLETION = TypeAdapter(Completion)


class AnswerCache:
    """A file of answers, keyed by the model, its weights, what was said and the settings.

    Threads may share it, and processes the file: each finds there what was given before it began.

    Args:
        path: The file; made where it is missing. A last line that was not written to its end is cut off.
        identities: What tells a model from another of the same name, by name: its weights' digest, or its address.

    Raises:
        ValueError: If the file holds a line that is no answer.
    """

    def __init__(self, path: Path, identities: dict[str, str]) -> None:
        self.path = path
        self._identities = identities
        self._alone = Lock()
        with alone(path):
            cut(path)
            self._known = dict(parsed(path, _answer, "answer"))

    def get(self, model: ChatModel, messages: Messages, settings: ChatSettings) -> Completion | None:
        """The answer to the same question of the same model."""
        return self._known.get(self._key(model, messages, settings))

    def put(self, model: ChatModel, messages: Messages, settings: ChatSettings, answer: Completion) -> None:
        """Keeps an answer."""
        key = self._key(model, messages, settings)
        with self._alone:
            if key not in self._known:
                self._known[key] = answer
                line = json.dumps({"key": key, "answer": answer.to_dict()}, ensure_ascii=False)
                with alone(self.path):
                    append(self.path, line.encode())

    def __len__(self) -> int:
        return len(self._known)

    def _key(self, model: ChatModel, messages: Messages, settings: ChatSettings) -> str:
        # answers that were kept before there were grammars are answers without one
        values = {name: value for name, value in asdict(settings).items() if name != "grammar" or value is not None}
        told = [model.name, self._identities[model.name], [dict(each) for each in messages], values]
        return sha256(json.dumps(told, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _answer(line: bytes) -> tuple[str, Completion]:
    value = json.loads(line)
    answer = _COMPLETION.validate_python(value["answer"])
    if value["answer"].keys() != answer.to_dict().keys():
        raise ValueError(f"a completion holds {', '.join(answer.to_dict())}, got {', '.join(value['answer'])}")
    return value["key"], answer
