"""Claims and their anchors."""

import pytest

from sigma0.claims import checkable, sentences
from sigma0.grounding import check

CONTEXT = (
    "Albany, GA has around 75,000 people. Albany, NY has almost 100,000 people. The tower of Pisa rises 56 m. "
    'Barack Obama was born on August 4, 1961 in Honolulu. He wrote "Dreams from My Father" in 1995. '
    "The cat is not in the garden. Call `load_model()` first, see https://example.org/docs. "
    "The National Aeronautics and Space Administration spent 3,123,456 dollars, 12.5 % of it on fuel. "
    "Mary went to the park. The hat is with Mary."
)


@pytest.mark.parametrize(
    "text, kind, anchored",
    [
        ("Albany, GA has around 75,000 people.", "number", True),
        ("Albany, NY has around 75,000 people.", "number", False),
        ("Albany, GA has 76,000 people.", "number", False),
        ("Albany, GA has about 76,000 people.", "number", True),
        ("Atlanta has 75,000 people.", "number", False),
        ("The tower of Pisa is 0.056 km high.", "number", True),
        ("The tower of Pisa is 56 miles high.", "number", False),
        ("Obama was born on 4 August 1961.", "date", True),
        ("Obama was born on 5 August 1961.", "date", False),
        ("Barack Obama was born in August 1961.", "date", True),
        ("Barack Obama was born in 1961.", "number", True),
        ("Michelle Obama was born in 1961.", "number", False),
        ('He wrote "dreams from my father".', "quote", True),
        ('He wrote "dreams of my mother".', "quote", False),
        ("NASA spent 3.1 million dollars.", "number", True),
        ("NASA spent 3.4 million dollars.", "number", False),
        ("NASA spent 12.5 percent on fuel.", "number", True),
        ("The cat is in the garden.", "statement", False),
        ("The cat is not in the garden.", "statement", True),
        ("Mary is in the park.", "entity", True),
        ("Mary is in the cellar.", "entity", False),
        ("The hat is in the park.", "statement", True),
        ("The hat is on the moon.", "statement", False),
        ("Use `load_model()`.", "code", True),
        ("Use `save_model()`.", "code", False),
        ("See https://example.org/docs.", "link", True),
        ("See https://example.org/other.", "link", False),
    ],
)
def test_a_claim(text, kind, anchored):
    told = check(text, CONTEXT)
    assert [(claim.kind, claim.anchored) for claim in told.claims] == [(kind, anchored)]
    assert told.score == float(anchored)
    assert told.claims[0].text == text


@pytest.mark.parametrize(
    "text",
    [
        "", "I think it is lovely!", "What a day it was.", "In my opinion it could not be better.",
        "Is Paris in France?", "Perhaps Paris has 40 towers.", "Paris is the most beautiful city.",
        "I feel great. You should be happy!",
    ],
)  # fmt: skip
def test_nothing_checkable(text):
    assert check(text, CONTEXT).score is None
    assert check(text, CONTEXT).claims == ()


def test_the_score_is_a_share_and_the_rest_is_named():
    told = check("Mary went to the park. She paid 40 dollars. I think it was fun.", CONTEXT)
    assert told.score == 0.5
    assert [claim.text for claim in told.unanchored] == ["She paid 40 dollars."]
    assert told.claims[0].evidence == "Mary went to the park."
    assert told.to_dict()["claims"][1]["anchored"] is False


def test_several_sources_and_none():
    assert check("Rome has 7 hills.", ["Paris is large.", "Rome has seven hills."]).score == 1.0
    assert check("Rome has 7 hills.", []).score == 0.0


def test_sentences():
    text = (
        "Dr. Smith paid 3.5 million to J. Doe. He left at 5 p.m. yesterday! Why?\n- one item\n- another one\n\nThe end"
    )
    assert sentences(text) == [
        "Dr. Smith paid 3.5 million to J. Doe.", "He left at 5 p.m. yesterday!", "Why?", "one item", "another one",
        "The end",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, values",
    [
        ("It took 1,234.5 kg and 3 km", [1234500.0, 3000.0]),
        ("$5 million or 20%", [5e6, 20.0]),
        ("twenty-five people in 3 days", [25.0, 259200.0]),
        ("one of them", []),
        ("the 21st of two hundred", [21.0, 200.0]),
    ],
)
def test_numbers(text, values):
    assert sorted(number.value for number in checkable(text).numbers) == pytest.approx(sorted(values))


def test_a_model_may_be_asked():
    class Picky:
        def support(self, claim, evidence):
            return 1.0 if "park" in evidence and "park" in claim else 0.0

    assert check("Mary went to the park.", CONTEXT, model=Picky()).score == 1.0
    assert check("The tower of Pisa rises 56 m.", CONTEXT, model=Picky()).score == 0.0


def test_a_bad_tolerance_is_refused():
    with pytest.raises(ValueError, match="tolerance"):
        check("x", "y", tolerance=1.0)
