"""Warm-up notes: the marked words complete facts told before, and no other token is marked."""

import re

import pytest

from sigma0.bench.pocket.data import KINDS, LENGTH, NONE, note_row


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_marked_tokens_complete_facts_told_before(tokenizer, kind):
    sources, goals, ladder = KINDS[kind]
    forms = {word for form in ladder for word in re.sub(r"{.}|[.]", " ", form).split()}
    for index in range(kind, 25 * len(KINDS), len(KINDS)):
        row = note_row(tokenizer, 0, index)
        output = {}
        source = None
        for token, mark, about in zip(row.ids, row.answer, row.subjects, strict=True):
            word = tokenizer.decode([token]).strip()
            assert word in {*forms, *sources, *goals, ".", ""}
            if source is None or (word in sources and word not in goals):
                assert not mark
                if word in sources:
                    source = word
                    assert tokenizer.decode([about]).strip() == source
                else:
                    assert (about == NONE) == (word.lower() in ("the", "family", "of"))
            elif word in goals:
                assert mark == (source in output)
                assert output.setdefault(source, word) == word
                assert tokenizer.decode([about]).strip() == source
                source = None
            else:
                assert not mark and tokenizer.decode([about]).strip() == source
        assert 2 <= len(output) <= 5 and len(set(output.values())) == len(output)
        assert LENGTH <= len(row.ids) < LENGTH + 12
        marked = [token for token, mark in zip(row.ids, row.answer, strict=True) if mark]
        for trail, token in zip(row.trails, marked, strict=True):
            subject, goal = (tokenizer.decode([part]).strip() for part in trail)
            assert trail[-1] == token and output[subject] == goal
    assert note_row(tokenizer, 0, kind) == note_row(tokenizer, 0, kind) != note_row(tokenizer, 1, kind)
