"""Requests to an endpoint: bounded in time, size and number, and nothing that it says is believed unseen."""

import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any, get_args

from pydantic import ValidationError

from sigma0.config import Messages
from sigma0.ladder.budget import BudgetTracker, RungCost, Spending
from sigma0.ladder.rungs import EndpointRung
from sigma0.signals.verdict import Door, ReasonVerdict

# An answer is cut off beyond this, whatever was asked for: no token of a common tokenizer is longer on average.
BYTES_PER_TOKEN = 16
# Ids of a prompt at most: one for each byte, and some around each message.
IDS_PER_MESSAGE = 64
# Bytes of one event of a stream, or of a body without events, at most: these, and some for each token of the answer,
# since this package's server tells about each in its last event. A whole stream has as much room as some of those.
EVENT_BYTES = 2**20
EVENT_BYTES_PER_TOKEN = 512
EVENTS = 8
_BLANK_LINES = (b"\n\n", b"\r\r", b"\r\n\r\n")
_UNPACKED_AT_ONCE = 2**16
# On average over a text; in texts of words each is a token at least.
_BYTES_PER_SHOWN_TOKEN = 8
# An end of another kind is none: of an answer that is filtered or broken off, or of a call of tools, which none have.
_ENDS = ("stop", "length")
# No answer has looped more often.
MOST_PASSES = 2**53


@dataclass(frozen=True)
class Reply:
    """Result of a request to an endpoint, with its attempts."""

    text: str | None  # The answer; None where there is none
    outcome: str  # "ok", or the kind of failure of the last attempt
    lacking: str | None  # The limit that forbade another attempt, or None
    limit: Spending  # The most that the last attempt could cost
    cut: bool = False  # Whether the endpoint stopped at its limit of tokens
    # On the answer. None, like door and passes, where the endpoint is no server of this package
    verdict: ReasonVerdict | None = None
    door: Door | None = None  # Routing decision of the verdict
    passes: int | None = None  # Of the looped model's block


@dataclass
class _Answer:
    """An answer as it comes in, written by one thread and read by another.

    `size` is in bytes, and `thought` in characters of what a server tells of its reasoning.
    """

    parts: list[str] = field(default_factory=list)
    size: int = 0
    thought: int = 0
    finish_reason: str | None = None
    tokens: tuple[int, int] | None = None
    outcome: str | None = None
    sigma0: dict[str, Any] = field(default_factory=dict)


class EndpointClient:
    """Asks one endpoint.

    Args:
        rung: The endpoint.
        purse: Checked before every attempt.
        cost: What the rung did so far.
    """

    def __init__(self, rung: EndpointRung, purse: BudgetTracker, cost: RungCost) -> None:
        self.rung = rung
        self.purse = purse
        self.cost = cost
        self.spent: list[tuple[Spending, float, str]] = []

    def _open(self, limit: float, max_new_tokens: int) -> Any:
        from openai import DefaultHttpxClient, OpenAI

        # requests are counted here, so the client makes none of its own: neither attempts nor where it is sent on to
        sender = DefaultHttpxClient(
            headers={"Accept-Encoding": "identity"},
            follow_redirects=False,
            event_hooks={"response": [_bounding(max_new_tokens)]},
        )
        key = self.rung.api_key.get_secret_value()
        return OpenAI(base_url=self.rung.base_url, api_key=key, max_retries=0, timeout=limit, http_client=sender)

    def ask(self, messages: Messages, max_new_tokens: int, options: Mapping[str, Any] | None = None) -> Reply:
        """Asks as often as the rung and the budget allow.

        Args:
            messages: Of the chat.
            max_new_tokens: Of the answer at most.
            options: What else the request says: temperature, seed, stop, ...; greedy by default.
        """
        spending = self.most(messages, max_new_tokens)
        outcome = "not asked"
        for attempt in range(self.rung.attempts):
            if attempt and not self._wait(attempt):
                return Reply(None, outcome, "seconds", spending)
            lacking = self.purse.lacks(spending, f"ask {self.rung.name}")
            if lacking is not None:
                return Reply(None, outcome, lacking, spending)
            began = time.monotonic()
            answer = self._attempt(messages, max_new_tokens, {"temperature": 0, **(options or {})})
            outcome = answer.outcome or "cut off"
            shown = _least_ids("".join(answer.parts)) + answer.thought // _BYTES_PER_SHOWN_TOKEN
            least = (sum(_least_ids(_said(message)) for message in messages), shown)
            self._pay(spending, least, answer.tokens, time.monotonic() - began, outcome)
            if outcome == "ok":
                cut = answer.finish_reason == "length"
                return Reply(_whole("".join(answer.parts)), outcome, None, spending, cut, *_verdict(answer.sigma0))
            if outcome == "refused":
                break
        return Reply(None, outcome, None, spending)

    def most(self, messages: Messages, max_new_tokens: int) -> Spending:
        """The most that one attempt costs."""
        price = self.rung.price.of(_most_ids(messages), max_new_tokens)
        return Spending(large_tokens=max_new_tokens, catch_up_tokens=_most_ids(messages), calls=1, money=price)

    def _wait(self, attempt: int) -> bool:
        """Waits before another attempt, longer each time; False if there is no time for it."""
        pause = self.rung.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
        left = self.purse.seconds_left
        if left is not None and pause >= left:
            self.purse.refused.add("seconds")
            return False
        time.sleep(pause)
        return True

    def _attempt(self, messages: Messages, max_new_tokens: int, options: Mapping[str, Any]) -> _Answer:
        """One request, given up when its time is over, whatever the server dribbles.

        A read's own timeout begins anew with every byte, so the clock runs in another thread than the reading.
        """
        left = self.purse.seconds_left
        limit = self.rung.timeout if left is None else max(0.001, min(self.rung.timeout, left))
        answer = _Answer()
        try:
            client = self._open(limit, max_new_tokens)
        except (OSError, RuntimeError, ValueError):
            # it reads certificates and proxies: files and descriptors may be missing
            return replace(answer, outcome="no client")
        thread = Thread(target=self._request, args=(client, messages, max_new_tokens, options, answer), daemon=True)
        thread.start()
        thread.join(limit)
        snapshot = replace(answer, parts=list(answer.parts))
        if snapshot.outcome is None:
            # a whole answer whose connection stays open is an answer
            snapshot.outcome = "ok" if snapshot.finish_reason is not None else "timeout"
        client.close()
        return snapshot

    def _request(
        self, client: Any, messages: Messages, max_new_tokens: int, options: Mapping[str, Any], answer: _Answer
    ) -> None:
        import openai

        said: Any = list(messages)
        try:
            stream = client.chat.completions.create(
                model=self.rung.model,
                messages=said,
                max_tokens=max_new_tokens,
                stream=True,
                stream_options={"include_usage": True},
                **options,
            )
            with stream:
                answer.outcome = _gather(stream, answer, max_new_tokens)
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError, openai.BadRequestError):
            # a retry would not help; the server's message may hold the key, so it is not reported
            answer.outcome = "refused"
        except _TooLong:
            answer.outcome = "too long" if answer.finish_reason is None else "ok"
        except openai.APITimeoutError:
            answer.outcome = "timeout"
        except openai.APIStatusError as error:
            answer.outcome = f"status {error.status_code}"
        except openai.APIConnectionError:
            answer.outcome = "no connection" if not answer.parts else "cut off"
        except Exception as error:
            # the end of a thread, with data of a foreign server: any failure of the client is reported by its kind
            late = "Timeout" in type(error).__name__
            whole = answer.finish_reason is not None
            answer.outcome = "ok" if whole else "timeout" if late else "garbage"

    def _pay(
        self, spending: Spending, least: tuple[int, int], output: tuple[int, int] | None, seconds: float, outcome: str
    ) -> None:
        """Pays for an attempt: what the endpoint told, but no less than the texts show; the most if that cannot be."""
        read, written = most = (spending.catch_up_tokens, spending.large_tokens)
        if output is not None and 0 <= output[0] <= most[0] and 0 <= output[1] <= most[1]:
            # a text may show more than was asked for, and the budget knew of no more than that
            read, written = (
                max(said, min(shown, limit)) for said, shown, limit in zip(output, least, most, strict=True)
            )
        money = self.rung.price.of(read, written)
        cost = Spending(large_tokens=written, catch_up_tokens=read, calls=1, money=money)
        self.purse.pay(cost, f"ask {self.rung.name}", 0.0)
        self.spent.append((cost, seconds, outcome))
        self.cost.calls += 1
        self.cost.read += read
        self.cost.tokens += written
        self.cost.money += money
        self.cost.seconds += seconds


def _gather(stream: Any, answer: _Answer, max_new_tokens: int) -> str:
    """Reads an answer to its end or its limit of size; how it went."""
    for chunk in stream:
        answer.tokens = _usage(getattr(chunk, "usage", None)) or answer.tokens
        answer.sigma0 = _ending(getattr(chunk, "sigma0", None)) or answer.sigma0
        for choice in chunk.choices or ():
            if choice.index != 0:
                continue
            piece = choice.delta.content if choice.delta is not None else None
            if isinstance(piece, str) and piece:
                answer.parts.append(piece)
                answer.size += len(piece.encode(errors="replace"))
            # not part of the answer, but written and charged
            thought = getattr(choice.delta, "reasoning_content", None)
            answer.thought += len(thought) if isinstance(thought, str) else 0
            if choice.finish_reason not in (None, "", *_ENDS):
                return "ended otherwise"
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        if answer.size > BYTES_PER_TOKEN * max_new_tokens:
            return "too long"
    return "cut off" if answer.finish_reason is None else "ok"


def _whole(text: str) -> str:
    """A text in which halves of surrogate pairs are put together, or replaced where one is alone: no file holds it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _usage(usage: Any) -> tuple[int, int] | None:
    """Tokens read and written, as far as the endpoint says; what cannot be read is unknown."""
    read, written = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
    # true is no number
    return (read, written) if type(read) is int and type(written) is int else None


def _ending(event: Any) -> dict[str, Any]:
    """The last event of a choice from this package's server; empty if it is malformed."""
    choices = event.get("choices") if isinstance(event, dict) else None
    ended = isinstance(choices, list) and choices and isinstance(choices[0], dict) and "verdict" in choices[0]
    return choices[0] if ended and choices else {}


def _verdict(event: Mapping[str, Any]) -> tuple[ReasonVerdict | None, Door | None, int | None]:
    """Verdict, door and passes of a foreign server; malformed ones are unknown."""
    try:
        verdict = ReasonVerdict.model_validate(event.get("verdict"))
    except ValidationError:
        return None, None, None
    door, passes = event.get("door"), event.get("passes")
    known = isinstance(passes, int) and not isinstance(passes, bool) and 0 <= passes <= MOST_PASSES
    return verdict, door if door in get_args(Door) else None, passes if known else None


class _TooLong(Exception):
    """A body, or an event of it, is longer than any answer could make it."""


def _bounding(max_new_tokens: int) -> Callable[[Any], None]:
    """A hook of the client of HTTP: bounds what is read of a response, as it was sent and unpacked."""
    event = EVENT_BYTES + EVENT_BYTES_PER_TOKEN * max_new_tokens

    def bound(response: Any) -> None:
        # what is packed otherwise cannot be read as gzip
        packed = response.headers.pop("content-encoding", "identity") != "identity"
        sent = response.iter_raw

        def parts() -> Iterator[bytes]:
            bounded = _within(sent(), event)
            return _within(_unpacked(bounded), event) if packed else bounded

        response.iter_raw = parts

    return bound


def _within(parts: Iterable[bytes], event: int) -> Iterator[bytes]:
    """Parts of a body, as long as each event and all of them are within bounds.

    Raises:
        _TooLong: If they are not.
    """
    whole = since = 0
    tail = b""
    for part in parts:
        whole += len(part)
        seen = tail + part
        blank = max(seen.rfind(line) for line in _BLANK_LINES)
        since = len(seen) - blank if blank >= 0 else since + len(part)
        if since > event or whole > EVENTS * event:
            raise _TooLong
        tail = seen[-3:]
        yield part


def _unpacked(parts: Iterable[bytes]) -> Iterator[bytes]:
    """A body that was packed by gzip or deflate, in parts of bounded size."""
    packer = zlib.decompressobj(zlib.MAX_WBITS | 32)
    for part in parts:
        while part:
            yield packer.decompress(part, _UNPACKED_AT_ONCE)
            part = packer.unconsumed_tail
    yield packer.flush()


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return " ".join(str(part.get("text", "")) for part in parts)


def _least_ids(text: str) -> int:
    """Ids that a text shows at least."""
    return max(len(text.split()), len(text.encode(errors="replace")) // _BYTES_PER_SHOWN_TOKEN)


def _most_ids(messages: Messages) -> int:
    return sum(len(str(message.get("content", "")).encode()) + IDS_PER_MESSAGE for message in messages)


def as_messages(prompt: str | Messages) -> Sequence[dict[str, Any]]:
    """A prompt as messages: a string is what the user says."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]
