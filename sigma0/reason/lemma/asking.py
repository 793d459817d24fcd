"""How the parts of the lemma graph ask: settings applied, lemmas limited, a larger model where the first one fails."""

from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import Literal

from sigma0.config import Messages
from sigma0.reason.desk import Desk
from sigma0.reason.lemma.settings import LemmaSettings
from sigma0.reason.messages import ChatFailed, ChatModel, ChatSettings, Completion

Kind = Literal["plan", "prove", "check", "code"]


class LemmaLimitReached(RuntimeError):
    """The limit of questions about one lemma, which forbids the next one."""


class Questions:
    """Asks on behalf of a run.

    Args:
        model: Who is asked.
        desk: Of the run.
        settings: Of its questions.
        above: A larger model, asked where the other gives no answer, or where a proof's verdict asks for it.
    """

    def __init__(self, model: ChatModel, desk: Desk, settings: LemmaSettings, above: ChatModel | None = None) -> None:
        self.model = model
        self.desk = desk
        self.settings = settings
        self.above = above
        self._asked: Counter[str] = Counter()
        self._alone = Lock()

    def ask(
        self, kind: Kind, purpose: str, messages: Messages, lemma: str | None = None, of_above: bool = False
    ) -> Completion:
        """Asks for a text.

        Args:
            kind: Of the question: gives its effort.
            purpose: Its name, one of its own.
            messages: It.
            lemma: Id of the lemma that it is about, if there is one.
            of_above: Whether the larger model is asked at once.

        Raises:
            LimitReached: If a limit of the run forbids it.
            LemmaLimitReached: If that of the lemma does.
            ChatFailed: If no model answers.
        """
        if of_above:
            assert self.above is not None
            return self._ask(self.above, kind, f"{purpose}, above", messages, lemma)
        try:
            return self._ask(self.model, kind, purpose, messages, lemma)
        except ChatFailed as error:
            return self._ask(self._larger(purpose, error), kind, f"{purpose}, above", messages, lemma)

    def choose(
        self, kind: Kind, purpose: str, messages: Messages, labels: Sequence[str], lemma: str | None = None
    ) -> str | None:
        """Asks for one of some labels, as `Desk.choose` does; else as `ask`."""
        self._count(lemma, purpose)
        effort = getattr(self.settings.efforts, kind)
        try:
            return self.desk.choose(self.model, purpose, messages, labels, effort=effort)
        except ChatFailed as error:
            larger = self._larger(purpose, error)
        self._count(lemma, purpose)
        return self.desk.choose(larger, f"{purpose}, above", messages, labels, effort=effort)

    def _ask(self, model: ChatModel, kind: Kind, purpose: str, messages: Messages, lemma: str | None) -> Completion:
        self._count(lemma, purpose)
        effort = getattr(self.settings.efforts, kind)
        settings = ChatSettings(effort, self.settings.max_tokens, self.settings.temperature)
        return self.desk.ask(model, purpose, messages, settings)

    def _larger(self, purpose: str, error: ChatFailed) -> ChatModel:
        if self.above is None:
            raise error
        why = f"{self.model.name} gave no answer to {purpose!r}, so {self.above.name} is asked: {error}"
        self.desk.trail.decide("escalate", why, purpose=purpose, model=self.above.name)
        return self.above

    def _count(self, lemma: str | None, purpose: str) -> None:
        if lemma is None:
            return
        with self._alone:
            if self._asked[lemma] >= self.settings.calls_per_lemma:
                limit = self.settings.calls_per_lemma
                raise LemmaLimitReached(f"the limit of {limit} questions about {lemma} is reached before {purpose!r}")
            self._asked[lemma] += 1
