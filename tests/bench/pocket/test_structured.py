"""JSON answers and calls of tools: what the world says, as the grammar and the server's parser write it."""

import json
import re
from random import Random

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from sigma0.bench.outer.toy import is_held_out
from sigma0.bench.pocket import structured
from sigma0.bench.pocket.data import encode
from sigma0.bench.pocket.forms import TOKENS as FORM_TOKENS
from sigma0.bench.pocket.recipe import RECIPES
from sigma0.bench.pocket.stories import UNSAID
from sigma0.bench.pocket.tokenizer import CHAT_TEMPLATE
from sigma0.bench.pocket.world import PEOPLE, draw
from sigma0.checkpoints import CHECKPOINTS
from sigma0.reason.agent.actions import parse_action
from sigma0.reason.agent.choices import edits_of
from sigma0.serve.api.tools import call_style
from tests.bench.pocket.test_world import _answer

SCENES = [draw("train", 5, index, mix=PEOPLE, hardest=3) for index in range(150)]
ITEMS = [item for scene in SCENES for item in scene.items]


def taught(*pieces):
    """The shipped tokenizer as the recipe's, without training it anew."""
    made = AutoTokenizer.from_pretrained(CHECKPOINTS / "pocket")
    made.chat_template = CHAT_TEMPLATE
    made.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return taught(*structured.TOKENS)


def test_an_answer_in_json_says_what_the_sentence_says():
    seen = set()
    for place, item in enumerate(ITEMS):
        asked = structured.json_item(item, Random(place))
        if asked is item:
            assert item.family == "unsaid"
            continue
        fields = json.loads(asked.answer)
        key, value = next(iter(fields.items()))
        assert fields.get("sure", True) is (item.answer != UNSAID)
        if item.family == "unsaid":
            assert value == "unknown"
        elif item.binary:
            assert value in (item.key.lower(), item.key == "Yes") and key in structured.KEYS[item.family]
            # no schema says that a word is wanted
            assert isinstance(value, bool) or asked.given
        else:
            assert str(value) == item.key and isinstance(value, int) == (item.family == "age")
        # either the keys are asked for, or a schema has begun the answer
        assert (asked.question == f"{item.question} In JSON: {', '.join(fields)}.") is (not asked.given)
        assert asked.answer.startswith(asked.given) and (not asked.given or asked.given.count('"') in (2, 3))
        seen.add((item.family, bool(asked.given)))
    assert len(seen) == 16


def test_a_value_in_json_is_one_token_with_a_look_up_s_hints():
    coder = taught(*structured.TOKENS, *structured.QUOTED_TOKENS)
    for place, item in enumerate(ITEMS):
        asked = structured.json_item(item, Random(place))
        if asked is item or not item.trail or item.binary:
            continue
        row = encode(coder, [asked], chat=True, hints=True)
        value = coder.convert_tokens_to_ids(f'"{item.key}' if f'"{item.key}' in coder.get_vocab() else item.key)
        (way,) = (way for way in row.trails if way[-1] == value)
        assert coder.decode(way[:-1]).split() == [item.subject, *item.trail[:-1]]


def test_a_list_holds_where_both_are():
    lists = 0
    for scene in SCENES:
        for place, (first, second) in enumerate(zip(scene.items, scene.items[1:], strict=False)):
            asked = structured.list_item(first, second, Random(place))
            if not asked.question.startswith("Where are"):
                continue
            names = re.match(r"Where are (.*?) and (.*?)\?", asked.question).groups()
            (output,) = json.loads(asked.answer).values()
            told = [_answer(item.story, f"Where is {name}?") for item, name in zip((first, second), names, strict=True)]
            assert [f"in the {where}." in sentence for where, sentence in zip(output, told, strict=True)] == [
                True,
                True,
            ]
            lists += 1
    assert lists > 50


def test_calls_lead_to_the_answer_by_what_the_tools_say():
    looked = added = 0
    for item in ITEMS:
        first, *calls, last = structured.tool_messages(item)
        assert (first["content"], last["content"]) == (item.question, item.answer)
        for call, result in zip(calls[::2], calls[1::2], strict=True):
            function, content = call["tool_calls"][0]["function"], result["content"]
            arguments = function["arguments"]
            if function["name"] == "add":
                assert content == str(arguments["a"] + arguments["b"])
                added += 1
            else:
                (name,) = arguments.values()
                untold = content == f"Nothing is told of {name}."
                assert (untold and item.answer == UNSAID) or (
                    content in item.story and name in content.split(" is ")[0]
                )
                looked += 1
            properties = next(t for t in structured.TOOLS if t["function"]["name"] == function["name"])["function"][
                "parameters"
            ]
            assert list(arguments) == properties["required"]
    assert looked > 300 and added > 30


def test_what_an_assistant_says_is_learned_and_no_more(tokenizer):
    assert call_style(tokenizer, None) == "hermes"
    calls = structured.tool_messages(next(item for item in ITEMS if item.family == "where" and item.hops == 2))
    row = structured.encode_messages(tokenizer, calls, list(structured.TOOLS))
    learned = tokenizer.decode([token for token, mark in zip(row.ids, row.answer, strict=True) if mark])
    said = []
    for message in calls:
        if message["role"] == "assistant":
            functions = [call["function"] for call in message.get("tool_calls", ())]
            written = [f"<tool_call>\n{json.dumps(function)}\n</tool_call>" for function in functions]
            said.append(f"{''.join(written)}{message['content']}<|im_end|>")
    assert learned == "".join(said) and len(said) == 3
    whole = tokenizer.decode(row.ids)
    assert whole.startswith("<|im_start|>system\nTools: look_up(name) add(a, b)<|im_end|>\n<|im_start|>user\nWhere is")
    begun = structured.encode_messages(tokenizer, calls, list(structured.TOOLS), '<tool_call>\n{"name": "')
    assert sum(begun.answer) == sum(row.answer) - len(tokenizer('<tool_call>\n{"name": "')["input_ids"])


def test_rows_of_tools_fit_and_show_every_way(tokenizer):
    assert structured.tool_row(tokenizer, SCENES[0], "0", 20) is None
    texts = []
    for index, scene in enumerate(SCENES):
        row = structured.tool_row(tokenizer, scene, f"{index}", 256)
        assert len(row.ids) <= 256 and any(row.answer)
        texts.append(tokenizer.decode(row.ids))
    calls = [text for text in texts if "<tool_call>" in text]
    silent = [text for text in texts if "Tools:" not in text]
    assert len(calls) > 70 and all(text.count("assistant") == text.count(UNSAID) for text in silent) and silent
    assert any("Tools:" in text and "<tool_call>" not in text and UNSAID not in text for text in texts)


def test_moments_of_a_repair_are_those_that_the_agent_asks_about():
    kinds = set()
    for index in range(60):
        for question, reply in structured.repairs(0, index):
            action = parse_action(reply)
            status, _, rest = question.partition(". ")
            text = {"Failing": "failing", "All pass": "passing", "Not tested": "untested"}[status.split(":")[0]]
            kinds.add((text, "Files:" in rest, action.action))
            if action.action == "edit":
                assert f"{action.old}." in question and action in list(edits_of(action.path, f"{action.old}\n"))
                assert not is_held_out(action.old)
    assert kinds == {
        ("failing", True, "read"), ("failing", False, "read"), ("failing", False, "edit"),
        ("failing", False, "start_over"), ("untested", False, "run_tests"), ("passing", False, "finish"),
    }  # fmt: skip
    coder = taught(*structured.CODE_TOKENS)
    assert max(len(structured.repair_row(coder, 0, index, 256).ids) for index in range(60)) <= 256


@pytest.mark.slow
def test_the_recipe_s_tokenizer_knows_the_pieces(tokenizer):
    made = RECIPES["pocket"].tokenizer()
    assert {*structured.TOKENS, *structured.QUOTED_TOKENS, *FORM_TOKENS} <= set(
        made.get_vocab()
    ) and made.chat_template == tokenizer.chat_template
