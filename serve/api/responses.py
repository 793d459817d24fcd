"""Response builder: responses and stream chunks in OpenAI's shape, with the field `sigma0` (see README.md)."""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerFast

from sigma0.decode.grammar.spec import ToolCalls
from sigma0.serve.api.logprobs import chat_logprobs, completion_logprobs, echoed_logprobs
from sigma0.serve.api.requests import ParsedRequest
from sigma0.serve.api.tool_parsers import CallParser, Delta, finish_reason_of, parser_of
from sigma0.serve.engine.messages import RequestOutput, TokenOutput

_TOKEN = ("id", "text", "depth", "reason", "fate", "proximity", "margin", "entropy", "rung", "handed_up")
# name of each list in a response, and of the token attribute in it
_LISTS = {
    "depths": "depth",
    "reasons": "reason",
    "fates": "fate",
    "proximity": "proximity",
    "margins": "margin",
    "entropies": "entropy",
    "rungs": "rung",
    "would_have_met": "would_have_met",
    "deepest_surprises": "deepest_surprise",
    "deepest_entropies": "deepest_entropy",
    "deepest_margins": "deepest_margin",
    "deepest_agrees": "deepest_agrees",
}


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"
# Items of a list that are encoded in one call: Python's lock is held during it.
_SLICE = 256


def server_sent(value: Mapping[str, Any]) -> bytes:
    """An object as a server-sent event."""
    return b"data: " + _ENCODE(value).encode() + b"\n\n"


def encoded(value: Any) -> Iterator[bytes]:
    """A JSON value in pieces, between which other threads may run; together they are what one call would give.

    Args:
        value: Lists of up to 256 objects, and objects, are encoded item by item; longer lists 256 items at a time.
    """
    if isinstance(value, dict) and value:
        for number, (name, item) in enumerate(value.items()):
            yield (b"," if number else b"{") + _COMPACT(name).encode() + b":"
            yield from encoded(item)
        yield b"}"
    elif isinstance(value, list) and value:
        yield b"["
        is_nested = len(value) <= _SLICE and isinstance(value[0], dict)
        for start in range(0, len(value), 1 if is_nested else _SLICE):
            if start:
                yield b","
            if is_nested:
                yield from encoded(value[start])
            else:
                yield _COMPACT(value[start : start + _SLICE])[1:-1].encode()
        yield b"]"
    else:
        yield _COMPACT(value).encode()


@dataclass
class _StreamProgress:
    """How much of a choice was streamed."""

    text: int = 0  # Characters
    passes: int = 0  # Sum of the depths of its tokens
    tokens: int = 0  # Number of tokens
    parser: CallParser | None = None  # Of calls; None where there are none


@dataclass
class ResponseBuilder:
    """Builds the response to one request, or the chunks of its stream."""

    parsed: ParsedRequest  # The request
    model: str  # Name of the model
    tokenizer: PreTrainedTokenizerFast  # Its tokenizer
    total_loops: int  # T
    id: str = ""  # Of the response
    created: int = field(default_factory=lambda: int(time.time()))  # Seconds since 1970

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self._is_chat else "cmpl-") + secrets.token_hex(12)
        calls = self.parsed.calls
        self._progress = [
            _StreamProgress(parser=None if calls is None else parser_of(calls)) for _ in self.parsed.choices
        ]

    @property
    def _is_chat(self) -> bool:
        return self.parsed.kind == "chat"

    def response(self, ends: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole response.

        Args:
            ends: Of all choices, in their order.
        """
        if self.parsed.only_prompt:
            ends = [replace(done, text="", tokens=(), finish_reason="length") for done in ends]
        summaries = [{"index": index, **self._summary(done)} for index, done in enumerate(ends)]
        choices = [self._choice(index, done) for index, done in enumerate(ends)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._envelope(kind, choices, summaries), "usage": self._usage(ends)}

    def opening(self) -> Iterator[bytes]:
        """The chunks before all tokens: for chats, one with the role for each choice."""
        if self._is_chat:
            for index in range(len(self.parsed.choices)):
                yield self._chunk(index, "", (), None, {"role": "assistant", "content": ""})

    def tokens(self, index: int, tokens: Sequence[TokenOutput]) -> bytes:
        """The chunk of one token of a choice, or of several that follow one another."""
        text = tokens[0].text if len(tokens) == 1 else "".join(token.text for token in tokens)
        return self._chunk(index, text, tokens, None)

    def end(self, index: int, done: RequestOutput) -> Iterator[bytes]:
        """The chunks after all tokens of a choice: text that no token chunk held, and the end."""
        rest = done.text[self._progress[index].text :]
        if rest:
            yield self._chunk(index, rest, (), None)
        parser = self._progress[index].parser
        held = _delta(list(parser.flush())) if parser is not None else {}
        if held:
            yield self._chunk(index, "", (), None, held)
        yield self._chunk(index, "", (), done, {})

    def usage(self, ends: Sequence[RequestOutput]) -> bytes:
        """The last chunk of a stream with `include_usage`."""
        return server_sent({**self._envelope(self._chunk_kind, [], []), "usage": self._usage(ends)})

    @cached_property
    def _around(self) -> tuple[bytes, bytes, bytes]:
        """What is the same in all chunks with output: before, between and after the two lists of choices."""
        chunk = self._envelope(self._chunk_kind, [], [])
        empty = server_sent({**chunk, "usage": None} if self.parsed.include_usage else chunk)
        first, second, third = empty.split(b'"choices": []')
        return first + b'"choices": ', second + b'"choices": ', third

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _envelope(self, kind: str, choices: list[dict[str, Any]], details: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "sigma0": {
                "exit": self.parsed.exit_config.to_dict(),
                "total_loops": self.total_loops,
                "reasoning_effort": self.parsed.effort,
                "choices": details,
            },
        }

    def _choice(self, index: int, done: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": done.text, "refusal": None}
        if self.parsed.calls is not None:
            message |= _message(self.parsed.calls, done.text)
        return {
            "index": index,
            **({"message": message} if self._is_chat else {"text": f"{self._echo(index)}{done.text}"}),
            "logprobs": self._all_logprobs(index, done),
            "finish_reason": finish_reason_of(self.parsed.calls, done),
        }

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: Sequence[TokenOutput],
        done: RequestOutput | None,
        delta: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with more of a choice's text, or with another delta."""
        progress = self._progress[index]
        logprobs = self._logprobs(index, tokens, progress.text) if tokens else None
        progress.text += len(text)
        if delta is None:
            delta = {"content": text} if progress.parser is None else _delta(list(progress.parser.feed(text)))
        progress.passes += sum(token.depth for token in tokens)
        progress.tokens += len(tokens)
        details = {
            "index": index,
            "tokens": [_fields(token) for token in tokens],
            "passes": progress.passes,
            "full_passes": progress.tokens * self.total_loops,
            # the passes counted by the engine, known at the end, replace the estimate above
            **({} if done is None else self._summary(done)),
        }
        choice = {
            "index": index,
            **({"delta": delta} if self._is_chat else {"text": text}),
            "logprobs": logprobs,
            "finish_reason": None if done is None else finish_reason_of(self.parsed.calls, done),
        }
        first, second, third = self._around
        return first + _ENCODE([choice]).encode() + second + _ENCODE([details]).encode() + third

    def _echo(self, index: int) -> str:
        """Of a choice, what its text begins with."""
        return self.parsed.choices[index].echo or ""

    def _all_logprobs(self, index: int, done: RequestOutput) -> dict[str, Any] | None:
        choice, new = self.parsed.choices[index], self._logprobs(index, done.tokens, len(self._echo(index)))
        if new is None or choice.echo is None:
            return new
        return echoed_logprobs(self.tokenizer, choice.request.prompt_ids[0], done.prompt, new)

    def _logprobs(self, index: int, tokens: Sequence[TokenOutput], offset: int) -> dict[str, Any] | None:
        wanted = self.parsed.choices[index].request.logprobs
        if wanted is None:
            return None
        if self._is_chat:
            return chat_logprobs(self.tokenizer, tokens)
        return completion_logprobs(self.tokenizer, tokens, offset, wanted)

    def _summary(self, done: RequestOutput) -> dict[str, Any]:
        summary: dict[str, Any] = {
            name: [getattr(token, attribute) for token in done.tokens] for name, attribute in _LISTS.items()
        }
        summary |= vars(done.savings) | {
            "passes": done.passes,
            "rows": done.rows,
            "verdict": None if done.verdict is None else done.verdict.to_dict(),
            "door": done.door,
            "door_text": done.door_text,
            "cached_tokens": self._cached([done]),
            "preemptions": done.preemptions,
            "collapsed": done.collapsed,
            "tokens_forced": done.tokens_forced,
        }
        if done.costs:
            summary |= {"top_rung": done.top_rung, "not_tried": list(done.not_tried)}
            summary |= {"trail_id": secrets.token_hex(8), "costs": list(done.costs)}
            if self.parsed.trail:
                summary["trail"] = list(done.trail)
        return summary

    def _usage(self, ends: Sequence[RequestOutput]) -> dict[str, Any]:
        """Each prompt counts once, however many choices were written for it."""
        first = {choice.prompt: done for choice, done in reversed(list(zip(self.parsed.choices, ends, strict=True)))}
        prompt_tokens = sum(done.prompt_tokens for done in first.values())
        new_tokens = sum(self._new_tokens(done) for done in ends)
        cached = self._cached(first.values())
        forced: dict[str, Any] = {}
        if self.parsed.choices[0].request.grammar is not None:
            forced["completion_tokens_details"] = {"tokens_forced": sum(done.tokens_forced for done in ends)}
        return {
            **forced,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        }

    def _cached(self, ends: Iterable[RequestOutput]) -> int | None:
        """Prompt tokens found in the cache; None without a salt, where they may be those of another client's prompt."""
        if self.parsed.choices[0].request.cache_salt is None:
            return None
        return sum(done.cached_tokens for done in ends)

    def _new_tokens(self, done: RequestOutput) -> int:
        """Tokens of a choice; of a text that was handed up whole, its length in the served model's tokens."""
        if done.tokens or not done.text:
            return len(done.tokens)
        return len(self.tokenizer(done.text, add_special_tokens=False, verbose=False)["input_ids"])


def _delta(parts: Sequence[Delta]) -> dict[str, Any]:
    """What parts of an answer add to a message, as OpenAI's streams have it."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, str):
            delta["content"] = delta.get("content", "") + part
            continue
        call = calls.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
        if part.name is not None:
            call |= {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            call["function"] = {"name": part.name, "arguments": ""}
        call["function"]["arguments"] += part.arguments
    return {**delta, "tool_calls": list(calls.values())} if calls else delta


def _message(calls: ToolCalls, text: str) -> dict[str, Any]:
    """Content and calls of a whole answer; without calls the content alone."""
    parser = parser_of(calls)
    output = _delta([*parser.feed(text), *parser.flush()])
    if "tool_calls" not in output:
        # of a call that was cut before its name nothing is shown, as in a stream
        return {"content": text if parser.is_whole else output.get("content", "")}
    made = [{name: call[name] for name in ("id", "type", "function")} for call in output["tool_calls"]]
    return {"content": output.get("content"), "tool_calls": made}


def _fields(token: TokenOutput) -> dict[str, Any]:
    """A token in a chunk; with `would_have_met` only where it is known, that is under `full` and `fixed`."""
    would_have_met = {} if token.would_have_met is None else {"would_have_met": token.would_have_met}
    return {name: getattr(token, name) for name in _TOKEN} | would_have_met
