"""Tensor parallel: several processes hold a model together, each its own attention heads and its share of every MLP.

transformers shards the weights by the plans of `sigma0.models`, so that keys and values come out by head: the planes of
a process hold its own heads alone. Behind every layer the processes' parts are summed, and the states are the same
everywhere but for rounding, which may differ between unlike devices.

What makes the next pass must not differ at all, since a process that left a loop alone would leave the others waiting.
So whatever is decided is decided by the first process and sent to the others: which tokens stop, which ids are written,
whether a text ends. These are a few whole numbers in a pass, one message each. Everything else follows from them and
from the prompt, which every process is given.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from torch import Tensor

from sigma0.decode.ops import alone
from sigma0.errors import first_line

_STARTED_BY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ParallelSettings(BaseSettings):
    """Read from the environment.

    Attributes:
        parallel_timeout: `SIGMA0_PARALLEL_TIMEOUT`: seconds that a process waits for the others, loading included,
            before it ends.
    """

    model_config = SettingsConfigDict(env_prefix="SIGMA0_", frozen=True, extra="ignore", env_ignore_empty=True)

    parallel_timeout: float = Field(default=300.0, gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class Processes:
    """Those that hold a model together.

    Attributes:
        group: They talk through it.
        device: Where its messages lie.
    """

    group: "dist.ProcessGroup"
    device: torch.device

    def agree(self, decision: Tensor) -> Tensor:
        """What the first process has decided; the others' decisions count for nothing.

        Args:
            decision: Of one shape and dtype everywhere; left as it is.
        """
        sent = decision.detach().to(self.device, copy=True).contiguous()
        dist.broadcast(sent, group=self.group, group_src=0)
        return sent.to(decision.device)

    def check_alike(self, *told: object) -> None:
        """Refuses to begin where processes were told different things.

        Args:
            *told: Whatever the work depends on; equal if it prints alike.

        Raises:
            ValueError: On every process, if they were.
        """
        digest = torch.frombuffer(bytearray(sha256(repr(told).encode()).digest()), dtype=torch.uint8).to(self.device)
        found = [torch.empty_like(digest) for _ in range(self.group.size())]
        dist.all_gather(found, digest, group=self.group)
        other = [rank for rank, each in enumerate(found) if not torch.equal(each, found[0])]
        if other:
            raise ValueError(
                f"process {other[0]} was given another prompt or other settings than process 0: under tensor parallel "
                "every process makes the same calls"
            )


def processes_of(model: Any) -> Processes | None:
    """Those that hold a model of transformers together; None where it is whole."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    return Processes(mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp"), model.device)


def agreement(model: Any) -> Callable[[Tensor], Tensor]:
    """How the processes that hold a model come to one decision."""
    others = processes_of(model)
    return alone if others is None else others.agree


def shares(config: Any) -> int:
    """Over how many processes a model of this configuration is being spread, as transformers notes it there."""
    told = getattr(config, "distributed_config", None)
    return 1 if told is None else int(told.tp_size or 1)


def check_heads(config: Any) -> None:
    """Refuses a number of processes that heads cannot be dealt out to.

    Raises:
        ValueError: Naming both numbers.
    """
    count, heads = shares(config), config.num_key_value_heads
    if heads % count:
        possible = " or ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ValueError(
            f"{count} processes cannot share the {heads} key/value heads of this model evenly: start {possible} of them"
        )


def join_processes(device: torch.device) -> int:
    """Joins the processes that `torchrun` has started, unless this one has been joined with them already.

    Args:
        device: What was asked for; each process takes the one of its own number.

    Returns:
        How many there are.

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
def together(wanted: bool) -> Iterator[bool]:
    """Around everything that one program does with a model that several processes hold.

    Args:
        wanted: Whether they are to; if not, nothing is done.

    Yields:
        Whether this is the first process, which speaks for all.

    Raises:
        ConnectionError: In place of torch's own error, once another process has ended or stood still.
    """
    if not wanted:
        yield True
        return
    try:
        yield os.environ.get("RANK", "0") == "0"
    except RuntimeError as error:
        if not _is_of_the_group(error):
            raise
        rank, first = os.environ.get("RANK", "?"), first_line(error)
        raise ConnectionError(
            f"process {rank}: another process of this job has ended, or has not answered for "
            f"{ParallelSettings().parallel_timeout:g} seconds, so this one ends too ({first})"
        ) from error
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_of_the_group(error: RuntimeError) -> bool:
    """Whether an error came out of talking to the other processes; gloo has no class of its own for its errors."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
