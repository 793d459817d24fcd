"""Courses of tokens to replay: recorded from a model, or stated in a file."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from sigma0.bench.drafts import full_texts, record
from sigma0.bench.fidelity.grid import threshold
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.replay import Trace
from sigma0.loading import load
from sigma0.prompts import encode_prompts
from sigma0.settings import ExitConfig, explain

PROMPTS = 8
NEW_TOKENS = 24
_TRACE = TypeAdapter(Trace)


def recorded(name: str, config: ExitConfig | None) -> tuple[Trace, str]:
    """The course of a shipped model's tokens along its own answers to questions of its world.

    Args:
        name: `pocket` or `pocket-large`, or a folder of such a model.
        config: The exit rule; the model's own by default.

    Returns:
        The course, for the number of loops of that model, and where it comes from.
    """
    model, tokenizer = load(name, device="cpu", dtype="float32")
    rule = model.resolve_exit_config(None) if config is None else config
    prompts = encode_prompts(model, tokenizer, list(micro_world(PROMPTS)), NEW_TOKENS)
    traces, exits = record(model, prompts, full_texts(model, prompts, NEW_TOKENS), rule)
    settled = [settled_loops(each) for each in traces]
    trace = Trace(model.num_loops, tuple(chain(*map(np.ndarray.tolist, exits))), tuple(chain(*settled)))
    settings = ", ".join(f"{field} {value}" for field, value in threshold(rule).items())
    return trace, f"{name} ({rule.mode}: {settings}), {PROMPTS} questions, {NEW_TOKENS} tokens each"


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
        raise ValueError(f"{str(path)!r} holds no course: {explain(error)}") from error
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} holds no course: {error}") from error
