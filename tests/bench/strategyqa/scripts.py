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
    """A step of an item, marked by hand.

    Attributes:
        asks: As it must be asked, earlier answers in the place of `#1`.
        says: The answer that must be read: a fact, or yes or no to a condition.
        is_condition: Whether it asks yes or no about earlier answers.
    """

    asks: str
    says: str
    is_condition: bool


@dataclass(frozen=True)
class Script:
    """What is to be expected of an item, marked by hand.

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


def fact(asks, says):
    return Step(asks, says, False)


def yes(asks):
    return Step(asks, "Yes", True)


def no(asks):
    return Step(asks, "No", True)


SCRIPTS = {
    "penguins": Script(
        "simple",
        "factual",
        (fact("What kind of animal are penguins?", "birds"), yes("Do birds lay eggs?")),
        "#2",
        "not #2",
    ),
    "violin": Script(
        "medium",
        "comparison",
        (
            fact("How tall is a violin?", "0.6 metres"),
            fact("How tall is a double bass?", "1.8 metres"),
            no("Is 0.6 metres more than 1.8 metres?"),
        ),
        "#1 > #2",
        "#1 <= #2",
    ),
    "goldfish": Script(
        "medium",
        "possibility",
        (
            fact("In which water do goldfish live?", "fresh water"),
            fact("Which water is in the Dead Sea?", "very salty water"),
            no("Is very salty water the same as fresh water?"),
        ),
        "#1 = #2",
        "#1 != #2",
    ),
    "aristotle": Script(
        "medium",
        "similarity",
        (
            fact("In which century did Aristotle live?", "the 4th century BC"),
            fact("In which century was Napoleon born?", "the 18th century"),
            no("Is the 4th century BC the same as the 18th century?"),
        ),
    ),
    "elephants": Script(
        "hard",
        "comparison",
        (
            fact("How much do 2 elephants weigh?", "10 tonnes"),
            fact("How much do 1 mouse and 1 cat weigh?", "about 5 kg"),
            yes("Is 10 tonnes more than about 5 kg?"),
        ),
        "#1 > #2",
        "#2 > #1",
    ),
    "boiling": Script(
        "hard",
        "comparison",
        (
            fact("Where is the air thin?", "on high mountains"),
            fact("What does thin air do to a boiling point?", "it lowers it"),
            yes("If it lowers it, is it lower on high mountains?"),
        ),
        "#3",
        "not #3",
    ),
    "lima": Script(
        "simple",
        "factual",
        (fact("What is the capital of Chile?", "Santiago"), no("Is Santiago Lima?")),
        '#1 = "Lima"',
        '#1 != "Lima"',
    ),
    "newton": Script(
        "simple",
        "temporal",
        (
            fact("When did Isaac Newton die?", "in 1727"),
            fact("When was the telephone invented?", "in 1876"),
            no("Is in 1876 before in 1727?"),
        ),
        "#2 < #1",
        "#2 >= #1",
    ),
    "marzipan": Script(
        "hard",
        "possibility",
        (fact("What is the marzipan made of?", "almonds"), no("Are almonds peanuts?")),
        "not #2",
        "#2",
    ),
    "smoke": Script(
        "simple",
        "causal",
        (fact("What does smoke contain?", "tar"), yes("Does tar harm the lungs?")),
    ),
    "whales": Script(
        "medium",
        "factual",
        (
            fact("What kind of animal are cows?", "mammals"),
            fact("What kind of animal are whales?", "mammals"),
            yes("Do mammals feed their young with milk?"),
            yes("Is mammals the same as mammals?"),
        ),
        "#3 and #1 = #2",
        "#1 != #2 or not #3",
    ),
    "leap": Script(
        "medium",
        "temporal",
        (fact("How many days has a leap year?", "366"), yes("Is 366 an even number?")),
        "it is even",
        "it is odd",
    ),
    "gelatine": Script(
        "medium",
        "possibility",
        (
            fact("What is gelatine made of?", "bones of animals"),
            fact("What does a vegetarian refuse?", "parts of animals"),
            yes("Are bones of animals among parts of animals?"),
        ),
        "#1 < #2",
        "#2 < #1",
    ),
    "eiffel": Script(
        "hard",
        "temporal",
        (
            fact("Which city held the Olympic Games in 1936?", "Berlin"),
            fact("In which city is the Eiffel Tower?", "Paris"),
            no("Is Berlin Paris?"),
        ),
        "#1 = #2",
        "#1 != #2",
    ),
    "hamlet": Script(
        "simple",
        "factual",
        (fact("How does “Hamlet” end?", "with a duel"), no("Is with a duel a wedding?")),
    ),
    "zurich": Script(
        "medium",
        "comparison",
        (
            fact("How far is Kyōto from Zürich?", "9,500 km"),
            fact("How far is Genève from Zürich?", "220 km"),
            yes("Is 9,500 km more than 220 km?"),
        ),
        "#1 >= #2",
        "not #1 >= #2",
    ),
    "panama": Script(
        "hard",
        "comparison",
        (
            fact("Which canal crosses Panama?", "the Panama Canal"),
            fact("How many locks lead up in the Panama Canal?", "3"),
            fact("How many locks lead down in the Panama Canal?", "3"),
            fact("How many are 3 and 3 together?", "6"),
            no("Is 6 less than 3?"),
        ),
        "#4 < 3",
        "#4 >= 3",
    ),
    "ice": Script("simple", "factual", (fact("What is ice?", "frozen water"),)),
    "tomato": Script(
        "simple",
        "factual",
        (fact("Which kind of fruit is a tomato?", "a fleshy one"), yes("Is a fleshy one a berry?")),
        "yes",
        "no",
    ),
    "rome": Script(
        "simple",
        "temporal",
        (
            fact("When did Rome fall?", "in 476"),
            fact("When did Columbus sail?", "in 1492"),
            yes("Is in 476 before in 1492?"),
        ),
        "#1 < #2",
        "#1 > #2",
    ),
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
