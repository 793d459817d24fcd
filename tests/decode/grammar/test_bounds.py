"""How many expressions a value has to match at once: eight are taken, nine are not."""

import json

import pytest

from sigma0.decode.grammar.bounds import MOST, check_grammar, check_schema
from tests.decode.grammar.matching import refused

P = {"pattern": "a"}


def each(count, part=P):
    return [part] * count


def chain(count):
    """Definitions that refer to the next, each with a pattern of its own."""
    own = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}", **P} for place in range(count - 1)}
    return {"$defs": {**own, f"d{count - 1}": P}, "$ref": "#/$defs/d0"}


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
        {"$defs": {"a": {"$ref": "#/$defs/a", **P}}, "$ref": "#/$defs/a"},
        {"allOf": [{"properties": {str(place): P}} for place in range(20)]},
    ],
    ids=str,
)
def test_expressions_of_different_values_do_not_add_up(schema):
    check_schema(json.dumps(schema))


def test_definitions_that_lead_on_for_long_are_refused():
    own = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}"} for place in range(2000)}
    with refused("nested too deep"):
        check_schema(json.dumps({"$defs": own, "$ref": "#/$defs/d0"}))


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
