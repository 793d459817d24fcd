"""Random checkpoints of real sizes: their text means nothing, their time does."""

import json
from hashlib import sha256
from typing import Any

import torch

from sigma0.models import OuroConfig, OuroForCausalLM
from sigma0.models.load import resolve_device
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
