"""Models whose block computes nothing, so that what is left of a pass is the host's work."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from sigma0.decode.attention import PassRows
from sigma0.models.cache_name import given_cache, named_cache
from sigma0.models.ouro import OuroForCausalLM
from sigma0.models.ouro_config import OuroConfig

# The id that is written all the time: a word of the tokenizer of `pocket`, with a space ahead.
WRITTEN = 300
_SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    "eos_token_id": None,
}


class EmptyLoopedModel(OuroForCausalLM):
    """A looped model of which a loop returns its input, and the head the same logits for every row.

    Its gate is open: under `qexit` a token stops after its first loop, and its other loops follow beside later tokens.
    """

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        logits = torch.zeros(1, config.vocab_size)
        logits[0, WRITTEN] = 1.0
        self.register_buffer("logits", logits, persistent=False)
        with torch.no_grad():
            self.model.early_exit_gate.weight.zero_()
            self.model.early_exit_gate.bias.fill_(20.0)

    def loop(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """The input."""
        return hidden

    def read(self, hidden: Tensor, rows: PassRows | None = None) -> Tensor:
        """The same logits for every row, `[R, V]`."""
        logits: Tensor = self.logits
        return logits.expand(len(hidden), -1)


class EmptyModel(LlamaForCausalLM):  # type: ignore[misc]
    """A model of transformers that does nothing but keep its cache as long as its text."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        logits = torch.zeros(1, 1, config.vocab_size)
        logits[..., WRITTEN] = 1.0
        self.register_buffer("logits", logits, persistent=False)
        self.one = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: DynamicCache | None = None,
        cache: DynamicCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The same logits for every row, `[B, 1, V]`."""
        batch, length = input_ids.shape
        cache = given_cache(past_key_values, cache)
        if cache is not None:
            new = self.one.expand(batch, 1, length, 1)
            cache.update(new, new, 0)
        return CausalLMOutputWithPast(logits=self.logits.expand(batch, 1, -1), **named_cache(cache))


def empty_looped(vocabulary: int, loops: int, positions: int) -> EmptyLoopedModel:
    """An empty looped model of T loops."""
    torch.manual_seed(0)
    sizes = _SIZES | {"vocab_size": vocabulary, "max_position_embeddings": positions}
    config = OuroConfig(**sizes, num_key_value_heads=2, total_ut_steps=loops)
    model: EmptyLoopedModel = EmptyLoopedModel(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def empty_plain(vocabulary: int, positions: int) -> EmptyModel:
    """An empty model of transformers."""
    sizes = _SIZES | {"vocab_size": vocabulary, "max_position_embeddings": positions}
    model: EmptyModel = EmptyModel(LlamaConfig(**sizes, bos_token_id=None, pad_token_id=0)).eval()
    return model
