"""Clients that ask a server for streamed answers: so many at once, or as chance lets them come."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx
import numpy as np

from sigma0.bench.core.ledger import Percentiles

# A server that is slower than that is stuck.
TIMEOUT = 600.0

WAYS = ("full", "never", "finish", "drop", "verify")


@dataclass
class Answer:
    """One streamed completion.

    Attributes:
        began: When it was asked for, seconds of `perf_counter`.
        arrivals: When each chunk with tokens came.
        tokens: In those chunks.
        failure: What went wrong, if anything did.
        text: Of those chunks.
        number: Of the request.
        ended: When the answer was whole.
    """

    began: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    failure: str | None = None
    text: str = ""
    number: int = 0
    ended: float = 0.0


@dataclass(frozen=True)
class Load:
    """What a server did under a load.

    Attributes:
        seconds: From the first request to the last token.
        answers: Of all requests.
    """

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests over the whole time."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def failed(self) -> int:
        """Requests that were not answered whole."""
        return sum(answer.failure is not None for answer in self.answers)

    @property
    def first_token(self) -> Percentiles:
        """Milliseconds from request to first token."""
        return percentiles([answer.arrivals[0] - answer.began for answer in self.answers if answer.arrivals])

    @property
    def between_tokens(self) -> Percentiles:
        """Milliseconds from one chunk with tokens to the next."""
        gaps = [np.diff(answer.arrivals) for answer in self.answers if len(answer.arrivals) > 1]
        return percentiles(np.concatenate(gaps) if gaps else [])


def percentiles(seconds: Any) -> Percentiles:
    """Of times in seconds, in milliseconds; zeros where there are none."""
    told = 1000 * np.asarray(seconds, dtype=np.float64)
    p50, p90, p99 = np.percentile(told, (50, 90, 99)).tolist() if len(told) else (0.0, 0.0, 0.0)
    return Percentiles(p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True)
class Ask:
    """What every client asks.

    Attributes:
        url: Of the server, `/v1` left out.
        model: Its name there.
        prompts: Taken in turn.
        max_tokens: Of each answer.
        extra: Further fields of the request.
        counts: What a server at an address has counted so far, by name.
    """

    url: str
    model: str
    prompts: Sequence[str]
    max_tokens: int
    extra: dict[str, Any]
    counts: Callable[[str], dict[str, float]] = lambda url: {}


async def drive(ask: Ask, kind: str, amount: float, requests: int, seed: int = 0) -> Load:
    """Asks a server.

    Args:
        ask: What is asked.
        kind: "closed": clients, each with its next request as soon as it has its answer; "open": requests that come at
            random, whether or not earlier ones are answered.
        amount: Clients; or requests a second, the times between which are exponential.
        requests: How many.
        seed: Of the times.
    """
    clients = int(amount) if kind == "closed" else None
    turns = asyncio.Semaphore(clients or requests)
    moments = np.cumsum(np.random.default_rng(seed).exponential(1 / amount, requests))
    began = perf_counter()

    async def one(connection: httpx.AsyncClient, number: int) -> Answer:
        if clients is None:
            await asyncio.sleep(max(0.0, began + float(moments[number]) - perf_counter()))
        async with turns:
            return await complete(connection, ask, number)

    async with httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=clients)) as connection:
        answers = await asyncio.gather(*(one(connection, number) for number in range(requests)))
    return Load(perf_counter() - began, tuple(answers))


async def complete(connection: httpx.AsyncClient, ask: Ask, number: int) -> Answer:
    """One streamed completion."""
    body = {
        "model": ask.model,
        "messages": [{"role": "user", "content": ask.prompts[number % len(ask.prompts)]}],
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        **ask.extra,
    }
    answer = Answer(perf_counter(), number=number)
    try:
        async with connection.stream("POST", f"{ask.url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                answer.failure = f"{response.status_code}: {(await response.aread())[:200]!r}"
                return answer
            async for chunk in chunks(response):
                _take(answer, chunk)
    except httpx.HTTPError as error:
        answer.failure = f"{type(error).__name__}: {error}"
    answer.ended = perf_counter()
    if answer.failure is None and not answer.tokens:
        answer.failure = "no token came"
    return answer


async def chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Of a streamed answer."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    """Counts the tokens of a chunk: as many as it says, or one where it says nothing but has text."""
    answer.text += "".join((choice.get("delta") or {}).get("content") or "" for choice in chunk.get("choices", []))
    if "error" in chunk:
        answer.failure = str(chunk["error"])
        return
    told = chunk.get("sigma0", {}).get("choices", [])
    count = sum(len(choice.get("tokens", ())) for choice in told)
    usage = chunk.get("usage")
    if not told and usage:
        count = usage["completion_tokens"] - answer.tokens
    elif not told:
        count = sum(bool(choice.get("delta", {}).get("content")) for choice in chunk.get("choices", []))
    if count:
        answer.tokens += count
        answer.arrivals.append(perf_counter())
