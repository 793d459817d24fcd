"""Which runner calls the step, and why."""

from typing import Literal, get_args

from torch import nn

from sigma0.cpp_compiler import compiler
from sigma0.decode.batch import PassCounts
from sigma0.decode.compiled import Announce, CompiledRunner, silently
from sigma0.decode.lanes import Lanes
from sigma0.decode.late import LateRunner
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import no_broadcast
from sigma0.decode.runner import EagerRunner, RunnerChoice, Storage
from sigma0.decode.settings import SequenceSettings

RunnerName = Literal["auto", "eager", "compile"]
RUNNERS: tuple[RunnerName, ...] = get_args(RunnerName)


# Devices that would be waited for if the host looked at the decisions of a pass before it went on.
LATE_DEVICES = frozenset({"cuda"})


def choose_runner(wanted: str, model: LoopedModel, waits: str | None = None) -> RunnerChoice:
    """The runner for a model.

    Args:
        wanted: One of `RUNNERS`.
        model: On its device, with its hooks.
        waits: Why the host has to see each step before the next one; None where it need not.

    Raises:
        ValueError: For an unknown name.
    """
    if wanted not in RUNNERS:
        raise ValueError(f"no such runner: {wanted!r}; there are {', '.join(RUNNERS)}")
    why = {"eager": "asked for", "auto": "what auto takes"}.get(wanted) or _why_not(model)
    if why is None:
        return RunnerChoice("compile", "asked for")
    if model.device.type not in LATE_DEVICES:
        return RunnerChoice("eager", why)
    if waits is None and model.device.type == "cuda" and model.operations.depth_attention is None:
        waits = "attention in plain torch reads positions on the host"
    return RunnerChoice("eager", why, late=True) if waits is None else RunnerChoice("eager", f"{why}; {waits}")


def _why_not(model: LoopedModel) -> str | None:
    """Why a model's step cannot be compiled; None where it can."""
    if model.device.type != "cpu":
        return f"compile is for models on a CPU, this one is on {model.device.type}"
    if model.operations.broadcast is not no_broadcast:
        return "compile is for models on one process, this one is spread over several"
    if isinstance(model, nn.Module):
        if len({parameter.device for parameter in model.parameters()}) > 1:
            return "compile is for models on one device, this one is spread over several"
        if any(_is_hooked(module) for module in model.modules()):
            return "modules of the model have hooks, which only Python can call"
    return None if compiler() else "no C++ compiler was found (set CXX, or install g++)"


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
) -> EagerRunner:
    """The runner that was chosen; arguments as `CompiledRunner` takes them."""
    if choice.name == "compile" and storage.placement(0).seen is not None:
        choice = RunnerChoice("eager", "compile is for prompts whose pads all come first")
    if choice.name == "eager":
        if choice.late and model.operations.copies_exits and storage.placement(0).seen is not None:
            choice = RunnerChoice("eager", f"{choice.reason}; pads do not all come first")
        kind = LateRunner if choice.late else EagerRunner
        return kind(model, lanes, settings, storage, counts, choice)
    return CompiledRunner(model, lanes, settings, storage, counts, choice, announce)
