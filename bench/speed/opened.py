"""What is timed: a checkpoint or random weights, and prompts for it."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sigma0.bench.core.conditions import Conditions, Digests, describe
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.speed.shapes import SEED, digest, random_model
from sigma0.calibrate.prompts import encode_prompts
from sigma0.checkpoints import shipped_models
from sigma0.models.load import load

# No question of pocket's world has fewer ids than this.
_SHORTEST = 12


def open_model(
    model: str,
    shape: str,
    device: str,
    dtype: str,
    quantization: str | None = None,
    recurrence: int | None = None,
    stride: int | None = None,
) -> tuple[Any, Any]:
    """A model and its tokenizer; random weights of a shape have none."""
    if shape:
        if recurrence is not None or stride is not None:
            raise ValueError("--recurrence and --stride go with a model, not with --shape: leave them out")
        return random_model(shape, device, dtype, quantization), None
    return load(model, device=device, dtype=dtype, quantization=quantization, recurrence=recurrence, stride=stride)


def prompt_ids(
    looped: Any, tokenizer: Any, model: str, batch: int, context: int, new_tokens: int, split: str = "test"
) -> tuple[Tensor, str]:
    """Prompts `[B, S]` of `context` ids each, with room for new tokens, and where they come from.

    Random weights have no tokenizer; their ids of another split than "test" have another seed.
    """
    limit = looped.config.max_position_embeddings
    if context + new_tokens > limit:
        raise ValueError(
            f"--context {context} and --new-tokens {new_tokens} are more than the {limit} positions of this model"
        )
    if tokenizer is not None and model in shipped_models():
        # A shipped model knows its own world alone; on random ids its tokens settle late.
        questions = encode_prompts(
            looped, tokenizer, list(micro_world(batch * (context // _SHORTEST + 1), split)), new_tokens
        )
        # Questions in a row, of which each sequence reads the last ids: all end with a question.
        ids = torch.tensor([list(chain(*questions[row::batch]))[-context:] for row in range(batch)])
        return ids.to(looped.device), f"questions of pocket's world in a row, {split} split, seed 0"
    generator = torch.Generator().manual_seed(SEED + (split != "test"))
    ids = torch.randint(3, looped.config.vocab_size, (batch, context), generator=generator)
    return ids.to(looped.device), f"random ids, seed {SEED}"


def conditions_of(
    looped: Any, model: str, shape: str, source: str, rows: Sequence[tuple[int, ...]], new_tokens: int, batch: int
) -> Conditions:
    """The conditions of a run over prompts of these ids."""
    answers = [None] * len(rows)
    if shape:
        digests = Digests(weights_sha256=digest(shape), settings_sha256=digest(shape))
        return describe(looped, f"random {shape}", source, rows, answers, new_tokens, batch, digests)
    return describe(looped, model, source, rows, answers, new_tokens, batch)
