"""Servers under load, way by way: clients that ask for streamed answers, and rows of what came of it."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import httpx
import numpy as np

from sigma0.bench.core.conditions import Conditions, Figure, describe, utc_now
from sigma0.bench.core.rows import Percentiles, ServeRow, VllmRow
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.serving.servers import counts
from sigma0.calibrate.prompts import encode_prompts
from sigma0.commands.console import progress_bar
from sigma0.config import AfterExit, ExitConfig

# A server that is slower than that is stuck.
TIMEOUT = 600.0

WAYS = ("full", "never", "finish", "drop", "verify")


@dataclass
class Answer:
    """One streamed completion."""

    began: float  # When it was asked for, seconds of `perf_counter`
    arrivals: list[float] = field(default_factory=list)  # When each chunk with tokens came
    tokens: int = 0  # In those chunks
    failure: str | None = None  # What went wrong, if anything did
    text: str = ""  # Of those chunks
    number: int = 0  # Of the request
    ended: float = 0.0  # When the answer was whole


@dataclass(frozen=True)
class Load:
    """What a server did under a load."""

    seconds: float  # From the first request to the last token
    answers: Sequence[Answer]  # Of all requests
    # What the server counted meanwhile; empty where it does not tell
    counts: Mapping[str, float] = field(default_factory=dict)

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
    output = 1000 * np.asarray(seconds, dtype=np.float64)
    p50, p90, p99 = np.percentile(output, (50, 90, 99)).tolist() if len(output) else (0.0, 0.0, 0.0)
    return Percentiles(p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True)
class Ask:
    """What every client asks."""

    url: str  # Of the server, `/v1` left out
    model: str  # Its name there
    prompts: Sequence[str]  # Taken in turn
    max_tokens: int  # Of each answer
    extra: dict[str, Any]  # Further fields of the request
    # What a server at an address has counted so far, by name
    counts: Callable[[str], dict[str, float]] = lambda url: {}


async def drive(ask: Ask, kind: str, amount: float, requests: int, seed: int = 0) -> Load:
    """Asks a server `requests` times.

    Under a "closed" load `amount` clients have each its next request as soon as they have their answer. Under an "open"
    one so many a second come at random, exponential times apart, whether or not earlier ones are answered.
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
    return Load(perf_counter() - began, answers)


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
    output = chunk.get("sigma0", {}).get("choices", [])
    count = sum(len(choice.get("tokens", ())) for choice in output)
    usage = chunk.get("usage")
    if not output and usage:
        count = usage["completion_tokens"] - answer.tokens
    elif not output:
        count = sum(bool(choice.get("delta", {}).get("content")) for choice in chunk.get("choices", []))
    if count:
        answer.tokens += count
        answer.arrivals.append(perf_counter())


# By kind (closed or open) and amount (clients or requests a second) of the load, and by way; one for each round.
Found = Mapping[tuple[str, float], Mapping[str, Sequence[Load]]]


def run(ask: Ask, kind: str, amount: float, requests: int) -> Load:
    """One way under one load, once."""
    before = ask.counts(ask.url)
    load = asyncio.run(drive(ask, kind, amount, requests))
    after = ask.counts(ask.url)
    return replace(load, counts={name: after[name] - before[name] for name in before})


def in_turn(
    asks: Mapping[str, Ask],
    loads: Sequence[tuple[str, float]],
    rounds: int,
    requests: Callable[[str, float], int],
    hidden: bool,
) -> Found:
    """What each way asks under every load, there and back, so that none is always the first; `requests` in a round."""
    result: dict[tuple[str, float], dict[str, list[Load]]] = {load: {way: [] for way in asks} for load in loads}
    runs = [(load, way) for load in loads for number in range(rounds) for way in list(asks)[:: -1 if number % 2 else 1]]
    with progress_bar("runs", len(runs), hidden) as advance:
        for done, (load, way) in enumerate(runs, start=1):
            result[load][way].append(run(asks[way], *load, requests(*load)))
            advance(done)
    return result


def our_configs(current: ExitConfig, wanted: Sequence[str] = WAYS) -> dict[str, ExitConfig]:
    """Full depth, its rule never met, and the three things that become of deeper loops."""
    unknown = sorted(set(wanted) - set(WAYS))
    if unknown or wanted[0] != "full":
        raise ValueError(f"ways {','.join(wanted)!r} must begin with full and be some of {', '.join(WAYS)}")
    afters: tuple[AfterExit, ...] = ("finish", "drop", "verify")
    configs = {"full": ExitConfig(mode="full"), "never": ExitConfig(mode="qexit", q=1.0)}
    configs |= {after: replace(current, after_exit=after) for after in afters}
    return {way: configs[way] for way in wanted}


def our_asks(
    configs: Mapping[str, ExitConfig], url: str, model: str, prompts: Sequence[str], max_tokens: int
) -> dict[str, Ask]:
    """What each of our ways asks of our server; answers go on past their end, where they may well run in circles."""
    extras = {way: {"exit": asdict(config), "on_collapse": "ignore"} for way, config in configs.items()}
    return {way: Ask(url, model, prompts, max_tokens, {"sigma0": extra}, counts) for way, extra in extras.items()}


def questions(looped: Any, tokenizer: Any, model: str, max_tokens: int) -> tuple[list[str], Conditions]:
    """Questions of pocket's world, and the conditions of a run with them."""
    asked = [prompt for prompt in micro_world(64) if not isinstance(prompt.content, str)]
    ids = encode_prompts(looped, tokenizer, asked, max_tokens)
    where = "questions of pocket's world as chat, test split, seed 0"
    conditions = describe(looped, model, where, ids, [None] * len(ids), max_tokens)
    return [str(prompt.content[0]["content"]) for prompt in asked], conditions  # type: ignore[index]


def vllm_version(python: str) -> str:
    """The version of vLLM in an interpreter's environment."""
    code = "import importlib.metadata as m; print(next(m.version(n) for n in m.packages_distributions()['vllm']))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def serve_rows(result: Found, configs: Mapping[str, ExitConfig], conditions: Conditions, runner: str) -> list[ServeRow]:
    """A row for each way and load, ratios over full depth taken round by round; the runner is that of our server."""
    ended, rows = utc_now(), []
    for (kind, amount), by_way in result.items():
        for way, runs in by_way.items():
            output = {
                "time": ended,
                "way": way,
                "runner": runner if way in configs else "eager",
                "exit_config": configs[way].to_dict() if way in configs else None,
                "load": kind,
                "amount": amount,
                "rows_per_second": _rate(runs, "rows"),
                "passes_per_second": _rate(runs, "passes"),
                "between_tokens_ms": runs[-1].between_tokens,
            }
            figures = _figures(runs, by_way["full"])
            rows.append(ServeRow.model_validate({**conditions.model_dump(), **output, **figures}))
    return rows


def vllm_rows(result: Found, conditions: Conditions, version: str, drafts: int, draft_loops: int) -> list[VllmRow]:
    """A row for each way and load, ratios over vLLM at full depth taken round by round."""
    ended, rows = utc_now(), []
    for (_, clients), by_way in result.items():
        expected = {answer.number: answer.text for answer in by_way["full"][-1].answers}
        for way, runs in by_way.items():
            answers = [answer for run in runs for answer in run.answers]
            drafting, last = way == "vllm-drafts", runs[-1]
            steps = last.counts.get("drafts")
            output = {
                "time": ended,
                "way": way,
                "vllm": version,
                "drafts": drafts if drafting else None,
                "draft_loops": draft_loops if drafting else None,
                "accepted_length": 1 + last.counts["accepted_tokens"] / steps if steps else None,
                "clients": int(clients),
                "same_text": sum(answer.text == expected[answer.number] for answer in answers) / len(answers),
                "answer_ms": percentiles([answer.ended - answer.began for answer in last.answers]),
            }
            figures = _figures(runs, by_way["vllm"])
            rows.append(VllmRow.model_validate({**conditions.model_dump(), **output, **figures}))
    return rows


def _figures(runs: Sequence[Load], base: Sequence[Load]) -> dict[str, Any]:
    """What both rows tell of a way."""
    speeds, others = ([run.tokens_per_second for run in item] for item in (runs, base))
    last = runs[-1]
    return {
        "requests": len(last.answers),
        "rounds": len(runs),
        "failed": sum(run.failed for run in runs),
        "tokens_per_second": Figure.spread(speeds),
        "speed_ratio": Figure.spread([speed / other for speed, other in zip(speeds, others, strict=True)]),
        "first_token_ms": last.first_token,
    }


def _rate(runs: Sequence[Load], name: str) -> float | None:
    values = [run.counts[name] / run.seconds for run in runs if name in run.counts]
    return median(values) if values else None
