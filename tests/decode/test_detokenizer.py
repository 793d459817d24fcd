"""Text out of ids: whole characters, and nothing of a stop string."""

from hypothesis import given
from hypothesis import strategies as st

import sigma0
from sigma0.decode.detokenizer import TextFeed

TOKENIZER = sigma0.load("pocket")[1]
STORY = "Mary went to the park. Leo took the book. Where is Mary?"


def feed_all(ids, stop=()):
    feed, shown = TextFeed(TOKENIZER, tuple(stop)), []
    for token_id in ids:
        shown.append(feed.add(token_id))
        if feed.stopped:
            break
    shown.append(feed.end())
    assert "".join(shown) == feed.text
    return feed


def test_without_stop_strings_all_is_shown():
    ids = TOKENIZER(STORY)["input_ids"]
    assert feed_all(ids).text == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.lists(st.sampled_from([". Leo", "park", "the", "book. W", "zebra", "k. ", STORY]), min_size=1, max_size=4))
def test_the_text_ends_before_the_first_stop_string(stop):
    text = feed_all(TOKENIZER(STORY)["input_ids"], stop)
    whole = TOKENIZER.decode(TOKENIZER(STORY)["input_ids"], skip_special_tokens=True)
    places = [whole.find(each) for each in stop if each in whole]
    # of several that come, the one that is complete first ends the text
    assert text.stopped == bool(places)
    assert whole.startswith(text.text) and not any(each in text.text for each in stop)
    if len(places) == 1:
        assert text.text == whole[: places[0]]
    if not places:
        assert text.text == whole


def test_what_looked_like_a_stop_string_is_shown_at_the_end():
    ids = TOKENIZER("Mary went to the park")["input_ids"]
    feed = TextFeed(TOKENIZER, ("park.",))
    shown = "".join(feed.add(token_id) for token_id in ids)
    assert not shown.endswith("park") and (shown + feed.end()).endswith("park")


def test_bytes_of_an_unfinished_character_are_held_back():
    ids = TOKENIZER("é")["input_ids"]
    feed = TextFeed(TOKENIZER, ())
    assert all("\ufffd" not in feed.add(token_id) for token_id in ids)
