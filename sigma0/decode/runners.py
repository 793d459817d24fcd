"""Which runner calls the step, and why."""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import nn

from sigma0.cpp_compiler import compiler
from sigma0.decode.compiled import Announce, silently
from sigma0.decode.graph_runner import GraphRunner
from sigma0.decode.graphs import Capture, CudaCapture, StepGraphs
from sigma0.decode.lanes import Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.native_runner import NativeRunner
from sigma0.decode.ops import no_broadcast
from sigma0.decode.runner import EagerRunner, LateRunner, RunnerChoice, Storage
from sigma0.decode.settings import SequenceSettings
from sigma0.decode.transfer import PassCounts

RunnerName = Literal["auto", "eager", "compile", "cudagraph"]
RUNNERS: tuple[RunnerName, ...] = get_args(RunnerName)


# Devices that would be waited for if the host looked at the decisions of a pass before it went on.
LATE_DEVICES = frozenset({"cuda"})


# What captures steps, by type of device.
CAPTURES: Mapping[str, Callable[[torch.device], Capture]] = {"cuda": CudaCapture}


def choose_runner(wanted: str, model: LoopedModel, python: str | None = None, waits: str | None = None) -> RunnerChoice:
    """The runner for a model.

    Args:
        wanted: One of `RUNNERS`.
        model: On its device, with its hooks.
        python: Why the host takes part in a step; None where it does not.
        waits: Why the host has to see each step before the next one; None where it need not.

    Raises:
        ValueError: For an unknown name.
    """
    if wanted not in RUNNERS:
        raise ValueError(f"no such runner: {wanted!r}; there are {', '.join(RUNNERS)}")
    reason = "what auto takes" if wanted == "auto" else "asked for"
    python = python or _looks(model)
    if wanted != "eager" and model.device.type in CAPTURES:
        why_not = python or _why_not_whole(model)
        if why_not is None:
            return RunnerChoice(
                "compile" if wanted == "compile" else "cudagraph", reason, late=waits is None, captured=True
            )
        reason = why_not
    elif wanted in ("compile", "cudagraph"):
        why_not = _why_not_compiled(model) if wanted == "compile" else f"no CUDA graphs on {model.device.type}"
        if why_not is None:
            return RunnerChoice("compile", reason)
        reason = why_not
    if model.device.type not in LATE_DEVICES:
        return RunnerChoice("eager", reason)
    sees = python or waits
    if sees is None or sees == reason:
        return RunnerChoice("eager", reason, late=sees is None)
    return RunnerChoice("eager", f"{reason}; {sees}")


def _looks(model: LoopedModel) -> str | None:
    """Why a step of a model looks at its values on the host; None where it does not."""
    if model.device.type == "cuda" and model.operations.depth_attention is None:
        return "attention in plain torch reads positions on the host"
    return None


def _why_not_whole(model: LoopedModel) -> str | None:
    """Why a model's step cannot be one launch; None where it can."""
    if model.operations.broadcast is not no_broadcast:
        return "a step in one piece is for models on one process, this one is spread over several"
    if isinstance(model, nn.Module):
        if len({parameter.device for parameter in model.parameters()}) > 1:
            return "a step in one piece is for models on one device, this one is spread over several"
        if any(_is_hooked(module) for module in model.modules()):
            return "modules of the model have hooks, which only Python can call"
    return None


def _why_not_compiled(model: LoopedModel) -> str | None:
    """Why a model's step cannot be compiled; None where it can."""
    if model.device.type != "cpu":
        return f"compile is for models on a CPU or on CUDA, this one is on {model.device.type}"
    why_not = _why_not_whole(model)
    if why_not is None and not compiler():
        return "no C++ compiler was found (set CXX, or install g++)"
    return why_not


def _is_hooked(module: nn.Module) -> bool:
    own = (module._forward_hooks, module._forward_pre_hooks, getattr(module, "_hf_hook", None))
    return any(own)


def open_runner(
    choice: RunnerChoice,
    model: LoopedModel,
    lanes: Lanes,
    settings: SequenceSettings,
    storage: Storage,
    counts: PassCounts,
    announce: Announce = silently,
    graphs: StepGraphs | None = None,
) -> EagerRunner:
    """The runner that was chosen; arguments as `EagerRunner` takes them."""
    place = storage.placement(0)
    if place.coded is not None and (choice.name != "eager" or choice.late):
        choice = RunnerChoice("eager", "K/V in few bits are encoded between steps")
    unordered = place.seen is not None
    if choice.name == "compile" and not choice.captured and model.operations.run_block is not None:
        with torch.no_grad():
            if model.plain_block(1, lanes.hidden) is not None:
                choice = RunnerChoice("eager", "the layers run in C++ as they are, in one call")
    if unordered and model.operations.attend_rows is None and (choice.late or choice.captured):
        choice = RunnerChoice("eager", f"{choice.reason}; pads do not all come first")
    if choice.captured:
        graphs = StepGraphs(CAPTURES[model.device.type](model.device)) if graphs is None else graphs
        kind: type[EagerRunner] = GraphRunner
    elif choice.late:
        kind = LateRunner
    else:
        native = model.operations.host_rows and model.operations.broadcast is no_broadcast
        kind = NativeRunner if native else EagerRunner
    return kind(model, lanes, settings, storage, counts, choice, announce, graphs)
