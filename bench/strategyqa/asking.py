"""How a level asks: each question named, counted, and answered from the cache where it was asked before."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sigma0.bench.strategyqa.cache import AnswerCache
from sigma0.config import Effort
from sigma0.reason.messages import ChatModel, ChatSettings, Completion

MAX_TOKENS = 64


@dataclass(frozen=True)
class Asked:
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
    asked: list[Asked] = field(default_factory=list)

    def __call__(self, purpose: str, prompt: str, stop: Sequence[str] = ()) -> str:
        """The answer to a question.

        Args:
            purpose: The step of the level.
            prompt: What the user says.
            stop: Strings that end the answer.

        Raises:
            ChatFailed: If there is none.
        """
        messages = [{"role": "user", "content": prompt}]
        settings = replace(self.settings, stop=(*self.settings.stop, *stop))
        found = None if self.cache is None else self.cache.get(self.model, messages, settings)
        if found is None:
            found = self.model.complete(messages, settings)
            if self.cache is not None:
                self.cache.put(self.model, messages, settings, found)
        self.asked.append(Asked(purpose, prompt, found))
        return found.text
