"""Tools of a request: OpenAI's fields, and how the served checkpoint's chat template writes calls."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from transformers import PreTrainedTokenizerFast

from sigma0.config import Messages
from sigma0.decode.grammar.calls import CLOSE, OPEN
from sigma0.decode.grammar.spec import CallStyle, JsonSchema, Tool, ToolCalls
from sigma0.serve.api.fields import FILLED, ChatMessage, Closed, Settings, Text, plain_json

MAX_TOOLS = 128
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
Name = Annotated[str, Field(min_length=1, max_length=64, pattern="^[A-Za-z0-9_-]+$")]


class FunctionTool(Closed):
    """What a function is called with.

    Attributes:
        name: Its name.
        description: Shown to the model.
        parameters: JSON Schema of its arguments; None for no arguments.
        strict: Whether a keyword that cannot be enforced is refused, as without this field; false ignores it.
    """

    name: Name
    description: Text | None = None
    parameters: Annotated[Settings, AfterValidator(plain_json)] | None = None
    strict: bool | None = None


class ToolField(Closed):
    """A tool.

    Attributes:
        type: Only functions can be called.
        function: The function.
    """

    type: Literal["function"]
    function: FunctionTool

    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {**function, "parameters": self._parameters}}

    def tool(self) -> Tool:
        """As grammars take it.

        Raises:
            ValueError: For parameters that are no schema of an object.
        """
        if (kind := self._parameters.get("type", "object")) != "object":
            raise ValueError(
                f"the parameters of {self.function.name!r} have to be an object, got the type {kind!r:.40}"
            )
        schema = JsonSchema.of({**self._parameters, "type": "object"}, self.function.strict is not False)
        return Tool(self.function.name, schema)

    @property
    def _parameters(self) -> dict[str, Any]:
        return self.function.parameters or _NO_ARGUMENTS


class FunctionName(Closed):
    """A function by its name.

    Attributes:
        name: Its name.
    """

    name: Name


class NamedChoice(Closed):
    """The one tool that has to be called, once.

    Attributes:
        type: Only functions can be called.
        function: The function.
    """

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Closed):
    """Some of the tools.

    Attributes:
        mode: Whether one of them has to be called.
        tools: Which.
    """

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], FILLED]


class AllowedChoice(Closed):
    """The tools that may be called; all are shown to the model.

    Attributes:
        type: Which choice it is.
        allowed_tools: The tools.
    """

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


class ToolFields(Closed):
    """The fields of a chat that are about tools.

    Attributes:
        tools: That may be called.
        tool_choice: `none`, `auto` (by default), `required`, a tool that has to be called, or those that may be.
        parallel_tool_calls: Whether there may be several calls, as by default.
    """

    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tool_choice")
    @classmethod
    def _names_tools(cls, value: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        known = [tool.function.name for tool in info.data.get("tools") or ()]
        if value in (None, "none", "auto"):
            return value
        if not known:
            raise ValueError("needs tools")
        if unknown := [name for name in _chosen(value) or () if name not in known]:
            raise ValueError(f"names {unknown[0]!r}, which is none of the tools")
        return value

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them: none where none may be called."""
        return [] if self.tool_choice == "none" else [tool.shown() for tool in self.tools or ()]

    def calls(self, style: CallStyle, thinks: bool) -> ToolCalls:
        """What the answer may call.

        Args:
            style: Of the chat template.
            thinks: Whether the prompt has opened a thought, which then ends ahead of calls that have to be.

        Raises:
            ValueError: For parameters that are no schema, or two tools of one name.
        """
        choice, names = self.tool_choice, _chosen(self.tool_choice)
        tools = tuple(tool.tool() for tool in self.tools or () if names is None or tool.function.name in names)
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
        begins: Literal["text", "thought", "call"] = "thought" if thinks else "call"
        several = self.parallel_tool_calls is not False and not isinstance(choice, NamedChoice)
        return ToolCalls(tools, style, "text" if mode in (None, "auto") else begins, several)


def _chosen(choice: ToolChoice | None) -> list[str] | None:
    """The tools that a choice names; None where it names none."""
    match choice:
        case NamedChoice():
            return [choice.function.name]
        case AllowedChoice():
            return [item.function.name for item in choice.allowed_tools.tools]
    return None


def tool_template(tokenizer: PreTrainedTokenizerFast) -> str:
    """The chat template that shows tools and their calls.

    Raises:
        ValueError: For a checkpoint whose template knows none.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if template is None or "tools" not in template:
        raise ValueError("this model's chat template knows no tools: leave them out, or serve a model that does")
    return str(template)


def call_style(tokenizer: PreTrainedTokenizerFast, named: CallStyle | None) -> CallStyle:
    """How a checkpoint's chat template writes calls.

    Args:
        tokenizer: The checkpoint's.
        named: As the server was told; None reads it from the template.

    Raises:
        ValueError: For a template that knows no tools, or writes calls in a way that is not known here.
    """
    template = tool_template(tokenizer)
    for tag in (OPEN, CLOSE):
        if tag in tokenizer.all_special_tokens:
            raise ValueError(f"{tag} is a special token of this model, which answers do not show: leave tools out")
    if named is not None:
        return named
    if OPEN not in template:
        raise ValueError(
            "this server does not know how this model's chat template writes calls: start it with --tool-parser "
            "hermes or nanbeige, or leave tools out"
        )
    return "nanbeige" if "<function=" in template else "hermes"


def has_calls(messages: Messages) -> bool:
    """Whether messages hold calls or their results, which the chat template has to know."""
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def check_history(messages: Sequence[ChatMessage]) -> None:
    """Refuses results that answer no call, and calls that are not answered before the model goes on.

    Raises:
        ValueError: Naming the id.
    """
    waiting: list[str] = []
    for message in messages:
        if message.role == "tool":
            answered = message.tool_call_id or ""
            if answered not in waiting:
                raise ValueError(f"the tool_call_id {answered[:80]!r} is of no call that waits for an answer")
            waiting.remove(answered)
        elif waiting:
            break
        else:
            waiting = [call.id for call in message.tool_calls or ()]
    if waiting:
        raise ValueError(f"the call {waiting[0][:80]!r} is not answered: a message of role tool has to follow it")
