"""Fault injection, SQLite's way: a mixed run of 40 requests in which the n-th call of one point fails.

A run is deterministic: app, parser, ladder and engine take turns in one thread (`SteppedService`, `Inline`), so that
the n-th call is the same call in every run. `Fault` counts calls, and notes for each where it came from (its phase: the
innermost frames of the package), so that runs can be had for every call, or for one call of each phase.

| point | fails at |
|---|---|
| allocation | every operation of torch in a turn of the engine that makes a tensor, with torch's own out-of-memory error |
| page | taking and finding blocks of K/V |
| tokeniser | encoding, decoding a prompt, each new token's text, the tokens of log-probabilities |
| template | rendering the chat template |
| socket | each write to a client |
| step | the passes, and what is done with what came out of them |
| grammar | compiling, copying, masking, taking and giving back |
| endpoint | asking a ladder's endpoint, and reading each piece of its answer |
"""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

import sigma0.ladder.endpoint
import sigma0.serve.api.ladder
import sigma0.serve.api.pools
import sigma0.serve.engine.loop
from sigma0.decode.detokenizer import IncrementalDetokenizer
from sigma0.decode.grammar.compiled import CompiledGrammar, Matcher
from sigma0.decode.grammar.vocabulary import Vocabulary
from sigma0.decode.lanes import STAGE
from sigma0.ladder import Always, FidelityLadder, Rung
from sigma0.models.special_tokens import TextEncoder
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from sigma0.serve.api.errors import ErrorBody
from sigma0.serve.engine.batch import RunningBatch
from sigma0.serve.engine.block_pool import BlockPool
from sigma0.serve.engine.client import EngineClient
from sigma0.serve.engine.engine import Engine, EngineLimits
from sigma0.serve.engine.loop import EngineLoop
from sigma0.serve.engine.outputs import OutputProcessor
from sigma0.serve.engine.scheduler import Scheduler
from sigma0.serve.engine.wire import EngineFacts
from tests.byte_model import byte_model

PRIVATE = "what the prompt says"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
BLOCKS, BLOCK, POSITION_BYTES = 20, 8, 2 * 2 * 4 * 2 * 8 * 4
LIMITS = EngineLimits(4, 64, 48, BLOCK, POSITION_BYTES * BLOCK * BLOCKS)
PACKAGE = f"{Path(sigma0.__file__).parent}/"
# Requests of the mixed run that are under way at the same time.
AT_ONCE = 12
# Frames of the package that a phase is told by.
FRAMES = 5


class Client:
    """What writes to a client: the point of socket writes."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    def write(self, message: dict[str, Any]) -> None:
        """Sends it."""
        self.messages.append(message)

    async def send(self, message: dict[str, Any]) -> None:
        """Of ASGI; a write that fails ends the connection."""
        if self.gone.is_set():
            return
        try:
            self.write(message)
        except OSError:
            self.gone.set()
            raise
        await asyncio.sleep(0)


class Endpoint:
    """An endpoint in this process, in place of the `openai` client of a rung."""

    def __init__(self) -> None:
        self.chat = SimpleNamespace(completions=self)

    def create(self, **request: Any) -> "Endpoint":
        """Begins an answer."""
        self._pieces = iter([("the ", None), ("endpoint", None), ("", "stop")])
        return self

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def close(self) -> None:
        """Nothing is open."""

    def __iter__(self) -> "Endpoint":
        return self

    def __next__(self) -> Any:
        text, ends = next(self._pieces)
        choice = SimpleNamespace(index=0, delta=SimpleNamespace(content=text), finish_reason=ends)
        return SimpleNamespace(choices=[choice])


@dataclass(frozen=True)
class Point:
    """What fails.

    Attributes:
        places: Methods, each a class and a name; none: the operations of torch.
        error: Makes what is raised.
        alone: Whether the fault belongs to one request, and all others have to be answered as ever.
    """

    places: tuple[tuple[Any, str], ...]
    error: Callable[[], Exception]
    alone: bool


def _broken() -> Exception:
    return RuntimeError(PRIVATE)


POINTS = {
    "allocation": Point((), lambda: torch.OutOfMemoryError(PRIVATE), False),
    "page": Point(
        ((BlockPool, "allocate_run"), (BlockPool, "match_prefix"), (BlockPool, "register"), (BlockPool, "free")),
        lambda: MemoryError(PRIVATE),
        False,
    ),
    "tokeniser": Point(
        (
            (TextEncoder, "text"),
            (TextEncoder, "messages"),
            (IncrementalDetokenizer, "__init__"),
            (IncrementalDetokenizer, "add"),
            (IncrementalDetokenizer, "end"),
            (PreTrainedTokenizerFast, "_decode"),
            (PreTrainedTokenizerFast, "convert_ids_to_tokens"),
        ),
        _broken,
        True,
    ),
    "template": Point(((PreTrainedTokenizerFast, "apply_chat_template"),), _broken, True),
    "socket": Point(((Client, "write"),), lambda: BrokenPipeError(PRIVATE), True),
    "step": Point(
        (
            (Scheduler, "schedule"),
            (Scheduler, "update"),
            (RunningBatch, "apply"),
            (RunningBatch, "run"),
            (RunningBatch, "remove"),
            (OutputProcessor, "known"),
            (OutputProcessor, "note_left"),
        ),
        _broken,
        False,
    ),
    "grammar": Point(
        (
            (Vocabulary, "compile"),
            (CompiledGrammar, "matcher"),
            (Matcher, "mask"),
            (Matcher, "take"),
            (Matcher, "check"),
            (Matcher, "back_to"),
        ),
        _broken,
        True,
    ),
    "endpoint": Point(((Endpoint, "__init__"), (Endpoint, "create"), (Endpoint, "__next__")), _broken, True),
}


@dataclass
class Fault:
    """The n-th call of a point fails, once.

    Attributes:
        point: Name of the point.
        at: n, from 1; 0: none fails, and all are counted.
        calls: Calls so far.
        phases: Where each came from; of a run in which none fails.
        armed: Whether calls count.
    """

    point: str
    at: int = 0
    calls: int = 0
    phases: list[tuple[str, ...]] = field(default_factory=list)
    armed: bool = False

    def count(self) -> None:
        """Counts a call, and raises if it is the one."""
        if not self.armed:
            return
        self.calls += 1
        if not self.at:
            self.phases.append(_phase())
        if self.calls == self.at:
            raise POINTS[self.point].error()

    @contextmanager
    def installed(self):
        """In place as long as the context lasts."""
        with ExitStack() as patches:
            for owner, name in POINTS[self.point].places:
                patches.enter_context(patch.object(owner, name, self._counted(getattr(owner, name))))
            yield self

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return method(*args, **kwargs)

        return counted


class Allocations(TorchDispatchMode):
    """Counts the operations that make a tensor."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _allocates(func):
            self._fault.count()
        return func(*args, **(kwargs or {}))


@cache
def _allocates(operation: Any) -> bool:
    returns = operation._schema.returns
    return bool(returns) and all(value.alias_info is None for value in returns)


def _phase() -> tuple[str, ...]:
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < FRAMES:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            found.append(f"{path.removeprefix(PACKAGE)}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(found)


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

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


class SteppedService(EngineClient):
    """An engine on the event loop of its callers: a turn of its loop, then some of theirs."""

    def __init__(self, engine: Engine, fault: Fault) -> None:
        super().__init__(EngineFacts.of(engine, "tiny"))
        self.engine, self._fault = engine, fault
        self._loop = EngineLoop(engine, self._inbox, self._receive)

    async def run(self) -> None:
        """Until it is drained, or breaks."""
        try:
            while not self._loop.is_over:
                if self._fault.point == "allocation" and self._fault.armed:
                    with Allocations(self._fault):
                        self._loop.turn(wait=False)
                else:
                    self._loop.turn(wait=False)
                for _ in range(3):
                    await asyncio.sleep(0)
        finally:
            self._lose("the engine's loop has ended")

    def _join(self) -> None:
        pass


@dataclass(frozen=True)
class Asked:
    """A request of the mixed run.

    Attributes:
        path: Where to.
        body: What.
        leaves: The client leaves after so many writes, or, of a whole answer, turns of the event loop; None: it stays.
    """

    path: str
    body: dict[str, Any]
    leaves: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a client has seen.

    Attributes:
        kind: `answer`, `error` (refused or failed, in OpenAI's shape), `cut` (an error event in a stream), `broken`
            (the connection ended), `left`.
        status: Of the response; 0 where none came.
        texts: Of every choice, by index, as far as they came.
        code: Of the error.
    """

    kind: str
    status: int
    texts: tuple[str, ...] = ()
    code: str | None = None


def _chat(content: str, **body: Any) -> Asked:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 6}
    return Asked("/v1/chat/completions", fields | body)


def _text(prompt: Any, **body: Any) -> Asked:
    return Asked("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 6} | body)


def _leaving(asked: Asked, after: int) -> Asked:
    return Asked(asked.path, asked.body, after)


def mixed() -> list[Asked]:
    """The 40 requests: chats and texts, whole and streamed, sampled, with grammars, with a ladder, and some that leave."""
    streamed, drawn = {"stream": True}, {"temperature": 0.9}
    said = [f"{word} and more of it" for word in ("one", "two", "three", "four", "five")]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
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
        _leaving(_chat(said[3], max_tokens=20, **streamed), 4),
        _text([[5, 6, 7, 8, 9], [9, 8, 7]], max_tokens=4),
        _chat(said[0], response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}),
        _chat(said[1], sigma0={"exit": {"mode": "margin", "theta": 0.3, "after_exit": "verify"}}, max_tokens=9),
        _chat(said[2], sigma0={"exit": {"mode": "qexit", "q": 0.5, "after_exit": "drop"}}, **streamed),
        _chat(said[3], **stays, **streamed),
        _chat(said[4], repetition_penalty=1.3, guided_regex="[ab]{3,5}", **drawn, seed=2),
        _leaving(_chat(said[0], max_tokens=20), 30),
        _chat(said[1], sigma0={"exit": {"mode": "full"}, "on_collapse": "tighten"}, max_tokens=9),
        _chat(said[2], n=3, **streamed),
        _chat(said[3], max_tokens=9, cache_salt="salt"),
        _chat(said[4], **up, **streamed),
    ]
    again = [Asked(each.path, {**each.body, "user": "again"}, each.leaves) for each in reversed(kinds)]
    return kinds + again


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

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": asked.path, "query_string": b"", "headers": headers}
    try:
        await app({**scope, "asgi": {"version": "3.0", "spec_version": "2.4"}}, receive, send)
    except OSError:
        return Outcome("broken", 0)
    if asked.leaves is not None and client.gone.is_set():
        return Outcome("left", 0)
    return _outcome(client.messages, is_stream)


def _outcome(messages: list[dict[str, Any]], is_stream: bool) -> Outcome:
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
    """What came of a run.

    Attributes:
        outcomes: Of the requests, in their order.
        after: Of the same request, sent when all was over.
        health: Status of `/health` then.
        held: What is still held then, by name; empty where nothing is.
        counted: Requests that the metrics have counted.
        fault: As it was installed.
    """

    outcomes: list[Outcome]
    after: Outcome
    health: int
    held: dict[str, Any]
    counted: int
    fault: Fault


AFTERWARDS = _chat("one and more of it", max_tokens=8)


class Bench:
    """A model and a ladder for all runs."""

    def __init__(self) -> None:
        self.model, self.tokenizer = byte_model(3)
        self.tokenizer.chat_template = TEMPLATE
        rungs = [
            Rung.local(self.model, self.tokenizer, "tiny"),
            Rung.endpoint("http://127.0.0.1:9/v1", "far", "key", attempts=2, backoff=0.0),
        ]
        self.ladder = FidelityLadder(rungs, policy=Always())

    def run(self, point: str, at: int = 0, asked: list[Asked] | None = None) -> Report:
        """The mixed run, in which the n-th call of a point fails; 0: none."""
        threads = set(threading.enumerate())
        fault = Fault(point, at)
        with ExitStack() as patches:
            for module in (sigma0.serve.api.ladder, sigma0.serve.api.pools, sigma0.serve.engine.loop):
                if hasattr(module, "ThreadPoolExecutor"):
                    patches.enter_context(patch.object(module, "ThreadPoolExecutor", Inline))
            patches.enter_context(
                patch.object(sigma0.ladder.endpoint.Asker, "_open", lambda self, limit: Endpoint())
            )
            patches.enter_context(fault.installed())
            report = asyncio.run(asyncio.wait_for(self._run(fault, mixed() if asked is None else asked), 120))
        if left := set(threading.enumerate()) - threads:
            report.held["threads"] = left
        return report

    async def _run(self, fault: Fault, asked: list[Asked]) -> Report:
        tasks = asyncio.all_tasks()
        engine = Engine(self.model, self.tokenizer, "tiny", LIMITS, watch=True)
        service = SteppedService(engine, fault)
        app = create_app(service, ServerSettings(request_timeout=60.0), self.ladder)
        running = asyncio.ensure_future(service.run())
        places = asyncio.Semaphore(AT_ONCE)

        async def one(each: Asked) -> Outcome:
            async with places:
                return await exchange(app, each)

        fault.armed = True
        outcomes = await asyncio.gather(*(one(each) for each in asked))
        fault.armed = False
        # what was cancelled leaves the engine with the next turns
        for _ in range(20):
            await asyncio.sleep(0)
        counted, health = await _metrics(app), await _status(app, "/health")
        after = await exchange(app, AFTERWARDS)
        held = held_by(engine, app)
        await service.drain()
        await asyncio.gather(running, return_exceptions=True)
        if tasks := asyncio.all_tasks() - tasks:
            held["tasks"] = tasks
        return Report(list(outcomes), after, health, held, counted, fault)


def held_by(engine: Engine, app: Any) -> dict[str, Any]:
    """What an engine and an app still hold, by name."""
    batch, scheduler, status, handler = engine._batch, engine.scheduler, engine.status(), app.state.handler
    lanes = batch.lanes
    found = {
        "requests": len(engine._states),
        "running": status.running,
        "waiting": status.waiting,
        "pages": status.blocks_used,
        "references": sum(engine.pool._references),
        "slots": LIMITS.max_running - len(scheduler._free_slots),
        "free slots twice": len(scheduler._free_slots) - len(set(scheduler._free_slots)),
        "slots of the batch": sum(state is not None for state in batch.states),
        "lanes": int((lanes.table[:-1, STAGE] < lanes.idle).sum()),
        "prefill": len(batch.prefill),
        "grammars": len(batch._grammars._sequences),
        "placed": sum(batch._planes.rooms),
        "open": handler.open,
        "backlog": handler._backlog.waiting,
    }
    return {name: count for name, count in found.items() if count}


async def _get(app: Any, path: str) -> tuple[int, bytes]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost")]
    await app({"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def _status(app: Any, path: str) -> int:
    return (await _get(app, path))[0]


async def _metrics(app: Any) -> int:
    lines = (await _get(app, "/metrics"))[1].decode().splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("sigma0_requests_total{")))
