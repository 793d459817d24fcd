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
_OPTIONS = {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False, "cpp_wrapper": True}


class BoundProgram:
    """A program with the state of one runner.

    Args:
        call: The compiled graph.
        inputs: What it is called with; None where `given` or their sizes belong.
        given: Place among the inputs, and which argument stands there.
        lengths: Place among the inputs, and of which argument the length stands there.
        outputs: Which output of the graph each result is.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        inputs: list[Any],
        given: list[tuple[int, int]],
        lengths: list[tuple[int, int]],
        outputs: list[int],
    ) -> None:
        self._call, self._inputs, self._outputs = call, inputs, outputs
        self._given, self._lengths = given, lengths

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """The results of the function, in its order."""
        inputs = self._inputs
        for place, which in self._given:
            inputs[place] = given[which]
        for place, which in self._lengths:
            inputs[place] = len(given[which])
        outputs = self._call(*inputs)
        return [outputs[which] for which in self._outputs]


@dataclass(frozen=True)
class StateProgram:
    """A program that any runner may use whose state has the same `state_key`.

    Attributes:
        call: The compiled graph.
        constants: What it is called with; None where a runner's state or an argument belongs.
        state: Place among the inputs, and which tensor of the state stands there.
        sizes: Place among the inputs, and of which tensor of the state the second size stands there.
        given: As `state`, for arguments.
        lengths: As `sizes`, for the first size of arguments.
        outputs: Which output of the graph each result is.
    """

    call: Callable[..., Any]
    constants: list[Any]
    state: list[tuple[int, int]]
    sizes: list[tuple[int, int]]
    given: list[tuple[int, int]]
    lengths: list[tuple[int, int]]
    outputs: list[int]

    def bind(self, state: Sequence[Tensor]) -> BoundProgram:
        """The program over this state."""
        inputs = list(self.constants)
        for place, which in self.state:
            inputs[place] = state[which]
        for place, which in self.sizes:
            inputs[place] = state[which].shape[1]
        return BoundProgram(self.call, inputs, self.given, self.lengths, self.outputs)


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
    opaque: Sequence[Tensor],
    flexible: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> tuple[StateProgram, list[Tensor]]:
    """Compiles a function as one graph, whose shapes are fixed but for those named here, and runs it.

    Args:
        function: Of the given tensors, and of a state that it knows; it changes that in place, and returns none of it.
        given: Arguments, of one row each, or of any number from two on.
        state: Tensors of the state.
        opaque: Those of them that are only handed to `sigma0::attend_rows`, which looks at their sizes itself.
        flexible: Those of them whose second size may be any.
        constants: Tensors that are the same for every state: the model's.

    Returns:
        The program, and the results of this first run.

    Raises:
        RuntimeError: If the function reads any other tensor, which another runner would read too, or an opaque one.
    """
    recorded: dict[str, Any] = {}

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        call = generate_code(graph, examples)
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        recorded["read"] = [
            any(user.target is not torch.ops.sigma0.attend_rows for user in node.users) for node in placeholders
        ]
        recorded["examples"] = [node.meta["example_value"] for node in placeholders]
        recorded["sources"] = [node.meta["grapharg"].source.name for node in placeholders]

        def run(*inputs: Any) -> Any:
            recorded["call"], recorded["inputs"], recorded["outputs"] = call, inputs, call(*inputs)
            return recorded["outputs"]

        return run

    for tensor in flexible:
        torch._dynamo.mark_dynamic(tensor, 1)
    for tensor in given:
        if len(tensor) > 1:
            torch._dynamo.mark_dynamic(tensor, 0)
    # what is compiled is kept by the code object, so one of its own for each program
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__)
    # sizes that are the same in this run need not be in another
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        results = list(torch.compile(own, backend=backend, fullgraph=True, dynamic=False)(*given))
    inputs, examples = list(recorded["inputs"]), recorded["examples"]
    places = {id(tensor): which for which, tensor in enumerate(state)}
    arguments = {id(tensor): which for which, tensor in enumerate(given)}
    known, hidden = set(map(id, constants)), set(map(id, opaque))
    of_state, of_given, sizes, lengths = [], [], [], []
    for place, value in enumerate(inputs):
        if isinstance(value, int):
            continue
        if id(value) in arguments:
            of_given.append((place, arguments[id(value)]))
            lengths += [(size, arguments[id(value)]) for size in _places_of(examples[place].shape[0], examples)]
        elif id(value) in places:
            if id(value) in hidden and recorded["read"][place]:
                raise RuntimeError(f"input {place} is read by something else than attention")
            of_state.append((place, places[id(value)]))
            if value.dim() > 1:
                sizes += [(size, places[id(value)]) for size in _places_of(examples[place].shape[1], examples)]
        elif id(value) in known:
            continue
        else:
            raise RuntimeError(f"input {place} is neither state nor weight")
        inputs[place] = None
    told = {place for place, _ in sizes + lengths}
    names = own.__code__.co_varnames[: own.__code__.co_argcount]
    for place, source in enumerate(recorded["sources"]):
        # of an argument of which nothing but the length is read
        match = [which for which, name in enumerate(names) if source == f"L['{name}'].size()[0]"]
        if place not in told and match:
            lengths.append((place, match[0]))
            told.add(place)
    if any(isinstance(value, int) and place not in told for place, value in enumerate(inputs)):
        raise RuntimeError("a size of the graph is none of a tensor that it is called with")
    outputs = {id(output): which for which, output in enumerate(recorded["outputs"])}
    order = [outputs[id(result)] for result in results]
    return StateProgram(recorded["call"], inputs, of_state, sizes, of_given, lengths, order), results


def _places_of(size: Any, examples: Sequence[Any]) -> list[int]:
    """Where among the inputs of a graph a size of one of them stands."""
    if not isinstance(size, torch.SymInt):
        return []
    symbol = size.node.expr
    return [
        place
        for place, example in enumerate(examples)
        if isinstance(example, torch.SymInt) and example.node.expr == symbol
    ]


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


def state_key(state: Sequence[Tensor], flexible: Sequence[Tensor]) -> Hashable:
    """Shapes, strides and dtypes; of flexible tensors without the second size."""
    any_size = {id(tensor) for tensor in flexible}
    return tuple(
        (tensor.shape[:1] + tensor.shape[2:], tensor.dtype)
        if id(tensor) in any_size
        else (tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in state
    )
