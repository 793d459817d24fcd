"""Text out of ids: whole characters, and nothing of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sigma0
from sigma0.decode.detokenizer import IncrementalDetokenizer, StopChecker, eos_ids, truncate_at_stop
from tests.byte_model import END, byte_tokenizer

TOKENIZER = sigma0.load("pocket")[1]
STORY = "Mary went to the park. Leo took the book. Where is Mary?"


def feed_all(ids, stop=()):
    feed, shown = IncrementalDetokenizer(TOKENIZER, tuple(stop)), []
    for token_id in ids:
        shown.append(feed.add(token_id))
        if feed.stopped:
            break
    shown.append(feed.end())
    assert "".join(shown) == feed.text
    return feed


@given(st.lists(st.sampled_from([". Leo", "park", "the", "book. W", "zebra", "k. ", STORY]), min_size=1, max_size=4))
def test_the_text_ends_before_the_first_stop_string(stop):
    text = feed_all(TOKENIZER(STORY)["input_ids"], stop)
    whole = TOKENIZER.decode(TOKENIZER(STORY)["input_ids"], skip_special_tokens=True)
    places = [whole.find(item) for item in stop if item in whole]
    # of several that come, the one that is complete first ends the text
    assert text.stopped == bool(places)
    assert whole.startswith(text.text) and not any(item in text.text for item in stop)
    if len(places) == 1:
        assert text.text == whole[: places[0]]
    if not places:
        assert text.text == whole


def test_what_looked_like_a_stop_string_is_shown_at_the_end():
    ids = TOKENIZER("Mary went to the park")["input_ids"]
    feed = IncrementalDetokenizer(TOKENIZER, ("park.",))
    shown = "".join(feed.add(token_id) for token_id in ids)
    assert not shown.endswith("park") and (shown + feed.end()).endswith("park")


def test_ids_that_end_a_sequence_are_none_one_or_several():
    assert eos_ids(None) == frozenset()
    assert eos_ids(0) == {0} and eos_ids(7) == {7}
    assert eos_ids([3, 5, 3]) == {3, 5}


def test_a_whole_text_is_cut_before_the_first_stop_string():
    assert truncate_at_stop("one two three", ["three", "two"]) == "one "
    assert truncate_at_stop("one two", ["four"]) == truncate_at_stop("one two", []) == "one two"
    assert truncate_at_stop("one", ["one"]) == ""


@given(
    st.lists(st.text("ab", min_size=0, max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_nothing_is_released_that_may_begin_a_stop_string(pieces, stop):
    checker, text, shown = StopChecker(stop), "", ""
    for piece in pieces:
        stopped = checker.stopped
        shown += checker.add(piece)
        assert checker.text == shown
        if stopped:
            continue
        text += piece
        places = [text.find(string) for string in stop if string in text]
        assert checker.stopped == bool(places)
        if places:
            assert shown == text[: min(places)]
            continue
        beginnings = {string[:length] for string in stop for length in range(1, len(string))}
        held = max((len(item) for item in beginnings if text.endswith(item)), default=0)
        assert shown == text[: len(text) - held]
    rest = checker.flush()
    assert checker.text == shown + rest and (checker.stopped or checker.text == text)
    assert checker.flush() == ""


def test_ends_are_no_text():
    tokenizer = byte_tokenizer()
    feed = IncrementalDetokenizer(tokenizer)
    ids = tokenizer("ab")["input_ids"]
    assert [feed.add(item) for item in (ids[0], END, ids[1])] == ["a", "", "b"]
    assert feed.end(END) == "" and feed.text == "ab"


@pytest.mark.parametrize("text", ["x", "Leo , she 's", "Leo is n't ."])
def test_a_last_id_is_shown_as_it_is_written(text):
    tokenizer = byte_tokenizer()
    *first, last = tokenizer(text)["input_ids"]
    feed = IncrementalDetokenizer(tokenizer)
    assert "".join(map(feed.add, first)) == text[:-1]
    assert feed.end(last) == text[-1] and feed.text == text
