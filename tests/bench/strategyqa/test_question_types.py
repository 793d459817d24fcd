import pytest

from sigma0.bench.strategyqa.adaptive import asked, question_type
from sigma0.bench.strategyqa.items import world_items


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Are the flags of Chad and Romania similar?", "similarity"),
        ("Is a ton of steel the same as a ton of wool?", "similarity"),
        ("Is the Nile longer than the Rhine?", "comparison"),
        ("Would a week be enough time to read it?", "comparison"),
        ("Is this the heaviest of all planets?", "comparison"),
        ("Was the bridge built before the tower?", "temporal"),
        ("Did anyone vote by telephone in 1650?", "temporal"),
        ("Did drought cause the famine?", "causal"),
        ("Did Led Zeppelin play in Oslo?", "factual"),
        ("Did the strike lead to a new law?", "causal"),
        ("Could a cat drive a bus?", "possibility"),
        ("WOULD a cat drive a bus?", "possibility"),
        ("Do gulls eat fish?", "factual"),
        ("", "factual"),
        # the first rule that holds decides
        ("Could both be of the same size, or is one larger?", "similarity"),
        ("Could one be larger?", "comparison"),
    ],
)
def test_words_of_a_question_tell_its_type(text, expected):
    assert question_type(text) == expected


def test_a_story_before_the_question_does_not_count():
    assert question_type("Ella is older than Tom. Does Ella sing?") == "factual"
    for item in world_items(20):
        assert asked(item.question) == item.decomposition[-1]
    for text in ("Would Dr. Seuss like St. Paul?", "Who? Me?", "No question at all. None.", ""):
        assert asked(text) == text
