"""Warm-up notes: the marked words complete facts told before, and no other token is marked."""

import re

import pytest
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.notes import KINDS, LENGTH, note_row
from sigma0.bench.pocket.subjects import NONE


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_marked_tokens_complete_facts_told_before(tokenizer: PreTrainedTokenizerFast, kind: int) -> None:
    sources, goals, _ = KINDS[kind]
    for index in range(kind, 25 * len(KINDS), len(KINDS)):
        row = note_row(tokenizer, 0, index)
        told: dict[str, str] = {}
        source = None
        for token, mark, about in zip(row.ids, row.answer, row.subjects, strict=True):
            word = tokenizer.decode([token]).strip()
            if source is None or (word in sources and word not in goals):
                assert not mark
                if word in sources:
                    source = word
            elif word in goals:
                assert mark == (source in told)
                assert told.setdefault(source, word) == word
                assert tokenizer.decode([about]).strip() == source
                source = None
            else:
                assert not mark and tokenizer.decode([about]).strip() == source
        assert 2 <= len(told) <= 5 and len(set(told.values())) == len(told)
        assert LENGTH <= len(row.ids) < LENGTH + 12
        assert len(row.trails) == sum(row.answer)
        for trail, token in zip(row.trails, [t for t, m in zip(row.ids, row.answer, strict=True) if m], strict=True):
            subject, goal = (tokenizer.decode([part]).strip() for part in trail)
            assert trail[-1] == token and told[subject] == goal


def test_a_note_is_about_its_first_word(tokenizer: PreTrainedTokenizerFast) -> None:
    for index in range(60):
        row = note_row(tokenizer, 2, index)
        words = [tokenizer.decode([token]).strip() for token in row.ids]
        for word, about in zip(words, row.subjects, strict=True):
            assert about != NONE or word.lower() in ("the", "family", "of")


def test_rows_take_turns_at_the_kind(tokenizer: PreTrainedTokenizerFast) -> None:
    for index in range(24):
        _, _, ladder = KINDS[index % len(KINDS)]
        rest = {word for form in ladder for word in re.sub(r"{.}|[.]", " ", form).split()}
        words = tokenizer.decode(note_row(tokenizer, 0, index).ids).replace(".", " ").split()
        sources, goals, _ = KINDS[index % len(KINDS)]
        assert set(words) <= {*rest, *sources, *goals}
    assert note_row(tokenizer, 0, 3) == note_row(tokenizer, 0, 3) != note_row(tokenizer, 1, 3)
