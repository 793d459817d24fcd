"""Answers that were kept are found again by what they were asked with, as they were when their settings were fewer."""

import json
from hashlib import sha256

from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.cache import AnswerCache
from sigma0.reason.chat import Completion, ScriptedChat

USER = [{"role": "user", "content": "Is it?"}]
# The settings of the first answers that were kept.
FIRST = {"effort": "low", "max_tokens": 9, "temperature": 0.0, "seed": 3, "stop": []}


def test_an_answer_of_before_there_were_grammars_is_found(tmp_path):
    key = sha256(json.dumps(["scripted", "digest", USER, FIRST], sort_keys=True).encode()).hexdigest()
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"key": key, "answer": Completion("Yes.").to_dict()}) + "\n")
    cache, chat = AnswerCache(path, {"scripted": "digest"}), ScriptedChat([])
    settings = AskSettings("low", 9, 0.0, 3)
    assert cache.get(chat, USER, settings) == Completion("Yes.")
    held = AskSettings("low", 9, 0.0, 3, grammar='start: "No."')
    assert cache.get(chat, USER, held) is None
    cache.put(chat, USER, held, Completion("No."))
    assert AnswerCache(path, {"scripted": "digest"}).get(chat, USER, held) == Completion("No.")
    assert cache.get(chat, USER, settings) == Completion("Yes.")
