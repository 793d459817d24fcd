"""`/openapi.json`: FastAPI's description, completed with the model and the limits of this server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from sigma0.config import THRESHOLDS, ExitConfig, switches
from sigma0.ladder import Budget
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.protocol import MAX_SETTING
from sigma0.serve.api.tools import call_style
from sigma0.serve.engine.messages import Service

if TYPE_CHECKING:
    from sigma0.serve.api.ladder import LadderRunner

Schema = dict[str, Any]
_NULL = {"type": "null"}
_UNITS = ("token", "draft", "answer")
# Formats of texts: JSON text of a JSON Schema; an expression without look-around and back-references; a grammar in
# Lark's notation or in EBNF.
_TEXT_FORMATS = {
    **dict.fromkeys(("json", "guided_json"), "json-schema"),
    **dict.fromkeys(("regex", "guided_regex"), "regular-expression"),
    **dict.fromkeys(("grammar", "guided_grammar"), "grammar"),
}
# Of the fields that say what an answer has to be, the values that say nothing.
_INSIDE: Mapping[str, Schema] = {
    **dict.fromkeys(("json", "regex", "choice", "grammar"), _NULL),
    "json_object": {"enum": [False, None]},
}
_STRUCTURES: Mapping[str, Schema] = {
    "response_format": {"anyOf": [{"$ref": "#/components/schemas/TextFormat"}, _NULL]},
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"), _NULL),
    "structured_outputs": {
        "anyOf": [{"type": "object", "additionalProperties": False, "properties": dict(_INSIDE)}, _NULL]
    },
}
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}


@dataclass(frozen=True)
class Served:
    """The facts about a server that its description depends on."""

    service: Service  # The engine
    settings: ServerSettings  # Limits
    ladder: "LadderRunner | None"  # Its ladder, if it has one


def describe(app: FastAPI, served: Served) -> None:
    """Narrows an app's description to what this server takes and answers.

    FastAPI's 422 is removed: an invalid request is a 400, as with OpenAI.

    Args:
        app: With all of its routes.
        served: What it serves.
    """
    make = app.openapi

    def openapi() -> Schema:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = make()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["responses"]["421"] = {"description": "Misdirected Request", "content": _ERROR}
        schemas = _whole(schema["components"]["schemas"])
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        _limit_options(schemas["Sigma0Options"], served)
        _name_texts(schemas["StructuredOutputs"]["properties"])
        _one_of(schemas["StructuredOutputs"], _INSIDE)
        for name, needs in (("ChatRequest", _chat_needs), ("CompletionRequest", _completion_needs)):
            _limit_request(schemas[name]["properties"], served)
            _name_texts(schemas[name]["properties"])
            schemas[name]["allOf"] = [_needs("stream_options", [None], "stream"), *needs(served)]
            _one_of(schemas[name], _STRUCTURES)
        _limit_messages(schemas, served)
        _limit_prompt(schemas["CompletionRequest"]["properties"]["prompt"], served)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _whole(schema: Any) -> Any:
    """A schema, in place, with the limits of whole numbers as whole numbers: as floats they are read less precisely."""
    parts = list(schema.values()) if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for part in parts:
        _whole(part)
    if isinstance(schema, dict) and schema.get("type") == "integer":
        schema |= {name: int(value) for name, value in schema.items() if type(value) is float}
    return schema


def _limit_request(properties: Schema, served: Served) -> None:
    properties["model"] |= {"enum": [served.service.name]}
    for name, most in (
        ("max_tokens", served.settings.max_new_tokens),
        ("max_completion_tokens", served.settings.max_new_tokens),
        ("n", served.settings.max_n),
    ):
        number = properties[name]["anyOf"][0]
        number.pop("exclusiveMaximum")
        number["maximum"] = most
    bias = properties["logit_bias"]["anyOf"][0]
    last = int(served.service.model.config.vocab_size) - 1
    bias["propertyNames"] = {"pattern": f"^({'|'.join(_numbers_up_to(str(last)))})$"}
    bias["additionalProperties"] = next(iter(bias.pop("patternProperties").values()))


def _numbers_up_to(last: str) -> list[str]:
    """Patterns of which each whole number from 0 to the last matches one."""
    patterns = ["[0-9]"] if len(last) > 1 else [f"[0-{last}]"]
    patterns += [f"[1-9][0-9]{{{size}}}" for size in range(1, len(last) - 1)]
    if len(last) > 1:
        for place, digit in enumerate(last):
            least, rest = int(place == 0), len(last) - place - 1
            if int(digit) > least:
                patterns.append(f"{last[:place]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
        patterns.append(last)
    return patterns


def _limit_messages(schemas: Schema, served: Served) -> None:
    """Which fields go with which role; without tools where the chat template knows none."""
    no_calls: Schema = {"anyOf": [{"type": "array", "maxItems": 0}, _NULL]}
    said: Schema = {"properties": {"content": {"not": _NULL}, "tool_calls": no_calls}, "required": ["content"]}
    no_id: Schema = {"properties": {"role": {"not": {"const": "tool"}}, "tool_call_id": _NULL}}
    variants: list[Schema] = [{"allOf": [said, no_id]}]
    request = schemas["ChatRequest"]["properties"]
    try:
        call_style(served.service.tokenizer, served.settings.tool_parser)
    except ValueError:
        request["tools"], request["tool_choice"] = no_calls, {"enum": ["none", "auto", None]}
    else:
        result = {
            "properties": {"role": {"const": "tool"}, "tool_call_id": {"not": _NULL}},
            "required": ["tool_call_id"],
        }
        calls = {
            "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
            "required": ["tool_calls"],
        }
        variants += [{"allOf": [said, result]}, {"allOf": [calls, no_id]}]
    schemas["ChatMessage"]["anyOf"] = variants


def _name_texts(properties: Schema) -> None:
    """Names the formats of texts that say what an answer has to be: not every text is one."""
    for name, kind in _TEXT_FORMATS.items():
        for part in properties.get(name, {}).get("anyOf", ()):
            if part.get("type") == "string":
                part["format"] = kind


def _one_of(schema: Schema, fields: Mapping[str, Schema]) -> None:
    """Of some fields at most one has a value that says something; `fields` has the schema of a value that does not."""
    alternatives: list[Schema] = [
        {"properties": {name: empty for name, empty in fields.items() if name != given}} for given in fields
    ]
    schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": alternatives}]


def _limit_prompt(prompt: Schema, served: Served) -> None:
    _, texts, ids, several = prompt["anyOf"]
    texts["maxItems"] = several["maxItems"] = served.settings.max_prompts
    for one in (ids, several["items"]):
        one["items"] = {"type": "integer", "minimum": 0, "maximum": int(served.service.model.config.vocab_size) - 1}
        one["maxItems"] = served.service.context - 1


def _limit_options(options: Schema, served: Served) -> None:
    model, properties = served.service.model, options["properties"]
    properties["exit"] = {"anyOf": [*_exits(int(model.num_loops), model.has_gate), _NULL]}
    budget = TypeAdapter(Budget).json_schema()
    properties["budget"] = {"anyOf": [budget, _NULL]} if served.ladder else _NULL
    if served.ladder is None:
        properties["ladder"] = {"enum": [False, None]}
        properties["trail"] = {"const": False}
        return
    unread = {"on_collapse": _NULL, "special_tokens": {"const": False}}
    asked: Schema = {"properties": {"ladder": {"enum": [True, *_UNITS]}, **unread}, "required": ["ladder"]}
    left_out = {"budget": _NULL, "trail": {"const": False}}
    routes = [{"properties": {"ladder": _NULL}}] if switches().routing else []
    options["allOf"] = [{"anyOf": [asked, {"properties": {"ladder": {"enum": [False, None]}, **left_out}}, *routes]}]


def _exits(total_loops: int, has_gate: bool) -> list[Schema]:
    """Exit settings of every mode that the model has, with the thresholds that the mode reads."""
    schema = TypeAdapter(ExitConfig).json_schema()
    count = {"type": "integer", "minimum": 1, "maximum": MAX_SETTING}
    share: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    above_zero: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SETTING}
    properties = {
        **schema["properties"],
        # null: as the model was calibrated
        **{name: {"anyOf": [share, _NULL]} for name in ("q", "theta")},
        **{name: {"anyOf": [above_zero, _NULL]} for name in ("eps", "delta")},
        **{name: {"anyOf": [count, _NULL]} for name in ("patience", "stable")},
        "min_loops": count,
    }
    depths = {"fixed": {"type": "integer", "minimum": 1, "maximum": total_loops}}
    default = schema["properties"]["mode"]["default"]
    settings = []
    for mode in schema["properties"]["mode"]["enum"]:
        if mode == "qexit" and not has_gate:
            continue
        unread = dict.fromkeys((name for name, modes in THRESHOLDS.items() if mode not in modes), _NULL)
        of_mode = {"mode": {"const": mode}, "depth": depths.get(mode, _NULL)}
        required = [*([] if mode == default else ["mode"]), *(["depth"] if mode in depths else [])]
        settings.append(
            {
                "type": "object",
                "additionalProperties": False,
                "properties": properties | unread | of_mode,
                "required": required,
            }
        )
    return settings


def _needs(name: str, empty: list[Any], other: str) -> Schema:
    """A field that needs another one to be true, unless it has an empty value."""
    return {
        "anyOf": [
            {"properties": {name: {"enum": empty}}},
            {"properties": {other: {"const": True}}, "required": [other]},
        ]
    }


def _chat_needs(served: Served) -> list[Schema]:
    return [_needs("top_logprobs", [None, 0], "logprobs")]


def _completion_needs(served: Served) -> list[Schema]:
    """`best_of` is `n`."""
    one: Schema = {"properties": {"best_of": {"enum": [None, 1]}, "n": {"enum": [None, 1]}}}
    several: list[Schema] = [
        {"properties": {"best_of": {"enum": [None, n]}, "n": {"const": n}}, "required": ["n"]}
        for n in range(2, served.settings.max_n + 1)
    ]
    return [{"anyOf": [one, *several]}]
