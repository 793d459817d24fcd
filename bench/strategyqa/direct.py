"""L0: one question, one answer."""

from collections.abc import Sequence

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.items import Item
from sigma0.bench.strategyqa.level import Prediction, Question, read

FORM = "Answer with Yes or No."


class Direct:
    """Asks the question as it is.

    Calls: answer.
    """

    name = "L0"
    learns = False

    def predict(self, question: Question, ask: Ask) -> Prediction:
        """See `Level`."""
        return read(ask("answer", f"{question.text}\n{FORM}"), "answer", {})

    def learn(self, item: Item, prediction: Prediction) -> None:
        """Learns nothing."""

    def seeds(self) -> Sequence[str]:
        """Knows no items."""
        return ()
