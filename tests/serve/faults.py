"""Fault injection, SQLite's way: the n-th call of one point fails, once, in the mixed run of `mixed_run.py`."""

import asyncio
import sys
from collections.abc import Callable
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

import sigma0
from sigma0.decode.batch import RunningBatch
from sigma0.decode.detokenizer import IncrementalDetokenizer
from sigma0.decode.grammar.compiled import CompiledGrammar, Matcher
from sigma0.decode.grammar.vocabulary import Vocabulary
from sigma0.models.special_tokens import TextEncoder
from sigma0.serve.engine.block_pool import BlockPool
from sigma0.serve.engine.outputs import OutputProcessor
from sigma0.serve.engine.scheduler import Scheduler

# In the message of every exception, and in no answer.
PRIVATE = "what the prompt says"
PACKAGE = f"{Path(sigma0.__file__).parent}/"
# Frames of the package that a phase is told by.
FRAMES = 5


class Client:
    """What writes to a client: the point of socket writes."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    def write(self, message: dict[str, Any]) -> None:
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
        self._pieces = iter([("the ", None), ("endpoint", None), ("", "stop")])
        return self

    def __enter__(self) -> "Endpoint":
        return self

    __iter__ = __enter__

    def close(self, *exception: object) -> None:
        pass

    __exit__ = close

    def __next__(self) -> Any:
        text, ends = next(self._pieces)
        choice = SimpleNamespace(index=0, delta=SimpleNamespace(content=text), finish_reason=ends)
        return SimpleNamespace(choices=[choice])


@dataclass(frozen=True)
class Point:
    # methods by their class; none: the operations of torch
    places: dict[Any, tuple[str, ...]]
    error: Callable[[], Exception]
    # whether the fault belongs to one request, and all others have to be answered as ever
    alone: bool


def _broken() -> Exception:
    return RuntimeError(PRIVATE)


POINTS = {
    "allocation": Point({}, lambda: torch.OutOfMemoryError(PRIVATE), False),
    "grammar": Point(
        {Vocabulary: ("compile",), CompiledGrammar: ("matcher",), Matcher: ("mask", "take", "check", "back_to")},
        _broken,
        True,
    ),
    "page": Point(
        {BlockPool: ("allocate_run", "match_prefix", "register", "free")}, lambda: MemoryError(PRIVATE), False
    ),
    "tokeniser": Point(
        {
            TextEncoder: ("text", "messages"),
            IncrementalDetokenizer: ("__init__", "add", "end"),
            PreTrainedTokenizerFast: ("_decode", "convert_ids_to_tokens"),
        },
        _broken,
        True,
    ),
    "template": Point({PreTrainedTokenizerFast: ("apply_chat_template",)}, _broken, True),
    "socket": Point({Client: ("write",)}, lambda: BrokenPipeError(PRIVATE), True),
    "step": Point(
        {
            Scheduler: ("schedule", "remove"),
            RunningBatch: ("enter", "run", "remove"),
            OutputProcessor: ("known", "note_left"),
        },
        _broken,
        False,
    ),
    "endpoint": Point({Endpoint: ("__init__", "create", "__next__")}, _broken, True),
}


@dataclass
class Fault:
    point: str
    # n, from 1; 0: none fails, and all are counted, with the phase that each came from
    at: int = 0
    calls: int = 0
    phases: list[tuple[str, ...]] = field(default_factory=list)
    # whether calls count
    armed: bool = False

    @property
    def is_over(self) -> bool:
        return 0 < self.at <= self.calls

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
        with ExitStack() as patches:
            for owner, names in POINTS[self.point].places.items():
                for name in names:
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
    frame, result = sys._getframe(1), []
    while frame is not None and len(result) < FRAMES:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            result.append(f"{path.removeprefix(PACKAGE)}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(result)


def spread(phases: list[tuple[str, ...]], most: int) -> list[int]:
    """Calls to fail, from 1: the first of every phase, then the last, then others; of many phases, every so manieth."""
    calls = range(1, len(phases) + 1)
    last = dict(zip(phases, calls, strict=True))
    first = dict(zip(reversed(phases), reversed(calls), strict=True))
    ends = [end[phase] for end in (first, last) for phase in sorted(first, key=first.get)]
    some = calls[:: max(1, len(phases) // most)]
    if len(first) > most:
        ends = [ends[number * len(first) // most] for number in range(most)]
    return sorted([*dict.fromkeys([*ends, *some])][:most])
