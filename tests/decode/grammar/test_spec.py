"""What an answer has to be, as plain data: how it is read, and which characters it cannot do without."""

import json

import pydantic
import pytest

from sigma0.decode.grammar.spec import (
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    Tool,
    ToolCalls,
    parse_call_style,
    parse_spec,
)
from tests.decode.grammar.matching import refused


@pytest.mark.parametrize(
    "schema, needed",
    [
        (True, ""),
        ({}, ""),
        ({"type": "object"}, '{}":'),
        ({"type": "array"}, "[]"),
        ({"type": "string"}, '"'),
        ({"type": "boolean"}, "truefalse"),
        ({"type": "null"}, "null"),
        ({"type": "integer"}, ""),
        ({"type": ["array", "null"]}, "[]null"),
        ({"type": [3, "null"]}, "null"),
        ({"items": {"type": "null"}}, "[]null"),
        ({"prefixItems": [{"type": "null"}, {"type": "string"}]}, '[]null"'),
        ({"pattern": "ab"}, '"'),
        ({"required": ["a"]}, '{}":'),
        ({"properties": {}}, '{}":'),
        ({"properties": {"xy": {"type": "integer"}}}, '{}":xy'),
        ({"properties": {"xy": {}, "é": {}}}, '{}":xyé,'),
        ({"type": "integer", "properties": {"q": {}}}, 'q"'),
        ({"properties": []}, '{}":'),
        ({"properties": {"x": {"type": "array"}}}, '{}":x[]'),
        ({"const": "ab"}, '"ab'),
        ({"const": None}, "null"),
        ({"const": "é"}, '"é'),
        ({"enum": [1, "b"]}, '1"b'),
        ({"enum": ["a"], "type": "object"}, '"a'),
        ({"enum": 5}, ""),
        ({"$defs": {"a": {"type": "null"}}}, "null"),
        ({"definitions": {"a": {"type": "null"}}}, "null"),
        ({"patternProperties": {"a": {"type": "null"}}}, "null"),
        ({"$defs": {"enum": {"type": "null"}}}, "null"),
        ({"$defs": []}, ""),
        ({"anyOf": [{"type": "null"}, {"type": "array"}]}, "null[]"),
        ({"additionalProperties": {"type": "null"}}, "null"),
    ],
    ids=str,
)
def test_characters_that_some_answer_needs(schema, needed):
    assert JsonSchema.of(schema).needs() == set(needed)


def test_characters_of_other_specs():
    assert JsonObject().needs() == set('{}":')
    assert Choice(("ab", "bc")).needs() == set("abc")
    assert Regex("ab").needs() == Grammar("start: A").needs() == frozenset()


def test_characters_of_calls():
    tag = set("<tool_call></tool_call>\n")
    schema = JsonSchema.of({"type": "array"})
    for style, frame, more in (
        ("hermes", '{"name": "", "arguments": }', "[]"), ("nanbeige", "<function=></function>", ""),
    ):  # fmt: skip
        plain = ToolCalls((Tool("XY", schema), Tool("Z", JsonSchema.of(True))), style)
        assert plain.needs() == tag | set(frame) | set(more) | set("XYZ")
        thought = ToolCalls(plain.tools, style, "thought")
        assert thought.needs() == plain.needs() | set("</think>")


def test_a_schema_is_an_object_text_or_a_model():
    class Own(pydantic.BaseModel):
        b: int
        a: str

    assert JsonSchema.of({"b": 1, "a": 2}).schema == '{"b": 1, "a": 2}'
    assert JsonSchema.of('{"b":1}') == JsonSchema('{"b":1}', strict=True)
    assert list(json.loads(JsonSchema.of(Own).schema)["properties"]) == ["b", "a"]
    assert JsonSchema.of(True).schema == "true" and not JsonSchema.of({}, strict=False).strict
    with refused("holds what is no JSON"):
        JsonSchema.of({"enum": {1, 2}})
    deep = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with refused("nested too deep"):
        JsonSchema.of(deep)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Choice(()), "at least one text"), (lambda: Choice(("a", "")), "a choice has to be a text"),
        (lambda: Choice((3,)), "got 3"), (lambda: Regex(""), "regex has to be"), (lambda: Grammar(""), "grammar has"),
        (lambda: JsonSchema("[]"), "JSON object"), (lambda: JsonSchema("false"), "no answer"),
        (lambda: JsonSchema("{"), "no JSON"), (lambda: JsonSchema(""), "schema has to be a text"),
        (lambda: ToolCalls(()), "at least one tool"),
        (lambda: ToolCalls((Tool("", JsonSchema("{}")),)), "a tool's name"),
        (lambda: ToolCalls((Tool("a", JsonSchema("{}")), Tool("a", JsonSchema("true")))), "two tools are called 'a'"),
    ],
)  # fmt: skip
def test_what_is_no_spec_is_refused(make, message):
    with refused(message):
        make()


def test_a_spec_is_parsed_by_its_kind():
    assert parse_spec() is None
    assert parse_spec(schema={"type": "null"}) == JsonSchema('{"type": "null"}')
    assert parse_spec(regex="a") == Regex("a") and parse_spec(grammar="start: A") == Grammar("start: A")
    assert parse_spec(choice=["a", "b"]) == Choice(("a", "b"))
    with refused("schema and grammar exclude each other"):
        parse_spec(schema=True, grammar="start: A")
    with refused("takes a list of texts, got the text 'ab'"):
        parse_spec(choice="ab")


def test_styles_of_calls():
    assert [parse_call_style(name) for name in (None, "hermes", "nanbeige")] == [None, "hermes", "nanbeige"]
    with refused("hermes or nanbeige, got 'qwen'"):
        parse_call_style("qwen")
