"""A hundred schemas of many kinds, whose answers are short enough for a random model to finish."""

WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
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


def integer(least, most):
    return {"type": "integer", "minimum": least, "maximum": most}


NODE = record({"value": SMALL, "next": {"anyOf": [NULL, record({"value": SMALL})]}})

SCALARS = [
    FLAG,
    NULL,
    SMALL,
    WORD,
    TEXT,
    integer(-5, 5),
    integer(100, 999),
    integer(-1000, -10),
    integer(7, 7),
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4},
    {"type": "number", "minimum": 0, "maximum": 3, "multipleOf": 0.5},
    {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 25},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^(red|green|blue)$"},
    {"type": "string", "pattern": "^[A-Z][a-z]{2}-[0-9]{2}$"},
    {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    {"type": "string", "pattern": "^\\+?[0-9]{3,5}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": ["boolean", "null"]},
    {"type": ["null", "string"], "maxLength": 4},
    {"const": "only"},
    {"const": 42},
    {"const": None},
    {"const": {"a": [1, 2]}},
    {"enum": ["a", "ab", "abc"]},
    {"enum": [1, 10, 100]},
    {"enum": [True, None, "x", 3]},
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
    {"type": "array", "prefixItems": [SMALL, WORD], "items": False, "minItems": 2},
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
    record({"id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, "ok": FLAG}),
    record({"x": integer(-9, 9), "y": integer(-9, 9), "z": integer(-9, 9)}),
    record({"kind": {"const": "circle"}, "radius": SMALL}),
    record({"unit": {"enum": ["kg", "g", "lb"]}, "value": integer(1, 500)}),
    record({"tags": listed(WORD, 1, 3)}),
    record({"point": record({"x": SMALL, "y": SMALL})}),
    record({"a": record({"b": record({"c": FLAG})})}),
    record({"a": record({"b": record({"c": record({"d": NULL})})}, [])}),
    record({"user": record({"name": WORD, "mail": {"type": "string", "pattern": "^[a-z]{2,5}@[a-z]{2,4}\\.de$"}})}),
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
    {"$defs": {"word": WORD}, **record({"a": {"$ref": "#/$defs/word"}, "b": {"$ref": "#/$defs/word"}})},
    {"$defs": {"p": record({"x": SMALL})}, **record({"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}})},
    {"definitions": {"n": SMALL}, **listed({"$ref": "#/definitions/n"}, 1, 3)},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": ["deep"]}}, **record({"v": {"$ref": "#/$defs/a"}})},
    {"$defs": {"e": {"enum": ["n", "s", "e", "w"]}}, **listed({"$ref": "#/$defs/e"}, 2, 4)},
    {"$defs": {"m": {"anyOf": [NULL, SMALL]}}, **record({"a": {"$ref": "#/$defs/m"}, "b": {"$ref": "#/$defs/m"}})},
    {
        "$defs": {"tree": record({"v": FLAG, "kids": listed({"$ref": "#/$defs/tree"}, 0, 1)})},
        "$ref": "#/$defs/tree",
    },
    {
        "$defs": {"id": {"type": "string", "pattern": "^[0-9a-f]{4}$"}},
        **record({"ids": listed({"$ref": "#/$defs/id"}, 1, 2)}),
    },
    NODE,
    {
        "$defs": {"t": {"type": "array", "prefixItems": [FLAG, SMALL], "items": False, "minItems": 2}},
        **record({"t": {"$ref": "#/$defs/t"}}),
    },
    {"$defs": {"c": {"const": [1, "two", None]}}, **record({"c": {"$ref": "#/$defs/c"}, "n": integer(0, 1)})},
    {"$defs": {"o": record({"k": WORD}, [])}, **listed({"$ref": "#/$defs/o"}, 1, 2)},
]
SCHEMAS = [*SCALARS, *ARRAYS, *OBJECTS, *COMBINED, *REFERENCES]
