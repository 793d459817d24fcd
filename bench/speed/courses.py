"""Courses of tokens to replay: stated here or in a file, or recorded from a model."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from sigma0.bench.core.replay import Trace
from sigma0.bench.fidelity.grid import threshold
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.prompts import encode_prompts
from sigma0.config import ExitConfig
from sigma0.errors import needs_extra, one_line
from sigma0.models.load import load

PROMPTS = 24
NEW_TOKENS = 32
# Made up, and harder than what `pocket-large` does on its own world: tokens stop half-way on average, and one proposal
# in six is withdrawn, at the next loop or later.
STATED = Trace(
    4,
    exits=(2, 1, 2, 1, 3, 2, 1, 2, 4, 1, 2, 2, 3, 1, 2, 1, 2, 4, 1, 3),
    settled=(2, 1, 1, 3, 2, 2, 1, 4, 4, 1, 1, 2, 1, 1, 3, 1, 2, 3, 1, 3),
)
_TRACE = TypeAdapter(Trace)


def recorded(name: str, config: ExitConfig | None) -> tuple[Trace, str]:
    """The course of a shipped model's tokens along its own answers to questions of its world, up to their ends.

    Args:
        name: `pocket` or `pocket-large`, or a folder of such a model.
        config: The exit rule; the model's own by default.

    Returns:
        The course, for the number of loops of that model, and where it comes from.

    Raises:
        ValueError: If the extra `bench` is not installed.
    """
    with needs_extra("bench"):
        from sigma0.bench.lossless.drafts import full_texts, record

    model, tokenizer = load(name, device="cpu", dtype="float32")
    rule = model.resolve_exit_config(config)
    prompts = encode_prompts(model, tokenizer, list(micro_world(PROMPTS)), NEW_TOKENS)
    ends = model.generation_config.eos_token_id
    texts = [
        cut_at_end(text, len(prompt), ends)
        for prompt, text in zip(prompts, full_texts(model, prompts, NEW_TOKENS), strict=True)
    ]
    traces, exits = record(model, prompts, texts, rule)
    settled = [settled_loops(each) for each in traces]
    trace = Trace(model.num_loops, tuple(chain(*map(np.ndarray.tolist, exits))), tuple(chain(*settled)))
    settings = ", ".join(f"{field} {value}" for field, value in threshold(rule).items())
    return trace, f"{name} ({rule.mode}: {settings}), answers to {PROMPTS} questions"


def cut_at_end(text: Tensor, prompt: int, ends: int | list[int] | None) -> Tensor:
    """A text `[1, S]` up to the first end behind its first `prompt` ids."""
    known = [] if ends is None else [ends] if isinstance(ends, int) else ends
    found = torch.isin(text[0, prompt:], torch.tensor(known, device=text.device)).nonzero()
    return text[:, : prompt + int(found[0]) + 1] if len(found) else text


def described(trace: Trace, source: str) -> str:
    """Where a course comes from, how deep it goes and how often it is wrong."""
    early = [(exit, right) for exit, right in zip(trace.exits, trace.settled, strict=False) if exit < trace.total_loops]
    wrong = sum(exit < right for exit, right in early) / max(len(early), 1)
    mean = sum(trace.exits) / len(trace.exits)
    return (
        f"{source}; mean exit {mean:.2f} of {trace.total_loops} loops, {100 * wrong:.0f} % of the proposals withdrawn"
    )


def settled_loops(argmax: NDArray[np.int64]) -> list[int]:
    """First loop from which on the argmax is that of loop T.

    Args:
        argmax: At loop 1 to T, `[T, n]`.
    """
    differs = argmax != argmax[-1]  # [T, n]
    total = len(argmax)
    last = np.where(differs.any(0), total - np.argmax(differs[::-1], axis=0), 0)
    return [int(loop) + 1 for loop in last]


def stated(path: Path) -> tuple[Trace, str]:
    """A course from a JSON file with `total_loops`, `exits` and `settled`.

    Raises:
        ValueError: If it holds none.
    """
    try:
        return _TRACE.validate_python(json.loads(path.read_text())), path.name
    except ValidationError as error:
        raise ValueError(f"{str(path)!r} holds no course: {one_line(error)}") from error
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} holds no course: {error}") from error
