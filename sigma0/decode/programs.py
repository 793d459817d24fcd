"""Functions of a decoder's state, compiled once and then called with their tensors directly.

`torch.compile` finds the tensors that a function reads by walking its objects, and looks at all of them again before
every call. Here that walk is recorded: the compiled graph is called with the tensors that it took the first time, and
those that are some runner's own state are replaced by another runner's, in the same places.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from sigma0.decode.stored_parts import stored_parts

# Shapes are the runner's business (`state_key`), so nothing is checked again in every call.
_OPTIONS = {
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "cpp_wrapper": True,
    "memory_planning": True,
}


# Place among the inputs of a graph, and which tensor belongs there.
Places = list[tuple[int, int]]


class BoundProgram:
    """A program with the state of one runner.

    Args:
        call: The compiled graph.
        inputs: What it is called with; None where an argument or its length belongs.
        given: Place among the inputs, and which argument stands there.
        lengths: Place among the inputs, and of which argument the length stands there.
        outputs: Which output of the graph each result is.
    """

    def __init__(
        self, call: Callable[..., Any], inputs: list[Any], given: Places, lengths: Places, outputs: list[int]
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
class Inputs:
    """What a graph is called with.

    Attributes:
        constants: The model's tensors; None where something else belongs.
        state: Place among the inputs, and which tensor of the state stands there.
        sizes: Place among the inputs, and of which tensor of the state the second size stands there.
        given: As `state`, for arguments.
        lengths: As `sizes`, for the first size of arguments.
    """

    constants: list[Any]
    state: Places
    sizes: Places
    given: Places
    lengths: Places


@dataclass(frozen=True)
class StateProgram:
    """A program that any runner may use whose state has the same `state_key`.

    Attributes:
        call: The compiled graph.
        inputs: What it is called with.
        outputs: Which output of the graph each result is.
    """

    call: Callable[..., Any]
    inputs: Inputs
    outputs: list[int]

    def bind(self, state: Sequence[Tensor]) -> BoundProgram:
        """The program over this state."""
        inputs = list(self.inputs.constants)
        for place, which in self.inputs.state:
            inputs[place] = state[which]
        for place, which in self.inputs.sizes:
            inputs[place] = state[which].shape[1]
        return BoundProgram(self.call, inputs, self.inputs.given, self.inputs.lengths, self.outputs)


class ModelPrograms:
    """The programs of a model; kept with it, and not copied with it."""

    def __init__(self) -> None:
        self.programs: dict[Hashable, StateProgram] = {}
        self._layout: Hashable = None

    def keep_for(self, layout: Hashable) -> None:
        """Drops programs that were compiled for another layout of the model's weights, and their copies of them."""
        if layout != self._layout:
            self.programs.clear()
            self._layout = layout

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelPrograms":
        return ModelPrograms()

    def __reduce__(self) -> tuple[type["ModelPrograms"], tuple[()]]:
        return ModelPrograms, ()


def programs_of(model: Any) -> ModelPrograms:
    """The programs of a model."""
    kept: ModelPrograms | None = vars(model).get("_compiled_programs")
    if kept is None:
        kept = vars(model)["_compiled_programs"] = ModelPrograms()
    return kept


def weights_of(model: Any) -> Hashable:
    """Tells a model's weights from others that take their place."""
    return tuple(map(id, model.parameters())) if isinstance(model, nn.Module) else ()


def generate_code(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """A graph as machine code."""
    call: Callable[..., Any] = torch._inductor.compile(graph, examples, options=_OPTIONS)
    return call


def compile_program(
    function: Callable[..., Sequence[Tensor]],
    given: Sequence[Tensor],
    state: Sequence[Tensor],
    opaque: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> tuple[StateProgram, list[Tensor]]:
    """Compiles a function as one graph, whose shapes are fixed but for those named here, and runs it.

    Args:
        function: Of the given tensors, and of a state that it knows; it changes that in place, and returns none of it.
        given: Arguments, of one row each, or of any number from two on.
        state: Tensors of the state.
        opaque: Those of them that are only handed to operations which look at their sizes themselves; their second
            size may be any.
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
        sources = {_source(node): node for node in placeholders}

        def run(*inputs: Any) -> Any:
            # before anything has changed
            recorded["inputs"] = _told_apart(sources, inputs, named, state, opaque, constants)
            recorded["call"], recorded["outputs"] = call, call(*inputs)
            return recorded["outputs"]

        return run

    for tensor in opaque:
        torch._dynamo.mark_dynamic(tensor, 1)
    for tensor in given:
        if len(tensor) > 1:
            torch._dynamo.mark_dynamic(tensor, 0)
    # what is compiled is kept by the code object, so one of its own for each program
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__)
    named = dict(zip(own.__code__.co_varnames, given, strict=False))
    # sizes that are the same in this run need not be in another
    with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        results = list(torch.compile(own, backend=backend, fullgraph=True, dynamic=False)(*given))
    outputs = {id(output): which for which, output in enumerate(recorded["outputs"])}
    return StateProgram(recorded["call"], recorded["inputs"], [outputs[id(result)] for result in results]), results


def _told_apart(
    sources: Mapping[str, torch.fx.Node],
    inputs: Sequence[Any],
    given: Mapping[str, Tensor],
    state: Sequence[Tensor],
    opaque: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> Inputs:
    """Where each of a graph's inputs comes from.

    Args:
        sources: Where each was found, and its node.
        inputs: What the graph is called with.
        given: Arguments of the function by name.
        state: As `compile_program` has it.
        opaque: Likewise.
        constants: Likewise.
    """
    arguments = {id(tensor): which for which, tensor in enumerate(given.values())}
    of_state = {id(tensor): which for which, tensor in enumerate(state)}
    known, hidden = set(map(id, constants)), set(map(id, opaque))
    held = {source: value for source, value in zip(sources, inputs, strict=True) if isinstance(value, Tensor)}
    # of an argument perhaps nothing but the length is read
    held |= {f"L['{name}']": tensor for name, tensor in given.items()}
    found = Inputs(list(inputs), [], [], [], [])
    for place, ((source, node), value) in enumerate(zip(sources.items(), inputs, strict=True)):
        if isinstance(value, Tensor):
            tensor, to_argument, to_state = value, found.given, found.state
            if id(tensor) in hidden and any(user.target not in _opaque_calls() for user in node.users):
                raise RuntimeError(f"{source} is read by something else than attention")
        else:
            tensor, to_argument, to_state = held[source.partition(".size()")[0]], found.lengths, found.sizes
        if id(tensor) in arguments:
            to_argument.append((place, arguments[id(tensor)]))
        elif id(tensor) in of_state:
            to_state.append((place, of_state[id(tensor)]))
        elif id(tensor) in known and tensor is value:
            continue
        else:
            raise RuntimeError(f"{source} is neither state nor weight")
        found.constants[place] = None
    return found


def _opaque_calls() -> tuple[object, ...]:
    """Operations that look at the sizes of planes themselves."""
    return torch.ops.sigma0.attend_rows, torch.ops.sigma0.run_block, torch.ops.sigma0.copy_plane


def _source(placeholder: torch.fx.Node) -> str:
    """Where a graph's input was found, as an expression."""
    name = placeholder.meta["grapharg"].source.name
    # a method before torch 2.11
    return str(name() if callable(name) else name)


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


def state_key(state: Sequence[Tensor], flexible: Sequence[Tensor]) -> Hashable:
    """Shapes, strides and dtypes; of flexible tensors without the second size."""
    any_size = {id(tensor) for tensor in flexible}
    return tuple(
        (tensor.shape[:1] + tensor.shape[2:], tensor.dtype)
        if id(tensor) in any_size
        else (tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in state
    )
