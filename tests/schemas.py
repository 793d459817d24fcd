"""A hundred schemas of many kinds, whose answers are short enough for a random model to finish."""

TEXT = {"type": "string", "maxLength": 6}
SMALL = {"type": "integer", "minimum": 0, "maximum": 20}
FLAG = {"type": "boolean"}
NULL = {"type": "null"}


def record(properties, required=None, **more):
    """An object without other properties."""
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def listed(items, least=0, most=3):
    """An array of so many items."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def matching(pattern):
    return {"type": "string", "pattern": pattern}


def defined(name):
    return {"$ref": f"#/$defs/{name}"}


def pair(first, second):
    return {"type": "array", "prefixItems": [first, second], "items": False, "minItems": 2}


def integer(least, most):
    return {"type": "integer", "minimum": least, "maximum": most}


WORD = matching("^[a-z]{1,6}$")
SCALARS = [
    FLAG,
    NULL,
    SMALL,
    WORD,
    TEXT,
    *(integer(least, most) for least, most in ((-5, 5), (100, 999), (-1000, -10), (7, 7))),
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4},
    {"type": "number", "minimum": 0, "maximum": 3, "multipleOf": 0.5},
    {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 25},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3, "maxLength": 5},
    *map(matching, ("^(red|green|blue)$", "^[A-Z][a-z]{2}-[0-9]{2}$", "^#[0-9a-f]{6}$", "^\\+?[0-9]{3,5}$")),
    *({"type": "string", "format": name} for name in ("date", "uuid", "ipv4")),
    {"type": ["boolean", "null"]},
    {"type": ["null", "string"], "maxLength": 4},
    *({"const": value} for value in ("only", 42, None, {"a": [1, 2]})),
    *({"enum": [*values]} for values in (("a", "ab", "abc"), (1, 10, 100), (True, None, "x", 3))),
    {"enum": ["naïve", "日本", 'quo"te']},
]
ARRAYS = [
    listed(FLAG),
    listed(SMALL, 1, 4),
    listed(WORD, 2, 2),
    listed(NULL, 0, 1),
    listed({"enum": ["x", "y"]}, 3, 5),
    listed(listed(FLAG, 1, 2), 1, 2),
    listed(record({"id": SMALL}), 0, 2),
    listed({"anyOf": [SMALL, WORD]}, 1, 3),
    pair(SMALL, WORD),
    {"type": "array", "prefixItems": [FLAG, NULL], "items": SMALL, "minItems": 2, "maxItems": 4},
    {"type": "array", "maxItems": 0},
    listed({"const": "ping"}, 1, 2),
]
OBJECTS = [
    record({}),
    record({"name": WORD}),
    record({"name": WORD, "age": integer(0, 120)}),
    record({"name": WORD, "age": SMALL}, ["name"]),
    record({"name": WORD, "age": SMALL}, []),
    record({"a": FLAG, "b": FLAG, "c": FLAG, "d": FLAG}),
    record({"a": FLAG, "b": FLAG, "c": FLAG}, ["b"]),
    record({"id": matching("^[A-Z]{2}[0-9]{3}$"), "ok": FLAG}),
    record({"x": integer(-9, 9), "y": integer(-9, 9), "z": integer(-9, 9)}),
    record({"kind": {"const": "circle"}, "radius": SMALL}),
    record({"unit": {"enum": ["kg", "g", "lb"]}, "value": integer(1, 500)}),
    record({"tags": listed(WORD, 1, 3)}),
    record({"point": record({"x": SMALL, "y": SMALL})}),
    record({"a": record({"b": record({"c": FLAG})})}),
    record({"a": record({"b": record({"c": record({"d": NULL})})}, [])}),
    record({"user": record({"name": WORD, "mail": matching("^[a-z]{2,5}@[a-z]{2,4}\\.de$")})}),
    record({"rows": listed(record({"k": WORD, "v": SMALL}), 1, 2)}),
    record({"matrix": listed(listed(integer(0, 9), 2, 2), 2, 2)}),
    record({"first name": WORD, "größe": SMALL}),
    record({'quote"d': FLAG, "back\\slash": FLAG}),
    record({"value": {"type": ["integer", "null"], "minimum": 0, "maximum": 9}}),
    record({"value": {"anyOf": [SMALL, NULL]}}),
    record({"when": {"type": "string", "format": "date"}, "at": {"type": "string", "format": "time"}}),
    record({"optional": WORD}, []),
    record({"a": TEXT, "b": TEXT}, ["a"]),
    {"type": "object", "additionalProperties": SMALL, "maxProperties": 0},
    {"type": "object", "properties": {"a": FLAG}, "required": ["a"], "additionalProperties": False, "title": "T"},
    record({"step": integer(1, 3), "say": {"enum": ["go", "stop"]}, "why": TEXT}),
    record({"answer": {"enum": ["yes", "no", "unknown"]}, "sure": integer(0, 100)}),
    record({"lat": {"type": "number", "minimum": -90, "maximum": 90, "multipleOf": 10}}),
    record({"empty": record({}), "none": {"type": "array", "maxItems": 0}}),
    record({"long_property_name_that_is_forced": FLAG, "another_long_property_name": NULL}),
]
COMBINED = [
    {"anyOf": [SMALL, FLAG]},
    {"anyOf": [record({"a": FLAG}), record({"b": FLAG})]},
    {"anyOf": [{"const": "x"}, {"const": "xy"}, NULL]},
    {"oneOf": [NULL, FLAG]},
    {"oneOf": [record({"t": {"const": "a"}, "n": SMALL}), record({"t": {"const": "b"}, "s": WORD})]},
    {"allOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]},
    {"allOf": [{"properties": {"a": FLAG}, "required": ["a"]}, record({"a": {}, "b": FLAG})]},
    record({"shape": {"anyOf": [record({"r": SMALL}), record({"w": SMALL, "h": SMALL})]}}),
    listed({"anyOf": [record({"n": SMALL}), record({"s": WORD}), NULL]}, 1, 2),
    record({"pick": {"anyOf": [{"enum": ["a", "b"]}, integer(5, 6), listed(FLAG, 1, 1)]}}),
    {"anyOf": [listed(SMALL, 1, 2), record({"only": SMALL})]},
    {"type": "object", "properties": {"x": {"anyOf": [WORD, NULL]}}, "required": ["x"], "additionalProperties": False},
]
REFERENCES = [
    {"$defs": {"flag": FLAG}, "$ref": "#/$defs/flag"},
    {"$defs": {"word": WORD}, **record({"a": defined("word"), "b": defined("word")})},
    {"$defs": {"p": record({"x": SMALL})}, **record({"from": defined("p"), "to": defined("p")})},
    {"definitions": {"n": SMALL}, **listed({"$ref": "#/definitions/n"}, 1, 3)},
    {"$defs": {"a": defined("b"), "b": {"enum": ["deep"]}}, **record({"v": defined("a")})},
    {"$defs": {"e": {"enum": ["n", "s", "e", "w"]}}, **listed(defined("e"), 2, 4)},
    {"$defs": {"m": {"anyOf": [NULL, SMALL]}}, **record({"a": defined("m"), "b": defined("m")})},
    {"$defs": {"tree": record({"v": FLAG, "kids": listed(defined("tree"), 0, 1)})}, **defined("tree")},
    {"$defs": {"id": matching("^[0-9a-f]{4}$")}, **record({"ids": listed(defined("id"), 1, 2)})},
    record({"value": SMALL, "next": {"anyOf": [NULL, record({"value": SMALL})]}}),
    {"$defs": {"t": pair(FLAG, SMALL)}, **record({"t": defined("t")})},
    {"$defs": {"c": {"const": [1, "two", None]}}, **record({"c": defined("c"), "n": integer(0, 1)})},
    {"$defs": {"o": record({"k": WORD}, [])}, **listed(defined("o"), 1, 2)},
]
SCHEMAS = [*SCALARS, *ARRAYS, *OBJECTS, *COMBINED, *REFERENCES]
