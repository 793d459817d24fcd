"""The index of a context: what it finds in which passage, and nothing else."""

import numpy as np
import pytest

from sigma0.signals.grounding.claims import checkable
from sigma0.signals.grounding.evidence import Evidence, initials, tokens_of
from sigma0.signals.grounding.quantities import Date, Number


def index(*texts):
    return Evidence(texts, frozenset())


def everywhere(evidence):
    return np.ones(len(evidence.passages), dtype=bool)


def has_number(text, context, tolerance=0.0):
    evidence = index(context)
    (number,) = checkable(text).numbers
    return evidence.has_number(number, everywhere(evidence), tolerance)


@pytest.mark.parametrize(
    "text, context, result",
    [
        ("12.5 cats", "He saw 12.54 cats.", True),
        ("12.5 cats", "He saw 12.46 cats.", True),
        ("12.5 cats", "He saw 12.56 cats.", False),
        ("3.5 million cats", "He saw 3,549,000 cats.", True),
        ("3.5 million cats", "He saw 3,551,000 cats.", False),
        # within the share of what is known: 100 differs from 105.2 by less than a twentieth of 105.2
        ("about 100 cats", "He saw 105.2 cats.", True),
        ("about 100 cats", "He saw 105.3 cats.", False),
        ("about 100 cats", "He saw 95.3 cats.", True),
        ("100 cats", "He saw 105.2 cats.", False),
        ("4 kg", "It has 4,000 grams.", True),
        ("4 kg", "It has 4.", True),
        # rounded in its own unit, and found in another
        ("4.0 kg", "It has 4,049 grams.", True),
        ("4.0 kg", "It has 4,051 grams.", False),
    ],
)
def test_numbers_are_found_within_their_rounding(text, context, result):
    assert has_number(text, context, 0.05) is result


def test_numbers_and_years_are_found_in_near_passages_or_alone():
    evidence = index("Bob saw 5 cats. Ann saw 6 cats.", "7", "8%")
    assert [passage.text for passage in evidence.passages] == ["Bob saw 5 cats.", "Ann saw 6 cats.", "7", "8%"]
    bob = evidence.naming("Bob")
    for amount, near in ((5, True), (6, False), (7, True), (9, False)):
        assert evidence.has_number(Number(float(amount), nouns=("cat",)), bob, 0.0) is near
    assert evidence.has_number(Number(8.0, text="8"), bob, 0.0), "alone, it lacks its percent sign"
    assert not evidence.has_number(Number(float("inf")), bob, 0.0)
    evidence = index("Bob left on May 5, 2024. Ann left on May 6, 2025.")
    bob = evidence.naming("Bob")
    assert evidence.has_number(Number(2024.0, text="2024"), bob, 0.0)
    assert not evidence.has_number(Number(2025.0, text="2025"), bob, 0.0)
    assert not evidence.has_number(Number(2024.0, nouns=("cat",), text="2024"), bob, 0.0)


def test_passages_are_sentences_and_pairs_whose_second_names_nobody():
    evidence = index("Bob sat on a mat. He never slept. Was it 5? Ann saw 3 cats on May 5, 2024.", "It is 5.")
    texts = [passage.text for passage in evidence.passages]
    assert texts == [
        "Bob sat on a mat.", "He never slept.", "Ann saw 3 cats on May 5, 2024.", "Bob sat on a mat. He never slept.",
        "It is 5.",
    ]  # fmt: skip
    pair = evidence.passages[3]
    assert pair.negated and pair.parts.names == ("Bob",) and pair.stems == {"bob", "sat", "mat", "slept"}
    assert pair.tokens == ("bob", "sat", "on", "a", "mat", "he", "never", "slept")
    assert evidence.lengths.tolist() == [5, 3, 8, 8, 3]
    assert evidence.wordless.tolist() == [False, False, False, False, True] and not evidence.lone.any()
    assert evidence.stems >= {"sat", "slept", "cat"}
    assert evidence.shared(["cat", "sat", "dog"]).tolist() == [1, 0, 1, 1, 0]


def test_a_pair_has_all_of_its_parts():
    one = "It has a.b_c and `f` and 5 cats and said 'we all won it' on May 5, 2024 at a.org/b."
    two = "it has 6 cats on May 6, 2024 at a.org/c and `g` and said 'we all lost it'"
    (pair,) = index(f"{one}\n{two}").passages[2:]
    first, second = checkable(one), checkable(two)
    for name in ("links", "code", "quotes", "dates", "numbers"):
        assert getattr(pair.parts, name) == getattr(first, name) + getattr(second, name) != ()
    assert pair.parts.rest == f"{first.rest} {second.rest}" and not pair.negated
    denials = index("Bob never sat.\nhe never slept.").passages
    assert [passage.negated for passage in denials] == [True, True, False], "two of a pair are none"
    assert [passage.lone for passage in index("42", "He is 42.", "1\n2", "Rome").passages] == [True] + [False] * 5


def test_links_are_the_same_but_for_scheme_and_host():
    evidence = index("See https://www.a.org/b there.")
    assert all(map(evidence.has_link, ("https://a.org/b", "http://A.org/b/", "a.org/b", "www.a.org/b")))
    assert not any(map(evidence.has_link, ("a.org/B", "a.org/", "b.a.org/b")))


def test_dates_are_found_in_the_parts_that_are_given():
    evidence = index("Bob left on May 5, 2024.")
    result = [Date(*date, "") for date in ((2024, 5, 5), (None, 5, 5), (2024, 5, None), (None, 5, None))]
    other = [Date(*date, "") for date in ((2024, 5, 6), (2025, 5, 5), (None, 6, None))]
    assert [evidence.has_date(date, everywhere(evidence)) for date in (*result, *other)] == [True] * 4 + [False] * 3
    assert not any(evidence.has_date(date, ~everywhere(evidence)) for date in result)


def test_identifiers_stand_apart():
    result = (("a.b", "a.b"), ("a.b", "a.bc and xa.b and a.b"), ("a.b", "(a.b)"), ("a_b", "an a_b"))
    for code, text in (*result, ("v1.2.3", "at 1.2.3"), ("1.2.3", "at v1.2.3 now")):
        assert index(text).has_code(code), text
    missed = (("a.b", "xa.b"), ("a.b", "a.bc"), ("a.b", "there is none"), ("a_b", "an a_bc"))
    for code, text in (*missed, ("1.2.3", "at 1.2.3.4"), ("1.2.3", "at 1.2.3x")):
        assert not index(text).has_code(code), text


def test_quotations_are_the_same_but_for_case_and_punctuation():
    evidence = index("He said: we,  WON it!", "And more.")
    assert all(map(evidence.has_quote, ("we won", "?", "He said we won it")))
    assert not any(map(evidence.has_quote, ("we wo", "e won", "it and more")))


def test_names_are_found_in_a_row_or_by_their_initials():
    for context, result, missed in (
        ("The Nice Air Space Agency flew.", ("NASA", "Air Space", "Agency's"), ("Air Agency", "Nic Air")),
        ("The Nice Air Space Agency United Kingdom flew.", ("NASAUK",), ()),
        ("The Nice Air Space Agency United Kingdom Xray flew.", (), ("NASAUKX",)),
        ("The NASA flew.", ("Nice Air Space Agency",), ("Nice Air",)),
        ("The Nice Air flew.", ("NA",), ("Nic Air",)),
    ):
        evidence = index(context)
        assert all(evidence.naming(name).any() for name in result), context
        assert not any(evidence.naming(name).any() for name in missed), context
    assert tokens_of("Jean-Paul O'Neill's 5 cats'") == ("jean", "paul", "o'neill", "5", "cats")
    assert initials("National Aeronautics and Space Administration") == "NASA"
