"""Responses and the chunks of a stream, as OpenAI has them, each with `sigma0` (its fields stand in README.md)."""

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sigma0.serve.api.logprobs import chat_logprobs, completion_logprobs
from sigma0.serve.api.requests import ParsedRequest
from sigma0.serve.engine.messages import RequestOutput, TokenOutput

_TOKEN = ("id", "text", "depth", "reason", "fate", "proximity", "margin", "entropy", "rung", "handed_up")
# name of a list in a response, and of the token's attribute that it lists
_LISTS = {
    "depths": "depth",
    "reasons": "reason",
    "fates": "fate",
    "proximity": "proximity",
    "margins": "margin",
    "entropies": "entropy",
    "rungs": "rung",
    "would_have_met": "would_have_met",
}


@dataclass
class _StreamProgress:
    """How much of a choice a stream has told.

    Attributes:
        text: Its length.
        passes: Loops of its tokens.
        tokens: Their number.
    """

    text: int = 0
    passes: int = 0
    tokens: int = 0


@dataclass
class ResponseBuilder:
    """Tells what became of one request.

    Attributes:
        plan: What the request came to.
        model: Name of the model.
        tokenizer: Its tokenizer.
        total_loops: T.
        id: Of the response.
        created: Seconds since 1970.
    """

    plan: ParsedRequest
    model: str
    tokenizer: Any
    total_loops: int
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self._is_chat else "cmpl-") + secrets.token_hex(12)
        self._told = [_StreamProgress() for _ in self.plan.choices]

    @property
    def _is_chat(self) -> bool:
        return self.plan.kind == "chat"

    def response(self, ends: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole response.

        Args:
            ends: Of all choices, in their order.
        """
        told = [{"index": index, **self._summary(done)} for index, done in enumerate(ends)]
        choices = [self._choice(index, done) for index, done in enumerate(ends)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._envelope(kind, choices, told), "usage": self._usage(ends)}

    def opening(self) -> Iterator[dict[str, Any]]:
        """The chunks ahead of all tokens: of chats, one for each choice that says who speaks."""
        if self._is_chat:
            for index in range(len(self.plan.choices)):
                yield self._chunk(index, {"role": "assistant", "content": ""}, (), None)

    def token(self, index: int, token: TokenOutput) -> dict[str, Any]:
        """The chunk of one token of a choice."""
        return self._chunk(index, {"content": token.text}, (token,), None)

    def end(self, index: int, done: RequestOutput) -> Iterator[dict[str, Any]]:
        """The chunks behind all tokens of a choice: text that no token has told yet, and the end."""
        rest = done.text[self._told[index].text :]
        if rest:
            yield self._chunk(index, {"content": rest}, (), None)
        yield self._chunk(index, {}, (), done)

    def usage(self, ends: Sequence[RequestOutput]) -> dict[str, Any]:
        """The last chunk of a stream that is asked for the usage."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._envelope(kind, [], []), "usage": self._usage(ends)}

    def _envelope(self, kind: str, choices: list[dict[str, Any]], told: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "sigma0": {
                "exit": self.plan.exit_config.to_dict(),
                "total_loops": self.total_loops,
                "reasoning_effort": self.plan.effort,
                "choices": told,
            },
        }

    def _choice(self, index: int, done: RequestOutput) -> dict[str, Any]:
        text = {"message": {"role": "assistant", "content": done.text, "refusal": None}}
        return {
            "index": index,
            **(text if self._is_chat else {"text": done.text}),
            "logprobs": self._logprobs(index, done.tokens, 0),
            "finish_reason": done.finish_reason,
        }

    def _chunk(
        self, index: int, delta: dict[str, str], tokens: tuple[TokenOutput, ...], done: RequestOutput | None
    ) -> dict[str, Any]:
        so_far = self._told[index]
        logprobs = self._logprobs(index, tokens, so_far.text) if tokens else None
        so_far.text += len(delta.get("content", ""))
        so_far.passes += sum(token.depth for token in tokens)
        so_far.tokens += len(tokens)
        told = {
            "index": index,
            "tokens": [_fields(token) for token in tokens],
            "passes": so_far.passes,
            "full_passes": so_far.tokens * self.total_loops,
            # a choice's own passes, which only its end knows, are the better figure there
            **({} if done is None else self._summary(done)),
        }
        choice = {
            "index": index,
            **({"delta": delta} if self._is_chat else {"text": delta.get("content", "")}),
            "logprobs": logprobs,
            "finish_reason": None if done is None else done.finish_reason,
        }
        chunk = self._envelope("chat.completion.chunk" if self._is_chat else "text_completion", [choice], [told])
        return {**chunk, "usage": None} if self.plan.include_usage else chunk

    def _logprobs(self, index: int, tokens: Sequence[TokenOutput], offset: int) -> dict[str, Any] | None:
        wanted = self.plan.choices[index].job.logprobs
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
        }
        if done.costs:
            summary |= {"trail_id": secrets.token_hex(8), "costs": list(done.costs)}
            if self.plan.trail:
                summary["trail"] = list(done.trail)
        return summary

    def _usage(self, ends: Sequence[RequestOutput]) -> dict[str, Any]:
        """Each prompt counts once, however many choices were written for it."""
        first = {choice.prompt: done for choice, done in reversed(list(zip(self.plan.choices, ends, strict=True)))}
        read = sum(done.prompt_tokens for done in first.values())
        written = sum(self._written(done) for done in ends)
        cached = self._cached(first.values())
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        }

    def _cached(self, ends: Iterable[RequestOutput]) -> int | None:
        """Prompt tokens found in the cache; None without a salt, where they may be those of somebody else's prompt."""
        if self.plan.choices[0].job.cache_salt is None:
            return None
        return sum(done.cached_tokens for done in ends)

    def _written(self, done: RequestOutput) -> int:
        """Tokens of a choice; of a text that went up whole, as many as the served model would have written it in."""
        if done.tokens or not done.text:
            return len(done.tokens)
        return len(self.tokenizer(done.text, add_special_tokens=False, verbose=False)["input_ids"])


def _fields(token: TokenOutput) -> dict[str, Any]:
    """What a chunk says of a token; `would_have_met` where it is known, which it never is under a rule."""
    asked = {} if token.would_have_met is None else {"would_have_met": token.would_have_met}
    return {name: getattr(token, name) for name in _TOKEN} | asked
