"""A slow reference for models with a prelude and a coda, in float64: no cache, no rows, each text from its start."""

from dataclasses import dataclass, field
from typing import get_args

import torch

from sigma0.models import RavenConfig, RavenForCausalLM
from sigma0.models.raven_published import Criterion, _Meter

SHAPES = {
    "sandwich": {"n_heads": 4, "head_dim": 8, "qk_bias": True, "tie_embeddings": True},
    "pre": {"n_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 10000.0},
    "post": {"n_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "rope_theta": 10000.0},
}


def tiny_raven(layout: str, seed: int, **overrides) -> RavenForCausalLM:
    """A random float32 model whose loops settle slowly and whose decisions are not all near ties."""
    torch.manual_seed(seed)
    settings = {
        "block_layout": layout,
        "vocab_size": 53,
        "n_embd": 32,
        "intermediate_size": 40,
        "n_layers_in_prelude": 1,
        "n_layers_in_recurrent_block": 2,
        "n_layers_in_coda": 2,
        "mean_recurrence": 4,
        "block_size": 128,
    }
    model = RavenForCausalLM(RavenConfig(**settings | SHAPES[layout] | overrides)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "wte" in name else 0.7 * weight.shape[-1] ** -0.5)
        model.transformer.adapter.weight[:, :32] *= 0.6
        if layout == "sandwich":
            model.transformer.wte.weight *= 32**-0.5
        else:
            model.lm_head.weight.normal_(std=32**-0.5)
    model.generation_config.pad_token_id = 0
    return model


def save_raven(folder, tokenizer, layout: str, seed: int, **overrides):
    """Such a model with a tokenizer, as a checkpoint; the folder."""
    tiny_raven(layout, seed, vocab_size=len(tokenizer), **overrides).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Written:
    """New tokens, the loop that each was read at, and how near each decision was to a tie."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    margin: float = float("inf")


class Reference:
    """Greedy decoding where every position's coda sees earlier codas at the loop that these were read at."""

    def __init__(self, model: RavenForCausalLM) -> None:
        self.model = RavenForCausalLM(model.config).double().eval()
        self.model.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        self.loops = model.num_loops

    @torch.no_grad()
    def write(self, prompt: list[int], new: int, mode: str, threshold: float, min_loops: int = 1) -> Written:
        """`finish`: where the rule stops; the prompt but its last token is read at loop T."""
        out, ids, depths = Written(), list(prompt), [self.loops] * (len(prompt) - 1)
        for _ in range(new):
            states = self.model.transformer(torch.tensor([ids])).loop_states[:, 0]  # [T, S, D]
            depth, logits = self._stop(out, states, depths, mode, threshold, min_loops)
            best = logits.topk(2).values
            out.margin = min(out.margin, float(best[0] - best[1]))
            depths.append(depth)
            out.depths.append(depth)
            out.tokens.append(int(logits.argmax()))
            ids.append(out.tokens[-1])
        return out

    def _stop(self, out, states, depths, mode, threshold, min_loops):
        start = torch.zeros_like(states[0, -1])[None, None]
        meter = _Meter(mode, start, self.model.config.vocab_size) if mode in get_args(Criterion) else None
        for loop in range(1, self.loops + 1):
            logits = self.read(states, [*depths, loop])
            if loop == self.loops:
                return loop, logits
            value = self._value(mode, states[:, -1], loop, logits)
            if meter is not None:
                value = meter.value(states[loop - 1, -1][None, None], logits)
            if value is None:
                continue
            if mode != "argmax-stability" and value == value:
                out.margin = min(out.margin, abs(value - threshold))
            met = value >= threshold if mode in ("margin", "argmax-stability") else value < threshold
            if met and loop >= min_loops:
                return loop, logits
        raise AssertionError

    def _value(self, mode, path, loop, logits):
        if mode == "margin":
            best = logits.softmax(-1).topk(2).values
            return float(best[0] - best[1])
        if mode == "converge" and loop > 1:
            return float((path[loop - 1] - path[loop - 2]).norm() / path[loop - 2].norm())
        return None

    def read(self, states: torch.Tensor, depths: list[int]) -> torch.Tensor:
        """Logits of the last position, where each is read at its loop: one coda over all of them."""
        chosen = torch.stack([states[depth - 1, place] for place, depth in enumerate(depths)])
        read = self.model.transformer.read_prompt(chosen[None], None, None)
        return self.model.read_states(read[0, -1])[: self.model.config.vocab_size]

    @torch.no_grad()
    def full_depth(self, prompt: list[int], new: int) -> Written:
        """Every token at loop T."""
        return self.write(prompt, new, "full", 0.0)
