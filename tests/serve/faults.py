"""Fault injection, SQLite's way: the n-th call of one point fails, once, in the mixed run of `tests.serve.mixed_run`.

| point | fails at |
|---|---|
| allocation | each operation of torch in a turn of the engine that makes a tensor, with torch's out-of-memory error |
| page | taking, finding, registering and freeing blocks of K/V |
| tokeniser | encoding, decoding a prompt, each new token's text, the tokens of log-probabilities |
| template | rendering the chat template |
| socket | each write to a client |
| step | the parts of a pass, and what is done with what came out of it |
| grammar | compiling, copying, masking, taking and giving back |
| endpoint | asking a ladder's endpoint, and reading each piece of its answer |
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import zip_longest
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
            (Scheduler, "remove"),
            (RunningBatch, "enter"),
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
        branch: Called with the number of each call; where it says so, that call is the n-th.
    """

    point: str
    at: int = 0
    calls: int = 0
    phases: list[tuple[str, ...]] = field(default_factory=list)
    armed: bool = False
    branch: Callable[[int], bool] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def is_over(self) -> bool:
        """Whether it has come."""
        return 0 < self.at <= self.calls

    def count(self) -> None:
        """Counts a call, and raises if it is the one."""
        if not self.armed:
            return
        with self._lock:
            self.calls += 1
            call = self.calls
        if not self.at:
            self.phases.append(_phase())
            if self.branch is not None and self.branch(call):
                self.at = call
        if call == self.at:
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


def spread(phases: list[tuple[str, ...]], most: int) -> list[int]:
    """Calls to fail, from 1: all where there are no more than `most`, else of every phase the first, then the last ...

    Args:
        phases: Of each call, in their order.
        most: How many are taken; where there are more phases, from every so manieth.
    """
    if len(phases) <= most:
        return list(range(1, len(phases) + 1))
    of_phase: dict[tuple[str, ...], list[int]] = {}
    for call, phase in enumerate(phases, start=1):
        of_phase.setdefault(phase, []).append(call)
    turns = [_ends_first(calls) for calls in of_phase.values()]
    if len(turns) > most:
        turns = [turns[number * len(turns) // most] for number in range(most)]
    chosen = [call for turn in zip_longest(*turns) for call in turn if call is not None]
    return sorted(chosen[:most])


def _ends_first(calls: list[int]) -> list[int]:
    """The first one, the last one, the middle, and the middles of what is between."""
    ordered, spans = [calls[0], *calls[-1:]] if len(calls) > 1 else [calls[0]], [(0, len(calls) - 1)]
    while spans:
        low, high = spans.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            ordered.append(calls[middle])
            spans += [(low, middle), (middle, high)]
    return ordered
