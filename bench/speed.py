"""Decode time of adaptive depth against full depth, as ratios from one run."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from sigma0.exits import exit_probabilities
from sigma0.loading import load, resolve_device
from sigma0.models import OuroConfig, OuroForCausalLM
from sigma0.settings import ExitConfig

SHAPES: dict[str, dict[str, Any]] = {
    "100m": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 7,
        "num_attention_heads": 16,
    },
}
SEED = 0


@dataclass(frozen=True)
class Run:
    """One way of decoding.

    Attributes:
        name: `full`, `finish` or `drop`.
        milliseconds_per_token: Median over the rounds, prompt left out.
        passes_per_token: Calls of the shared block for each token after the first.
        speedup: Time at full depth over this run's: medians of the same rounds.
        ideal: T / passes per token: what the passes alone would give.
        bandwidth: Bytes of the block's weights read for each second of decoding, in 1e9.
    """

    name: str
    milliseconds_per_token: float
    passes_per_token: float
    speedup: float
    ideal: float
    bandwidth: float


@dataclass(frozen=True)
class SpeedReport:
    """Conditions and runs of one measurement."""

    model: str
    parameters: int
    device: str
    dtype: str
    threads: int
    context: int
    new_tokens: int
    repeats: int
    exit_config: dict[str, Any]
    total_loops: int
    torch: str
    runs: tuple[Run, ...]


def measure(
    model: str, shape: str, device: str, dtype: str, threads: int, context: int, new_tokens: int, repeats: int
) -> SpeedReport:
    """Times full depth, finish and drop in turn.

    Args:
        model: Name of a model to load, or "".
        shape: Name of a random checkpoint in `SHAPES`, or "".
        device: As `sigma0.load` takes it.
        dtype: `float32`, `bfloat16` or `float16`.
        threads: CPU threads.
        context: Prompt tokens, random ids.
        new_tokens: New tokens of each run, at least 2.
        repeats: Rounds.

    Returns:
        The report.

    Raises:
        ValueError: If not exactly one of model and shape is given, or a value is out of range.
    """
    if bool(model) == bool(shape):
        raise ValueError("give either a model or --shape")
    if min(threads, context, repeats) < 1 or new_tokens < 2:
        raise ValueError("threads, context and repeats must be at least 1, new tokens at least 2")
    torch.set_num_threads(threads)
    looped = load(model, device=device, dtype=dtype)[0] if model else random_model(shape, device, dtype)
    looped.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, looped.config.vocab_size, (1, context), generator=generator).to(looped.device)
    adaptive = looped.resolve_exit_config(None) if model else middle_exit(looped, ids)
    configs = {
        "full": ExitConfig(mode="full"),
        "finish": replace(adaptive, after_exit="finish"),
        "drop": replace(adaptive, after_exit="drop"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    passes: dict[str, int] = {}
    console = Console(stderr=True)  # so that --json leaves nothing else on stdout
    for round_index in track(range(repeats + 1), description="rounds", console=console):
        for name, config in configs.items():
            prompt, _ = _timed(looped, ids, config, 1)
            whole, outputs = _timed(looped, ids, config, new_tokens)
            passes[name] = outputs.loop_passes
            if round_index:  # the first round warms up
                seconds[name].append((whole - prompt) / (new_tokens - 1))
    return SpeedReport(
        model=model or f"random {shape}",
        parameters=sum(parameter.numel() for parameter in looped.parameters()),
        device=str(looped.device),
        dtype=dtype,
        threads=threads,
        context=context,
        new_tokens=new_tokens,
        repeats=repeats,
        exit_config=adaptive.to_dict(),
        total_loops=looped.num_loops,
        torch=torch.__version__,
        runs=tuple(_run(name, seconds, passes[name] / (new_tokens - 1), looped) for name in configs),
    )


def random_model(shape: str, device: str, dtype: str) -> OuroForCausalLM:
    """A random checkpoint of a named shape.

    Raises:
        ValueError: For a shape that is not in `SHAPES`.
    """
    if shape not in SHAPES:
        raise ValueError(f"no such shape: {shape!r}; one of {', '.join(SHAPES)}")
    torch.manual_seed(SEED)
    model = OuroForCausalLM(OuroConfig(**SHAPES[shape], total_ut_steps=4, max_position_embeddings=4096))
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.model.early_exit_gate.weight.normal_(std=0.05)
    model.to(resolve_device(device), getattr(torch, dtype)).eval()
    return model


def middle_exit(model: OuroForCausalLM, ids: Tensor) -> ExitConfig:
    """A gate threshold at which the tokens of `ids` `[1, S]` stop half-way on average: random gates mean nothing."""
    with torch.no_grad():
        gates = model(ids, output_loop_states=True, use_cache=False).gate_logits[:, 0]  # [T, S]
    cumulative = exit_probabilities(gates).cumsum(0)
    grid = [index / 100 for index in range(1, 100)]
    depth = {q: float((cumulative < q)[:-1].sum(0).add(1).float().mean()) for q in grid}
    return ExitConfig(q=min(grid, key=lambda q: abs(depth[q] - model.num_loops / 2)))


def _timed(model: Any, ids: Tensor, config: ExitConfig, new_tokens: int) -> tuple[float, Any]:
    wait: Callable[[], None] = torch.cuda.synchronize if ids.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    outputs = model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, exit_config=config, return_dict_in_generate=True
    )
    wait()
    return time.perf_counter() - start, outputs


def _run(name: str, seconds: dict[str, list[float]], passes_per_token: float, model: Any) -> Run:
    median = statistics.median(seconds[name])
    block = sum(parameter.numel() * parameter.element_size() for parameter in model.model.layers.parameters())
    return Run(
        name=name,
        milliseconds_per_token=1000 * median,
        passes_per_token=passes_per_token,
        speedup=statistics.median(seconds["full"]) / median,
        ideal=model.num_loops / passes_per_token,
        bandwidth=block * passes_per_token / median / 1e9,
    )
