"""One prompt at a time: free generation with its counts, and a given continuation decoded under `drop`."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sigma0.calibrate.agreement import continue_alone
from sigma0.calibrate.teacher_forcing import ForcedText, check_finite, divergence
from sigma0.config import ExitConfig


@dataclass(frozen=True)
class FreeRun:
    """A prompt continued greedily.

    Attributes:
        ids: The new tokens.
        depths: Loop at which each was read.
        reasons: Why each stopped there.
        passes: Calls of the shared block after the prompt.
        rows: Rows in them.
        prompt_rows: Rows that reading the prompt took.
        head_rows: Rows that the head read after the prompt.
        seconds: Wall-clock time, prompt included.
    """

    ids: tuple[int, ...]
    depths: tuple[int, ...]
    reasons: tuple[str, ...]
    passes: int
    rows: int
    prompt_rows: int
    head_rows: int
    seconds: float


def run_free(model: Any, prompt: tuple[int, ...], config: ExitConfig, max_new_tokens: int) -> FreeRun:
    """Continues a prompt of ids greedily, alone in its batch."""
    _wait(model.device)
    start = time.perf_counter()
    outputs = continue_alone(model, prompt, config, max_new_tokens)
    _wait(model.device)
    seconds = time.perf_counter() - start
    return FreeRun(
        ids=tuple(outputs.sequences[0, len(prompt) :].tolist()),
        depths=tuple(outputs.exit_depths[0].tolist()),
        reasons=tuple(outputs.exit_reasons[0]),
        passes=outputs.loop_passes,
        rows=outputs.loop_rows,
        prompt_rows=outputs.prompt_rows,
        head_rows=outputs.head_rows,
        seconds=seconds,
    )


@dataclass(frozen=True)
class ForcedRun:
    """The continuation of a text, decoded with its own tokens fed back; arrays `[new]`.

    Attributes:
        same: Whether the argmax at the exit is full depth's.
        kl: KL(full || exit), nats.
    """

    same: NDArray[np.bool_]
    kl: NDArray[np.float32]


@torch.no_grad()
def run_forced(model: Any, text: ForcedText, config: ExitConfig) -> ForcedRun:
    """Decodes a given continuation one token at a time, so that `drop` sees the planes that it would see.

    The prompt is read as prompts are, at full depth.
    """
    ids = torch.tensor([text.ids], device=model.device)
    prompt = ids.shape[1] - text.new
    full = model(ids, use_cache=False, exit_config=ExitConfig(mode="full"), logits_to_keep=text.new + 1)
    reference = torch.log_softmax(check_finite(full.logits[0, :-1], model.num_loops).float(), -1)  # [new, V]
    cache = model.new_cache(ids.shape[1])
    parts = [model(ids[:, :prompt], past_key_values=cache, exit_config=config, logits_to_keep=1).logits[0]]
    for place in range(prompt, ids.shape[1] - 1):
        parts.append(model(ids[:, place : place + 1], past_key_values=cache, exit_config=config).logits[0])
    found = torch.log_softmax(torch.cat(parts).float(), -1)  # [new, V]
    same = reference.argmax(-1) == found.argmax(-1)
    return ForcedRun(same.cpu().numpy(), divergence(reference, found).cpu().numpy())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
