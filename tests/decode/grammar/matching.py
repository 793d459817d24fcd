"""Whether a text follows a spec, byte by byte."""

import pytest

from sigma0.decode.grammar.compiled import GrammarError
from sigma0.decode.grammar.vocabulary import vocabulary_of
from tests.byte_model import END, byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = vocabulary_of(TOKENIZER, 260, {END})


def follows(spec, text):
    """Whether an answer may be this text as a whole."""
    matcher = VOCABULARY.compile(spec).matcher()
    try:
        for token_id in TOKENIZER(text)["input_ids"]:
            matcher.take(token_id)
        matcher.check(END)
    except GrammarError:
        return False
    return True


def check_texts(spec, good, bad):
    assert [text for text in good if not follows(spec, text)] == [], "refused"
    assert [text for text in bad if follows(spec, text)] == [], "taken"


def refused(message):
    """A ValueError of one line that says so."""
    return pytest.raises(ValueError, match=message)
