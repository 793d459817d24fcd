"""Parsers of calls of tools in an answer as it is written, one for each way of writing them.

The grammar of the answer (`sigma0.decode.grammar.calls`) has held it to just this notation, so nothing is guessed.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from sigma0.decode.grammar.calls import CLOSE, END_OF_VALUE, OPEN, THOUGHT, Parameter, parameters_of
from sigma0.decode.grammar.spec import ToolCalls
from sigma0.serve.engine.messages import RequestOutput


class CallDelta(NamedTuple):
    """More of a call."""

    call: int  # Its index
    name: str | None  # Of its tool, where it begins
    arguments: str  # More of its arguments' JSON


Delta = str | CallDelta


class CallParser(ABC):
    """Splits an answer into content and calls. What may be the beginning of a mark is held back.

    Args:
        calls: What the answer may call.

    Attributes:
        count: Calls that have begun.
        is_whole: Whether the last of them has ended.
    """

    def __init__(self, calls: ToolCalls) -> None:
        self._calls = calls
        self._rest = ""
        self._is_thought = calls.begins == "thought"
        self.count, self.is_whole = 0, True

    def feed(self, text: str) -> Iterator[Delta]:
        """Takes more of the answer, and gives what it adds."""
        self._rest += text
        if self._is_thought:
            yield from self._thought()
        while not self._is_thought:
            if not self.is_whole:
                yield from self._inside()
                if not self.is_whole:
                    return
            before, mark, after = self._rest.partition(OPEN)
            if not mark:
                yield from self._content()
                return
            # templates write the line between text and calls themselves
            if before := before.rstrip():
                yield before
            self._rest, self.is_whole = after, False
            self._begin()

    def flush(self) -> Iterator[Delta]:
        """The rest of an answer that has ended: of a call that was cut what there is."""
        if self.is_whole and self.count == 0 and self._rest:
            yield self._rest
        self._rest = ""

    def _thought(self) -> Iterator[Delta]:
        """What is thought before the calls, with the tag that ends it: it may hold any other."""
        before, mark, after = self._rest.partition(THOUGHT)
        kept = before + mark if mark else before[: len(before) - _overlap(before, THOUGHT)]
        self._rest, self._is_thought = (after, False) if mark else (self._rest[len(kept) :], True)
        if kept:
            yield kept

    def _content(self) -> Iterator[Delta]:
        """Text up to white space at its end, and what a call may begin with."""
        held = _overlap(self._rest, OPEN)
        kept = self._rest[: len(self._rest) - held].rstrip()
        self._rest = self._rest[len(kept) :]
        if kept:
            yield kept

    def _named(self, name: str) -> CallDelta:
        self.count += 1
        return CallDelta(self.count - 1, name, "")

    def _more(self, arguments: str) -> CallDelta:
        return CallDelta(self.count - 1, None, arguments)

    @abstractmethod
    def _begin(self) -> None:
        """Called after the tag that begins a call."""

    @abstractmethod
    def _inside(self) -> Iterator[Delta]:
        """What there is of a call; sets `is_whole` after its end."""


class HermesCalls(CallParser):
    """`{"name": ..., "arguments": {...}}` between two tags."""

    _HEAD = re.compile(r'\n\{"name": "([^"]*)", "arguments": ')
    # no JSON holds it: line breaks in its strings are escaped
    _END = f"}}\n{CLOSE}"

    def _begin(self) -> None:
        self._has_name = False

    def _inside(self) -> Iterator[Delta]:
        if not self._has_name:
            head = self._HEAD.match(self._rest)
            if head is None:
                return
            self._has_name, self._rest = True, self._rest[head.end() :]
            yield self._named(head[1])
        arguments, end, after = self._rest.partition(self._END)
        if end:
            self._rest, self.is_whole = after, True
        else:
            arguments = self._rest[: len(self._rest) - _overlap(self._rest, self._END)]
            self._rest = self._rest[len(arguments) :]
        if arguments:
            yield self._more(arguments)


class NanbeigeCalls(CallParser):
    """`<function=...>` with a `<parameter=...>` for each argument, made into JSON."""

    _HEAD = re.compile(r"\n<function=([^>]*)>\n")
    _PARAMETER = re.compile(r"<parameter=([^>]*)>\n")
    _END = f"</function>\n{CLOSE}"

    def __init__(self, calls: ToolCalls) -> None:
        super().__init__(calls)
        self._known = {tool.name: {item.name: item for item in parameters_of(tool)} for tool in calls.tools}

    def _begin(self) -> None:
        self._name: str | None = None
        self._parameter: Parameter | None = None
        self._glue = "{"

    def _inside(self) -> Iterator[Delta]:
        if self._name is None:
            head = self._HEAD.match(self._rest)
            if head is None:
                return
            self._name, self._rest = head[1], self._rest[head.end() :]
            yield self._named(self._name)
        while True:
            if self._parameter is not None:
                yield from self._value(self._parameter)
                if self._parameter is not None:
                    return
            elif head := self._PARAMETER.match(self._rest):
                self._parameter, self._rest = self._known[self._name][head[1]], self._rest[head.end() :]
                yield self._more(f"{self._glue}{_json(head[1])}: ")
                self._glue = ", "
                if self._is_text(self._parameter):
                    yield self._more('"')
            elif self._rest.startswith(self._END):
                self._rest, self.is_whole = self._rest[len(self._END) :], True
                yield self._more("{}" if self._glue == "{" else "}")
                return
            else:
                return

    def _value(self, parameter: Parameter) -> Iterator[Delta]:
        """More of a value; plain text is sent as it comes, the rest once it is there."""
        end = END_OF_VALUE + "\n"
        text, mark, after = self._rest.partition(end)
        is_text = self._is_text(parameter)
        if mark:
            self._rest, self._parameter = after, None
        elif is_text:
            text = self._rest[: len(self._rest) - _overlap(self._rest, end)]
            self._rest = self._rest[len(text) :]
        else:
            return
        if is_text:
            yield self._more(_json(text)[1:-1] + ('"' if mark else ""))
        else:
            yield self._more(parameter.json(text))

    @staticmethod
    def _is_text(parameter: Parameter) -> bool:
        return parameter.kinds == frozenset({"string"})


_PARSERS: dict[str, type[CallParser]] = {"hermes": HermesCalls, "nanbeige": NanbeigeCalls}


def parser_of(calls: ToolCalls) -> CallParser:
    """A parser for one answer."""
    return _PARSERS[calls.style](calls)


def finish_reason_of(calls: ToolCalls | None, done: RequestOutput) -> str:
    """Why a choice ended, as OpenAI has it: `tool_calls` where it has ended with calls that are whole.

    Args:
        calls: What the answer might call; None for nothing.
        done: The choice.
    """
    if calls is None or done.finish_reason != "stop":
        return done.finish_reason
    parser = parser_of(calls)
    for _ in parser.feed(done.text):
        pass
    return "tool_calls" if parser.count and parser.is_whole else "stop"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text with which a mark may begin."""
    return next(size for size in range(min(len(text), len(mark) - 1), -1, -1) if text.endswith(mark[:size]))
