"""Programs of a decoder's state: compiled functions, and CUDA graphs.

The block of a pass on a CPU is compiled, and a whole step before it is captured. `torch.compile` looks at all that a
function reads again before every call. Here a program is kept by what it was compiled for (`state_key` and what its
caller names), and nothing is asked again: a program that was compiled over one runner's tensors reads those of another
in the same places, since they are reached through its arguments.

A CUDA graph is a function of tensors that stay in place, launched as one. It is called first on a stream of its own, so
that kernels are compiled and libraries take their workspaces; then once more to be captured, which computes nothing and
records every launch. A replay is all launches by one call of the host, over the same tensors.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sigma0.decode.attention import PassRows
from sigma0.decode.logits import stored_parts
from sigma0.decode.model import LoopedModel
from sigma0.errors import first_line

# Positions that a program is compiled for at least; more take another one for each power of two.
_SHORTEST = 1024
_OPTIONS = {
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "cpp_wrapper": True,
    "memory_planning": True,
}
Program = Callable[..., Any]
Progress = Callable[[str], AbstractContextManager[object]]


def no_progress(what: str) -> AbstractContextManager[object]:
    """Announces nothing."""
    return nullcontext()


@dataclass(frozen=True)
class Direct:
    """A program without the frame of Python that dynamo calls it by, which takes a third of the time of a small one."""

    code: Callable[..., Any]  # Takes the inputs of its graph
    constants: Sequence[Any]  # Inputs, where they are the model's and the same in every call; None elsewhere
    # Input and place among the tensors of a call, of which the first is `[R, W]` and the last a plane
    tensors: Sequence[tuple[int, int]]
    sizes: tuple[Sequence[int], Sequence[int]]  # Inputs that are R, and inputs that are the positions of a plane
    offsets: Sequence[tuple[int, int]]  # Input and place of the tensor whose first number is so far into its memory

    @classmethod
    def of(cls, code: Callable[..., Any], inputs: Sequence[Any], state: Sequence[Tensor]) -> "Direct | None":
        """Finds the inputs of a call among its tensors; None where a number may be one or another of theirs."""
        places = {id(tensor): place for place, tensor in enumerate(state)}
        offsets = {int(tensor.storage_offset()): place for place, tensor in enumerate(state)}
        rows, positions = state[0].shape[0], state[-1].shape[1]
        numbers = {at: given for at, given in enumerate(inputs) if isinstance(given, int)}
        known = {rows, positions, *offsets}
        if rows == positions or {rows, positions} & set(offsets) or not known.issuperset(numbers.values()):
            return None
        result = {at: places[id(given)] for at, given in enumerate(inputs) if id(given) in places and at not in numbers}
        return cls(
            code,
            [None if at in result or at in numbers else given for at, given in enumerate(inputs)],
            list(result.items()),
            ([at for at in numbers if numbers[at] == rows], [at for at in numbers if numbers[at] == positions]),
            [(at, offsets[given]) for at, given in numbers.items() if given in offsets],
        )

    def __call__(self, state: Sequence[Tensor]) -> Any:
        """The results for the tensors of a call, in the order in which they were found."""
        given = list(self.constants)
        for at, place in self.tensors:
            given[at] = state[place]
        for size, those in zip((state[0].shape[0], state[-1].shape[1]), self.sizes, strict=True):
            for at in those:
                given[at] = _number(size)
        for at, place in self.offsets:
            given[at] = _number(int(state[place].storage_offset()))
        return self.code(*given)


@lru_cache(maxsize=1024)
def _number(value: int) -> Tensor:
    """A number as generated code reads it; of a plain one it makes a tensor in every call."""
    return torch.tensor(value)


class ModelPrograms:
    """The programs of a model; kept with it, and not copied with it."""

    def __init__(self) -> None:
        self.programs: dict[Hashable, Program] = {}
        self.direct: dict[Hashable, Direct] = {}
        self._layout: Hashable = None

    def keep_for(self, layout: Hashable) -> None:
        """Drops programs that were compiled for another layout of the model's weights."""
        if layout != self._layout:
            self.programs.clear()
            self.direct.clear()
            self._layout = layout

    def call(
        self, key: Hashable, function: Callable[..., Any], *given: Any, state: Sequence[Tensor] | None = None
    ) -> Any:
        """Calls a function that is compiled for a key; arguments of it are all that it reads.

        Args:
            key: What it was compiled for.
            function: Compiled at the first call.
            *given: Its arguments.
            state: Tensors among what it reads that are others in other calls, as `Direct` takes them; None where that
                is not known of all.
        """
        known = self.programs.get(key)
        if known is not None:
            return known(*given)
        # what is compiled is kept by the code object, so one of its own for each program
        current = FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
        )
        unguarded: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}
        record: list[tuple[Any, ...]] = []

        def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
            code = generate_code(graph, examples)

            def call(*inputs: Any) -> Any:
                outputs = code(*inputs)
                if key not in self.programs:
                    record.append((code, inputs, outputs))
                return outputs

            return call

        program = torch.compile(current, backend=backend, fullgraph=True, dynamic=False, options=unguarded)
        # sizes that are the same in this run need not be in another
        with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            results = program(*given)
        self.programs[key] = program
        if state is not None and len(record) == 1:
            code, inputs, outputs = record.pop()
            direct = Direct.of(code, inputs, state)
            if direct is not None and len(outputs) == len(results) and all(map(is_, outputs, results)):
                self.direct[key] = direct
        record.clear()
        return results

    def __reduce__(self) -> tuple[type["ModelPrograms"], tuple[()]]:
        return ModelPrograms, ()


def programs_of(model: Any) -> ModelPrograms:
    """The programs of a model."""
    kept: ModelPrograms | None = vars(model).get("_compiled_programs")
    if kept is None:
        kept = vars(model)["_compiled_programs"] = ModelPrograms()
    return kept


def generate_code(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """A graph as machine code."""
    call: Callable[..., Any] = torch._inductor.compile(graph, examples, options=_OPTIONS)
    return call


class CompiledLoop:
    """`LoopedModel.loop` of the rows of a pass, and its norm, compiled for one row and for any number from two on.

    Args:
        model: On a CPU.
        progress: Called with what is about to be compiled; the context lasts until it is.
        give_up: Called with the reason once passes run as they are.
    """

    def __init__(self, model: LoopedModel, progress: Progress, give_up: Callable[[str], None]) -> None:
        self._model, self._progress, self._give_up = model, progress, give_up
        self._programs = programs_of(model)
        # tells them from others that take their place
        self._weights = tuple(map(id, model.parameters())) if isinstance(model, nn.Module) else ()
        self._most, self._gave_up = 0, False
        self._direct: dict[Hashable, Direct | None] = {}
        self._raw: Tensor | None = None
        self._normed: Tensor | None = None

    def norm(self, raw: Tensor) -> Tensor:
        """See `LoopedModel.norm`; of what the last call has returned it is known."""
        known = self._normed if raw is self._raw else None
        return self._model.norm(raw) if known is None else known

    def __call__(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """See `LoopedModel.loop`."""
        self._raw = None
        if self._gave_up:
            return self._model.loop(hidden, rows)
        if rows.longest > self._most:
            self._most = max(_SHORTEST, 1 << (rows.longest - 1).bit_length())
            self._programs.keep_for(self._model.reserve_positions(self._most, hidden))
        kind = len(hidden) > 1, rows.fixed, state_key([hidden[:1]])
        key = "loop", *kind, self._most, self._weights, torch.get_num_threads()
        direct = self._direct.get(key)
        if direct is not None:
            self._raw, self._normed = direct([hidden, *rows.by_row, *rows.planes])
            return self._raw
        if key in self._programs.programs:
            self._raw, self._normed = self._programs.call(key, _loop, self._model, hidden, rows)
            if key not in self._direct:
                self._direct[key] = self._still_direct(key)
            return self._raw
        for part in (hidden, *rows.by_row) if len(hidden) > 1 else ():
            torch._dynamo.mark_dynamic(part, 0)
        for part in rows.planes:
            torch._dynamo.mark_dynamic(part, 1)
        try:
            with self._progress("a loop of one row" if len(hidden) == 1 else "a loop of some rows"):
                state = [hidden, *rows.by_row, *rows.planes] if rows.is_plain else None
                self._raw, self._normed = self._programs.call(key, _loop, self._model, hidden, rows, state=state)
            return self._raw
        except Exception as error:  # whatever dynamo, inductor or a compiler may raise
            # dynamo wraps what a backend raised
            reason = f"a loop could not be compiled: {first_line(getattr(error, 'inner_exception', error))}"
            self._gave_up = True
            self._give_up(reason)
            warnings.warn(reason, stacklevel=2)
            return self._model.loop(hidden, rows)

    def _still_direct(self, key: Hashable) -> Direct | None:
        """A program that may be called directly, since what it took for constants still is the model's."""
        direct = self._programs.direct.get(key)
        if direct is None:
            return None
        known = set(map(id, model_tensors(self._model)))
        return direct if all(current is None or id(current) in known for current in direct.constants) else None


def _loop(model: LoopedModel, hidden: Tensor, rows: PassRows) -> tuple[Tensor, Tensor]:
    raw = model.loop(hidden, rows)
    return raw, model.norm(raw)


def tensors_of(thing: Any) -> list[Tensor]:
    """The tensors that an object of the decoder holds, in the order of its attributes."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, list | tuple):
        return [tensor for part in thing for tensor in tensors_of(part)]
    if type(thing).__module__.startswith("sigma0.") and hasattr(thing, "__dict__"):
        return [tensor for part in vars(thing).values() for tensor in tensors_of(part)]
    return []


def model_tensors(model: Any) -> list[Tensor]:
    """Weights and buffers of a model, and what its modules keep beside them, such as rotary tables."""
    if not isinstance(model, nn.Module):
        return []
    beside = [part for module in model.modules() for part in vars(module).values() if not isinstance(part, nn.Module)]
    weights = list(model.parameters())
    parts = [part for weight in weights for part in stored_parts(weight)]
    return [*weights, *parts, *model.buffers(), *tensors_of(beside)]


def state_key(state: Sequence[Tensor]) -> Hashable:
    """Shapes, strides and dtypes."""
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in state)


Function = Callable[[], tuple[Tensor, ...]]


class Captured(NamedTuple):
    """What runs a captured function, and what that returns, in tensors that the next replay writes again."""

    replay: Callable[[], None]
    outputs: tuple[Tensor, ...]


# Makes one launch of a function, which must change nothing that matters when it is called for it; raises a RuntimeError
# that names the operation that a graph cannot hold.
Capture = Callable[[Function], Captured]


class StepGraph(NamedTuple):
    """A captured step, the tensors that it works on and that a run may replace, and the model's, which it keeps."""

    captured: Captured
    parts: tuple[object, ...]
    constants: Sequence[Tensor]


class StepGraphs:
    """What captures steps, and those that were, by what they were captured for."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.steps: dict[Hashable, StepGraph] = {}
        self._planes: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a cache, whose tensors it does not share, makes its own."""
        return None

    def evict_unless(self, planes: Tensor) -> None:
        """Drops the steps over other planes, whose memory they would keep."""
        if planes is not self._planes:
            self.steps.clear()
        self._planes = planes


class CudaCapture:
    """Captures CUDA graphs, whose memory is one pool.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, function: Function) -> Captured:
        """The function as one launch; see `Capture`."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            function()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        called = LastOperation()
        try:
            # only this thread's calls belong to the graph, and only they can break it
            held = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            with held, called:
                outputs = function()
        except RuntimeError as error:
            raise RuntimeError(f"a CUDA graph cannot hold {called.name}: {first_line(error)}") from error
        return Captured(graph.replay, outputs)


class LastOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the name of the operation that was called last."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = "its first operation"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        self.name = str(func)
        return func(*args, **(kwargs or {}))
