"""Warm-up notes: the marked words complete facts told before, and no other token is marked."""

import re

from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.moves import NAMES, PLACES, THINGS
from sigma0.bench.pocket.notes import LENGTH, note_row


def test_marked_tokens_complete_facts_told_before(tokenizer: PreTrainedTokenizerFast) -> None:
    marked = set()
    for index in range(150):
        row = note_row(tokenizer, 0, index)
        known: set[tuple[str, str]] = set()
        words: list[str] = []
        for token, mark in zip(tokenizer.convert_ids_to_tokens(row.ids), row.answer, strict=True):
            word = token.removeprefix("Ġ")
            if word in (*NAMES, *PLACES, *THINGS) and word not in words:  # a question and its answer name one person
                words.append(word)
            if len(words) == 2:
                fact = (min(words), max(words))
                assert mark == (fact in known)
                marked |= {word} if mark else set()
                known.add(fact)
                words = []
            else:
                assert not mark
        assert len(known) <= 10
        assert LENGTH <= len(row.ids) < LENGTH + 12
    assert marked == {*PLACES, *THINGS}


def test_rows_take_turns_at_kind_and_forms(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [tokenizer.decode(note_row(tokenizer, 0, index).ids) for index in range(15)]
    assert not re.search(r"\.", texts[0] + texts[1])
    asked = "What does"
    assert any(asked in text for text in texts[1::3]) and not any(asked in text for text in texts[0::3])
    assert all("has the" in text or "took" in text or "picked" in text for text in texts[2::3])
    assert note_row(tokenizer, 0, 3) == note_row(tokenizer, 0, 3) != note_row(tokenizer, 1, 3)
