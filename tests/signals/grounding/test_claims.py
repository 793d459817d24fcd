"""What of a sentence is an identifier or a link, and what only looks like one."""

import pytest

from sigma0.signals.grounding.claims import (
    Checkable,
    assertions,
    checkable,
    common_words,
    content_words,
    is_hedged,
    is_negated,
    is_opinion,
    is_question,
    is_statement,
    sentences,
)


@pytest.mark.parametrize(
    "text, code",
    [
        ("os.path", ("os.path",)),
        ("np.array()", ("np.array()",)),
        ("aa.bb.cc", ("aa.bb.cc",)),
        # one letter on one side is enough of a name, single letters alone are an abbreviation
        ("ab.c", ("ab.c",)),
        ("a.b", ()),
        ("a.b()", ("a.b()",)),
        ("U.S", ()),
        # two sentences without a space between them
        ("the end.Then he", ()),
        ("x y", ()),
        ("`x y`", ("x y",)),
        ("snake_case", ("snake_case",)),
        ("camelCase", ("camelCase",)),
        ("f()", ("f()",)),
        ("5KM", ()),
        ("kW", ()),
        ("3.2.1 or v1.2.3", ("3.2.1", "v1.2.3")),
        ("fig.two", ()),
        ("ph.d", ()),
        ("Numpy.array", ()),
        ("numpy.Array", ()),
        ("numpy.random.Array", ("numpy.random.Array",)),
        ("Numpy.array()", ("Numpy.array()",)),
    ],
)
def test_identifiers(text, code):
    assert checkable(f"one may see {text} there").code == code


@pytest.mark.parametrize(
    "text, link",
    [
        ("https://a.org/x", "https://a.org/x"),
        ("https://a.org/x(y). Then", "https://a.org/x(y)"),
        ("(https://a.org/x) there", "https://a.org/x"),
        ("(https://a.org/x(y)) there", "https://a.org/x(y)"),
        ("https://a.org/x!? There", "https://a.org/x"),
        ("www.a.org/b, and", "www.a.org/b"),
        ("a.org/b there", "a.org/b"),
        ("a.org/b(c)d(e)) (f there", "a.org/b(c)d(e)"),
        ("a.org/b)c(d there", "a.org/b"),
    ],
)
def test_links_end_before_what_stands_around_them(text, link):
    assert checkable(f"one may see {text}").links == (link,)
    assert checkable("one may see a.org there").links == ()


@pytest.mark.parametrize(
    "text, month", [("2024-00-05", None), ("2024-01-05", 1), ("2024-12-05", 12), ("2024-13-05", None)]
)
def test_a_date_has_a_month_of_twelve(text, month):
    assert [date.month for date in checkable(f"It was on {text} there").dates] == ([] if month is None else [month])


@pytest.mark.parametrize(
    "text, names",
    [
        ("we saw Mary Smith there", ("Mary Smith",)),
        # at the beginning a common word is no name, and what follows it is one
        ("Visit Mary Smith", ("Mary Smith",)),
        ("Visits end", ()),
        ("Cats end", ()),
        ("Zorro ends", ("Zorro",)),
        ("we saw Visit Smith", ("Visit Smith",)),
        ("Visit The", ()),
        ("The Mary", ("Mary",)),
        ("we saw Mary The", ("Mary",)),
        ("we saw The The", ()),
        ("Running ended", ()),
        ("Surely ended", ()),
        ("Great ended", ()),
        ("Running Bear ended", ("Running Bear",)),
        ("Great Bear ended", ("Great Bear",)),
        # a command
        ("Zip the file", ()),
        ("Zip", ()),
        ("Zip Mary", ("Zip Mary",)),
        ("Zip Mary the file", ("Zip Mary",)),
        ("we Zip the file", ("Zip",)),
        ('"Zip the file', ()),
        ("we saw X there", ()),
        ("we saw Al's hat", ("Al",)),
        # behind a quotation a new line begins, but no sentence
        ('he said "so it was" Visit Mary', ("Visit Mary",)),
        ('he said "so it was" Mary', ("Mary",)),
    ],
)
def test_names(text, names):
    assert checkable(text, frozenset({"visit", "cat"})).names == names


@pytest.mark.parametrize(
    "text, parts",
    [
        ("It is by A. Doe. He left.", ["It is by A. Doe.", "He left."]),
        ("So do I. He left.", ["So do I.", "He left."]),
        ("He left. She met Dr. Smith.", ["He left.", "She met Dr. Smith."]),
        ("Dr. Doe left. He", ["Dr. Doe left.", "He"]),
        ("He left at 5. He ran.", ["He left at 5.", "He ran."]),
        ('He said (see Fig. 3) "go." Then', ['He said (see Fig. 3) "go."', "Then"]),
        ("* one\n12. two\n\n  \n", ["one", "two"]),
        ("", []),
    ],
)
def test_where_sentences_end(text, parts):
    assert sentences(text) == parts


@pytest.mark.parametrize(
    "sentence, clauses",
    [
        ("Perhaps Bob and Ann were there, but the sun is hot.", ["the sun is hot."]),
        ("The sun is hot, but perhaps Bob and Ann were there.", ["The sun is hot"]),
        ("The sun  is hot.", ["The sun  is hot."]),
        ("Perhaps.", []),
    ],
)
def test_clauses_without_a_guess(sentence, clauses):
    assert assertions(sentence) == clauses
    assert is_hedged(sentence) == (clauses != [sentence])


def test_an_even_number_of_negations_denies_nothing():
    denials = ("He left.", "He never left.", "He never did not leave.", "No, he never did not leave.")
    assert [is_negated(text) for text in denials] == [False, True, False, True]


def test_a_question_may_be_one_word_and_a_link_may_end_like_one():
    assert is_question("Why?") and is_question("See (https://a.org/b), why?") and is_question('He asked "why?"')
    assert not is_question("Why") and not is_question("See https://a.org/b?")
    assert is_question("Is it https://a.org/b?") and not is_question("See (https://a.org/b?)")


def test_a_statement_says_something_of_something():
    assert is_statement("The cat sleeps") and not is_statement("The cat") and not is_statement("cat sleeps")
    assert content_words("The cat did not weigh 5 km in Rome") == ["cat", "weigh", "rom"]


def test_names_are_judged_where_they_stand_before_the_judgement():
    assert is_opinion("It is lovely") and not is_opinion("It is blue")
    assert is_opinion("Rome is very lovely", ("Rome",)) and not is_opinion("Rome is blue", ("Rome",))
    assert not is_opinion("It is lovely in Rome", ("Rome",)) and not is_opinion("Rome, lovely", ("Rome",))


def test_common_words_are_those_in_lower_case_and_their_stems():
    assert common_words("Mary saw cats") == {"saw", "cats", "cat"}


def test_the_hardest_thing_names_the_kind():
    names = ("links", "code", "quotes", "dates", "numbers", "names")
    kinds = ("link", "code", "quote", "date", "number", "entity")
    for place, kind in enumerate(kinds):
        parts = {name: ("x",) if index >= place else () for index, name in enumerate(names)}
        assert Checkable(**parts, rest="").kind == kind
    assert Checkable((), (), (), (), (), (), "x").kind is None


@pytest.mark.parametrize(
    "text, lone", [("42", True), ("2024-03-05.", True), ("5 cats", False), ("Rome", False), ("", False), ("f()", True)]
)
def test_what_stands_alone(text, lone):
    assert checkable(text).is_lone is lone
