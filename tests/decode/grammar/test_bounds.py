"""What a spec may ask of the engine: expressions that a value matches at once, sizes, chains, and that it can end."""

import json

import pytest

from sigma0.decode.grammar.bounds import (
    CHOICES,
    MOST,
    OWN_TOKENS,
    REGEX,
    RULES,
    TEXT,
    check_grammar,
    check_schema,
    check_spec,
)
from sigma0.decode.grammar.spec import Choice, Grammar, JsonObject, JsonSchema, Regex, Tool, ToolCalls
from tests.decode.grammar.matching import refused

P = {"pattern": "a"}


def each(count, part=P):
    return [part] * count


def chain(count):
    """Definitions that refer to the next, each with a pattern of its own."""
    current = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}", **P} for place in range(count - 1)}
    return {"$defs": {**current, f"d{count - 1}": P}, "$ref": "#/$defs/d0"}


# each makes a schema by which some value has to match so many expressions
INTERSECTIONS = {
    "allOf": lambda count: {"allOf": each(count)},
    "allOf beside": lambda count: {**P, "allOf": each(count - 1)},
    "pattern and format": lambda count: {**P, "format": "date", "allOf": each(count - 2)},
    "$ref": chain,
    "definitions": lambda count: {
        "definitions": {"a/b~c": {"allOf": each(count - 1)}}, "$ref": "#/definitions/a~1b~0c", **P,
    },
    "largest branch": lambda count: {"anyOf": [*each(3), {"allOf": each(count - 1)}, P], **P},
    "oneOf": lambda count: {"oneOf": [{"allOf": each(count - 1)}, P], **P},
    "anyOf and allOf": lambda count: {"anyOf": [P], "oneOf": [P], "allOf": each(count - 2)},
    "property": lambda count: {"properties": {"b": {"allOf": each(count)}, "a": P}},
    "properties of one name": lambda count: {"allOf": each(count, {"properties": {"a": P, "b": {}}})},
    "within a branch": lambda count: {"allOf": each(count, {"anyOf": [{"properties": {"a": P}}, {}]})},
    "any name": lambda count: {"properties": {"a": {"allOf": each(count - 1)}}, "patternProperties": {"x": P}},
    "any name alone": lambda count: {"patternProperties": {"x": {"allOf": each(count)}}},
    "behind definitions": lambda count: {"$defs": {}, "definitions": {}, "items": {"allOf": each(count)}},
    "additional": lambda count: {"properties": {"a": {"allOf": each(count - 1)}}, "additionalProperties": P},
    "items": lambda count: {"allOf": each(count, {"items": P})},
    "prefixItems": lambda count: {"prefixItems": [P, {"allOf": each(count)}]},
    "deeper": lambda count: {"items": {"properties": {"a": {"allOf": each(count)}}}},
    "other property": lambda count: {"properties": {"a": P, "b": {"properties": {"c": {"allOf": each(count)}}}}},
}  # fmt: skip


@pytest.mark.parametrize("kind", INTERSECTIONS)
def test_eight_expressions_are_matched_at_once_and_no_more(kind):
    assert MOST == 8
    check_schema(json.dumps(INTERSECTIONS[kind](8)))
    with refused("schema cannot be followed: a value has to match 9 expressions at once"):
        check_schema(json.dumps(INTERSECTIONS[kind](9)))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"allOf": P},
        {"properties": {str(place): P for place in range(20)}},
        {"items": {"anyOf": each(20)}, "oneOf": each(20)},
        {"prefixItems": each(20)},
        {"const": {"allOf": each(20)}, "enum": [{"allOf": each(20)}]},
        {"$defs": {"a": {"allOf": each(20)}}, "definitions": {"a": {"allOf": each(20)}}},
        {"$ref": "#/no/such"},
        {"$ref": 3, "allOf": each(8)},
        {"allOf": [{"properties": {str(place): P}} for place in range(20)]},
        {"allOf": [{"properties": {str(place): P for place in range(20)}}, {"required": ["0"]}]},
        {"properties": {"b": {"$ref": "#"}, "c": {**P, "format": "date"}}},
    ],
    ids=str,
)
def test_expressions_of_different_values_do_not_add_up(schema):
    check_schema(json.dumps(schema))


def test_definitions_that_lead_on_for_long_are_refused():
    current = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}"} for place in range(2000)}
    with refused("nested too deep"):
        check_schema(json.dumps({"$defs": current, "$ref": "#/$defs/d0"}))


def test_signs_of_a_grammar_count_outside_of_literals():
    for count, sign in ((8, "A"), (8, '"&&&&"'), (8, r'"\"&&"'), (8, "/&/"), (8, "A // & & &\n"), (8, "A # & &\n")):
        check_grammar("A: " + " & ".join([sign] * count))
        with refused("grammar cannot be followed: a value has to match 9 expressions"):
            check_grammar("A: " + " & ".join([sign] * count) + "\n & B")


def test_schemas_inside_of_a_grammar_count_where_they_may_intersect():
    for keyword in ('"allOf"', '"$ref"', '"\\u0061llOf"'):
        for name in ('"pattern"', '"format"', '"p\\u0061ttern"'):
            text = f"start: %json {{{keyword}: [{', '.join([f'{{{name}: 1}}'] * 8)}]}}"
            check_grammar(text)
            with refused("match 9 expressions"):
                check_grammar(text + ' %json {"pattern": 1}')
    check_grammar("start: %json {" + '"pattern": 1, ' * 9 + "}")
    check_grammar('start: "allOf" ' + '"pattern" ' * 9)


def doubled(count, **more):
    """Arrays of two of the next each, so that the shortest value grows with the power of their number."""
    current = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, **more} for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**current, f"d{count}": {"type": "null"}}}


def asks_for(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


REF = {"$ref": "#/$defs/a"}
ENDLESS = [
    asks_for(a={"$ref": "#"}),
    {**REF, "$defs": {"a": asks_for(b={"$ref": "#/$defs/b"}), "b": asks_for(a=REF)}},
    {**REF, "$defs": {"a": REF}},
    {**REF, "$defs": {"a": {"anyOf": [REF, asks_for(a=REF)]}}},
    {**REF, "$defs": {"a": {"type": "array", "items": REF, "minItems": 1}}},
    {**REF, "$defs": {"a": {"type": "array", "prefixItems": [{"type": "null"}, REF], "minItems": 2}}},
    {"allOf": [{}, asks_for(a={"$ref": "#"})]},
    {"type": "array", "items": False, "minItems": 1},
    {"enum": []},
    False,
]


@pytest.mark.parametrize("schema", ENDLESS, ids=str)
def test_a_schema_that_no_finite_value_follows_is_refused(schema):
    with refused("no answer of finite length follows it"):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {**REF, "$defs": {"a": {"anyOf": [asks_for(a=REF), {"type": "null"}]}}},
        {**REF, "$defs": {"a": asks_for(b={"$ref": "#/$defs/b"}), "b": {"type": ["null", "array"], "items": REF}}},
        {**REF, "$defs": {"a": {"type": "array", "prefixItems": [REF], "minItems": 0}}},
        doubled(20),
        doubled(10, minItems=2),
    ],
    ids=str,
)
def test_a_schema_that_holds_itself_where_it_may_end_is_taken(schema):
    check_schema(json.dumps(schema))


def test_the_reach_of_a_token_is_that_of_the_longest_part():
    assert check_spec(JsonObject()) == check_schema("true") == check_schema('{"type": "null"}') == 16
    part = asks_for(name={"type": "string", "minLength": 30}, on={"type": "boolean"}, of={"enum": ["ab", "abc"]})
    # {"name": "", "on": true, "of": "ab"}
    assert check_schema(json.dumps({"type": "object", "properties": {"a": part}})) == 36 + 30
    assert check_schema(json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 9})) == 2 + 9 * 3 - 2
    assert check_schema('{"const": "' + 300 * "x" + '"}') == 256
    tools = Tool("a", JsonSchema("{}")), Tool("b", JsonSchema(json.dumps(part)))
    assert check_spec(ToolCalls(tools)) == 66


def test_an_answer_that_is_too_long_for_anybody_is_refused():
    with refused("schema has no answer of under 65536 characters"):
        check_schema(json.dumps(doubled(20, minItems=2)))


def chained(count):
    return "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b" r{i + 1}\n' for i in range(count)) + f'r{count}: "z"'


def test_sizes_are_bounded():
    check_grammar(chained(RULES - 2))
    check_grammar('start: "a:\nb: c:"' + "\n// r: s\n" * (RULES + 1))
    for spec, message in (
        (Grammar("start: " + "a" * TEXT), f"grammar takes at most {TEXT} characters"),
        (Regex("a" * (REGEX + 1)), f"regex takes at most {REGEX} characters, got {REGEX + 1}"),
        (Choice(("a",) * (CHOICES + 1)), f"choice takes at most {CHOICES} texts"),
        (Choice(("a" * TEXT, "b")), f"choice takes at most {TEXT} characters"),
        (JsonSchema('{"title": "' + "a" * TEXT + '"}'), f"schema takes at most {TEXT} characters"),
    ):
        with refused(message):
            check_spec(spec)
    for lark in (chained(RULES - 1), "a[lazy]: b\n" * (RULES + 1), "?A.3: /b/\n" * (RULES + 1)):
        with refused(f"grammar takes at most {RULES} rules"):
            check_grammar(lark)
    flat = {f"d{i}": {"type": "null"} for i in range(RULES + 1)}
    with refused(f"schema takes at most {RULES} references"):
        check_schema(json.dumps({"anyOf": [{"$ref": f"#/$defs/{name}"} for name in flat], "$defs": flat}))


@pytest.mark.parametrize("place", [{}, {"items": {}}, {"properties": {"a": {}}}, {"anyOf": [{}]}], ids=str)
def test_keys_of_the_engine_are_refused(place):
    schema = json.dumps(place).replace("{}", json.dumps({"x-guidance": {"lenient": True}}))
    with refused("may not set the engine"):
        check_schema(schema)
    with refused("may not set the engine"):
        check_grammar(f"start: %json {schema}")
    with refused("may not set the engine"):
        check_spec(Grammar('%llguidance {"allow_invalid_utf8": true}\nstart: "a"'))
    # a name, and text, are no settings
    check_schema('{"properties": {"x-guidance": {"const": {"x-guidance": 1}}}}')
    check_spec(Grammar('start: "%llguidance"'))
    check_spec(Grammar(f'{OWN_TOKENS}start: "a"'))
