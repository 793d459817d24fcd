"""Where a strategy asks its models: every question counted, limited, seeded and written down."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from threading import Lock

from sigma0.config import Effort, Messages
from sigma0.reason.messages import DEFAULTS, ChatFailed, ChatModel, ChatSettings, Chooser, Completion, Usage
from sigma0.reason.record import Record, question_digest
from sigma0.reason.trail import Call, Trail

# of a label that is asked for in words: it, and a sign or two
LABEL_TOKENS = 8
# that a model may put around a label
_AROUND = "*_`'\" \t\r\n"


@dataclass(frozen=True)
class Limits:
    """Hard limits over a whole run; None sets none.

    Attributes:
        calls: Questions to models.
        tokens: Written by models.
        seconds: Since the run began; a question under way is not cut off.
    """

    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and not value > 0:
                raise ValueError(f"limit {item.name} must be above 0, got {value}")


class LimitReached(RuntimeError):
    """A limit that forbids the next question.

    Attributes:
        limit: Its name.
    """

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class Desk:
    """Asks models on behalf of one run.

    Args:
        trail: Where every question is written down.
        limits: Of the run.
        seed: Of the run; each purpose has a seed of its own drawn from it, the same whenever the run is repeated or
            resumed.

    Attributes:
        usage: Of all questions so far.
        record: Where answers are kept, and come from in a run that is resumed; None keeps none.
    """

    def __init__(self, trail: Trail, limits: Limits | None = None, seed: int = 0) -> None:
        self.trail = trail
        self.record: Record | None = None
        self.limits = limits or Limits()
        self.seed = seed
        self.usage = Usage()
        self._began = time.monotonic()
        self._alone = Lock()

    def ask(self, model: ChatModel, purpose: str, messages: Messages, settings: ChatSettings = DEFAULTS) -> Completion:
        """Asks for a text.

        Args:
            model: Who is asked.
            purpose: What for: names the question in the trail, and gives it its seed. Two of one purpose have one seed.
            messages: As `ChatModel.complete` takes them.
            settings: Of this question; its seed is the purpose's.

        Raises:
            LimitReached: If a limit forbids it.
            ChatFailed: If there is no answer; that is written down, too.
        """
        digest = question_digest(messages, asdict(replace(settings, seed=None)))
        return self._answered(
            model, purpose, settings.effort, digest, lambda seed: model.complete(messages, replace(settings, seed=seed))
        )

    def choose(
        self, model: ChatModel, purpose: str, messages: Messages, labels: Sequence[str], *, effort: Effort = "low"
    ) -> str | None:
        """Asks for one of some labels.

        A model that can be held to them token by token is (`Chooser`). Of any other the whole answer must be a label,
        but for its case and a full stop: one that merely holds a label says nothing, and is asked for once more.

        Args:
            model: Who is asked.
            purpose: As `ask` takes it.
            messages: A question whose answer is a label.
            labels: At least two words.
            effort: Of this question.

        Returns:
            The label; None where two answers were none.
        """
        if isinstance(model, Chooser):

            def chosen_label(seed: int) -> Completion:
                label, completion = model.choose(messages, labels, effort=effort, seed=seed)
                return replace(completion, text=label)

            digest = question_digest(messages, list(labels))
            return self._answered(model, purpose, effort, digest, chosen_label).text
        turns = list(messages)
        for attempt in ("", " again"):
            completion = self.ask(model, f"{purpose}{attempt}", turns, ChatSettings(effort, LABEL_TOKENS))
            chosen = as_label(completion.text, labels)
            if chosen is not None:
                return chosen
            ask_again = f"Answer with one word alone: {' or '.join(labels)}."
            turns += [{"role": "assistant", "content": completion.text}, {"role": "user", "content": ask_again}]
        return None

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began

    def _answered(
        self, model: ChatModel, purpose: str, effort: Effort, digest: str, answer: Callable[[int], Completion]
    ) -> Completion:
        """The answer to a question, by its seed, or the record's; counted and written down."""
        seed = self._begin(purpose)
        recorded = None if self.record is None else self.record.recall((purpose, model.name, effort, seed, digest))
        try:
            completion = recorded or answer(seed)
        except ChatFailed as error:
            self.trail.add(Call(purpose, model.name, effort, seed, None, str(error), digest))
            raise
        call = Call(purpose, model.name, effort, seed, completion.to_dict(), digest=digest)
        if self.record is not None and recorded is None:
            self.record.keep(call)
        self._end(call, completion.usage)
        return completion

    def _begin(self, purpose: str) -> int:
        with self._alone:
            self._check(purpose)
            self.usage = self.usage.plus(Usage(calls=1))
        digest = blake2b(f"{self.seed}/{purpose}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1

    def _check(self, purpose: str) -> None:
        limits = self.limits
        spent = (("calls", self.usage.calls), ("tokens", self.usage.completion_tokens), ("seconds", self.seconds))
        for name, value in spent:
            limit = getattr(limits, name)
            if limit is not None and value >= limit:
                raise LimitReached(name, f"the limit of {limit} {name} is reached before {purpose!r}")

    def _end(self, call: Call, usage: Usage) -> None:
        with self._alone:
            # the question itself was counted when it was asked
            self.usage = self.usage.plus(usage).plus(Usage(calls=-usage.calls))
        self.trail.add(call)


def as_label(text: str, labels: Sequence[str]) -> str | None:
    """The label that a text is, but for case, spaces, Markdown, quotes and a full stop; None where it is none."""
    bare = text.strip(_AROUND).removesuffix(".").strip(_AROUND).casefold()
    return next((label for label in labels if label.casefold() == bare), None)
