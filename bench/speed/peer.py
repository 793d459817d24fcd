"""Stock Hugging Face decoding of the same weights at full depth, to be compared with.

What the published Ouro code does (arXiv 2510.25741): every loop of every layer is a layer of an ordinary cache, here
transformers' `DynamicCache`, and transformers' own `generate` calls a plain forward for each token. The layers are the
very modules of the looped model, so the weights and the arithmetic of a layer are the same.
"""

from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from sigma0.models import OuroConfig, OuroForCausalLM
from sigma0.models.cache_name import given_cache, named_cache


class StockLoopedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A looped model as transformers' users write one.

    Args:
        looped: The model whose modules are used.
    """

    config_class = OuroConfig
    _supports_sdpa = True
    _supports_flash_attn = True
    _can_compile_fullgraph = True

    def __init__(self, looped: OuroForCausalLM) -> None:
        if not isinstance(looped, OuroForCausalLM):
            raise ValueError(
                f"the way huggingface is written for Ouro, not for {looped.config.model_type} models: leave it out of "
                "--ways"
            )
        super().__init__(config_of_planes(looped.config))
        self.inner = looped.model
        self.lm_head = looped.lm_head
        self.generation_config.eos_token_id = None
        self.generation_config.pad_token_id = 0

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Every loop for every position of `input_ids` `[B, S]`; logits of the last `logits_to_keep` positions."""
        hidden_states = self.inner.embed_tokens(input_ids)  # [B, S, D]
        cache = given_cache(past_key_values, cache)
        if cache is None:
            cache = DynamicCache()
        # `generate` makes the masks of a static cache itself, by the type of a layer
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask["full_attention"]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            **named_cache(cache),
            position_ids=position_ids,
        )
        position_embeddings = self.inner.rotary_emb(hidden_states, position_ids)
        for loop in range(self.config.total_ut_steps):
            for index, layer in enumerate(self.inner.layers):
                hidden_states = layer(
                    hidden_states,
                    position_embeddings=position_embeddings,
                    attention_mask=mask,
                    past_key_values=cache,
                    plane=loop * len(self.inner.layers) + index,
                )
            hidden_states = self.inner.norm(hidden_states)
        logits = self.lm_head(hidden_states[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, **named_cache(cache))


def config_of_planes(config: OuroConfig) -> OuroConfig:
    """A copy whose layers are those that a cache needs: one for each layer and loop."""
    config = deepcopy(config)
    config.num_hidden_layers *= config.total_ut_steps
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    return config
