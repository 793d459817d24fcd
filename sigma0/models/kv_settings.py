"""How a model stores K/V: its `generation_config.kv_config`, checked against its shape."""

from typing import Protocol

import torch
from transformers import GenerationConfig

from sigma0.config import FULL_KV, KVConfig
from sigma0.decode.model import KVShape
from sigma0.decode.planes import kv_quantizer


class KVModel(KVShape, Protocol):
    """A model, as far as its K/V go."""

    generation_config: GenerationConfig

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""


def kv_config_of(model: KVModel) -> KVConfig:
    """How a model stores K/V: as stored with it, or as it computes them.

    Raises:
        ValueError: For `bf16` of a model in another dtype, or a codec that does not fit the model.
    """
    stored = getattr(model.generation_config, "kv_config", None)
    kv = FULL_KV if stored is None else KVConfig.parse(stored)
    if kv.codec == "bf16" and model.dtype is not torch.bfloat16:
        raise ValueError(f"kv='bf16' is for models in bfloat16, this one computes in {model.dtype}: load it as such")
    if kv.is_coded:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_quantizer(kv, model.num_loops).check_width(head_dim)
    return kv
