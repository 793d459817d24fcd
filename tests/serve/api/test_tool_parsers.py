"""Parsers of calls: the same pieces wherever an answer is cut, and they read what the grammar lets through."""

import json

import pytest

from sigma0.decode.grammar.spec import JsonSchema, Tool, ToolCalls
from sigma0.decode.grammar.vocabulary import vocabulary_of
from sigma0.serve.api.responses import _message
from sigma0.serve.api.tool_parsers import parser_of
from tests.byte_model import END, byte_tokenizer
from tests.schemas import record

SCHEMA = record(
    {
        "text": {"type": "string"},
        "mark": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "boolean"}]},
        "size": {"type": ["string", "integer"]},
        "unit": {"enum": ["c", "celsius"]},
        "day": {"type": "string", "format": "date"},
        "place": {"$ref": "#/$defs/place"},
    },
    ["text"],
    **{"$defs": {"place": record({"x": {"type": "integer"}})}},
)
TOOLS = (Tool("note", JsonSchema.of(SCHEMA)), Tool("stop", JsonSchema.of(record({}))))
NOTE = {"text": 'a "b"\n<c>\n', "mark": None, "size": 12, "unit": "c", "day": "2020-01-01", "place": {"x": 5}}


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def nanbeige(name, **texts):
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in texts.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


WRITTEN = {
    "hermes": hermes("note", NOTE),
    "nanbeige": nanbeige(
        "note", text=NOTE["text"], mark="null", size="12", unit="c", day='"2020-01-01"', place='{"x": 5}'
    ),
}
STOPS = {"hermes": hermes("stop", {}), "nanbeige": nanbeige("stop")}
pytestmark = pytest.mark.parametrize("style", list(WRITTEN))


def read(style, *pieces, begins="text"):
    """Content, and name and arguments of each call."""
    parser, content, calls = parser_of(ToolCalls(TOOLS, style, begins)), "", []
    parts = [part for piece in pieces for part in parser.feed(piece)]
    for part in [*parts, *parser.flush()]:
        if isinstance(part, str):
            content += part
        elif part.name is not None:
            assert part.call == len(calls) and not part.arguments
            calls.append([part.name, ""])
        else:
            calls[part.call][1] += part.arguments
    return content, [(name, arguments) for name, arguments in calls], parser.is_whole


def test_an_answer_is_read_the_same_wherever_it_is_cut(style):
    text = f"Now <tool, look: \n\n{WRITTEN[style]}\n{STOPS[style]}"
    content, ((name, arguments), stopped), is_whole = read(style, text)
    assert (content, name, json.loads(arguments), is_whole) == ("Now <tool, look:", "note", NOTE, True)
    assert stopped == ("stop", "{}")
    for place in range(len(text) + 1):
        assert read(style, text[:place], text[place:])[:2] == read(style, text)[:2]
    assert read(style, *text) == read(style, text)
    # a call that is cut has begun, and is not whole
    for place in range(text.index("<tool_call>") + 11, text.index("</tool_call>")):
        assert not read(style, text[:place])[2]


def test_a_thought_may_hold_the_tags_of_a_call(style):
    thought = f"Hm {STOPS[style]} or <tool_call>\n<parameter=foo>?</thin</think>"
    text = f"{thought}\n\n{STOPS[style]}"
    for place in range(len(text) + 1):
        content, calls, is_whole = read(style, text[:place], text[place:], begins="thought")
        assert (content, calls, is_whole) == (thought, [("stop", "{}")], True)


def test_a_call_that_is_cut_before_its_name_adds_nothing_to_a_message(style):
    cut = WRITTEN[style][:16]
    assert _message(ToolCalls(TOOLS, style), cut) == {"content": ""}
    assert _message(ToolCalls(TOOLS, style), f"Well.\n{cut}") == {"content": "Well."}
    assert _message(ToolCalls(TOOLS, style), "Well.\n") == {"content": "Well.\n"}


def test_text_without_calls_is_all_there(style):
    for text in ("", "Hi.\n\n", "<tool_call", "a < b <tool_", " \n"):
        assert read(style, text) == read(style, *text) == (text, [], True)


@pytest.mark.parametrize("begins", ["text", "call", "thought"])
def test_the_grammar_takes_what_the_parser_reads(style, begins):
    vocabulary = vocabulary_of(byte_tokenizer(), 260, {END})
    calls = f"{WRITTEN[style]}\n{STOPS[style]}"
    texts = {"text": f"Well.\n{calls}", "call": calls, "thought": f"Hm <tool_call>.</think>\n\n{calls}"}
    compiled = vocabulary.compile(ToolCalls(TOOLS, style, begins))
    matcher = compiled.matcher()
    take_all(matcher, texts[begins])
    matcher.check(END)
    alone = vocabulary.compile(ToolCalls(TOOLS, style, begins, several=False)).matcher()
    take_all(alone, texts[begins].removesuffix(f"\n{STOPS[style]}"))
    with pytest.raises(ValueError, match="leave no id"):
        alone.check(byte_tokenizer()("\n")["input_ids"][0])


def take_all(matcher, text):
    for token_id in byte_tokenizer()(text)["input_ids"]:
        matcher.take(token_id)
