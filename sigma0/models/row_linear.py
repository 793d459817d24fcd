"""Linear layers in passes of few rows, where a call costs as much as a product: without the module's call, and several
layers of one input as one product.

Layers that are packed keep names, modules and parameters; only the memory of their weights is one matrix, in which they
lie one after the other.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

Modules = Mapping[str, Any]
Product = Callable[[Tensor, Tensor], Tensor]
Model = TypeVar("Model", bound="PackedWeightsMixin")


def is_plain(module: nn.Module) -> bool:
    """Whether calling a module runs its class's `forward` and nothing else."""
    return not (module._forward_pre_hooks or module._forward_hooks or "forward" in module.__dict__)


def plain_weight(module: Any, kind: type[nn.Module]) -> Tensor | None:
    """The weight of a module that is plain, and of this class itself; else None. Asked in every pass."""
    if type(module) is not kind or not is_plain(module):
        return None
    weight = module._parameters["weight"]
    # a tensor of another class may lie elsewhere
    return weight if type(weight) is nn.Parameter else None


def linear(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """`module(hidden_states)`; of a plain linear layer without the call, which costs as much as a small product."""
    if type(module) is nn.Linear and is_plain(module):
        parameters: dict[str, Any] = module._parameters
        return F.linear(hidden_states, parameters["weight"], parameters["bias"])
    return module(hidden_states)  # type: ignore[no-any-return]


class PackedLinear:
    """Linear layers without bias that read the same input, as one product.

    The layers are packed when they are first used, and again where a parameter's memory was replaced (a move to another
    dtype or device, a loaded checkpoint). They stay apart where they cannot be packed: under hooks, with adapters in
    their place, sharded or shared among processes, or while gradients are recorded.

    Args:
        names: Of the layers among the modules that hold them, in the order of their outputs.

    Attributes:
        weight: The matrix, `[sum of the layers' outputs, D]`, or empty; the same object as long as this one lives,
            since compiled programs hold it.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self.weight = _nothing()
        # where the weight of each layer lies
        self._starts: dict[str, int] = {}

    def __call__(self, modules: Modules, hidden_states: Tensor, multiply: Product = F.linear) -> Tensor:
        """What the layers return for rows `[R, D]`, side by side, `[R, sum of their outputs]`.

        Args:
            modules: Those that hold the layers, by name.
            hidden_states: Input of all of them.
            multiply: The product of rows with a matrix.
        """
        matrix = self.matrix(modules)
        if matrix is not None:
            return multiply(hidden_states, matrix)
        parts = [linear(modules[name], hidden_states) for name in self._names]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def matrix(self, modules: Modules) -> Tensor | None:
        """The matrix, where products may read it: the layers lie in it, and no gradients are recorded."""
        packed = self._starts if torch.compiler.is_compiling() else self._are_packed(modules) or self.pack(modules)
        return self.weight if packed and not torch.is_grad_enabled() else None

    def pack(self, modules: Modules) -> bool:
        """Packs the layers unless they are; whether they are now."""
        if self._are_packed(modules):
            return True
        self.release()
        layers = [modules[name] for name in self._names]
        if not all(type(layer) is nn.Linear and layer.bias is None and is_plain(layer) for layer in layers):
            return False
        weights = [layer.weight for layer in layers]
        if not _can_be_packed(weights):
            return False
        # never an inference tensor: weights may be trained afterwards
        with torch.inference_mode(False), torch.no_grad():
            self.weight.data = torch.cat(weights) if len(weights) > 1 else weights[0].data
            if len(weights) > 1:
                for weight, part in zip(
                    weights, torch.split(self.weight, [len(part) for part in weights]), strict=True
                ):
                    # a storage of its own for each, so that whatever saves, shares or frees tensors takes them for
                    # independent ones
                    weight.data = from_dlpack(part)
        self._starts = {name: weight.data_ptr() for name, weight in zip(self._names, weights, strict=True)}
        return True

    def _are_packed(self, modules: Modules) -> bool:
        """Whether the layers lie in the matrix; asked in every pass, so written to be quick."""
        for name, start in self._starts.items():
            layer = modules[name]
            if type(layer) is not nn.Linear or not is_plain(layer):
                return False
            weight: Any = layer._parameters["weight"]
            if weight.data_ptr() != start:
                return False
        return bool(self._starts)

    def release(self) -> None:
        """Lets go of the matrix; the layers that still lie in it keep the memory."""
        self.weight.data = _nothing()
        self._starts = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedLinear":
        return PackedLinear(*self._names)

    def __reduce__(self) -> tuple[type["PackedLinear"], tuple[str, ...]]:
        return PackedLinear, self._names


class PackedWeightsMixin:
    """For models whose passes over rows take `PackedLinear`: packs them, and lets go of them where they are no use."""

    def packed_weights(self) -> Iterable[tuple[PackedLinear, Modules]]:
        """Each of them, with the modules that hold its layers."""
        raise NotImplementedError

    def pack_weights(self) -> None:
        """Lays weights out for passes over rows: one matrix for layers that read the same input."""
        for product, modules in self.packed_weights():
            product.pack(modules)

    def _apply(self: Model, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        """A move to another dtype or device, after which the old matrices would only take memory."""
        super()._apply(fn, recurse)  # type: ignore[misc]
        for product, _ in self.packed_weights():
            product.release()
        return self


def _nothing() -> Tensor:
    # models are built on the meta device, whose tensors cannot become others, or within inference mode
    with torch.inference_mode(False):
        return torch.empty(0, device="cpu")


def _can_be_packed(weights: list[Any]) -> bool:
    """Whether weights are plain parameters of one kind, each with memory that is nobody else's."""
    first = weights[0]
    return all(
        type(weight) is nn.Parameter
        and (weight.dtype, weight.device) == (first.dtype, first.device)
        and weight.device.type in ("cpu", "cuda")
        and not weight.is_inference()
        and not (weight.device.type == "cpu" and weight.is_shared())  # type: ignore[no-untyped-call]
        and weight.is_contiguous()
        and weight.untyped_storage().nbytes() == weight.nbytes
        for weight in weights
    )
