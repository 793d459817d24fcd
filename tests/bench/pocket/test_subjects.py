"""The subject of every token of a text, spelled out by hand."""

import pytest
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.subjects import NONE, subjects, word_id


def told(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    ids = tokenizer(text)["input_ids"]
    return ["-" if token == NONE else tokenizer.decode([token]).strip() for token in subjects(tokenizer, ids)]


def test_the_first_person_or_thing_of_a_sentence_is_its_subject(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Mary went to the park. The cup is with Mary. Where is the cup?"
    expected = ["Mary"] * 6 + ["-"] + ["cup"] * 5 + ["-"] * 3 + ["cup"] * 2
    assert told(tokenizer, text) == expected


def test_an_answer_and_a_chat_turn_start_anew(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Is the cup in the box?<|im_end|>\n<|im_start|>assistant\nYes, the cup is in the box.<|im_end|>"
    expected = ["-"] * 2 + ["cup"] * 5 + ["-"] * 5 + ["-"] * 3 + ["cup"] * 6 + ["-"]
    assert told(tokenizer, text) == expected


def test_the_id_is_that_of_the_word_inside_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("Mary is in the park. Mary")["input_ids"]
    assert ids[0] != ids[-1]
    assert subjects(tokenizer, ids)[0] == subjects(tokenizer, ids)[-1] == ids[-1] == word_id(tokenizer, "Mary")


def test_digits_stand_by_themselves(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.decode([word_id(tokenizer, "7")]) == "7"


def test_a_word_of_several_tokens_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="submarine"):
        word_id(tokenizer, "submarine")
