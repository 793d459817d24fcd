"""What of a sentence is an identifier or a link, what only looks like one, and the stems of its words."""

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
from sigma0.signals.grounding.words import CAPITAL, is_stop, stem, without_possessive, words_of
from tests.marks import named
from tests.signals.grounding.test_reading_numbers import cases


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
        (
            "It cost 3.5 million to J. Doe. He left at 5 p.m. yesterday! Why?\n- one\n\nThe end",
            ["It cost 3.5 million to J. Doe.", "He left at 5 p.m. yesterday!", "Why?", "one", "The end"],
        ),
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
        ("It might rain; it is warm, and the wind may rise.", ["it is warm"]),
        ("Perhaps Bob sings and the tower is tall.", ["the tower is tall."]),
        ("I think cats and dogs slept.", []),
        ("Perhaps the cat and the dog slept.", []),
        ("Maybe Bob and Ann were there.", []),
    ],
)
def test_clauses_without_a_guess(sentence, clauses):
    assert assertions(sentence) == clauses
    assert is_hedged(sentence) == (clauses != [sentence])


def test_questions_opinions_and_denials_are_told_apart():
    denials = ("He left.", "He never left.", "He never did not leave.", "No, he never did not leave.")
    assert [is_negated(text) for text in denials] == [False, True, False, True]
    assert is_question("Why?") and is_question("See (https://a.org/b), why?") and is_question('He asked "why?"')
    assert not is_question("Why") and not is_question("See https://a.org/b?")
    assert is_question("Is it https://a.org/b?") and not is_question("See (https://a.org/b?)")
    assert is_opinion("It is lovely") and not is_opinion("It is blue")
    assert is_opinion("Rome is very lovely", ("Rome",)) and not is_opinion("Rome is blue", ("Rome",))
    assert not is_opinion("It is lovely in Rome", ("Rome",)) and not is_opinion("Rome, lovely", ("Rome",))


def test_the_hardest_thing_names_the_kind():
    names = ("links", "code", "quotes", "dates", "numbers", "names")
    kinds = ("link", "code", "quote", "date", "number", "entity")
    for place, kind in enumerate(kinds):
        parts = {name: ("x",) if index >= place else () for index, name in enumerate(names)}
        assert Checkable(**parts, rest="").kind == kind
    assert Checkable((), (), (), (), (), (), "x").kind is None


def test_identifiers():
    # one letter on one side is enough of a name; "the end.Then" is two sentences without a space between them
    names = ("os.path", "np.array()", "aa.bb.cc", "ab.c", "a.b()", "snake_case", "camelCase", "f()")
    for text in (*names, "numpy.random.Array", "Numpy.array()"):
        with named(text):
            assert checkable(f"one may see {text} there").code == (text,)
    for text in ("a.b", "U.S", "the end.Then he", "x y", "5KM", "kW", "fig.two", "ph.d", "Numpy.array", "numpy.Array"):
        with named(text):
            assert checkable(f"one may see {text} there").code == ()
    assert checkable("one may see `x y` there").code == ("x y",)
    assert checkable("one may see 3.2.1 or v1.2.3 there").code == ("3.2.1", "v1.2.3")


def test_what_stands_alone():
    assert all(checkable(text).is_lone for text in ("42", "2024-03-05.", "f()"))
    assert not any(checkable(text).is_lone for text in ("5 cats", "Rome", ""))


# texts and the names in them; "visit" and "cat" are common words
NAMES = """
we saw Mary Smith there: Mary Smith; we saw Visit Smith: Visit Smith; we saw Mary The: Mary; we saw The The:
we saw Al's hat: Al; we saw X there:; The Mary: Mary; Zorro ends: Zorro; Surely ended:; Running ended:; Great ended:
Running Bear ended: Running Bear; Great Bear ended: Great Bear; Visit Mary Smith: Mary Smith; Visits end:; Cats end:
Visit The:; Zip the file:; Zip:; Zip Mary: Zip Mary; Zip Mary the file: Zip Mary; we Zip the file: Zip; "Zip the file:
he said "so it was" Visit Mary: Visit Mary; he said "so it was" Mary: Mary
"""
LINKS = """
https://a.org/x -> https://a.org/x; https://a.org/x(y). Then -> https://a.org/x(y); a.org/b there -> a.org/b
(https://a.org/x) there -> https://a.org/x; (https://a.org/x(y)) there -> https://a.org/x(y); a.org there ->
https://a.org/x!? There -> https://a.org/x; a.org/b)c(d there -> a.org/b; www.a.org/b, and -> www.a.org/b
a.org/b(c)d(e)) (f there -> a.org/b(c)d(e)
"""


def test_names_begin_no_sentence_with_a_common_word_nor_a_command():
    for text, names in cases(NAMES):
        with named(text):
            assert list(checkable(text, frozenset({"visit", "cat"})).names) == names


def test_links_end_before_what_stands_around_them():
    for text, links in cases(LINKS, " ->"):
        with named(text):
            assert list(checkable(f"one may see {text}").links) == links


def test_words_of_statements():
    assert is_statement("The cat sleeps") and not is_statement("The cat") and not is_statement("cat sleeps")
    assert content_words("The cat did not weigh 5 km in Rome") == ["cat", "weigh", "rom"]
    assert common_words("Mary saw cats") == {"saw", "cats", "cat"}


@pytest.mark.parametrize(
    "word, root",
    [
        ("berries", "berry"), ("flies", "fli"), ("classes", "class"), ("class", "class"), ("singing", "sing"),
        ("sing", "sing"), ("carried", "carry"), ("played", "play"), ("used", "used"), ("boxes", "box"), ("uses", "us"),
        ("cats", "cat"), ("gas", "gas"), ("ages", "ag"), ("tree", "tr"), ("bee", "bee"), ("ice", "ice"),
        ("Cat's", "cat"), ("Rome", "rom"), ("eating", "eat"), ("king", "king"), ("being", "being"),
    ],
)  # fmt: skip
def test_stems(word, root):
    assert stem(word) == root


def test_possessives_stop_words_and_capitals_of_many_alphabets():
    for bare, words in (("Bob", ("Bob's", "Bob\u2019s")), ("dogs", ("dogs'", "dogs\u2019")), ("Bobs", ("Bobs",))):
        assert [without_possessive(word) for word in words] == [bare] * len(words)
    assert is_stop("The") and is_stop("it\u2019s") and not is_stop("cat")
    assert words_of("I saw a-b 5 cats, x2 O'Neill") == ["saw", "a-b", "cats", "O'Neill"]
    assert set("AZÄÉΩ\u041c\u1e9e") <= set(CAPITAL) and not set("azäé5\u2160") & set(CAPITAL)
