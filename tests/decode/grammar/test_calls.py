"""Calls of tools: which texts they may be, in both notations."""

import json

import pytest

from sigma0.decode.grammar.calls import Parameter, lark_of, parameters_of
from sigma0.decode.grammar.spec import JsonSchema, Tool, ToolCalls
from tests.decode.grammar.matching import check_texts, refused

CITY = {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip


def tool(schema, name="weather", strict=True):
    return Tool(name, JsonSchema.of(schema, strict))


def calls_of(*tools, **settings):
    return ToolCalls(tuple(tools), **{"style": "nanbeige", "begins": "call", "several": False, **settings})


def hermes(name="weather", arguments='{"city": "Rome"}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def nanbeige(name="weather", **values):
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


NOTATIONS = {"hermes": hermes(), "nanbeige": nanbeige(city="Rome")}


@pytest.mark.parametrize("style", NOTATIONS)
def test_what_stands_ahead_of_a_call(style):
    call, weather = NOTATIONS[style], tool(CITY)
    thought = "which?</think>\n\n"
    check_texts(
        calls_of(weather, style=style, begins="text"),
        ["", "Hello", "a < b", call, f"I look.\n{call}"],
        ["<tool_call>", call[:-1], f"{call} ", f"{call}\n", f"{call}\n{call}", f"{call} and more"],
    )
    check_texts(calls_of(weather, style=style), [call], ["", "Hello", f" {call}", f"{thought}{call}"])
    check_texts(
        calls_of(weather, style=style, begins="thought"),
        [f"{thought}{call}", f"</think>\n\n{call}"],
        [call, f"which?\n\n{call}", f"which?</think>\n{call}", thought, "which?"],
    )


@pytest.mark.parametrize("style", NOTATIONS)
@pytest.mark.parametrize("begins, ahead", [("text", "Both: "), ("call", ""), ("thought", "hm</think>\n\n")])
def test_several_calls_follow_each_other_on_lines_of_their_own(style, begins, ahead):
    call = NOTATIONS[style]
    spec = calls_of(tool(CITY), style=style, begins=begins, several=True)
    check_texts(spec, [ahead + call, f"{ahead}{call}\n{call}\n{call}"], [f"{ahead}{call}{call}", f"{ahead}{call}\n"])


def test_several_calls_and_text_ahead_are_the_default():
    spec = ToolCalls((tool(CITY),))
    assert (spec.style, spec.begins, spec.several) == ("hermes", "text", True)


def test_arguments_in_json_follow_the_schema_of_the_tool_that_is_called():
    other = tool({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, "count")
    check_texts(
        calls_of(tool(CITY), other, tool(True, "now"), style="hermes"),
        [
            hermes(), hermes(arguments='{"city": "Rome", "days": 3}'), hermes("count", '{"n": 3}'),
            hermes("now", "{}"), hermes("now", '{"any": [1, 2]}'),
        ],
        [
            hermes("count"), hermes(arguments='{"n": 3}'), hermes(arguments='{"days": 3, "city": "Rome"}'),
            hermes(arguments='{"city":"Rome"}'), hermes("other"), hermes(arguments='{"city": "Rome", "days": 1.5}'),
        ],
    )  # fmt: skip


def test_arguments_between_tags_are_in_the_order_of_the_schema():
    check_texts(
        calls_of(tool(CITY), tool(True, "now")),
        [nanbeige(city="Rome"), nanbeige(city="Rome", days=3), nanbeige("now")],
        [nanbeige(), nanbeige(days=3), nanbeige(days=3, city="Rome"), nanbeige(city="Rome", days="three"),
         nanbeige("now", city="Rome"), nanbeige("other", city="Rome")],
    )  # fmt: skip


@pytest.mark.parametrize(
    "schema, good, bad",
    [
        ({"type": "string"}, ["", "two\nlines", 'a "b" <c>', "</parameter>"], ["a\n</parameter>\nb"]),
        ({"type": "string", "minLength": 2}, ["ab", "a\nb", "abcdef"], ["", "a"]),
        ({"type": "string", "maxLength": 3}, ["", "abc"], ["abcd"]),
        ({"type": "string", "minLength": 2, "maxLength": 3, "title": "T"}, ["ab", "abc"], ["a", "abcd"]),
        ({"type": "string", "minLength": 0}, ["", "abc"], []),
        ({"type": "string", "enum": ["a", "b c"]}, ["a", "b c"], ["", "b", '"a"', "ab"]),
        ({"enum": ["a", "b"]}, ["a", "b"], ['"a"', "c"]),
        ({"enum": ["é", "🙂", 'a"\\']}, ["é", "🙂", 'a"\\'], ["e", "\\u00e9"]),
        ({"const": "a"}, ["a"], ['"a"', "b"]),
        ({"type": "string", "const": "a", "description": "d"}, ["a"], ['"a"', "b"]),
        ({"enum": [1, "b"]}, ["1", '"b"'], ["b", "2"]),
        ({"enum": ["a\nb"]}, ['"a\\nb"'], ["a\nb"]),
        ({"type": "integer", "enum": [1, 2]}, ["1", "2"], ["3", "a"]),
        ({"type": "integer"}, ["3", "-1"], ["1.5", "three", '"3"']),
        ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[true, false]"], ["[true,false]", "[1]", "text"]),
        ({"type": ["string", "null"]}, ["null", "text"], []),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "title": "T"}]}, ["3", "text"], []),
        ({"type": ["integer", "null"]}, ["null", "3"], ["text"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["null", "3"], ["text"]),
        ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ["aa", '"b"']),
        ({"$ref": "#/$defs/small"}, ["1", "2"], ["3", "text"]),
        (True, ['"text"', "3", "null"], ["text"]),
        ({}, ['"text"', "3", "null"], ["text"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_between_tags_is_text_or_json(schema, good, bad):
    root = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"small": {"enum": [1, 2]}}}
    check_texts(calls_of(tool(root)), [nanbeige(x=value) for value in good], [nanbeige(x=value) for value in bad])


def test_a_keyword_that_cannot_be_held_is_left_out_if_it_need_not_hold():
    schema = {**CITY, "minProperties": 2}
    with refused("cannot be held to 'minProperties'"):
        parameters_of(tool(schema))
    check_texts(calls_of(tool(schema, strict=False)), [nanbeige(city="Rome")], [nanbeige()])
    unique = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    check_texts(calls_of(tool(unique, strict=False)), [nanbeige(x="[1]"), nanbeige()], [nanbeige(x="1")])
    with refused("uniqueItems"):
        check_texts(calls_of(tool(unique)), [nanbeige()], [])
    with refused("uniqueItems"):
        check_texts(calls_of(tool(unique), style="hermes"), [hermes(arguments="{}")], [])


def test_notes_and_definitions_are_no_rules():
    notes = {"title": "T", "description": "d", "$schema": "s", "definitions": {}, "examples": [], "$comment": "c"}
    (city, days) = parameters_of(tool({**CITY, **notes, "default": {}, "deprecated": True}))
    assert (city.name, city.required, city.kinds) == ("city", True, frozenset({"string"}))
    assert (days.name, days.required, days.kinds, days.choices, days.length) == ("days", False, None, (), (0, None))


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "array"}, "have to be an object"),
        ({"properties": []}, "have to be an object"),
        ({"properties": {}, "required": "city"}, "have to be an object"),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, "require 'b', which is not among"),
        ({"properties": {"": {}}}, "have the name ''"),
        ({"properties": {"a b": {}}}, "have the name 'a b'"),
        ({"properties": {"a>": {}}}, "have the name 'a>'"),
    ],
)
def test_parameters_that_cannot_be_written_are_named(schema, message):
    with refused(message):
        parameters_of(tool(schema))


def test_a_schema_may_be_left_open():
    assert parameters_of(tool(True)) == parameters_of(tool({})) == ()
    assert [item.name for item in parameters_of(tool({"properties": {"b": {}, "a": {}}}))] == ["b", "a"]


@pytest.mark.parametrize("length, is_text", [(0, True), (10_000, True), (10_001, False), (-1, False), (True, False)])
def test_lengths_that_an_engine_can_count_are_of_plain_texts(length, is_text):
    for keyword in ("minLength", "maxLength"):
        (current,) = parameters_of(tool({"properties": {"x": {"type": "string", keyword: length}}}))
        assert current.kinds == (frozenset({"string"}) if is_text else None)
        assert current.length == (
            (0, None) if not is_text else (length, None) if keyword == "minLength" else (0, length)
        )


def test_definitions_go_along_only_where_they_are_referred_to():
    defined = {"$defs": {"a": {"enum": [1]}}, "definitions": {"b": {}}}
    schema = {**defined, "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"type": "integer"}, "z": False}}
    x, y, z = parameters_of(tool(schema))
    assert x.schema == {**defined, "$ref": "#/$defs/a"}
    assert y.schema == {"type": "integer"}
    assert z.schema == {"not": {}}


def test_texts_of_choices_are_told_once():
    (current,) = parameters_of(tool({"properties": {"x": {"enum": ["a", "b", "a"]}}}))
    assert current.choices == ("a", "b")
    for more in ({"const": "a"}, {"minLength": 1}, {"type": "integer"}):
        (current,) = parameters_of(tool({"properties": {"x": {"enum": ["a"], **more}}}))
        assert current.kinds is None and current.choices == ()


KINDS = frozenset({"string", "null", "boolean", "integer"})


@pytest.mark.parametrize(
    "kinds, text, read",
    [
        (None, '{"a": 1}', {"a": 1}),
        (KINDS, "null", None), (KINDS, "true", True), (KINDS, "false", False), (KINDS, "-12", -12), (KINDS, "0", 0),
        (KINDS, "1.5", "1.5"), (KINDS, "01", "01"), (KINDS, "True", "True"), (KINDS, "é", "é"), (KINDS, "", ""),
        (frozenset({"string"}), "null", "null"), (frozenset({"string"}), "true", "true"),
        (frozenset({"string"}), "3", "3"), (frozenset({"string", "number"}), "1.5e-3", 0.0015),
        (frozenset({"string", "number"}), "3", 3), (frozenset({"string", "number"}), "1.", "1."),
        (frozenset({"string", "integer"}), "1e3", "1e3"), (frozenset({"string", "boolean"}), "null", "null"),
    ],
)  # fmt: skip
def test_what_stands_between_the_tags_as_json(kinds, text, read):
    output = Parameter("x", True, {}, kinds).json(text)
    assert json.loads(output) == read and type(json.loads(output)) is type(read)
    assert isinstance(read, str) or output == text
    assert "\\u" not in output


def test_the_schemas_of_a_grammar_are_bounded_together():
    def size(*counts, style="hermes"):
        tools = [tool({"description": "x" * count}, f"t{place}") for place, count in enumerate(counts)]
        return lark_of(calls_of(*tools, style=style), {})

    frame = len('{"description": "", "x-guidance": {}}')
    size(2**21 - frame)
    size(2**20 - frame, 2**20 - frame)
    with refused(f"over {2**21} characters"):
        size(2**21 - frame + 1)
    with refused("give fewer arguments"):
        size(2**20 - frame, 2**20 - frame + 1)


def test_schemas_of_arguments_are_laid_out_and_lenient_as_they_are_told():
    layout = {"item_separator": ", "}
    text = lark_of(calls_of(tool({}, strict=False), style="hermes"), layout)
    assert '"x-guidance": {"item_separator": ", ", "lenient": true}' in text
    assert "lenient" not in lark_of(calls_of(tool({}), style="hermes"), layout)
