"""Random checkpoints of real sizes: their text means nothing, their time does."""

import json
from hashlib import sha256
from typing import Any

import torch

from sigma0.models import OuroConfig, OuroForCausalLM
from sigma0.models.load import resolve_device
from sigma0.models.quantization import quantize

SEED = 0
_OURO = {"vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
SHAPES: dict[str, dict[str, Any]] = {
    # says nothing of speed: for trying a bench out
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "100m": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 7,
        "num_attention_heads": 16,
    },
    "1024x8": {
        "vocab_size": 49152,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
    },
    # the products of Ouro-1.4B in two layers: for equality, not for time
    "ouro-two-layers": {**_OURO, "num_hidden_layers": 2},
    "ouro-1.4b": {**_OURO, "num_hidden_layers": 24},
    "ouro-2.6b": {**_OURO, "num_hidden_layers": 48},
}


def random_model(shape: str, device: str, dtype: str, quantization: str | None = None) -> OuroForCausalLM:
    """A random checkpoint of a named shape, T = 4, made where it stays; perhaps with a quantised block.

    Raises:
        ValueError: For a shape that is not in `SHAPES`, or a quantization that cannot be had.
    """
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
    """The fields of a shape's config.

    Raises:
        ValueError: For a shape that is not in `SHAPES`.
    """
    if shape not in SHAPES:
        raise ValueError(f"no such shape: {shape!r}; one of {', '.join(SHAPES)}")
    return SHAPES[shape]


def digest(shape: str) -> str:
    """What stands for the sha256 of a random checkpoint's weights: that of its fields and seed."""
    return sha256(json.dumps([settings_of(shape), SEED], sort_keys=True).encode()).hexdigest()
