"""Parsers of calls: the same pieces wherever an answer is cut, and values as their schemas have them."""

import json

import pytest

from sigma0.decode.grammar.calls import lark_of, parameters_of
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
        "note", text='a "b"\n<c>\n', mark="null", size="12", unit="c", day='"2020-01-01"', place='{"x": 5}'
    ),
}
STOPS = {"hermes": hermes("stop", {}), "nanbeige": nanbeige("stop")}


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


@pytest.mark.parametrize("style", list(WRITTEN))
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


@pytest.mark.parametrize("style", list(WRITTEN))
def test_a_thought_may_hold_the_tags_of_a_call(style):
    thought = f"Hm {STOPS[style]} or <tool_call>\n<parameter=foo>?</thin</think>"
    text = f"{thought}\n\n{STOPS[style]}"
    for place in range(len(text) + 1):
        content, calls, is_whole = read(style, text[:place], text[place:], begins="thought")
        assert (content, calls, is_whole) == (thought, [("stop", "{}")], True)


@pytest.mark.parametrize("style", list(WRITTEN))
def test_a_call_that_is_cut_before_its_name_adds_nothing_to_a_message(style):
    cut = WRITTEN[style][:16]
    assert _message(ToolCalls(TOOLS, style), cut) == {"content": ""}
    assert _message(ToolCalls(TOOLS, style), f"Well.\n{cut}") == {"content": "Well."}
    assert _message(ToolCalls(TOOLS, style), "Well.\n") == {"content": "Well.\n"}


def test_definitions_stand_with_the_arguments_that_refer_to_them_and_are_bounded():
    large = {"$defs": {"x": {"description": "y" * 2**16, "type": "integer"}}}
    free = {f"a{number}": {"type": "integer"} for number in range(100)}
    assert len(lark_of(ToolCalls((Tool("a", JsonSchema.of({**record(free), **large})),), "nanbeige"), {})) < 2**16
    bound = {f"a{number}": {"$ref": "#/$defs/x"} for number in range(100)}
    with pytest.raises(ValueError, match="smaller definitions"):
        lark_of(ToolCalls((Tool("a", JsonSchema.of({**record(bound), **large})),), "nanbeige"), {})


@pytest.mark.parametrize("style", list(WRITTEN))
def test_text_without_calls_is_all_there(style):
    for text in ("", "Hi.\n\n", "<tool_call", "a < b <tool_", " \n"):
        assert read(style, text) == read(style, *text) == (text, [], True)


@pytest.mark.parametrize("style", list(WRITTEN))
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


@pytest.mark.parametrize(
    "wrong",
    [
        nanbeige("note"),
        nanbeige("note", text="a", unit="k"),
        nanbeige("note", text="a", day="2020-01-01"),
        nanbeige("note", text="a", place='{"x": "y"}'),
        nanbeige("note", unit="c", text="a"),
        nanbeige("other"),
        "<tool_call> ",
    ],
)
def test_the_grammar_refuses_what_the_schema_does(wrong):
    matcher = vocabulary_of(byte_tokenizer(), 260, {END}).compile(ToolCalls(TOOLS, "nanbeige")).matcher()
    with pytest.raises(ValueError, match="leave no id"):
        take_all(matcher, wrong)


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("text", "null", "null"), ("mark", "null", None), ("mark", "true", True), ("mark", "nul", "nul"),
        ("mark", "5", "5"), ("size", "-5", -5), ("size", "05", "05"), ("size", "1.5", "1.5"), ("size", "", ""),
        ("unit", "celsius", "celsius"), ("day", '"2020-01-01"', "2020-01-01"), ("place", '{"x": 1}', {"x": 1}),
    ],
)  # fmt: skip
def test_values_are_of_their_types(name, text, value):
    parameter = next(each for each in parameters_of(TOOLS[0]) if each.name == name)
    read = json.loads(parameter.json(text))
    assert read == value and type(read) is type(value)


def test_numbers_keep_their_digits():
    root = {"type": "object", "properties": {"x": {"type": ["string", "number"]}}}
    (parameter,) = parameters_of(Tool("a", JsonSchema.of(root)))
    for text in ("1e999", "1" * 5000, "-0.50"):
        assert parameter.json(text) == text


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "object", "minProperties": 1}, "'minProperties'"),
        ({"type": "object", "properties": {"a b": {}}}, "'a b'"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "require 'a'"),
    ],
)
def test_what_this_notation_cannot_hold_is_named(schema, message):
    with pytest.raises(ValueError, match=message):
        parameters_of(Tool("a", JsonSchema.of(schema)))
    parameters_of(Tool("a", JsonSchema.of({"type": "object", "minProperties": 1}, strict=False)))
