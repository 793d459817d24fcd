"""`python -m sigma0.bench soak`: a long load of all kinds, and a server that must not mind clients that leave.

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
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import httpx
import psutil
import typer
from pydantic import BaseModel, computed_field

from sigma0.bench.core.conditions import git_commit
from sigma0.bench.core.options import ReportFile
from sigma0.bench.core.output import tell_report
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.serving.floods import Flooding, Floods
from sigma0.bench.serving.measure import chunks
from sigma0.bench.serving.servers import counters, serving_process
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson, ModelArgument

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
DROPS_AT_EXIT = 0.1
# Share by which memory may grow from the second tenth of a load to the last, and seconds from which on that is judged:
# before, what servers take once (threads, pages of allocators, compiled grammars) is most of it.
FLAT, LASTS = 0.03, 600.0


class Sample(BaseModel):
    """How the server stood at a moment."""

    seconds: float  # Since the load began
    memory_mb: float  # Of the server and of its engine's process
    pages_used: int  # Pages of K/V that requests held
    running: int  # Requests
    waiting: int  # Requests


class Soak(BaseModel):
    """What came of a load."""

    seconds: float  # How long it was
    clients: int  # How many asked at once
    asked: int = 0  # Requests that were sent
    answered: int = 0  # Of those, whole answers
    left: int = 0  # Requests whose client left in the middle
    refused: int = 0  # Requests that the full queue refused
    wrong: int = 0  # Answers that were not what the same request got before
    broken: Counter[str] = Counter()  # Answers that ended otherwise, by what happened
    answered_twice: int = 0  # Streams that told more than one end for a choice
    preemptions: int = 0  # Of the engine
    tokens: int = 0  # Of the engine
    samples: list[Sample] = []  # Of the server, at even distances; the last one once nobody asked any more
    finished_after_term: int = 0  # Requests under way at SIGTERM that were answered whole
    lost_after_term: int = 0  # Those that were not
    exit_code: int | None = None  # Of the server then
    floods: Floods | None = None  # What floods did beside the load; None where there were none

    @property
    def memory_mb(self) -> tuple[float, float]:
        """Mean memory of the server in the second tenth of the load, and in the last."""
        memory = [sample.memory_mb for sample in self.samples]
        tenth = max(1, len(memory) // 10)
        early, late = memory[tenth : 2 * tenth] or memory[:1], memory[-tenth:]
        return sum(early) / len(early), sum(late) / len(late)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def memory_is_flat(self) -> bool | None:
        """Whether memory stayed as it was; None of a load that is too short to say."""
        early, late = self.memory_mb
        return None if self.seconds < LASTS else late <= (1 + FLAT) * early

    @property
    def is_sound(self) -> bool:
        """Whether every request was answered once and rightly, nothing was left there, and memory stayed flat."""
        last = self.samples[-1]
        left = last.pages_used + last.running + last.waiting
        faults = self.wrong + self.answered_twice + sum(self.broken.values()) + self.lost_after_term
        faults += 0 if self.floods is None else sum(self.floods.broken.values())
        return not left and not faults and self.exit_code == 0 and self.memory_is_flat is not False


class _Asker:
    """Clients that share what is known of right answers; `sent` are the requests that were sent whole."""

    def __init__(self, url: str, model: str, prompts: list[str], max_tokens: int, obtained: Soak) -> None:
        self.url, self.model, self.prompts, self._most, self.found = url, model, prompts, max_tokens, obtained
        self._known: dict[str, list[str]] = {}
        self.sent = 0

    async def _trace(self, name: str, _: Any) -> None:
        self.sent += name == "http11.send_request_body.complete"

    async def one(self, connection: httpx.AsyncClient, rng: random.Random) -> bool:
        """One request of any kind; whether it was answered whole."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": rng.choice(self.prompts)}],
            "max_tokens": rng.choice([1, 8, self._most]),
            "n": rng.choice([1, 1, 1, 2]),
            "stream": rng.random() < 0.7,
            "sigma0": {"exit": rng.choice(WAYS)},
            **rng.choice(SAMPLINGS),
        }
        leaves = rng.random() < DROPS_AT_EXIT
        self.found.asked += 1
        try:
            texts = await self._answer(connection, body, rng.randint(0, 6) if leaves else None)
        except httpx.HTTPError as error:
            self.found.broken[type(error).__name__] += 1
            return False
        if texts is not None:
            self._check(body, texts)
        return texts is not None

    async def _answer(
        self, connection: httpx.AsyncClient, body: dict[str, Any], leaves: int | None
    ) -> list[str] | None:
        """Texts of the choices; None where the client left or was refused."""
        traced = {"trace": self._trace}
        address = f"{self.url}/v1/chat/completions"
        async with connection.stream("POST", address, json=body, extensions=traced) as response:
            if response.status_code == 429:
                self.found.refused += 1
                return None
            if response.status_code != 200:
                self.found.broken[f"status {response.status_code}"] += 1
                return None
            if leaves is not None and (not body["stream"] or not leaves):
                self.found.left += 1
                return None
            if not body["stream"]:
                output = json.loads(await response.aread())
                return [choice["message"]["content"] for choice in output["choices"]]
            return await self._streamed(response, body["n"], leaves)

    async def _streamed(self, response: httpx.Response, choices: int, leaves: int | None) -> list[str] | None:
        texts, ends, taken = [""] * choices, [0] * choices, 0
        async for output in chunks(response):
            taken += 1
            if leaves is not None and taken > leaves:
                self.found.left += 1
                return None
            if "error" in output:
                self.found.broken[str(output["error"]["code"])] += 1
                return None
            for choice in output["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
                ends[choice["index"]] += choice["finish_reason"] is not None
        if leaves is not None:
            # it was over before the client could leave
            return texts if ends == [1] * choices else None
        self.found.answered_twice += any(end > 1 for end in ends)
        if min(ends) < 1:
            self.found.broken["a stream without an end"] += 1
            return None
        return texts

    def _check(self, body: dict[str, Any], texts: list[str]) -> None:
        self.found.answered += 1
        key = json.dumps({name: value for name, value in body.items() if name not in ("stream", "n")}, sort_keys=True)
        known = self._known.setdefault(key, [])
        for place, text in enumerate(texts):
            if place >= len(known):
                known.append(text)
            self.found.wrong += known[place] != text


def soak_server(
    model: ModelArgument = "pocket",
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the load lasts.")] = 30.0,
    clients: Annotated[int, typer.Option(min=1, help="How many ask at once.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of the longest answers.")] = 48,
    floods: Annotated[
        int, typer.Option(min=0, help="How many flood beside them: prompts of 1 MB, requests left, half bodies.")
    ] = 6,
    kv_memory: Annotated[
        str, typer.Option(help="K/V of the server; little, so that requests are put back.")
    ] = "2560KiB",
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Load a server with clients of all kinds, one in ten of which leave in the middle; then end it under load."""
    with one_line_errors(), ExitStack() as stack:
        prompts = [str(prompt.content) for prompt in micro_world(60) if isinstance(prompt.content, str)]
        arguments = ["--dtype", "float32", "--threads", "1", "--kv-memory", kv_memory, "--max-running", "8"]
        process, url = stack.enter_context(serving_process(model, arguments))
        advance = stack.enter_context(progress_bar("seconds", int(60 * minutes), hidden=as_json))
        obtained = Soak(seconds=60 * minutes, clients=clients)
        asyncio.run(_soak(process, _Asker(url, Path(model).name, prompts, max_tokens, obtained), floods, advance))
    output = {"model": model, "kv_memory": kv_memory, "commit": git_commit(), **obtained.model_dump()}
    if tell_report(output, out, as_json):
        typer.echo("\n".join(lines_of(obtained)))
    if not obtained.is_sound:
        raise typer.Exit(1)


async def _soak(
    process: "subprocess.Popen[bytes]", asker: _Asker, floods: int, on_second: Callable[[int], None]
) -> None:
    """Loads a server, lets it come to rest, loads it again and ends it under load."""
    obtained, url = asker.found, asker.url
    seconds, began, going = obtained.seconds, monotonic(), True

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
            obtained.samples.append(await _sample(process, url, began))
            on_second(min(int(monotonic() - began), int(seconds)))

    tasks = [asyncio.create_task(client(number)) for number in range(obtained.clients)]
    tasks.append(asyncio.create_task(watch()))
    flooding = Flooding(url, asker.model, asker.prompts, floods, seconds)
    flooded = asyncio.create_task(flooding.run(lambda: going))
    await asyncio.sleep(seconds)
    going = False
    await asyncio.gather(*tasks, flooded)
    obtained.floods = flooding.result if floods else None
    await asyncio.sleep(1)
    obtained.samples.append(await _sample(process, url, began))
    output = await asyncio.to_thread(counters, url)
    obtained.preemptions, obtained.tokens = int(output["sigma0_preemptions_total"]), int(output["sigma0_tokens_total"])
    await _term(process, asker)


async def _term(process: "subprocess.Popen[bytes]", asker: _Asker) -> None:
    """SIGTERM while requests are under way: all of them are to be answered."""
    obtained = asker.found
    async with httpx.AsyncClient(timeout=600) as connection:
        rngs = [random.Random(-1 - number) for number in range(obtained.clients)]
        before, sent = obtained.left + obtained.refused, asker.sent
        asked = [asyncio.create_task(asker.one(connection, rng)) for rng in rngs]
        while asker.sent < sent + obtained.clients and not all(task.done() for task in asked):
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        obtained.finished_after_term = sum(await asyncio.gather(*asked))
    obtained.lost_after_term = (
        obtained.clients - obtained.finished_after_term - (obtained.left + obtained.refused - before)
    )
    obtained.exit_code = await asyncio.to_thread(process.wait, 60)


async def _sample(process: "subprocess.Popen[bytes]", url: str, began: float) -> Sample:
    output = await asyncio.to_thread(counters, url)
    server = psutil.Process(process.pid)
    memory = sum(one.memory_info().rss for one in (server, *server.children())) / 2**20
    return Sample(
        seconds=monotonic() - began,
        memory_mb=memory,
        pages_used=int(output["sigma0_pages_used"]),
        running=int(output["sigma0_running"]),
        waiting=int(output["sigma0_queue"]),
    )


def lines_of(obtained: Soak) -> list[str]:
    """The result in words."""
    early, late = obtained.memory_mb
    flat = {True: "flat", False: "not flat", None: "too short a load to judge"}[obtained.memory_is_flat]
    beside = [] if obtained.floods is None else [_line_of(obtained.floods)]
    return [
        f"{obtained.asked} requests in {obtained.seconds:g} s from {obtained.clients} clients: "
        f"{obtained.answered} answered, {obtained.left} left by their clients, "
        f"{obtained.refused} refused by the full queue",
        f"wrong {obtained.wrong}, answered twice {obtained.answered_twice}, broken {dict(obtained.broken)}",
        f"{obtained.tokens} tokens, {obtained.preemptions} requests put back; "
        f"{obtained.samples[-1].pages_used} pages held at rest",
        f"memory {early:.1f} MB in the second tenth, {late:.1f} MB in the last: {flat}",
        f"SIGTERM under load: {obtained.finished_after_term} finished, {obtained.lost_after_term} lost, "
        f"exit code {obtained.exit_code}",
        *beside,
    ]


def _line_of(floods: Floods) -> str:
    medians = " and ".join(
        "none" if item is None else f"{item:.0f} ms" for item in (floods.median_ms_without, floods.median_ms_with)
    )
    return (
        f"floods of {floods.clients} clients, half of the time: refused {dict(floods.refused)}, {floods.left} left, "
        f"{floods.half_sent} half sent, broken {dict(floods.broken)}; another client's median without and with them: "
        f"{medians}"
    )
