"""Batches and warm-up notes: which tokens count as answers, the ways to them, cutting to length, padding."""

import re
from dataclasses import replace

import pytest
import torch

from sigma0.bench.pocket import data
from sigma0.bench.pocket.recipe import RECIPES
from sigma0.bench.pocket.world import draw

CHAT = pytest.mark.parametrize("chat", [False, True])


@CHAT
def test_a_text_continues_its_prompt_and_exactly_answers_with_their_eos_are_marked(tokenizer, chat):
    for index in range(50):
        items = draw("train", 0, index).items
        encoded = data.encode(tokenizer, items, chat)
        prompt = tokenizer(items[0].prompt)["input_ids"]
        if chat:
            asked = [{"role": "user", "content": items[0].prompt}]
            prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        assert encoded.ids[: len(prompt)] == prompt and encoded.answer.index(True) == len(prompt)
        # an eos ends each run of marked tokens
        marked = [token for token, mark in zip(encoded.ids, encoded.answer, strict=True) if mark]
        assert tokenizer.decode(marked) == "".join(f"{'' if chat else ' '}{item.answer}<|im_end|>" for item in items)
        assert tokenizer.decode(encoded.ids).count(items[0].story) == 1


@CHAT
def test_fit_cuts_after_a_whole_answer(tokenizer, chat):
    scene = draw("train", 0, 0, difficulty=6)
    whole = data.encode(tokenizer, scene.items, chat)
    ends = [place + 1 for place, token in enumerate(whole.ids) if token == 2 and whole.answer[place]]
    assert len(ends) == len(scene.items)
    for length in range(ends[0], ends[-1] + 5):
        cut = data.fit(tokenizer, scene, chat, length)
        assert len(cut.ids) == max(end for end in ends if end <= length)
        assert cut.ids == whole.ids[: len(cut.ids)] and cut.answer == whole.answer[: len(cut.ids)]
    with pytest.raises(ValueError, match="20 tokens"):
        data.fit(tokenizer, scene, chat, 20)
    longer = replace(scene, story="", items=tuple(replace(item, question=200 * "a ") for item in scene.items))
    assert data.fit(tokenizer, longer, chat, ends[0], otherwise=scene) == data.fit(tokenizer, scene, chat, ends[0])


def test_every_scene_fits_the_recipe_s_rows(tokenizer):
    scenes = [draw("train", 1, index, difficulty=6) for index in range(400)]
    longest = max(len(data.encode(tokenizer, scene.items[:1], chat).ids) for scene in scenes for chat in (False, True))
    # "The cup was put into the box." is the longest sentence, a chat with a yes or no the longest question.
    assert longest <= 213 <= min(recipe.length for recipe in RECIPES.values())


def test_collate_pads_on_the_right():
    long = data.Encoded([5, 6, 7], [False, True, True], [(4, 9, 6), (7,)], [data.NONE, 5, 5])
    batch = data.collate([long, data.Encoded([8, 9], [False, True], [(3, 9)], [8, 8])], pad=0)
    assert batch.ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.answer.tolist() == [[False, True, True], [False, True, False]]
    assert batch.real.tolist() == [[True, True, True], [True, True, False]]
    assert batch.trails.tolist() == [[4, 9, 6], [7, 7, 7], [3, 9, 9]]
    assert batch.subjects.tolist() == [[data.NONE, 5, 5], [8, 8, data.NONE]]


@CHAT
def test_a_trail_leads_over_the_words_of_the_derivation_to_the_token(tokenizer, chat):
    seen = set()
    for index in range(200):
        item = draw("train", 2, index).items[0]
        encoded = data.encode(tokenizer, [item], chat, hints=True)
        answers = [token for token, mark in zip(encoded.ids, encoded.answer, strict=True) if mark]
        assert [trail[-1] for trail in encoded.trails] == answers
        ways = {tuple(tokenizer.decode(token).strip() for token in way) for way in encoded.trails if len(way) > 1}
        expected = {(item.subject, *item.trail)} if item.trail else set()
        if item.trail and item.binary:
            expected.add((item.subject, *item.trail, item.key))
        assert ways == expected
        seen.add((item.binary, bool(item.trail)))
    assert seen == {(False, True), (True, True), (True, False)}


def test_whole_answers_needs_every_token():
    marks = [False, True, True, False, True, True]
    batch = data.collate([data.Encoded([4, 5, 6, 7, 8, 9], marks, [(5,), (6,), (8,), (9,)], [data.NONE] * 6)], pad=0)
    numbers = batch.answer_numbers()
    assert numbers.tolist() == [0, 0, 1, 1]
    right = torch.tensor([[True, True, True, False], [False, True, True, True]])
    assert data.whole_answers(right, numbers).tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "Mary went to the park. The cup is with Mary. Where is the cup?",
            ["Mary"] * 6 + ["-"] + ["cup"] * 5 + ["-"] * 3 + ["cup"] * 2,
        ),
        # an answer and a chat turn start anew
        (
            "Is the cup in the box?<|im_end|>\n<|im_start|>assistant\nYes, the cup is in the box.<|im_end|>",
            ["-"] * 2 + ["cup"] * 5 + ["-"] * 5 + ["-"] * 3 + ["cup"] * 6 + ["-"],
        ),
    ],
)
def test_the_first_person_or_thing_of_a_sentence_is_its_subject(tokenizer, text, expected):
    result = data.subjects(tokenizer, tokenizer(text)["input_ids"])
    assert ["-" if token == data.NONE else tokenizer.decode([token]).strip() for token in result] == expected


def test_the_id_is_that_of_the_word_inside_a_text(tokenizer):
    ids = tokenizer("Mary is in the park. Mary")["input_ids"]
    assert ids[0] != ids[-1]
    assert (
        data.subjects(tokenizer, ids)[0]
        == data.subjects(tokenizer, ids)[-1]
        == ids[-1]
        == data.word_id(tokenizer, "Mary")
    )
    # a digit stands by itself
    assert tokenizer.decode([data.word_id(tokenizer, "7")]) == "7"
    with pytest.raises(ValueError, match="submarine"):
        data.word_id(tokenizer, "submarine")


@pytest.mark.parametrize("kind", range(len(data.KINDS)))
def test_marked_tokens_complete_facts_told_before(tokenizer, kind):
    sources, goals, ladder = data.KINDS[kind]
    forms = {word for form in ladder for word in re.sub(r"{.}|[.]", " ", form).split()}
    for index in range(kind, 25 * len(data.KINDS), len(data.KINDS)):
        row = data.note_row(tokenizer, 0, index)
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
                    assert (about == data.NONE) == (word.lower() in ("the", "family", "of"))
            elif word in goals:
                assert mark == (source in output)
                assert output.setdefault(source, word) == word
                assert tokenizer.decode([about]).strip() == source
                source = None
            else:
                assert not mark and tokenizer.decode([about]).strip() == source
        assert 2 <= len(output) <= 5 and len(set(output.values())) == len(output)
        assert data.LENGTH <= len(row.ids) < data.LENGTH + 12
        marked = [token for token, mark in zip(row.ids, row.answer, strict=True) if mark]
        for trail, token in zip(row.trails, marked, strict=True):
            subject, goal = (tokenizer.decode([part]).strip() for part in trail)
            assert trail[-1] == token and output[subject] == goal
    assert data.note_row(tokenizer, 0, kind) == data.note_row(tokenizer, 0, kind) != data.note_row(tokenizer, 1, kind)
