"""Nanbeige4.2 (Nanbeige/Nanbeige4.2-3B): a stack of Llama layers applied T times to every token, without a gate.

Parameter names are those of the published checkpoints. The model's last norm runs after every loop; the next loop
starts from its output, and the head reads it. With `skip_loop_final_norm` loops hand on the state before the norm,
and only the head reads it normed. No adaptive exit is published: the default is full depth, and every rule but `qexit`
works.
"""

from torch import Tensor

from sigma0.decode.attention import PassRows
from sigma0.decode.ops import EndWeights, LoopEndWeights
from sigma0.models.looped import LoopedPreTrainedModel
from sigma0.models.nanbeige_config import NanbeigeConfig
from sigma0.models.ouro_block import OuroAttention, PreNormDecoderLayer
from sigma0.models.shared_block import SharedBlockForCausalLM, SharedBlockModel


class NanbeigePreTrainedModel(LoopedPreTrainedModel):
    """Loading and saving for the family."""

    config_class = NanbeigeConfig
    _no_split_modules = ["PreNormDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": PreNormDecoderLayer, "attentions": OuroAttention}  # noqa: RUF012


class NanbeigeModel(NanbeigePreTrainedModel, SharedBlockModel):
    """Embeddings, the stack of layers and its norm."""

    layer_class = PreNormDecoderLayer

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__(config)
        self.post_init()

    @property
    def norms_for_head(self) -> bool:
        """Whether states are carried without their norm, which only the head's input gets."""
        return self.config.skip_loop_final_norm  # type: ignore[no-any-return]

    def end_loop(self, hidden_states: Tensor) -> Tensor:
        """See `SharedBlockModel.end_loop`."""
        return hidden_states if self.norms_for_head else super().end_loop(hidden_states)

    def head_input(self, hidden_states: Tensor) -> Tensor:
        """See `SharedBlockModel.head_input`."""
        return super().end_loop(hidden_states) if self.norms_for_head else hidden_states


class NanbeigeForCausalLM(NanbeigePreTrainedModel, SharedBlockForCausalLM):
    """Nanbeige4.2 with its output head."""

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__(config, NanbeigeModel(config))

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm after a loop, `[R, D]`, where there is one."""
        return hidden if self.model.norms_for_head else super().norm(hidden)

    def plain_weights(self) -> EndWeights:
        """See `SharedBlockForCausalLM.plain_weights`; none of a norm that the head alone takes, nor of that."""
        weights = super().plain_weights()
        return weights._replace(norm=None, head=None) if self.model.norms_for_head else weights

    def loop_end_weights(self) -> LoopEndWeights:
        """Weights of the norm after a loop, where there is one."""
        return LoopEndWeights(None) if self.model.norms_for_head else super().loop_end_weights()

    def read(self, hidden: Tensor, rows: PassRows | None = None) -> Tensor:
        """Logits `[R, V]` of the states `[R, D]` that loops leave."""
        return super().read(super().norm(hidden) if self.model.norms_for_head else hidden, rows)

    def read_states(self, hidden_states: Tensor) -> Tensor:
        """Logits `[..., V]` of the states `[..., D]` that loops leave."""
        return super().read_states(self.model.head_input(hidden_states))
