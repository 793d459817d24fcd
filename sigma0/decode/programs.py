"""Functions of a decoder's state, compiled once and then called with their tensors directly.

`torch.compile` finds the tensors that a function reads by walking its objects, and looks at all of them again before
every call. Here that walk is recorded: the compiled graph is called with the tensors that it took the first time, and
those that are some runner's own state are replaced by another runner's, in the same places.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

# Shapes are the runner's business (`state_key`), so nothing is checked again in every call.
_OPTIONS = {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}


class BoundProgram:
    """A program with the state of one runner.

    Args:
        call: The compiled graph.
        inputs: What it is called with; None where `given` belongs.
        given: Place among the inputs, and which argument stands there.
        outputs: Which output of the graph each result is.
    """

    def __init__(
        self, call: Callable[..., Any], inputs: list[Any], given: list[tuple[int, int]], outputs: list[int]
    ) -> None:
        self._call, self._inputs, self._given, self._outputs = call, inputs, given, outputs

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """The results of the function, in its order."""
        inputs = self._inputs
        for place, which in self._given:
            inputs[place] = given[which]
        outputs = self._call(*inputs)
        return [outputs[which] for which in self._outputs]


@dataclass(frozen=True)
class StateProgram:
    """A program that any runner may use whose state has the same `state_key`.

    Attributes:
        call: The compiled graph.
        constants: What it is called with; None where a runner's state or an argument belongs.
        state: Place among the inputs, and which tensor of the state stands there.
        given: As `state`, for arguments.
        sizes: Places of the number of positions in a plane.
        outputs: Which output of the graph each result is.
    """

    call: Callable[..., Any]
    constants: list[Any]
    state: list[tuple[int, int]]
    given: list[tuple[int, int]]
    sizes: list[int]
    outputs: list[int]

    def bind(self, state: Sequence[Tensor], positions: int) -> BoundProgram:
        """The program over this state, whose planes have so many positions."""
        inputs = list(self.constants)
        for place, which in self.state:
            inputs[place] = state[which]
        for place in self.sizes:
            inputs[place] = positions
        return BoundProgram(self.call, inputs, self.given, self.outputs)


class ModelPrograms:
    """The programs of a model; kept with it, and not copied with it."""

    def __init__(self) -> None:
        self.programs: dict[Hashable, StateProgram] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelPrograms":
        return ModelPrograms()

    def __reduce__(self) -> tuple[type["ModelPrograms"], tuple[()]]:
        return ModelPrograms, ()


def generate_code(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """A graph as machine code."""
    call: Callable[..., Any] = torch._inductor.compile(graph, examples, options=_OPTIONS)
    return call


def compile_program(
    function: Callable[..., Sequence[Tensor]],
    given: Sequence[Tensor],
    state: Sequence[Tensor],
    planes: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> tuple[StateProgram, list[Tensor]]:
    """Compiles a function as one graph of fixed shapes, but for the number of positions in a plane, and runs it.

    Args:
        function: Of the given tensors, and of a state that it knows; it changes that in place, and returns none of it.
        given: Arguments.
        state: Tensors of the state.
        planes: Those of them that are `[planes, positions, ...]` of any number of positions, the same for all.
        constants: Tensors that are the same for every state: the model's.

    Returns:
        The program, and the results of this first run.

    Raises:
        RuntimeError: If the function reads any other tensor: another runner would read it too.
    """
    recorded: dict[str, Any] = {}

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        call = generate_code(graph, examples)

        def run(*inputs: Any) -> Any:
            recorded["call"], recorded["inputs"], recorded["outputs"] = call, inputs, call(*inputs)
            return recorded["outputs"]

        return run

    for tensor in planes:
        torch._dynamo.mark_dynamic(tensor, 1)
    # what is compiled is kept by the code object, so one of its own for each program
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__)
    results = list(torch.compile(own, backend=backend, fullgraph=True, dynamic=False)(*given))
    inputs = list(recorded["inputs"])
    places = {id(tensor): which for which, tensor in enumerate(state)}
    arguments = {id(tensor): which for which, tensor in enumerate(given)}
    known = set(map(id, constants))
    outputs = {id(output): which for which, output in enumerate(recorded["outputs"])}
    of_state, of_given, sizes = [], [], []
    for place, value in enumerate(inputs):
        if id(value) in arguments:
            of_given.append((place, arguments[id(value)]))
        elif id(value) in places:
            of_state.append((place, places[id(value)]))
        elif isinstance(value, int):
            assert value == planes[0].shape[1]
            sizes.append(place)
        elif id(value) in known:
            continue
        else:
            raise RuntimeError(f"input {place} is neither state nor weight")
        inputs[place] = None
    order = [outputs[id(result)] for result in results]
    return StateProgram(recorded["call"], inputs, of_state, of_given, sizes, order), results


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
    return [*model.parameters(), *model.buffers(), *tensors_of(beside)]


def state_key(state: Sequence[Tensor], planes: Sequence[Tensor]) -> Hashable:
    """Shapes, strides and dtypes; of planes without the number of positions."""
    flexible = {id(tensor) for tensor in planes}
    return tuple(
        (tensor.shape[:1] + tensor.shape[2:], tensor.dtype)
        if id(tensor) in flexible
        else (tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in state
    )
