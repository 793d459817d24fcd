"""What a model may do in a workspace: one action a reply, parsed strictly."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sigma0.errors import one_line

MAX_REPLY_CHARS = 200_000
MAX_READ_LINES = 400
MAX_FAULT_CHARS = 500
_FENCE = re.compile(r"^[ \t]*```(?:json)?\s(.*?)```[ \t]*$", re.MULTILINE | re.DOTALL)

GRAMMAR = """Answer with exactly one JSON object, alone or in one ```json fence. It is one of:
{"action": "list", "path": "."} shows what a folder holds.
{"action": "read", "path": "a.py", "start": 1, "lines": 200} shows lines of a file, from line `start` on.
{"action": "edit", "path": "a.py", "old": "...", "new": "..."} replaces text. `old` must stand in the file exactly
once, with its spaces and line breaks. An empty `old` makes a new file of `new`.
{"action": "run_tests"} runs all tests.
{"action": "start_over"} takes all edits back.
{"action": "finish"} ends the work; it is taken only if the tests pass after the last edit."""


def _encodable(text: str) -> str:
    if any("\ud800" <= sign <= "\udfff" for sign in text):
        raise ValueError("holds half of a surrogate pair, which no file can hold")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Path = Annotated[Text, Field(max_length=1000)]


class _Action(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @property
    def json_line(self) -> str:
        """The action as one line of JSON."""
        return json.dumps(self.model_dump(), ensure_ascii=False)


class ListFolder(_Action):
    """Shows what a folder holds.

    Attributes:
        path: The folder.
    """

    action: Literal["list"]
    path: Path = "."


class ReadFile(_Action):
    """Shows lines of a file.

    Attributes:
        path: The file.
        start: The first line, from 1.
        lines: How many at most.
    """

    action: Literal["read"]
    path: Path
    start: Annotated[int, Field(ge=1)] = 1
    lines: Annotated[int, Field(ge=1, le=MAX_READ_LINES)] = 200


class EditFile(_Action):
    """Replaces text that stands in a file exactly once.

    Attributes:
        path: The file.
        old: What is replaced; empty for a new file.
        new: What takes its place.
    """

    action: Literal["edit"]
    path: Path
    old: Text
    new: Text


class RunTests(_Action):
    """Runs all tests."""

    action: Literal["run_tests"]


class StartOver(_Action):
    """Takes all edits back."""

    action: Literal["start_over"]


class Finish(_Action):
    """Ends the work, if the tests pass."""

    action: Literal["finish"]


Action = Annotated[ListFolder | ReadFile | EditFile | RunTests | StartOver | Finish, Field(discriminator="action")]
AnyAction = ListFolder | ReadFile | EditFile | RunTests | StartOver | Finish
_ACTIONS: TypeAdapter[AnyAction] = TypeAdapter(Action)


def action_grammar(kinds: Sequence[type[AnyAction]] = get_args(AnyAction)) -> str:
    """What a reply may be where it is held to actions of some kinds, in Lark's notation as llguidance reads it."""
    schemas = []
    for kind in kinds:
        fields = kind.model_json_schema()["properties"]
        # all fields are told, so that a model has no choice between kinds of the same action
        schemas.append(
            {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        )
    return f"start: %json {json.dumps({'anyOf': schemas})}"


class ActionFault(ValueError):
    """A reply that is no action; its message is written for the model."""


def parse_action(reply: str) -> AnyAction:
    """The action that a reply is.

    Text around one fence is allowed, since models think aloud; beside a bare object nothing is.

    Args:
        reply: Of the model.

    Raises:
        ActionFault: If it is none, or more than one; names the fault.
    """
    if len(reply) > MAX_REPLY_CHARS:
        raise ActionFault(f"The reply has {len(reply)} characters, {MAX_REPLY_CHARS} are allowed.")
    fenced = _FENCE.findall(reply)
    if len(fenced) > 1:
        raise ActionFault(f"The reply holds {len(fenced)} fenced blocks: answer with one action at a time.")
    try:
        value = json.loads(
            fenced[0] if fenced else reply, object_pairs_hook=_without_repeats, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        raise ActionFault(f"The reply is not one JSON object: {error}.") from error
    except RecursionError as error:
        raise ActionFault("The reply is nested too deeply.") from error
    except ValueError as error:
        raise ActionFault(f"The reply is no valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ActionFault("The reply is JSON, but not an object.")
    try:
        return _ACTIONS.validate_python(value)
    except ValidationError as error:
        raise ActionFault(f"The reply is no action: {one_line(error)[:MAX_FAULT_CHARS]}.") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
