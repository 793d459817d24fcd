"""A pretrained decoder cut into prelude, core and coda, and what was learned since as small differences.

Source of the cut: "Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence" (arXiv 2511.07384).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sigma0.models.raven_causal import RavenForCausalLM
from sigma0.models.raven_config import RavenConfig


@dataclass(frozen=True)
class Cut:
    """Which layers become what: the first ones the prelude, those after them the core, the last ones the coda.

    Attributes:
        prelude: Layers that run once a token.
        core: Layers that are looped; what is left out between them and the coda, the loops are to stand for.
        coda: Layers that run where a token is read.
        loops: T.
    """

    prelude: int
    core: int
    coda: int
    loops: int

    @classmethod
    def parse(cls, text: str) -> "Cut":
        """`8/8/6x2`: prelude, core and coda, and T.

        Raises:
            ValueError: If the text is not of this form.
        """
        try:
            layers, loops = text.split("x")
            prelude, core, coda = map(int, layers.split("/"))
            return cls(prelude, core, coda, int(loops))
        except ValueError:
            raise ValueError(f"a cut is written PRELUDE/CORE/CODAxLOOPS, like 8/8/6x2, got {text!r}") from None

    def __str__(self) -> str:
        return f"{self.prelude}/{self.core}/{self.coda}x{self.loops}"

    def stands_for(self, layers: int) -> list[int]:
        """After how many of the teacher's layers a state stands that has run each number of loops, from 1 to T.

        Raises:
            ValueError: If the teacher has no such parts, or the loops are too few or too many for its middle.
        """
        if self.prelude < 0 or min(self.core, self.coda, self.loops) < 1:
            raise ValueError(f"{self}: core, coda and loops must be at least 1, the prelude at least 0")
        middle = layers - self.prelude - self.coda
        if self.core > middle:
            raise ValueError(f"{self}: the teacher has {layers} layers")
        if self.loops * self.core > 2 * middle:
            raise ValueError(f"{self}: {self.loops} loops of {self.core} layers are more than twice the {middle} left")
        return [self.prelude + round(middle * loop / self.loops) for loop in range(1, self.loops + 1)]


def retrofitted(teacher: LlamaForCausalLM, cut: Cut) -> RavenForCausalLM:
    """The teacher's layers in a Raven's places. The adapter starts as one that hands the state on as it is.

    With T = 1 and no layer left out it computes what the teacher does.

    Raises:
        ValueError: If the cut does not fit, or the teacher has biases or another hidden_act, which a Raven has not.
    """
    settings: LlamaConfig = teacher.config
    cut.stands_for(settings.num_hidden_layers)
    if settings.hidden_act != "silu":
        raise ValueError(f"the teacher's hidden_act is {settings.hidden_act!r}, a Raven's is 'silu'")
    if settings.attention_bias or settings.mlp_bias:
        raise ValueError("the teacher's layers have biases, for which a Raven has no place")
    config = RavenConfig(
        block_layout="pre",
        n_embd=settings.hidden_size,
        n_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.head_dim,
        n_layers=cut.prelude + cut.core + cut.coda,
        n_layers_in_prelude=cut.prelude,
        n_layers_in_recurrent_block=cut.core,
        n_layers_in_coda=cut.coda,
        intermediate_size=settings.intermediate_size,
        vocab_size=settings.vocab_size,
        block_size=settings.max_position_embeddings,
        mean_recurrence=cut.loops,
        mean_backprop_depth=cut.loops,
        initial_state_mode="skip-adapter",
        norm_eps=settings.rms_norm_eps,
        rope_parameters=settings.rope_parameters,
        tie_embeddings=settings.tie_word_embeddings,
        bos_token_id=settings.bos_token_id,
        eos_token_id=settings.eos_token_id,
        pad_token_id=settings.pad_token_id,
    )
    model = RavenForCausalLM(config)
    given = dict(teacher.named_parameters())
    first = (0, cut.prelude, settings.num_hidden_layers - cut.coda)
    stages = zip(("prelude", "core_block", "coda"), first, (cut.prelude, cut.core, cut.coda), strict=True)
    weights = {"wte.weight": given["model.embed_tokens.weight"], "ln_f.weight": given["model.norm.weight"]}
    weights["adapter.weight"] = torch.cat([torch.eye(config.n_embd), torch.zeros(config.n_embd, config.n_embd)], 1)
    for stage, start, count in stages:
        for layer in range(count):
            for name, parts in _PARTS.items():
                tensors = [given[f"model.layers.{start + layer}.{part}.weight"] for part in parts]
                weights[f"{stage}.{layer}.{name}.weight"] = torch.cat(tensors)
    named: dict[str, Tensor] = dict(model.transformer.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            named[name].copy_(weight)
        if not config.tie_embeddings:
            model.lm_head.weight.copy_(given["lm_head.weight"])
    assert weights.keys() == named.keys()
    model.generation_config.update(**teacher.generation_config.to_diff_dict())
    return model


def pack(student: RavenForCausalLM, begun: RavenForCausalLM) -> dict[str, Tensor]:
    """What a retrofit has learned, as differences from what it began with, of a byte a weight.

    Args:
        student: A trained retrofit.
        begun: What `retrofitted` makes of its teacher.

    Returns:
        Of each matrix that changed `NAME`, int8 `[out, in]`, and `NAME.scale`, float32 `[out, 1]`; of each vector its
        difference as it is.

    Raises:
        ValueError: If another weight than those of core and adapter differs, or one is not finite.
    """
    parts = {}
    for (name, weight), first in zip(student.named_parameters(), begun.parameters(), strict=True):
        if weight.shape != first.shape:
            raise ValueError(f"{name} is {tuple(weight.shape)}, not {tuple(first.shape)}: is it another teacher's?")
        difference = (weight - first).detach()
        if not difference.any():
            continue
        if not difference.isfinite().all() or not name.startswith(("transformer.core_block", "transformer.adapter")):
            raise ValueError(f"{name} is not what this teacher's retrofit learns")
        if difference.dim() == 1:
            parts[name] = difference
            continue
        scale = difference.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
        parts |= {name: (difference / scale).round().to(torch.int8), f"{name}.scale": scale}
    return parts


def unpack(begun: RavenForCausalLM, parts: dict[str, Tensor]) -> None:
    """Adds to a retrofit, in place, what `pack` took from another one.

    Raises:
        ValueError: If it has no such weight.
    """
    weights, one = dict(begun.named_parameters()), torch.ones(1)
    with torch.no_grad():
        for name, difference in parts.items():
            if name.endswith(".scale"):
                continue
            if name not in weights or weights[name].shape != difference.shape:
                raise ValueError(f"no weight {name} of shape {tuple(difference.shape)} to add a difference to")
            weights[name] += difference.float() * parts.get(f"{name}.scale", one)


# A Raven's weights of a layer, and the teacher's that are stacked there.
_PARTS = {
    "norm_1": ("input_layernorm",),
    "attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": ("self_attn.o_proj",),
    "norm_2": ("post_attention_layernorm",),
    "mlp.fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.proj": ("mlp.down_proj",),
}
