"""Tensor parallelism: each rank holds a part of the attention heads and of every MLP.

transformers shards the weights by the plans of `sigma0.models`, so that keys and values are sharded by head: the planes
of a rank hold its heads alone. After every layer the ranks' parts are summed, and the states are the same on all ranks
but for rounding, which may differ between unlike devices.

The rows of the next pass must not differ at all, since a rank that left a loop would leave the others waiting. So rank
0 broadcasts every decision: which tokens exit, which ids are sampled, whether a sequence ends. These are a few integers
a pass, one message each. Everything else follows from them and from the prompt, which every rank is given.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from torch import Tensor
from transformers import PreTrainedConfig

from sigma0.decode.ops import no_broadcast
from sigma0.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STARTED_BY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ParallelSettings(BaseSettings):
    """Read from the environment."""

    model_config = SettingsConfigDict(env_prefix="SIGMA0_", frozen=True, extra="ignore", env_ignore_empty=True)

    # `SIGMA0_PARALLEL_TIMEOUT`: seconds that a process waits for the others, loading included, before it ends
    parallel_timeout: float = Field(default=300.0, gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class TensorParallelGroup:
    """The ranks that share a model: their process group, and the device of its messages."""

    group: "dist.ProcessGroup"
    device: torch.device

    def broadcast(self, decision: Tensor) -> Tensor:
        """Rank 0's decision, of one shape and dtype on all ranks, on every rank."""
        sent = decision.detach().to(self.device, copy=True).contiguous()
        dist.broadcast(sent, group=self.group, group_src=0)
        return sent.to(decision.device)

    def check_same_inputs(self, *inputs: object) -> None:
        """Checks that all ranks are called with the same inputs, all that the work depends on, compared by `repr`.

        Raises:
            ValueError: On every rank, if they differ.
        """
        digest = torch.frombuffer(bytearray(sha256(repr(inputs).encode()).digest()), dtype=torch.uint8).to(self.device)
        digests = [torch.empty_like(digest) for _ in range(self.group.size())]
        dist.all_gather(digests, digest, group=self.group)
        other = [rank for rank, other_digest in enumerate(digests) if not torch.equal(other_digest, digests[0])]
        if other:
            raise ValueError(
                f"process {other[0]} was given another prompt or other settings than process 0: under tensor parallel "
                "every process makes the same calls"
            )


def tp_group(model: "PreTrainedModel") -> TensorParallelGroup | None:
    """The tensor parallel group of a transformers model; None where it is on one rank."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    return TensorParallelGroup(mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp"), model.device)


def broadcaster(model: "PreTrainedModel") -> Callable[[Tensor], Tensor]:
    """The broadcast of rank 0's decisions to all ranks of a model; the identity where it is on one rank."""
    group = tp_group(model)
    return no_broadcast if group is None else group.broadcast


def tp_size(config: PreTrainedConfig) -> int:
    """Number of ranks that a model of this configuration is sharded over, as transformers notes it there."""
    distributed = getattr(config, "distributed_config", None)
    return 1 if distributed is None else int(distributed.tp_size or 1)


def check_heads(config: PreTrainedConfig) -> None:
    """Checks that the key/value heads divide evenly among the ranks.

    Raises:
        ValueError: Naming both numbers.
    """
    count, heads = tp_size(config), config.num_key_value_heads
    if heads % count:
        possible = " or ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ValueError(
            f"{count} processes cannot share the {heads} key/value heads of this model evenly: start {possible} of them"
        )


def init_tensor_parallel(device: torch.device) -> int:
    """Joins the processes that `torchrun` has started, unless this one has been joined with them already.

    Args:
        device: Type of device; each rank takes the one of its local rank.

    Returns:
        Number of ranks.

    Raises:
        ValueError: If `torchrun` started none, or there is no device for this one.
    """
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu" if accelerator is None else accelerator.type
    if device.type != kind or device.index is not None:
        raise ValueError(
            f"under tensor parallel every process takes the {kind} device of its own number, not {str(device)!r}: "
            "leave the device out, or hide the GPUs with CUDA_VISIBLE_DEVICES= to stay on the CPU"
        )
    if not dist.is_initialized():
        _start(kind)
    return dist.get_world_size()


def _start(kind: str) -> None:
    missing = [name for name in _STARTED_BY if name not in os.environ]
    if missing:
        raise ValueError(
            "tensor parallel needs processes that torchrun has started: "
            "torchrun --nproc-per-node 2 -m sigma0.cli generate --tensor-parallel ..."
        )
    timeout = timedelta(seconds=ParallelSettings().parallel_timeout)
    if kind == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return
    number, there = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    if number >= there:
        raise ValueError(f"process {number} of this machine has no {kind} device of its own: there are {there}")
    torch.accelerator.set_device_index(number)
    backend = dist.get_default_backend_for_device(kind)
    dist.init_process_group(backend, timeout=timeout, device_id=torch.device(kind, number))


@contextmanager
def tensor_parallel_group(wanted: bool) -> Iterator[bool]:
    """Context of a program that runs a sharded model; leaves the process group at the end.

    Args:
        wanted: Whether the model is sharded; if not, nothing is done.

    Yields:
        Whether this is rank 0, which alone prints.

    Raises:
        ConnectionError: In place of torch's own error, once another rank has ended or stopped answering.
    """
    if not wanted:
        yield True
        return
    try:
        yield os.environ.get("RANK", "0") == "0"
    except RuntimeError as error:
        # gloo has no class for its errors
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        rank, first = os.environ.get("RANK", "?"), first_line(error)
        raise ConnectionError(
            f"process {rank}: another process of this job has ended, or has not answered for "
            f"{ParallelSettings().parallel_timeout:g} seconds, so this one ends too ({first})"
        ) from error
    if dist.is_initialized():
        dist.destroy_process_group()
