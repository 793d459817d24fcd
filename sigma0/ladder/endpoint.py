"""Requests to an endpoint: bounded in time, size and number, and nothing that it says is believed unseen."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sigma0.ladder.budget import Purse, RungCost, Spending
from sigma0.ladder.rungs import EndpointRung
from sigma0.text import Messages

# An answer is cut off beyond this, whatever was asked for: no token of a common tokenizer is longer on average.
BYTES_PER_TOKEN = 16
# Ids of a prompt at most: one for each byte, and some around each message.
IDS_PER_MESSAGE = 64


@dataclass(frozen=True)
class Reply:
    """What came of an endpoint.

    Attributes:
        text: The answer; None where there is none.
        told: "ok", or the kind of failure of the last attempt.
        lacking: The limit that forbade another attempt, or None.
        asked: The most that the last attempt could cost.
    """

    text: str | None
    told: str
    lacking: str | None
    asked: Spending


class Asker:
    """Asks one endpoint.

    Args:
        rung: The endpoint.
        purse: Asked before every attempt.
        cost: What the rung did so far.
    """

    def __init__(self, rung: EndpointRung, purse: Purse, cost: RungCost) -> None:
        from openai import OpenAI

        self.rung = rung
        self.purse = purse
        self.cost = cost
        # attempts are counted here, so the client makes none of its own
        self._client = OpenAI(
            base_url=rung.base_url, api_key=rung.api_key.get_secret_value(), max_retries=0, timeout=rung.timeout
        )
        self.spent: list[tuple[Spending, float, str]] = []

    def ask(self, messages: Messages, max_new_tokens: int) -> Reply:
        """Asks as often as the rung and the budget allow.

        Args:
            messages: Of the chat.
            max_new_tokens: Of the answer at most.
        """
        asked = self._most(messages, max_new_tokens)
        told = "not asked"
        for attempt in range(self.rung.attempts):
            if attempt and not self._wait(attempt):
                return Reply(None, told, "seconds", asked)
            lacking = self.purse.lacks(asked, f"ask {self.rung.name}")
            if lacking is not None:
                return Reply(None, told, lacking, asked)
            began = time.monotonic()
            text, told, tokens = self._attempt(messages, max_new_tokens)
            self._pay(messages, asked, tokens, time.monotonic() - began, told)
            if text is not None:
                return Reply(text, told, None, asked)
            if told == "refused":
                break
        return Reply(None, told, None, asked)

    def _most(self, messages: Messages, max_new_tokens: int) -> Spending:
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

    def _attempt(self, messages: Messages, max_new_tokens: int) -> tuple[str | None, str, tuple[int, int] | None]:
        """Text, how it went, and the tokens that were read and written as far as the endpoint said."""
        import openai

        left = self.purse.seconds_left
        limit = self.rung.timeout if left is None else max(0.001, min(self.rung.timeout, left))
        ends = time.monotonic() + limit
        said: Any = list(messages)
        try:
            stream = self._client.with_options(timeout=limit).chat.completions.create(
                model=self.rung.model,
                messages=said,
                max_tokens=max_new_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            with stream:
                return _gathered(stream, ends, max_new_tokens)
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError, openai.BadRequestError):
            # asking again would not help; what the server says may hold the key, so it is not told
            return None, "refused", None
        except openai.APITimeoutError:
            return None, "timeout", None
        except openai.APIStatusError as error:
            return None, f"status {error.status_code}", None
        except openai.APIConnectionError:
            return None, "no connection", None
        except (openai.APIError, ValueError, TypeError, AttributeError, KeyError, IndexError):
            # whatever else a broken server can make of the protocol's parsing
            return None, "garbage", None

    def _pay(
        self, messages: Messages, asked: Spending, tokens: tuple[int, int] | None, seconds: float, told: str
    ) -> None:
        """Pays for an attempt: what the endpoint said that it used, if that can be true; else the most."""
        read, written = most = (asked.catch_up_tokens, asked.large_tokens)
        if tokens is not None and 0 <= tokens[0] <= most[0] and 0 <= tokens[1] <= most[1]:
            read, written = tokens
        money = self.rung.price.of(read, written)
        cost = Spending(large_tokens=written, catch_up_tokens=read, calls=1, money=money)
        self.purse.pay(cost, f"ask {self.rung.name}", 0.0)
        self.spent.append((cost, seconds, told))
        self.cost.calls += 1
        self.cost.read += read
        self.cost.tokens += written
        self.cost.money += money
        self.cost.seconds += seconds


def _gathered(stream: Any, ends: float, max_new_tokens: int) -> tuple[str | None, str, tuple[int, int] | None]:
    """Reads an answer to its end, its limit of time or its limit of size."""
    parts: list[str] = []
    size, finished, tokens = 0, False, None
    for chunk in stream:
        if time.monotonic() > ends:
            return None, "timeout", None
        usage = getattr(chunk, "usage", None)
        if usage is not None:
            tokens = (int(usage.prompt_tokens), int(usage.completion_tokens))
        for choice in chunk.choices or ():
            if choice.index != 0:
                continue
            piece = choice.delta.content if choice.delta is not None else None
            if isinstance(piece, str):
                parts.append(piece)
                size += len(piece.encode())
            finished = finished or choice.finish_reason is not None
        if size > BYTES_PER_TOKEN * max_new_tokens:
            return None, "too long", tokens
    if not finished:
        return None, "cut off", tokens
    return "".join(parts), "ok", tokens


def _most_ids(messages: Messages) -> int:
    return sum(len(str(message.get("content", "")).encode()) + IDS_PER_MESSAGE for message in messages)


def as_messages(prompt: str | Messages) -> Sequence[dict[str, Any]]:
    """A prompt as messages: a string is what the user says."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]
