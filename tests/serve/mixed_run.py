"""A mixed run of 40 requests against an app and an engine that take turns in one thread.

App, parser, ladder and engine share one event loop (`SteppedService`, `Inline`), so that the n-th call of a point
(`tests.serve.faults`) is the same call in every run.
"""

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import sigma0.ladder.endpoint
import sigma0.serve.api.ladder
import sigma0.serve.api.pools
import sigma0.serve.engine.loop
from sigma0.decode.grammar.vocabulary import vocabulary_of
from sigma0.decode.lanes import STAGE
from sigma0.ladder import Always, FidelityLadder, Rung
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from sigma0.serve.api.errors import ErrorBody
from sigma0.serve.engine.client import EngineClient
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.loop import EngineLoop
from sigma0.serve.engine.messages import EngineLimits
from sigma0.serve.engine.wire import EngineFacts
from tests.byte_model import END, byte_model
from tests.schemas import record
from tests.serve.faults import POINTS, PRIVATE, Allocations, Client, Endpoint, Fault

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
BLOCKS, BLOCK, POSITION_BYTES = 20, 4, 2 * 2 * 4 * 2 * 8 * 4
LIMITS = EngineLimits(4, 64, 48, BLOCK, POSITION_BYTES * BLOCK * BLOCKS)
# Seconds after which a run is broken.
LIMIT = 600.0
# Requests of the mixed run that are under way at the same time.
AT_ONCE = 12


class Inline(Executor):
    """Runs what it is given at once, in place of a pool of threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(self, function, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class SteppedService(EngineClient):
    """An engine on the event loop of its callers: a turn of its loop, then some of theirs."""

    def __init__(self, engine: Engine, faults: Sequence[Fault]) -> None:
        super().__init__(EngineFacts.of(engine))
        self._allocations = next((fault for fault in faults if fault.point == "allocation"), None)
        self._loop = EngineLoop(engine, self._inbox, self._receive)

    async def run(self) -> None:
        try:
            while not self._loop.is_over:
                # a run after its fault needs no counting, which is dear here
                fault = self._allocations
                with nullcontext() if fault is None or fault.is_over else Allocations(fault):
                    self._loop.turn(wait=False)
                for _ in range(3):
                    await asyncio.sleep(0)
        finally:
            self._lose("the engine's loop has ended")

    def _join(self) -> None:
        pass


@dataclass(frozen=True)
class Asked:
    path: str
    body: dict[str, Any]
    # the client leaves after so many writes, or, of a whole answer, turns of the event loop; None: it stays
    leaves: int | None = None


@dataclass(frozen=True)
class Outcome:
    # `answer`, `error` (refused or failed, in OpenAI's shape), `cut` (an error event in a stream), `broken` (the
    # connection ended), `left`
    kind: str
    status: int
    # of every choice, by index, as far as they came
    texts: tuple[str, ...] = ()
    code: str | None = None


def _chat(content: str, **body: Any) -> Asked:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 6}
    return Asked("/v1/chat/completions", fields | body)


def _text(prompt: Any, **body: Any) -> Asked:
    return Asked("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 6} | body)


def _exits(**setting: Any) -> dict[str, Any]:
    return {"sigma0": {"exit": setting}, "max_tokens": 16}


def mixed() -> list[Asked]:
    """The 40 requests: chats and texts, whole and streamed, sampled, with grammars, with a ladder, some that leave."""
    streamed, drawn = {"stream": True}, {"temperature": 0.9}
    said = [f"{word} and more of it" for word in ("one", "two", "three", "four", "five")]
    named = {"name": "a", "schema": record({"a": {"type": "boolean"}})}
    up, stays = {"sigma0": {"ladder": "answer"}}, {"sigma0": {"ladder": "answer", "budget": {"calls": 0}}}
    kinds = [
        _chat(said[0]),
        _chat(said[1], **streamed, stream_options={"include_usage": True}),
        _text(said[2], **streamed, logprobs=2),
        _chat(said[3], **drawn, seed=5, n=2),
        _chat(said[4], guided_choice=["yes", "no"], **streamed),
        _chat(said[0], logprobs=True, top_logprobs=2, stop=["q"]),
        _text([said[1], said[2]], seed=1, **drawn, **streamed),
        _chat(said[2], **up),
        replace(_chat(said[3], max_tokens=20, **streamed), leaves=4),
        _text([[5, 6, 7, 8, 9], [9, 8, 7]], max_tokens=4),
        _chat(said[0], max_tokens=12, response_format={"type": "json_schema", "json_schema": named}),
        _chat(said[1], **_exits(mode="margin", theta=0.3, after_exit="verify")),
        _chat(said[2], **_exits(mode="qexit", q=0.5, after_exit="drop"), **streamed),
        _chat(said[3], **stays, **streamed),
        _chat(said[4], repetition_penalty=1.3, guided_regex="[ab]{3,5}", **drawn, seed=2),
        replace(_chat(said[0], max_tokens=20), leaves=30),
        _chat(said[1], sigma0={"exit": {"mode": "full"}, "on_collapse": "tighten"}, max_tokens=16),
        _chat(said[2], n=3, **streamed),
        _chat(said[3], max_tokens=9, cache_salt="salt"),
        _chat(said[4], **up, **streamed),
    ]
    again = [Asked(item.path, {**item.body, "user": "again"}, item.leaves) for item in reversed(kinds)]
    return kinds + again


def _scope(method: str, path: str) -> dict[str, Any]:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    return {**scope, "asgi": {"version": "3.0", "spec_version": "2.4"}}


async def exchange(app: Any, asked: Asked) -> Outcome:
    """Sends a request, and what came of it."""
    client, begun = Client(), False
    is_stream = bool(asked.body.get("stream"))

    async def receive() -> dict[str, Any]:
        nonlocal begun
        if not begun:
            begun = True
            return {"type": "http.request", "body": json.dumps(asked.body).encode(), "more_body": False}
        if asked.leaves is not None and not is_stream:
            for _ in range(asked.leaves):
                await asyncio.sleep(0)
            client.gone.set()
        await client.gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await client.send(message)
        if is_stream and asked.leaves is not None and len(client.messages) > asked.leaves:
            client.gone.set()

    try:
        await app(_scope("POST", asked.path), receive, send)
    except OSError:
        return Outcome("broken", 0)
    if asked.leaves is not None and client.gone.is_set():
        return Outcome("left", 0)
    return outcome_of(client.messages, is_stream)


def outcome_of(messages: list[dict[str, Any]], is_stream: bool) -> Outcome:
    """What a client has seen, of the messages of ASGI."""
    starts = [message for message in messages if message["type"] == "http.response.start"]
    assert len(starts) <= 1, "answered twice"
    ends = [message for message in messages if message["type"] == "http.response.body" and not message.get("more_body")]
    if not starts or not ends:
        return Outcome("broken", 0)
    assert len(ends) == 1 and messages[-1] is ends[0], "written after its end"
    status = starts[0]["status"]
    body = b"".join(message.get("body", b"") for message in messages[1:]).decode()
    if status != 200:
        assert PRIVATE not in body
        return Outcome("error", status, code=ErrorBody.model_validate_json(body).error.code)
    if is_stream:
        return _streamed(body)
    choices = json.loads(body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return Outcome("answer", 200, tuple(_said(choice, "message") for choice in choices))


def _streamed(body: str) -> Outcome:
    blocks = [block for block in body.split("\n\n") if block]
    texts: dict[int, str] = {}
    ended: set[int] = set()
    kind, code = "broken", None
    for block in blocks:
        assert kind == "broken", "an event behind the end"
        if block == "data: [DONE]":
            kind = "answer"
        elif block.startswith("event: error\n"):
            assert PRIVATE not in block
            kind, code = "cut", ErrorBody.model_validate_json(block.partition("data: ")[2]).error.code
        else:
            for choice in json.loads(block.removeprefix("data: "))["choices"]:
                index = choice["index"]
                assert index not in ended, "output of a choice that has ended"
                texts[index] = texts.get(index, "") + _said(choice, "delta")
                ended |= {index} if choice["finish_reason"] else set()
    assert kind != "answer" or ended == set(texts), "an answer without its end"
    return Outcome(kind, 200, tuple(texts[index] for index in sorted(texts)), code)


def _said(choice: dict[str, Any], name: str) -> str:
    return choice.get("text") or choice.get(name, {}).get("content") or ""


@dataclass
class Report:
    """What came of a run: of its requests in their order, and when all was over."""

    outcomes: list[Outcome]
    # of one more request, and of `/health`
    after: Outcome
    health: int
    # by name; empty where nothing is held
    held: dict[str, Any]
    # requests that the metrics have counted
    counted: int
    preemptions: int


AFTERWARDS = _chat("one and more of it", max_tokens=8)


class Bench:
    """A model and a ladder for all runs."""

    def __init__(self) -> None:
        self.model, self.tokenizer = byte_model(3)
        self.tokenizer.chat_template = TEMPLATE
        rungs = [
            Rung.local(self.model, self.tokenizer, "tiny"),
            Rung.endpoint("http://127.0.0.1:9/v1", "far", "key", attempts=2, backoff=0.0, timeout=LIMIT),
        ]
        self.ladder = FidelityLadder(rungs, policy=Always())
        self._vocabulary = vocabulary_of(self.tokenizer, int(self.model.config.vocab_size), [END])
        # what a first run alone makes, none of the others counts
        self.run()

    def count(self) -> tuple[Report, dict[str, Fault]]:
        """The mixed run in which nothing fails, and the calls of every point in it."""
        faults = {point: Fault(point) for point in POINTS}
        return self.run(*faults.values()), faults

    def run(self, *faults: Fault) -> Report:
        """The mixed run, with these faults installed."""
        threads = set(threading.enumerate())
        self._vocabulary._grammars.clear()
        with ExitStack() as patches:
            for module in (sigma0.serve.api.ladder, sigma0.serve.api.pools, sigma0.serve.engine.loop):
                patches.enter_context(patch.object(module, "ThreadPoolExecutor", Inline))
            patches.enter_context(
                patch.object(sigma0.ladder.endpoint.EndpointClient, "_open", lambda self, *_: Endpoint())
            )
            for fault in faults:
                patches.enter_context(fault.installed())
            report = asyncio.run(asyncio.wait_for(self._run(faults), LIMIT))
        if left := set(threading.enumerate()) - threads:
            report.held["threads"] = left
        return report

    async def _run(self, faults: Sequence[Fault]) -> Report:
        tasks = asyncio.all_tasks()
        engine = Engine(self.model, self.tokenizer, "tiny", LIMITS, watch=True)
        service = SteppedService(engine, faults)
        app = create_app(service, ServerSettings(request_timeout=LIMIT), self.ladder)
        running = asyncio.ensure_future(service.run())
        places = asyncio.Semaphore(AT_ONCE)

        async def one(item: Asked) -> Outcome:
            async with places:
                return await exchange(app, item)

        for fault in faults:
            fault.armed = True
        outcomes = await asyncio.gather(*(one(item) for item in mixed()))
        for fault in faults:
            fault.armed = False
        # what was cancelled leaves the engine with the next turns
        for _ in range(20):
            await asyncio.sleep(0)
        _, metrics = await _get(app, "/metrics")
        counts = [line for line in metrics.splitlines() if line.startswith("sigma0_requests_total{")]
        counted = int(sum(float(line.rpartition(" ")[2]) for line in counts))
        health, _ = await _get(app, "/health")
        after = await exchange(app, AFTERWARDS)
        held = held_by(engine, app)
        service.close()
        await asyncio.gather(running, return_exceptions=True)
        if tasks := asyncio.all_tasks() - tasks:
            held["tasks"] = tasks
        return Report(list(outcomes), after, health, held, counted, engine.status().preemptions)


def held_by(engine: Engine, app: Any) -> dict[str, Any]:
    """What an engine and an app still hold, by name."""
    batch, scheduler, status, handler = engine._batch, engine.scheduler, engine.status(), app.state.handler
    lanes = batch.lanes
    result = {
        "requests": len(engine._states),
        "running": status.running,
        "waiting": status.waiting,
        "pages": status.blocks_used,
        "references": sum(engine.pool._references),
        "slots": LIMITS.max_running - len(scheduler._free_slots),
        "free slots twice": len(scheduler._free_slots) - len(set(scheduler._free_slots)),
        "slots of the batch": sum(running is not None for running in batch._running),
        "lanes": int((lanes.table[:-1, STAGE] < lanes.idle).sum()),
        "prefill": len(batch.prefill),
        "grammars": len(batch._grammars._sequences),
        "placed": sum(batch.planes.rooms),
        "open": handler.open,
        "backlog": handler._backlog.waiting,
    }
    return {name: count for name, count in result.items() if count}


async def _get(app: Any, path: str) -> tuple[int, str]:
    client = Client()
    await app(_scope("GET", path), client.gone.wait, client.send)
    start, *rest = client.messages
    return start["status"], b"".join(message.get("body", b"") for message in rest).decode()


def problems(fault: Fault, report: Report, clean: Report) -> list[str]:
    """What is wrong with a run in which a fault was to come, compared to one without."""
    result = [] if fault.calls >= fault.at else [f"{fault.calls} calls"]
    harmed = 0
    for number, (outcome, expected) in enumerate(zip(report.outcomes, clean.outcomes, strict=True)):
        if outcome == expected:
            continue
        harmed += 1
        is_prefix = all(map(str.startswith, expected.texts, outcome.texts)) or expected.kind == "left"
        allowed = {
            "error": outcome.status == 500 and outcome.code == "internal_error",
            "cut": outcome.code == "internal_error" and is_prefix,
            "broken": fault.point == "socket",
        }
        if not allowed.get(outcome.kind, False):
            result.append(f"request {number}: {outcome}")
    # the endpoint is asked once more; what breaks the engine ends those that are in it
    most = 0 if fault.point == "endpoint" else 1 if POINTS[fault.point].alone else AT_ONCE
    if harmed > most:
        result.append(f"{harmed} requests did not get their answers")
    if report.after != clean.after or report.health != 200:
        result.append(f"served on with {report.after}, {report.health}")
    if report.counted != len(report.outcomes):
        result.append(f"{report.counted} requests counted")
    return result + ([f"held: {report.held}"] if report.held else [])
