"""Prompts from files, good and bad."""

import json
from copy import deepcopy

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from sigma0.calibrate.prompts import Prompt, encode_prompts, read_prompts


def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_paragraphs_and_json_lines_are_prompts_whatever_their_marks_and_separators(tmp_path):
    path = write(tmp_path, "a.txt", "\n\nOne line.\nAnother.\n  \n\t\nThe second, naïve.\n")
    assert read_prompts(path) == [Prompt("One line.\nAnother."), Prompt("The second, naïve.")]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]
    lines = [json.dumps({"prompt": "Hi"}), "", json.dumps({"prompt": turns, "answer": "Here."})]
    path = write(tmp_path, "a.jsonl", "\n".join(lines))
    assert read_prompts(path) == [Prompt("Hi"), Prompt(turns, "Here.")]
    (tmp_path / "mark.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": "Hi"}).encode() + b"\r\n")
    assert read_prompts(tmp_path / "mark.jsonl") == [Prompt("Hi")]
    line = json.dumps({"prompt": "one\u2028two"}, ensure_ascii=False)
    assert read_prompts(write(tmp_path, "line.jsonl", line)) == [Prompt("one\u2028two")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "holds no prompt"),
        ("a.txt", " \n\n ", "holds no prompt"),
        ("a.jsonl", "\n", "holds no prompt"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": 3}', "line 2 of .*prompt"),
        ("a.jsonl", '{"prompt": "x", "reply": "y"}', "line 1 of .*reply"),
        ("a.jsonl", "prompt", "line 1 of .*JSON"),
        ("a.jsonl", '{"prompt": ""}', "line 1 of .*empty"),
        ("a.jsonl", '{"prompt": []}', "line 1 of .*empty"),
        ("a.jsonl", '{"prompt": [{"role": "robot", "content": "x"}]}', "line 1 of .*role"),
    ],
)
def test_a_bad_file_is_told_by_its_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(write(tmp_path, name, text))


def test_missing_binary_and_too_long_files_are_told(tmp_path, monkeypatch):
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setattr("sigma0.calibrate.prompts.MAX_PROMPTS", 2)
    long = write(tmp_path, "a.txt", "a\n\nb\n\nc")
    for path, message in (
        (tmp_path / "none.txt", "none.txt"),
        (tmp_path / "b.txt", "UTF-8"),
        (long, "holds 3 prompts, more than 2"),
    ):
        with pytest.raises(ValueError, match=message):
            read_prompts(path)


def test_a_prompt_without_tokens_or_against_the_template_is_named(pocket):
    model, tokenizer = pocket
    strict = deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"prompt 2: the chat template refuses .*roles must alternate"):
        encode_prompts(model, strict, [Prompt("Hi"), Prompt([{"role": "user", "content": "Hi"}])], 4)
    silent = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0, "?": 1}, "?")))
    silent.backend_tokenizer.pre_tokenizer = Whitespace()
    with pytest.raises(ValueError, match="prompt 1 has no tokens: '  '"):
        encode_prompts(model, silent, [Prompt("  ")], 4)


def test_ids_leave_room_for_what_is_to_come(pocket):
    model, tokenizer = pocket
    limit = model.config.max_position_embeddings
    short, chat = Prompt("Mary went to the park."), Prompt([{"role": "user", "content": "Where is Mary?"}])
    ids = encode_prompts(model, tokenizer, [short, chat], 8)
    assert tokenizer.decode(ids[0]) == short.content
    assert "Where is Mary?" in tokenizer.decode(ids[1]) and len(ids[1]) > 5
    long = Prompt(" ".join(["Mary"] * limit))
    with pytest.raises(ValueError, match=rf"prompt 2 has \d+ tokens, .*context of {limit}"):
        encode_prompts(model, tokenizer, [short, long], 8)
    assert len(encode_prompts(model, tokenizer, [short], limit - len(ids[0]))) == 1
    with pytest.raises(ValueError, match="prompt 1 has"):
        encode_prompts(model, tokenizer, [short], limit - len(ids[0]) + 1)
