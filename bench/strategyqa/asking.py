"""How a level asks: each question named, counted, and answered from the cache where it was asked before."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock

from pydantic import TypeAdapter

from sigma0.bench.core.lines import alone, append, cut, parsed
from sigma0.config import Effort, Messages
from sigma0.reason.messages import ChatModel, ChatSettings, Completion

_COMPLETION = TypeAdapter(Completion)


class AnswerCache:
    """A file of answers, keyed by the model, its weights, what was said and the settings.

    Threads may share it, and processes the file: each finds there what was given before it began. A last line that was
    not written to its end is cut off. `identities` tell models of one name apart: their weights' digest, or address.

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
        output = [model.name, self._identities[model.name], [dict(item) for item in messages], values]
        return sha256(json.dumps(output, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _answer(line: bytes) -> tuple[str, Completion]:
    value = json.loads(line)
    answer = _COMPLETION.validate_python(value["answer"])
    if value["answer"].keys() != answer.to_dict().keys():
        raise ValueError(f"a completion holds {', '.join(answer.to_dict())}, got {', '.join(value['answer'])}")
    return value["key"], answer


MAX_TOKENS = 64


@dataclass(frozen=True)
class Query:
    """A question of a level for a step such as "decompose", and its answer."""

    purpose: str
    prompt: str
    answer: Completion


@dataclass(frozen=True)
class AskSettings(ChatSettings):
    """What every question of a run has in common: `ChatSettings` with other defaults."""

    effort: Effort = "medium"
    max_tokens: int = MAX_TOKENS
    seed: int = 0


@dataclass
class Ask:
    """Asks on behalf of one item, and remembers what was asked; without a cache it asks everything."""

    model: ChatModel
    settings: AskSettings = field(default_factory=AskSettings)
    cache: AnswerCache | None = None
    asked: list[Query] = field(default_factory=list)

    def __call__(self, purpose: str, prompt: str, stop: Sequence[str] = ()) -> str:
        """The answer to a question.

        Raises:
            ChatFailed: If there is none.
        """
        messages = [{"role": "user", "content": prompt}]
        settings = replace(self.settings, stop=(*self.settings.stop, *stop))
        result = None if self.cache is None else self.cache.get(self.model, messages, settings)
        if result is None:
            result = self.model.complete(messages, settings)
            if self.cache is not None:
                self.cache.put(self.model, messages, settings, result)
        self.asked.append(Query(purpose, prompt, result))
        return result.text
