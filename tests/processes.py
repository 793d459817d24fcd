"""Runs a function in several processes that talk through gloo, as `torchrun` would start them.

One server forks all of them, so that torch is imported once and not by each.
"""

import json
import multiprocessing
import os
import socket
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from sigma0.cli import app  # the server imports this file, and what it has imported its children have too

multiprocessing.set_forkserver_preload(["tests.processes"])


def in_processes(count: int, work, folder: Path, *arguments) -> list:
    """What `work(rank, *arguments)` returned in each process, by rank; it must stand in a module, and return JSON.

    A process that raises ends the others, and the error is raised here.
    """
    start_processes(_joined, (count, work, str(folder), arguments), nprocs=count, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def _joined(rank: int, count: int, work, folder: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=timedelta(seconds=300)
    )
    Path(folder, f"{rank}.json").write_text(json.dumps(work(rank, *arguments)))
    dist.destroy_process_group()


def commands(count: int, folder: Path, arguments: list[str], **environment: str) -> list[BaseProcess]:
    """Starts `sigma0` in each process; what it prints is in the folder, in `RANK.out` and `RANK.err`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
    context = multiprocessing.get_context("forkserver")
    started = []
    for rank in map(str, range(count)):
        output = {"RANK": rank, "LOCAL_RANK": rank, **shared}
        started.append(context.Process(target=_command, args=(output, str(folder / rank), arguments)))
        started[-1].start()
    return started


def _command(environment: dict[str, str], printed: str, arguments: list[str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    for number, kind in ((1, "out"), (2, "err")):
        with open(f"{printed}.{kind}", "wb") as file:
            os.dup2(file.fileno(), number)
    app(arguments)
