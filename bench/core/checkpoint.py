"""The state of a training run in one safetensors file."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

_MOMENTS = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")


def save_run(
    path: Path, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int, fingerprint: str
) -> None:
    """Write trained weights and optimizer state as one file, replaced at once: a kill leaves a whole one."""
    tensors = {}
    # no other state than parameters, and a tied head is one with its embedding
    for name, parameter in _trained(model):
        tensors[f"weights.{name}"] = parameter.detach()
        for optimizer in optimizers:
            tensors |= {f"{moment}.{name}": value for moment, value in optimizer.state.get(parameter, {}).items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"step": str(step), "settings": fingerprint})
    os.replace(partial, path)


def load_run(path: Path, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], fingerprint: str) -> int:
    """Restore what `save_run` wrote and return the number of steps done.

    Raises:
        ValueError: If the file was made under other settings or by other data, or is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            result = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is no checkpoint of a run: {error}") from error
    if result.get("settings") != fingerprint:
        raise ValueError(f"{path} was made under other settings: {result.get('settings')}; these are {fingerprint}")
    tensors = load_file(path)
    names = {parameter: name for name, parameter in _trained(model)}
    with torch.no_grad():
        for parameter, name in names.items():
            parameter.copy_(tensors[f"weights.{name}"])
    for optimizer in optimizers:
        for parameter in (element for group in optimizer.param_groups for element in group["params"]):
            for moment in _MOMENTS:
                value = tensors.get(f"{moment}.{names[parameter]}")
                if value is not None:
                    # AdamW counts its steps on the CPU
                    optimizer.state[parameter][moment] = value if moment == "step" else value.to(parameter.device)
    return int(result["step"])


def _trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
