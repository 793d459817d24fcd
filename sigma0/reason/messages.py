"""What is asked and answered: one interface over whatever answers messages."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

from sigma0.config import Effort, Messages
from sigma0.signals.verdict import Door, ReasonVerdict

FinishReason = Literal["stop", "length"]
MAX_TOKENS = 512


@dataclass(frozen=True)
class Usage:
    """What answers took.

    Attributes:
        calls: Questions asked.
        prompt_tokens: Ids read, as far as the model tells, like all below.
        completion_tokens: Ids written.
        loop_passes: Passes of looped blocks, prompts left out.
        bytes_read: Passes times block bytes over the rungs of a ladder.
        seconds: From question to answer.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    loop_passes: int = 0
    bytes_read: int = 0
    seconds: float = 0.0

    def plus(self, other: "Usage") -> "Usage":
        """The sum."""
        return Usage(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)})


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        text: It.
        usage: What it took.
        verdict: On the whole text; None where the model has none.
        finish_reason: `length` where it was cut off.
        door: That the verdict opens; None without one. `abort` comes of ladders.
        notes: What else a ladder or an endpoint tells: its costs, how often tokens went up; plain JSON values.
    """

    text: str
    usage: Usage = field(default_factory=lambda: Usage(calls=1))
    verdict: ReasonVerdict | None = None
    finish_reason: FinishReason = "stop"
    door: Door | None = None
    notes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "text": self.text,
            "usage": asdict(self.usage),
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "finish_reason": self.finish_reason,
            "door": self.door,
            "notes": dict(self.notes),
        }


@dataclass(frozen=True)
class ChatSettings:
    """How one question is answered.

    Attributes:
        effort: On a looped model depth (`sigma0.config`), on an endpoint `reasoning_effort`.
        max_tokens: New tokens at most, >= 1.
        temperature: 0 is greedy.
        seed: Of the sampling.
        stop: Strings that end the text.
        grammar: That the text follows, in Lark's notation; None: none. Ladders cannot be held to one.
    """

    effort: Effort = "low"
    max_tokens: int = MAX_TOKENS
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    grammar: str | None = None


DEFAULTS = ChatSettings()


class ChatFailed(RuntimeError):
    """A model that gave no answer: an endpoint that is down or refuses, a budget that is spent."""


@runtime_checkable
class ChatModel(Protocol):
    """Whatever answers messages.

    Attributes:
        name: In trails.
    """

    name: str

    def complete(self, messages: Messages, settings: ChatSettings = DEFAULTS) -> Completion:
        """Answers.

        Args:
            messages: With `role` and `content`, not empty.
            settings: How.

        Raises:
            ChatFailed: If there is no answer.
            ValueError: For bad settings.
        """


@runtime_checkable
class Chooser(Protocol):
    """A chat model that can be held to a few answers, token by token."""

    def choose(
        self, messages: Messages, labels: Sequence[str], *, effort: Effort = "low", seed: int | None = None
    ) -> tuple[str, Completion]:
        """The label that the model writes where it can write nothing else.

        Raises:
            ValueError: For labels that its tokenizer cannot write.
        """
