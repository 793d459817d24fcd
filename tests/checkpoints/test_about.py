"""What a checkpoint says of itself."""

import json

import pytest

import sigma0
from sigma0.checkpoints import resolve_model
from sigma0.checkpoints.about import About, read_about, unseen_note

ABOUT = About(knows="two words", words=("Mary", "went", "7"))


@pytest.mark.parametrize("name", sigma0.shipped_models())
@pytest.mark.parametrize("chat", [False, True])
def test_shipped_models_answer_their_examples(name, chat):
    model, tokenizer = sigma0.load(name, device="cpu")
    about = read_about(resolve_model(name))
    assert 3 <= len(about.examples) <= 5
    for example in about.examples:
        prompt = [{"role": "user", "content": example.prompt}] if chat else example.prompt
        assert sigma0.generate(model, tokenizer, prompt, max_new_tokens=24).text.strip() == example.answer
        assert about.unseen(f"{example.prompt} {example.answer}") == []


def test_words_count_as_they_are_written_and_once():
    assert ABOUT.unseen("Mary went. mary WENT, went: 7 is not 17? mary!") == ["mary", "WENT", "is", "not", "17"]
    assert About(knows="all").unseen("Mary") == []


def test_a_note_is_one_line_that_quotes_few_words():
    assert unseen_note("tiny", ABOUT, "Mary went") is None
    assert unseen_note("tiny", None, "Paris") is None
    assert unseen_note("tiny", ABOUT, "Mary ran") == "note: tiny has never seen 'ran'; it knows two words"
    long = unseen_note("tiny", ABOUT, f"one two {'x' * 900} four five\n\nMary")
    assert "'one', 'two', 'xxxxxxxxxxxxxxxxxxxx' and 2 more words" in long and "\n" not in long


def test_a_folder_without_the_file_says_nothing_and_a_bad_file_is_named(tmp_path):
    assert read_about(tmp_path) is None
    assert read_about("ByteDance/Ouro-1.4B") is None
    for content in ("{", json.dumps({"knows": 1}), json.dumps({"knows": "a", "sings": True})):
        (tmp_path / "about.json").write_text(content)
        with pytest.raises(ValueError, match=r"about\.json': "):
            read_about(tmp_path)
