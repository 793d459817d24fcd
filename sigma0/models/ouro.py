"""Ouro (arXiv 2510.25741): a block of layers applied T times to every token, with a gate after each loop.

Parameter names are those of the published checkpoints. Layers have a norm before and after attention and MLP; the
model's last norm runs after every loop, and the next loop starts from its output.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig

from sigma0.decode.exits import exit_probabilities
from sigma0.decode.ops import EndWeights, LoopEndWeights
from sigma0.models.looped import LoopedPreTrainedModel
from sigma0.models.ouro_block import OuroAttention, OuroDecoderLayer
from sigma0.models.ouro_config import OuroConfig, repaired_tokens
from sigma0.models.outputs import LoopedModelOutput
from sigma0.models.row_linear import plain_weight
from sigma0.models.shared_block import SharedBlockForCausalLM, SharedBlockModel


class OuroPreTrainedModel(LoopedPreTrainedModel):
    """Loading and saving for the family."""

    config_class = OuroConfig
    _no_split_modules = ["OuroDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": OuroDecoderLayer, "attentions": OuroAttention}  # noqa: RUF012


class OuroModel(OuroPreTrainedModel, SharedBlockModel):
    """Embeddings, the shared block, its norm and the exit gate."""

    layer_class = OuroDecoderLayer

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def gate_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[...]` of the exit gate for normed states `[..., D]`."""
        return self.early_exit_gate(hidden_states).squeeze(-1)  # type: ignore[no-any-return]


class OuroForCausalLM(OuroPreTrainedModel, SharedBlockForCausalLM):
    """Ouro with its output head."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config, OuroModel(config))

    @property
    def has_gate(self) -> bool:
        """True."""
        return True

    def adjust_generation_fn(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> None:
        """Repairs the published special ids where transformers reads them for generation."""
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        settings = self.generation_config
        repaired = repaired_tokens(settings.bos_token_id, settings.eos_token_id, settings.pad_token_id)
        for name, value in (repaired or {}).items():
            setattr(settings, name, value)

    def gate(self, hidden: Tensor) -> Tensor:
        """Gate logits `[R]`."""
        return self.model.gate_logits(hidden)  # type: ignore[no-any-return]

    def plain_weights(self) -> EndWeights:
        """See `SharedBlockForCausalLM.plain_weights`; of the gate too."""
        current: Any = self.model._modules
        gate = current["early_exit_gate"]
        weight, bias = self._plain("gate", plain_weight(gate, nn.Linear)), gate._parameters.get("bias")
        return super().plain_weights()._replace(gate=weight, bias=bias)

    def loop_end_weights(self) -> LoopEndWeights:
        """Weights of norm and gate."""
        norm, gate = self.model.norm, self.model.early_exit_gate
        return LoopEndWeights(norm.weight, norm.variance_epsilon, gate.weight[0], gate.bias)

    def loss(
        self, outputs: LoopedModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
    ) -> Tensor:
        """Sum over t of p_t CE_t (arXiv 2510.25741 section 3).

        The published code takes the cross-entropy of the averaged logits.
        """
        assert outputs.loop_states is not None and outputs.gate_logits is not None
        targets = labels[:, 1:].reshape(-1)  # [N]
        probabilities = exit_probabilities(outputs.gate_logits[:, :, :-1])  # [T, B, S - 1]
        loss = torch.zeros((), dtype=torch.float32, device=targets.device)
        for states, weight in zip(outputs.loop_states, probabilities, strict=True):
            logits = self.lm_head(states[:, :-1]).float()
            losses = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="none")  # [N]
            loss = loss + (weight.reshape(-1) * losses).sum()
        return loss / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)
