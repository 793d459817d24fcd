"""Tensor parallelism of Raven: a process's heads of every attention, and its part of every MLP.

One matrix holds queries, keys and values, another gate and up. transformers' styles cut a matrix into equal parts,
which grouped heads do not have. So these matrices are loaded whole and cut after the loading, each part for itself;
until then a process needs the memory of all of them. What is kept is a process's own, so that a product with it needs
no message; the matrices after are transformers' `rowwise`, which sums. Queries and keys that are normed over all heads
at once (`post`) take one more sum each.

What is cut is a plain parameter, not torch's `DTensor`, which knows of no such parts; `whole_tensors` puts it together
again to be saved.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from sigma0.decode.parallel import tp_group
from sigma0.models.raven_block import RavenBlock
from sigma0.models.raven_config import RavenConfig

STACKED, WIDE_NORM = "sigma0_stacked", "sigma0_wide_norm"


def plan_of(config: RavenConfig) -> dict[str, str]:
    """How a Raven is cut, for transformers: style by name of a module."""
    plan = {"wte": "embedding_rowwise"}
    for stage, layers in (
        ("prelude", config.n_layers_in_prelude),
        ("core_block", config.n_layers_in_recurrent_block),
        ("coda", config.n_layers_in_coda),
    ):
        if not layers:
            continue
        plan |= {f"{stage}.*.attn.Wqkv": STACKED, f"{stage}.*.mlp.fc": STACKED}
        plan |= {f"{stage}.*.attn.proj": "rowwise", f"{stage}.*.mlp.proj": "rowwise"}
        if config.layout == "post":
            plan |= {f"{stage}.*.attn.{name}": WIDE_NORM for name in ("q_norm", "k_norm")}
    return plan


def keep_share(model: Any) -> None:
    """Cuts what transformers has left whole of a model that is shared; nothing where it is on one process."""
    group = tp_group(model)
    if group is None:
        return
    rank, count = dist.get_rank(group.group), group.group.size()
    for block in _blocks(model).values():
        for name, (axis, sizes) in block.stacked_parts().items():
            module_name, _, parameter_name = name.rpartition(".")
            module = block.get_submodule(module_name)
            whole = module._parameters[parameter_name]
            assert whole is not None
            kept = torch.cat([_own(part, axis, rank, count) for part in torch.split(whole.detach(), sizes, axis)], axis)
            module._parameters[parameter_name] = nn.Parameter(kept, requires_grad=whole.requires_grad)
        attention = block.attn
        attention.heads, attention.kv_heads = attention.heads // count, attention.kv_heads // count


def whole_tensors(model: Any, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict whose cut tensors are whole again; every process calls it."""
    group = tp_group(model)
    result = dict(state_dict)
    if group is None:
        return result
    mesh = model._device_mesh
    mesh = mesh if mesh.ndim == 1 else mesh["tp"]
    rank, count = dist.get_rank(group.group), group.group.size()
    for prefix, block in _blocks(model).items():
        for name, (axis, sizes) in block.stacked_parts().items():
            local = result[f"{prefix}.{name}"]
            current = [len(_own(torch.empty(size), 0, rank, count)) for size in sizes]
            parts = []
            for part, size in zip(torch.split(local.detach(), current, axis), sizes, strict=True):
                shape = torch.Size([*part.shape[:axis], size, *part.shape[axis + 1 :]])
                stride = torch.empty(shape, device="meta").stride()
                spread = DTensor.from_local(
                    part.contiguous(), mesh, [Shard(axis)], run_check=False, shape=shape, stride=stride
                )
                parts.append(spread.full_tensor())
            result[f"{prefix}.{name}"] = torch.cat(parts, axis)
    return result


def _blocks(model: nn.Module) -> dict[str, RavenBlock]:
    return {name: module for name, module in model.named_modules() if isinstance(module, RavenBlock)}


def _own(part: Tensor, axis: int, rank: int, count: int) -> Tensor:
    """A process's chunk of a tensor, as `torch.chunk` and transformers cut it: the last ones may be short, or empty."""
    chunks = part.chunk(count, axis)
    return chunks[rank] if rank < len(chunks) else part.narrow(axis, 0, 0)


class _Summed(torch.autograd.Function):
    """Sums gradients over the processes; on the way forward the tensor itself, or also its sum."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: "dist.ProcessGroup", forward: bool) -> Tensor:
        context.group = group
        if not forward:
            return tensor.view_as(tensor)
        summed = tensor.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=context.group)
        return summed, None, None


def _group_of(mesh: Any) -> "dist.ProcessGroup":
    group: dist.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return group


class StackedParallel(TensorParallelLayer):  # type: ignore[misc]
    """A linear layer of which `keep_share` keeps rows: the same input everywhere, and a process's own outputs."""

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Each process knows its part of the input's gradient alone."""
        if torch.is_grad_enabled() and args[0].requires_grad:
            args = (_Summed.apply(args[0], _group_of(mesh), False), *args[1:])  # type: ignore[no-untyped-call]
        return args, kwargs


class WideNormParallel(TensorParallelLayer):  # type: ignore[misc]
    """RMSNorm over a width of which every process has a part."""

    def install_forward(self, module: Any, mesh: Any) -> nn.Module:
        """Takes the place of the module's forward; its weight is whole as yet."""
        module.forward = _wide_norm(module, module.weight.numel(), _group_of(mesh))
        return module  # type: ignore[no-any-return]


def _wide_norm(module: Any, width: int, group: "dist.ProcessGroup") -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()  # [..., width / N]
        squares = _Summed.apply(wide.square().sum(-1, keepdim=True), group, True)  # type: ignore[no-untyped-call]
        normed = wide * torch.rsqrt(squares / width + module.variance_epsilon)
        return module.weight * normed.to(hidden_states.dtype)  # type: ignore[no-any-return]

    return forward


ALL_PARALLEL_STYLES.register(STACKED, StackedParallel())
ALL_PARALLEL_STYLES.register(WIDE_NORM, WideNormParallel())
