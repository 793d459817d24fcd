"""Stems and possessives, word by word."""

import pytest

from sigma0.signals.grounding.words import CAPITAL, is_stop, stem, without_possessive, words_of


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
