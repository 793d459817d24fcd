"""Clients that do harm beside a load: prompts that never fit, requests left at once, bodies half sent, and grammars
and sources that cost a server much.

They come and go by turns, so that another client's latency is seen with and without them.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import httpx
from pydantic import BaseModel

# Bytes of a flood's bodies: just under what a server takes.
BODY = 2**20 - 64
BURST = 4
# Seconds of rest after a burst, and of a turn with or without floods at most.
REST, TURN = 0.5, 20.0
# What a prompt that never fits, or one too many, may be answered.
REFUSALS = (400, 413, 429, 503)
TIMEOUT = 600.0
SOURCE = " ".join(f"Mary put {number % 97} of the cups into the park." for number in range(700))[:31_500]
COSTLY: tuple[dict[str, Any], ...] = (
    {"guided_grammar": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b" r{i + 1}\n' for i in range(5000))},
    {"guided_regex": "(a{1000}){1000}"},
    {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    {"guided_json": {"properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}},
    {"guided_choice": ["<|im_end|>"]},
    {"n": 8, "sigma0": {"sources": [""] * 250_000}},
    {"n": 8, "sigma0": {"sources": [SOURCE]}},
)


class Floods(BaseModel):
    """What came of the floods, and of the client beside them."""

    clients: int  # How many flooded at once
    # Prompts, and what costs much, by status: refused, and what was within the limits
    refused: Counter[str] = Counter()
    left: int = 0  # Requests that were left as soon as they were sent
    half_sent: int = 0  # Bodies that were never finished
    broken: Counter[str] = Counter()  # Prompts that ended otherwise, by what happened
    # Of the other client's requests while nobody flooded; None where there was none
    median_ms_without: float | None = None
    median_ms_with: float | None = None  # While they did
    requests_without: int = 0  # Requests that the first median is of
    requests_with: int = 0  # And the second


class Flooding:
    """Floods a server with a model, and asks it, beside that, questions that fit, for as long as the whole load is.

    Every fourth of the clients sends prompts, leaves, sends half bodies, or what costs much.
    """

    def __init__(self, url: str, model: str, prompts: list[str], clients: int, seconds: float) -> None:
        self._url, self._model, self._prompts, self._clients = url, model, prompts, clients
        self._turn = min(TURN, seconds / 4)
        self._began = monotonic()
        self._seen: dict[bool, list[float]] = {False: [], True: []}
        self.result = Floods(clients=clients)

    @property
    def is_on(self) -> bool:
        """Whether it is the floods' turn; the first turn is without."""
        return int((monotonic() - self._began) / self._turn) % 2 == 1

    async def run(self, going: Callable[[], bool]) -> Floods:
        """Floods and asks in turns as long as the load goes on."""
        kinds = (self._send_prompts, self._send_costly, self._leave, self._send_half)
        tasks = [self._client(kinds[number % 4], random.Random(number), going) for number in range(self._clients)]
        await asyncio.gather(self._ask(going), *tasks)
        result, (without, during) = self.result, (self._seen[False], self._seen[True])
        result.requests_without, result.requests_with = len(without), len(during)
        result.median_ms_without = 1000 * median(without) if without else None
        result.median_ms_with = 1000 * median(during) if during else None
        return result

    async def _client(
        self, send: Callable[[random.Random], Any], rng: random.Random, going: Callable[[], bool]
    ) -> None:
        while going():
            if self.is_on:
                await send(rng)
            await asyncio.sleep(REST)

    async def _ask(self, going: Callable[[], bool]) -> None:
        """The other client: one short question after the other."""
        async with httpx.AsyncClient(timeout=TIMEOUT) as connection:
            while going():
                flooded, began = self.is_on, perf_counter()
                body = {**self._chat([self._prompts[0]]), "max_tokens": 8}
                answer = await connection.post(f"{self._url}/v1/chat/completions", json=body)
                # of a request in both turns nothing can be said
                if answer.status_code == 200 and self.is_on == flooded:
                    self._seen[flooded].append(perf_counter() - began)
                await asyncio.sleep(0.05)

    async def _send_prompts(self, rng: random.Random) -> None:
        """A burst of bodies of a megabyte: one text, many messages, or ids."""
        await self._burst((self._body(rng.randrange(3)) for _ in range(BURST)), REFUSALS)

    async def _send_costly(self, rng: random.Random) -> None:
        """A burst of what a grammar engine, or the search in sources, would take seconds for, or die of."""
        path = "/v1/chat/completions"
        for fields in rng.sample(COSTLY, len(COSTLY)):
            body = json.dumps({**self._chat([self._prompts[0]]), "max_tokens": 8, **fields}).encode()
            # sources within the limits are answered
            fits = (200,) if fields.get("sigma0") == {"sources": [SOURCE]} else ()
            await self._burst([(path, body)], (*REFUSALS, *fits))

    async def _burst(self, bodies: Iterable[tuple[str, bytes]], fine: Sequence[int]) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT) as connection:
            for path, body in bodies:
                headers = {"Content-Type": "application/json"}
                try:
                    answer = await connection.post(f"{self._url}{path}", content=body, headers=headers)
                except httpx.HTTPError as error:
                    self.result.broken[type(error).__name__] += 1
                    continue
                if answer.status_code in fine:
                    self.result.refused[str(answer.status_code)] += 1
                else:
                    self.result.broken[f"status {answer.status_code}"] += 1

    def _body(self, kind: int) -> tuple[str, bytes]:
        word = "Mary went to the kitchen. "
        if kind == 0:
            return "/v1/chat/completions", json.dumps(self._chat([word * (BODY // len(word) - 8)])).encode()
        if kind == 1:
            return "/v1/chat/completions", json.dumps(self._chat(["hi you"] * (BODY // 40 - 8))).encode()
        return "/v1/completions", json.dumps({"model": self._model, "prompt": [5] * (BODY // 3 - 30)}).encode()

    def _chat(self, contents: list[str]) -> dict[str, Any]:
        messages = [{"role": "user", "content": content} for content in contents]
        return {"model": self._model, "messages": messages, "temperature": 0}

    async def _leave(self, rng: random.Random) -> None:
        """A burst of streams that are left as soon as they are asked for."""
        for _ in range(BURST):
            body = json.dumps({**self._chat([rng.choice(self._prompts)]), "max_tokens": 400, "stream": True}).encode()
            await self._send(body, len(body), 0.02)
            self.result.left += 1

    async def _send_half(self, rng: random.Random) -> None:
        """A body of which half is sent, on a connection that stays for a while."""
        body = json.dumps(self._chat([rng.choice(self._prompts)])).encode()
        await self._send(body[: len(body) // 2], len(body), 2 * rng.random())
        self.result.half_sent += 1

    async def _send(self, body: bytes, length: int, stays: float) -> None:
        address = httpx.URL(self._url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n"
        try:
            writer.write(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
            await writer.drain()
            await asyncio.sleep(stays)
        finally:
            writer.transport.abort()
