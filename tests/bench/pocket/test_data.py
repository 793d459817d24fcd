"""Batches: which tokens count as answers, cutting to length, padding, determinism."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.data import Encoded, chat_text, collate, encode, fit, plain_text, train_batch, whole_answers
from sigma0.bench.pocket.recipe import RECIPES
from sigma0.bench.pocket.subjects import NONE
from sigma0.bench.pocket.world import draw


def answers_of(tokenizer: PreTrainedTokenizerFast, encoded: Encoded) -> list[str]:
    """Decode each run of marked tokens."""
    runs: list[list[int]] = []
    before = False
    for token, mark in zip(encoded.ids, encoded.answer, strict=True):
        if mark and not before:
            runs.append([])
        if mark:
            runs[-1].append(token)
        before = mark
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_exactly_the_answers_and_their_eos_are_marked(tokenizer: PreTrainedTokenizerFast, chat: bool) -> None:
    space = "" if chat else " "
    for index in range(100):
        items = draw("train", 0, index).items
        encoded = encode(tokenizer, items, chat)
        assert answers_of(tokenizer, encoded) == [f"{space}{item.answer}<|im_end|>" for item in items]


def test_plain_text_continues_the_prompt_token_by_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for index in range(50):
        items = draw("train", 0, index).items
        prompt = tokenizer(items[0].prompt)["input_ids"]
        encoded = encode(tokenizer, items, chat=False)
        assert encoded.ids[: len(prompt)] == prompt
        assert encoded.answer.index(True) == len(prompt)
        assert plain_text(items).startswith(f"{items[0].prompt} {items[0].answer}<|im_end|>")


def test_chat_text_continues_the_template_s_generation_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    for index in range(50):
        items = draw("train", 0, index).items
        asked = [{"role": "user", "content": items[0].prompt}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        encoded = encode(tokenizer, items, chat=True)
        assert encoded.ids[: len(prompt)] == prompt
        assert encoded.answer.index(True) == len(prompt)
        assert chat_text(tokenizer, items).count(items[0].story) == 1


@pytest.mark.parametrize("chat", [False, True])
def test_fit_cuts_after_a_whole_answer(tokenizer: PreTrainedTokenizerFast, chat: bool) -> None:
    scene = draw("train", 0, 0, difficulty=6)
    whole = encode(tokenizer, scene.items, chat)
    ends = [place + 1 for place, token in enumerate(whole.ids) if token == 2 and whole.answer[place]]
    assert len(ends) == len(scene.items)
    for length in range(ends[0], ends[-1] + 5):
        cut = fit(tokenizer, scene, chat, length)
        assert len(cut.ids) == max(end for end in ends if end <= length)
        assert cut.ids == whole.ids[: len(cut.ids)] and cut.answer == whole.answer[: len(cut.ids)]
    with pytest.raises(ValueError, match="20 tokens"):
        fit(tokenizer, scene, chat, 20)


def test_every_scene_fits_the_recipe_s_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    longest = 0
    for index in range(400):
        scene = draw("train", 1, index, difficulty=6)
        longest = max(longest, *(len(encode(tokenizer, scene.items[:1], chat).ids) for chat in (False, True)))
    # "The cup was put into the box." is the longest sentence, a chat with a yes or no the longest question.
    assert longest <= 213 <= min(recipe.length for recipe in RECIPES.values())


def test_collate_pads_on_the_right() -> None:
    long = Encoded([5, 6, 7], [False, True, True], [(4, 9, 6), (7,)], [NONE, 5, 5])
    batch = collate([long, Encoded([8, 9], [False, True], [(3, 9)], [8, 8])], pad=0)
    assert batch.ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.answer.tolist() == [[False, True, True], [False, True, False]]
    assert batch.real.tolist() == [[True, True, True], [True, True, False]]
    assert batch.trails.tolist() == [[4, 9, 6], [7, 7, 7], [3, 9, 9]]
    assert batch.subjects.tolist() == [[NONE, 5, 5], [8, 8, NONE]]


@pytest.mark.parametrize("chat", [False, True])
def test_a_trail_leads_over_the_words_of_the_derivation_to_the_token(
    tokenizer: PreTrainedTokenizerFast, chat: bool
) -> None:
    seen = set()
    for index in range(200):
        item = draw("train", 2, index).items[0]
        encoded = encode(tokenizer, [item], chat, hints=True)
        answers = [token for token, mark in zip(encoded.ids, encoded.answer, strict=True) if mark]
        assert [trail[-1] for trail in encoded.trails] == answers
        ways = {
            tuple(tokenizer.decode([token]).strip() for token in trail) for trail in encoded.trails if len(trail) > 1
        }
        if not item.trail:
            assert not ways
        elif item.binary:
            assert ways == {(item.subject, *item.trail), (item.subject, *item.trail, item.key)}
        else:
            assert ways == {(item.subject, *item.trail)}
        seen.add((item.binary, bool(item.trail)))
    assert seen == {(False, True), (True, True), (True, False)}


def test_a_batch_is_a_function_of_its_arguments(tokenizer: PreTrainedTokenizerFast) -> None:
    first = train_batch(tokenizer, 0, 3, 6, 224, 0.5)
    again = train_batch(tokenizer, 0, 3, 6, 224, 0.5)
    assert torch.equal(first.ids, again.ids) and torch.equal(first.answer, again.answer)
    assert not torch.equal(first.ids[:, :20], train_batch(tokenizer, 0, 4, 6, 224, 0.5).ids[:, :20])
    assert not torch.equal(first.ids[:, :20], train_batch(tokenizer, 1, 3, 6, 224, 0.5).ids[:, :20])
    chats = (first.ids[:, 0] == tokenizer.bos_token_id).tolist()
    assert chats == [True, True, True, False, False, False]


def test_hardest_bounds_the_stories(tokenizer: PreTrainedTokenizerFast) -> None:
    short = train_batch(tokenizer, 0, 0, 12, 152, 0.0, hardest=1)
    # The easiest stories hold five sentences about five subjects.
    easy = ("went", "walked", "comes", "years old")
    for text in tokenizer.batch_decode(short.ids):
        assert all(any(word in sentence for word in easy) for sentence in text.split(". ")[:5])


def test_whole_answers_needs_every_token() -> None:
    marks = [False, True, True, False, True, True]
    batch = collate([Encoded([4, 5, 6, 7, 8, 9], marks, [(5,), (6,), (8,), (9,)], [NONE] * 6)], pad=0)
    numbers = batch.answer_numbers()
    assert numbers.tolist() == [0, 0, 1, 1]
    right = torch.tensor([[True, True, True, False], [False, True, True, True]])
    assert whole_answers(right, numbers).tolist() == [[True, False], [False, True]]
