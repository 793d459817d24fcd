"""Twenty items of general knowledge in the published form, and what a scripted model says to each of their steps."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from sigma0.bench.strategyqa.items import Item

_FOLDER = Path(__file__).with_name("twenty")
_ITEMS = TypeAdapter(list[Item])
ITEMS = _ITEMS.validate_json((_FOLDER / "dev.json").read_bytes())
TRAIN = _ITEMS.validate_json((_FOLDER / "train.json").read_bytes())


@dataclass(frozen=True)
class Step:
    """A step of an item.

    Attributes:
        asks: As it must be asked, earlier answers in the place of `#1`.
        says: The answer that must be read: a fact, or Yes or No to a condition.
    """

    asks: str
    says: str

    @property
    def is_condition(self):
        return self.says in ("Yes", "No")


@dataclass(frozen=True)
class Script:
    """What is to be expected of an item.

    Attributes:
        difficulty: By the rules of the router.
        kind: Of the question.
        steps: Of its decomposition.
        condition: On their answers, that is the label; None where the model states none.
        opposite: The condition that is the other label.
    """

    difficulty: str
    kind: str
    steps: tuple[Step, ...]
    condition: str | None = None
    opposite: str | None = None


# marked by hand: difficulty, kind, the answer to each step, the condition that is the label, and the one that is not
_MARKED = {
    "penguins": ("simple", "factual", ("birds", "Yes"), "#2", "not #2"),
    "violin": ("medium", "comparison", ("0.6 metres", "1.8 metres", "No"), "#1 > #2", "#1 <= #2"),
    "goldfish": ("medium", "possibility", ("fresh water", "very salty water", "No"), "#1 = #2", "#1 != #2"),
    "aristotle": ("medium", "similarity", ("the 4th century BC", "the 18th century", "No")),
    "elephants": ("hard", "comparison", ("10 tonnes", "about 5 kg", "Yes"), "#1 > #2", "#2 > #1"),
    "boiling": ("hard", "comparison", ("on high mountains", "it lowers it", "Yes"), "#3", "not #3"),
    "lima": ("simple", "factual", ("Santiago", "No"), '#1 = "Lima"', '#1 != "Lima"'),
    "newton": ("simple", "temporal", ("in 1727", "in 1876", "No"), "#2 < #1", "#2 >= #1"),
    "marzipan": ("hard", "possibility", ("almonds", "No"), "not #2", "#2"),
    "smoke": ("simple", "causal", ("tar", "Yes")),
    "whales": ("medium", "factual", ("mammals", "mammals", "Yes", "Yes"), "#3 and #1 = #2", "#1 != #2 or not #3"),
    "leap": ("medium", "temporal", ("366", "Yes"), "it is even", "it is odd"),
    "gelatine": ("medium", "possibility", ("bones of animals", "parts of animals", "Yes"), "#1 < #2", "#2 < #1"),
    "eiffel": ("hard", "temporal", ("Berlin", "Paris", "No"), "#1 = #2", "#1 != #2"),
    "hamlet": ("simple", "factual", ("with a duel", "No")),
    "zurich": ("medium", "comparison", ("9,500 km", "220 km", "Yes"), "#1 >= #2", "not #1 >= #2"),
    "panama": ("hard", "comparison", ("the Panama Canal", "3", "3", "6", "No"), "#4 < 3", "#4 >= 3"),
    "ice": ("simple", "factual", ("frozen water",)),
    "tomato": ("simple", "factual", ("a fleshy one", "Yes"), "yes", "no"),
    "rome": ("simple", "temporal", ("in 476", "in 1492", "Yes"), "#1 < #2", "#1 > #2"),
}


def _steps(item, answers):
    steps = []
    for asks, says in zip(item.decomposition, answers, strict=True):
        for number, step in enumerate(steps, start=1):
            asks = asks.replace(f"#{number}", step.says)
        steps.append(Step(asks, says))
    return tuple(steps)


SCRIPTS = {
    item.qid: Script(difficulty, kind, _steps(item, answers), *conditions)
    for item in ITEMS
    for difficulty, kind, answers, *conditions in [_MARKED[item.qid]]
}
# of the items of train, marked by hand like the others
TRAIN_KINDS = {
    "cello": "comparison",
    "shark": "possibility",
    "plato": "temporal",
    "peru": "factual",
    "ostrich": "factual",
}
# whose conditions Python cannot work out: words, names that have no order, or no step
UNDECIDABLE = {"leap", "gelatine", "tomato"}
