"""The micro-world's tokenizer: exact round trips, one token a word, ids as Ouro means them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sigma0.bench.pocket.tokenizer import BOS, EOS, MAX_VOCABULARY, PAD, build_tokenizer
from sigma0.bench.pocket.world import draw
from sigma0.models.load import load_tokenizer

AWKWARD = ["a 12345", "Mary's café \n\n 漢字\t🙂", " leading", "trailing ", "don't , stop .", "\r\n\x00", ""]


def ids(tokenizer, text):
    return list(tokenizer(text)["input_ids"])


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_round_trips(tokenizer, text):
    if not any(special in text for special in (PAD, BOS, EOS)):
        assert tokenizer.decode(ids(tokenizer, text)) == text


def test_world_words_are_one_token(tokenizer):
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]
    for scene in (draw("test", 1, index) for index in range(200)):
        for text in (scene.story, *(f" {item.question} {item.answer}" for item in scene.items)):
            words = re.sub(r"([.,?])", r" \1", text).split()
            # A digit stands apart from the space before it.
            words += [word for word in words if word.isdigit()]
            assert len(ids(tokenizer, text)) == len(words), tokenizer.tokenize(text)
        for item in scene.items:
            assert len(ids(tokenizer, item.answer)) == len(ids(tokenizer, f" {item.answer}"))


@pytest.mark.exhaustive
def test_training_again_gives_the_same_tokenizer(tokenizer):
    assert build_tokenizer().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("loader", [AutoTokenizer.from_pretrained, load_tokenizer])
def test_both_loaders_keep_the_file(tokenizer, loader, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = loader(tmp_path)
    scene = draw("test", 2, 0)
    for text in (*AWKWARD, scene.story, scene.items[0].prompt + f" {scene.items[0].answer}{EOS}"):
        assert ids(loaded, text) == ids(tokenizer, text)
        assert loaded.decode(ids(loaded, text)) == text
    assert loaded.convert_tokens_to_ids([PAD, BOS, EOS]) == [0, 1, 2]
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
    assert sorted(loaded.get_vocab().values()) == list(range(len(loaded))) and len(loaded) <= MAX_VOCABULARY
    assert loaded.chat_template == tokenizer.chat_template


def test_chat_template_is_chatml_over_several_turns(tokenizer):
    turns = [("user", "Where is Mary?"), ("assistant", "Mary is in the park."), ("user", "Who has the cup?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    closed = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert text == f"{closed}<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == closed
    # Special tokens written by the template are the special ids, not text.
    assert ids(tokenizer, text).count(1) == 4 and ids(tokenizer, text).count(2) == 3
