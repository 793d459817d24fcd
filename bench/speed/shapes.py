"""What is timed: a checkpoint, or random weights of a real size, whose text means nothing; and prompts for it."""

import json
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sigma0.bench.core.conditions import Conditions, Digests, describe
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.prompts import encode_prompts
from sigma0.checkpoints import shipped_models
from sigma0.models import OuroConfig, OuroForCausalLM
from sigma0.models.load import load, resolve_device
from sigma0.models.quantization import quantize

SEED = 0
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        # says nothing of speed: for trying a bench out
        "tiny": (512, 64, 96, 2, 4),
        "100m": (8192, 1024, 2816, 7, 16),
        "1024x8": (49152, 1024, 2816, 8, 16),
        # the products of Ouro-1.4B in two layers: for equality, not for time
        "ouro-two-layers": (49152, 2048, 5632, 2, 16),
        "ouro-1.4b": (49152, 2048, 5632, 24, 16),
        "ouro-2.6b": (49152, 2048, 5632, 48, 16),
    }.items()
}


def random_model(shape: str, device: str, dtype: str, quantization: str | None = None) -> OuroForCausalLM:
    """A random checkpoint of a named shape, T = 4, made where it stays; perhaps with a quantised block."""
    config = OuroConfig(**settings_of(shape), total_ut_steps=4, max_position_embeddings=65536)
    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    # In its own dtype from the start: a float32 copy of the largest shapes would take twice the memory.
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(resolve_device(device)):
            model = OuroForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.model.early_exit_gate.weight.normal_(std=0.05)
    model.generation_config.eos_token_id = None
    model.eval()
    if quantization is not None:
        quantize(model, quantization)
    model.pack_weights()
    return model


def settings_of(shape: str) -> dict[str, Any]:
    """The fields of a shape's config."""
    if shape not in SHAPES:
        raise ValueError(f"no such shape: {shape!r}; one of {', '.join(SHAPES)}")
    return SHAPES[shape]


def digest(shape: str) -> str:
    """What stands for the sha256 of a random checkpoint's weights: that of its fields and seed."""
    return sha256(json.dumps([settings_of(shape), SEED], sort_keys=True).encode()).hexdigest()


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
