"""The families that loop over all layers, as vLLM's models: weights by published names, every loop for every token.

Each (loop, layer) has an `Attention` of its own, so vLLM pages, caches, splits and shards their K/V like those of a
model with T times the layers.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from sigma0.serve.vllm.block import LoopLayer
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors


def loops_of(config: Any) -> int:
    """Loops that every token runs: T, or fewer where `early_exit_step` (counted from 0) names a fixed loop.

    Raises:
        ValueError: If there are none, or if the fixed loop is not among them.
    """
    if not isinstance(config.num_loops, int) or config.num_loops < 1:
        raise ValueError(f"a model has at least 1 loop, got {config.num_loops!r}")
    step = getattr(config, "early_exit_step", None)
    if step is None:
        return config.num_loops
    if not 0 <= step < config.num_loops:
        raise ValueError(f"early_exit_step counts from 0 and must be below {config.num_loops}, got {step}")
    return int(step) + 1


@support_torch_compile
class LoopedModel(nn.Module):
    """Embeddings, the shared block and its norm.

    Args:
        vllm_config: Of the engine.
        prefix: Of the module's name.
        post_norms: As `LoopLayer` takes them.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str, post_norms: tuple[str, str] | None) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.loops = loops_of(config)
        # where the norm stands ahead of the head alone, loops hand on their states without it
        self.norms_for_head = getattr(config, "skip_loop_final_norm", False)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.embed_tokens",
        )
        self.layers = nn.ModuleList(
            LoopLayer(post_norms, config, self.loops, layer, vllm_config, f"{prefix}.layers.{layer}")
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def run_loops(self, positions: Tensor, hidden: Tensor, loops: int) -> Tensor:
        """What the head reads, `[N, D]`, after the first `loops` of embeddings `[N, D]` at positions `[N]`."""
        for loop in range(loops):
            for layer in self.layers:
                hidden = layer(positions, hidden, loop)
            if not self.norms_for_head:
                hidden = self.norm(hidden)
        readable: Tensor = self.norm(hidden) if self.norms_for_head else hidden
        return readable

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """All loops of ids `[N]`, or of embeddings `[N, D]`, at positions `[N]`."""
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return self.run_loops(positions, hidden, self.loops)


class LoopedForCausalLM(nn.Module):
    """Such a model with its head.

    Args:
        vllm_config: Of the engine.
        prefix: Of the module's name.

    Raises:
        ValueError: With pipeline parallelism: the last stage would have to hand its states back to the first.
    """

    post_norms: tuple[str, str] | None = None
    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    hf_to_vllm_mapper = WeightsMapper(
        # the gate is never asked: every token runs the same loops
        orig_to_new_prefix={"model.early_exit_gate.": None},
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        },
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        if (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
            raise ValueError(f"pipeline_parallel_size={stages}: a looped model's states would go round, use 1")
        config = vllm_config.model_config.hf_config
        self.model = LoopedModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), post_norms=self.post_norms
        )
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings `[N, D]` of ids `[N]`."""
        embeddings: Tensor = self.model.embed_tokens(input_ids)
        return embeddings

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """What the head reads of each position, `[N, D]`; arguments as `LoopedModel.forward` takes them."""
        hidden: Tensor = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits `[N, V]` of states `[N, D]`; None on ranks that gather none."""
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads weights by their published names; returns vLLM's names of what was filled."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded


class OuroForCausalLM(LoopedForCausalLM):
    """Ouro (arXiv 2510.25741): norms before and after attention and MLP."""

    post_norms = ("input_layernorm_2", "post_attention_layernorm_2")


class NanbeigeForCausalLM(LoopedForCausalLM):
    """Nanbeige4.2: Llama's layers."""
