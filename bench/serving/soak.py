"""A long mixed load: clients of all kinds, some of which leave in the middle, and a server that must not mind.

Every request has a known answer: the first whole one that its question got under its settings. Each request that nobody
left must be answered once, with that; what is left behind is counted on the server.
"""

import asyncio
import json
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any

import httpx
import psutil

from sigma0.bench.serving.floods import Flooding, Floods
from sigma0.errors import needs_extra

WAYS: tuple[dict[str, Any], ...] = (
    {"mode": "full"},
    {"mode": "qexit", "q": 0.6},
    {"mode": "qexit", "q": 0.6, "after_exit": "drop"},
    {"mode": "qexit", "q": 0.6, "after_exit": "verify"},
    {"mode": "margin", "theta": 0.9},
    {"mode": "fixed", "depth": 2},
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "stop": ["kitchen", ". "]},
    {"temperature": 0, "frequency_penalty": 0.5, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "seed": 7},
)
LEAVES = 0.1
# Share by which memory may grow from the second tenth of a load to the last, and seconds from which on that is judged:
# before, what servers take once (threads, pages of allocators, compiled grammars) is most of it.
FLAT, LASTS = 0.03, 600.0


@dataclass(frozen=True)
class Sample:
    """How the server stood at a moment.

    Attributes:
        seconds: Since the load began.
        memory_mb: Of the server and of its engine's process.
        pages_used: Pages of K/V that requests held.
        running: Requests.
        waiting: Requests.
    """

    seconds: float
    memory_mb: float
    pages_used: int
    running: int
    waiting: int


@dataclass
class Soak:
    """What came of a load.

    Attributes:
        seconds: How long it was.
        clients: How many asked at once.
        asked: Requests that were sent.
        answered: Of those, whole answers.
        left: Requests whose client left in the middle.
        refused: Requests that the full queue refused.
        wrong: Answers that were not what the same request got before.
        broken: Answers that ended otherwise, by what happened.
        answered_twice: Streams that told more than one end for a choice.
        preemptions: Of the engine.
        tokens: Of the engine.
        samples: Of the server, at even distances; the last one once nobody asked any more.
        finished_after_term: Requests under way at SIGTERM that were answered whole.
        lost_after_term: Those that were not.
        exit_code: Of the server then.
        floods: What floods did beside the load; None where there were none.
    """

    seconds: float
    clients: int
    asked: int = 0
    answered: int = 0
    left: int = 0
    refused: int = 0
    wrong: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    answered_twice: int = 0
    preemptions: int = 0
    tokens: int = 0
    samples: list[Sample] = field(default_factory=list)
    finished_after_term: int = 0
    lost_after_term: int = 0
    exit_code: int | None = None
    floods: Floods | None = None

    @property
    def memory_mb(self) -> tuple[float, float]:
        """Mean memory of the server in the second tenth of the load, and in the last."""
        memory = [sample.memory_mb for sample in self.samples]
        tenth = max(1, len(memory) // 10)
        early, late = memory[tenth : 2 * tenth] or memory[:1], memory[-tenth:]
        return sum(early) / len(early), sum(late) / len(late)

    @property
    def memory_is_flat(self) -> bool | None:
        """Whether memory stayed as it was; None of a load that is too short to say."""
        early, late = self.memory_mb
        return None if self.seconds < LASTS else late <= (1 + FLAT) * early

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        # `asdict` makes a counter of pairs out of a counter
        values = asdict(replace(self, broken=Counter(), floods=None))
        floods = None if self.floods is None else self.floods.to_dict()
        judged = {"memory_is_flat": self.memory_is_flat}
        return {**values, "broken": dict(self.broken), "floods": floods, **judged}


class _Asker:
    """Clients that share what is known of right answers.

    Args:
        url: Of the server.
        model: Its name there.
        prompts: Questions.
        max_tokens: Of an answer.
        found: Takes the counts.

    Attributes:
        sent: Requests that were sent whole.
    """

    def __init__(self, url: str, model: str, prompts: list[str], max_tokens: int, found: Soak) -> None:
        self._url, self._model, self._prompts, self._most = url, model, prompts, max_tokens
        self._found = found
        self._known: dict[str, list[str]] = {}
        self.sent = 0

    async def _trace(self, name: str, _: Any) -> None:
        self.sent += name == "http11.send_request_body.complete"

    async def one(self, connection: httpx.AsyncClient, rng: random.Random) -> bool:
        """One request of any kind; whether it was answered whole."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": rng.choice(self._prompts)}],
            "max_tokens": rng.choice([1, 8, self._most]),
            "n": rng.choice([1, 1, 1, 2]),
            "stream": rng.random() < 0.7,
            "sigma0": {"exit": rng.choice(WAYS)},
            **rng.choice(SAMPLINGS),
        }
        leaves = rng.random() < LEAVES
        self._found.asked += 1
        try:
            texts = await self._answer(connection, body, rng.randint(0, 6) if leaves else None)
        except httpx.HTTPError as error:
            self._found.broken[type(error).__name__] += 1
            return False
        if texts is not None:
            self._check(body, texts)
        return texts is not None

    async def _answer(
        self, connection: httpx.AsyncClient, body: dict[str, Any], leaves: int | None
    ) -> list[str] | None:
        """Texts of the choices; None where the client left or was refused."""
        traced = {"trace": self._trace}
        address = f"{self._url}/v1/chat/completions"
        async with connection.stream("POST", address, json=body, extensions=traced) as response:
            if response.status_code == 429:
                self._found.refused += 1
                return None
            if response.status_code != 200:
                self._found.broken[f"status {response.status_code}"] += 1
                return None
            if leaves is not None and (not body["stream"] or not leaves):
                self._found.left += 1
                return None
            if not body["stream"]:
                told = json.loads(await response.aread())
                return [choice["message"]["content"] for choice in told["choices"]]
            return await self._streamed(response, body["n"], leaves)

    async def _streamed(self, response: httpx.Response, choices: int, leaves: int | None) -> list[str] | None:
        texts, ends, chunks = [""] * choices, [0] * choices, 0
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunks += 1
            if leaves is not None and chunks > leaves:
                self._found.left += 1
                return None
            told = json.loads(line[6:])
            if "error" in told:
                self._found.broken[str(told["error"]["code"])] += 1
                return None
            for choice in told["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
                ends[choice["index"]] += choice["finish_reason"] is not None
        if leaves is not None:
            # it was over before the client could leave
            return texts if ends == [1] * choices else None
        self._found.answered_twice += any(end > 1 for end in ends)
        if min(ends) < 1:
            self._found.broken["a stream without an end"] += 1
            return None
        return texts

    def _check(self, body: dict[str, Any], texts: list[str]) -> None:
        self._found.answered += 1
        key = json.dumps({name: value for name, value in body.items() if name not in ("stream", "n")}, sort_keys=True)
        known = self._known.setdefault(key, [])
        for place, text in enumerate(texts):
            if place >= len(known):
                known.append(text)
            self._found.wrong += known[place] != text


async def soak(
    process: "subprocess.Popen[bytes]",
    url: str,
    model: str,
    prompts: list[str],
    seconds: float,
    clients: int,
    max_tokens: int,
    floods: int = 0,
    on_second: Callable[[int], None] = lambda done: None,
) -> Soak:
    """Loads a server, lets it come to rest, loads it again and ends it under load.

    Args:
        process: Of the server.
        url: Its address.
        model: Its name there.
        prompts: Questions.
        seconds: How long.
        clients: How many ask at once.
        max_tokens: Of the longest answers.
        floods: How many flood beside them.
        on_second: Told how many are over.
    """
    found = Soak(seconds, clients)
    asker = _Asker(url, model, prompts, max_tokens, found)
    began, going = monotonic(), True

    async def client(number: int) -> None:
        rng = random.Random(number)
        while going:
            # a client that leaves takes its connection with it
            async with httpx.AsyncClient(timeout=600) as connection:
                for _ in range(20):
                    if going:
                        await asker.one(connection, rng)

    async def watch() -> None:
        every = max(1.0, seconds / 60)
        while going:
            await asyncio.sleep(every)
            found.samples.append(await _sample(process, url, began))
            on_second(min(int(monotonic() - began), int(seconds)))

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    tasks.append(asyncio.create_task(watch()))
    flooding = Flooding(url, model, prompts, floods, seconds)
    flooded = asyncio.create_task(flooding.run(lambda: going))
    await asyncio.sleep(seconds)
    going = False
    await asyncio.gather(*tasks, flooded)
    found.floods = flooding.result if floods else None
    await asyncio.sleep(1)
    found.samples.append(await _sample(process, url, began))
    told = await _metrics(url)
    found.preemptions, found.tokens = int(told["sigma0_preemptions_total"]), int(told["sigma0_tokens_total"])
    await _term(process, asker, clients, found)
    return found


async def _term(process: "subprocess.Popen[bytes]", asker: _Asker, clients: int, found: Soak) -> None:
    """SIGTERM while requests are under way: all of them are to be answered."""
    async with httpx.AsyncClient(timeout=600) as connection:
        rngs = [random.Random(-1 - number) for number in range(clients)]
        before, sent = found.left + found.refused, asker.sent
        asked = [asyncio.create_task(asker.one(connection, rng)) for rng in rngs]
        while asker.sent < sent + clients and not all(task.done() for task in asked):
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        whole = sum(await asyncio.gather(*asked))
    found.finished_after_term = whole
    found.lost_after_term = clients - whole - (found.left + found.refused - before)
    found.exit_code = await asyncio.to_thread(process.wait, 60)


async def _metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=60) as connection:
        text = (await connection.get(f"{url}/metrics")).text
    with needs_extra("serve"):
        from prometheus_client.parser import text_string_to_metric_families
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


async def _sample(process: "subprocess.Popen[bytes]", url: str, began: float) -> Sample:
    told = await _metrics(url)
    server = psutil.Process(process.pid)
    memory = sum(one.memory_info().rss for one in (server, *server.children())) / 2**20
    counts = (int(told[f"sigma0_{name}"]) for name in ("pages_used", "running", "queue"))
    return Sample(monotonic() - began, memory, *counts)
