"""Slow references, written from the definitions and sharing no decoding code with the package: float64, no cache."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sigma0 import ExitConfig
from sigma0.config import THRESHOLDS
from sigma0.models import NanbeigeForCausalLM, OuroConfig, OuroForCausalLM, family_class

SharedBlock = OuroForCausalLM | NanbeigeForCausalLM
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": None,
}


def tiny_model(seed: int, added: float = 0.4, **overrides) -> OuroForCausalLM:
    """A random float32 model whose decisions are not all near ties; `added` scales what its layers add."""
    torch.manual_seed(seed)
    model = OuroForCausalLM(OuroConfig(**SIZES | {"total_ut_steps": 3} | overrides)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.model.early_exit_gate.weight.normal_(std=0.3)
        model.model.early_exit_gate.bias.normal_()
        for layer in model.model.layers:
            layer.input_layernorm_2.weight.fill_(added)
            layer.post_attention_layernorm_2.weight.fill_(added)
    model.generation_config.pad_token_id = 0
    return model


def tiny_llama(seed: int, vocab_size: int, **overrides) -> LlamaForCausalLM:
    """A random model without loops."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    settings = {**sizes, **ids, "initializer_range": 0.3, **overrides}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **settings)).eval()


def tiny_nanbeige(seed: int, family: str = "nanbeige", **overrides) -> NanbeigeForCausalLM:
    """As `tiny_model`, of a family with Llama's names and no gate, with heads that are no part of the width."""
    torch.manual_seed(seed)
    settings = SIZES | {"head_dim": 12, "num_loops": 3} | overrides
    model = family_class(family, "causal")(family_class(family, "config")(**settings)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
    model.generation_config.pad_token_id = 0
    return model


def settled_model(seed: int, **overrides) -> OuroForCausalLM:
    """A random model whose readouts settle early, as trained ones do: the head reads mostly the embedding."""
    return tiny_model(seed, added=0.15, **overrides)


def setting(mode: str, **values) -> ExitConfig:
    """Exit settings out of values for every rule, of which only those that the mode reads are taken."""
    unread = {name for name, modes in THRESHOLDS.items() if mode not in modes}
    return ExitConfig(mode=mode, **{name: value for name, value in values.items() if name not in unread})


@dataclass
class Decision:
    depth: int
    met: bool
    margin: float


def decide(config: ExitConfig, states: Tensor, gates: Tensor | None, logits: Tensor, total: int) -> Decision:
    """Exit of one token from its loop states so far [t, D], gate logits [t] and logits [t, V], in Python floats."""
    if config.mode in ("full", "fixed"):
        return Decision(len(states), False, math.inf)
    config = config.filled()
    margin = math.inf
    survival, cumulative, streak = 1.0, 0.0, 0
    for loop in range(1, len(states) + 1):
        holds = False
        hidden = states[loop - 1]
        if config.mode == "qexit":
            hazard = 1 / (1 + math.exp(-float(gates[loop - 1])))
            cumulative += hazard * survival
            survival *= 1 - hazard
            margin = min(margin, abs(cumulative - config.q))
            holds = cumulative >= config.q and config.q < 1
        elif config.mode == "margin":
            top = torch.softmax(logits[loop - 1], -1).sort(descending=True).values
            margin = min(margin, abs(float(top[0] - top[1]) - config.theta))
            holds = float(top[0] - top[1]) >= config.theta
        elif config.mode == "converge" and loop >= 2:
            ratio = float((hidden - states[loop - 2]).norm() / states[loop - 2].norm())
            margin = min(margin, abs(ratio - config.eps))
            holds = ratio < config.eps
        elif config.mode == "accel" and loop >= 3:
            step, before = hidden - states[loop - 2], states[loop - 2] - states[loop - 3]
            scale = states[loop - 2].norm() if config.accel_scale == "states" else step.norm() + before.norm()
            if not scale:
                return Decision(loop, False, 0.0)  # a standstill has no direction to compare
            ratio = float((step - before).norm() / scale)
            margin = min(margin, abs(ratio - config.eps))
            good = ratio < config.eps
            if config.accel_scale == "states":
                margin = min(margin, abs(float(step.norm() / before.norm()) - 0.9))
                good = good and float(step.norm()) <= 0.9 * float(before.norm())
            streak = streak + 1 if good else 0
            holds = streak >= config.patience
        if holds and loop >= min(config.min_loops, total):
            return Decision(loop, True, margin)
    return Decision(len(states), False, margin)


def norms_each_loop(model: SharedBlock) -> bool:
    """Whether loops end with the norm; else only the head's input has it."""
    return not getattr(model.config, "skip_loop_final_norm", False)


def logits_of(model: SharedBlock, states: Tensor) -> Tensor:
    """Logits of the states that loops leave."""
    return model.lm_head(states if norms_each_loop(model) else model.model.norm(states))


def gap(logits: Tensor) -> float:
    top = logits.topk(2).values
    return float(top[0] - top[1])


@dataclass
class Step:
    """A new token: the loop that it was read at, and how near the decisions about it were to a tie."""

    token: int
    depth: int
    met: bool
    margin: float
    logits: Tensor | None = None
    accepted: bool = True


@torch.no_grad()
def read(model: SharedBlock, ids: list[int], loops: int | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
    """States [T, D], gate logits [T] and logits [T, V] of the last of these tokens."""
    out = model.model(input_ids=torch.tensor([ids]), use_cache=False, num_loops=loops)
    states, gates = out.loop_states[:, 0, -1], out.gate_logits
    return states, None if gates is None else gates[:, 0, -1], logits_of(model, states)


def run_all_loops(model64: SharedBlock, ids: list[int], config: ExitConfig, new: int) -> list[Step]:
    """Greedy decoding that runs every loop over the whole text for every token and picks the exit afterwards."""
    ids, steps = list(ids), []
    loops = config.depth if config.mode == "fixed" else None
    for _ in range(new):
        states, gates, logits = read(model64, ids, loops)
        choice = decide(config, states, gates, logits, model64.config.num_loops)
        last = logits[choice.depth - 1]
        steps.append(Step(int(last.argmax()), choice.depth, choice.met, min(choice.margin, gap(last)), last))
        ids.append(steps[-1].token)
    return steps


@dataclass
class Flight:
    """A token in flight under `verify`: the loops that it has run, and the draft that it was read as, with its loop."""

    loops: int = 0
    draft: int | None = None
    depth: int = 0
    met: bool = False
    redrafted: bool = False


class VerifyingReference:
    """`verify` pass by pass, one row each token in flight; what a row reads is a run of all loops over the text so far.

    Attributes:
        passes: That were run.
        rows: In them all.
        tail: The last of them, in which no row is read for the first time.
    """

    def __init__(self, model64: SharedBlock, config: ExitConfig) -> None:
        self.model, self.config, self.total = model64, config, model64.config.num_loops
        self._read: dict[tuple[int, ...], tuple[Tensor, Tensor | None, Tensor]] = {}

    def read(self, ids: list[int]) -> tuple[Tensor, Tensor | None, Tensor]:
        if tuple(ids) not in self._read:
            self._read[tuple(ids)] = read(self.model, ids)
        return self._read[tuple(ids)]

    def generate(self, ids: list[int], new: int, ends: frozenset[int] = frozenset()) -> list[Step]:
        self.passes = self.rows = self.tail = 0
        self.margin = math.inf
        states, gates, logits = self.read(ids)
        met = decide(self.config, states, gates, logits, self.total).met
        token = self._best(logits[-1])
        steps, text, flight = [Step(token, self.total, met, self.margin, logits[-1])], [*ids, token], [Flight()]
        while len(steps) < new and steps[-1].token not in ends:
            self.passes += 1
            self.rows += len(flight)
            self.tail = self.tail + 1 if all(token.draft is not None for token in flight) else 0
            for token in flight:
                token.loops += 1
            first = len(text) - len(flight)
            for place, token in enumerate(flight):
                states, gates, logits = self.read(text[: first + place + 1])
                if self._drafts(token, states, gates, logits):
                    del flight[place + 1 :], text[first + place + 1 :]
            oldest, newest = flight[0], flight[-1]
            if oldest.loops == self.total:
                logits = self.read(text[: first + 1])[2]
                accepted = oldest.depth < self.total or not oldest.redrafted
                met = oldest.met and accepted
                steps.append(Step(oldest.draft, oldest.depth, met, self.margin, logits[-1], accepted))
                flight.pop(0)
            reported = len(steps) + len(flight)
            if newest.draft is not None and newest.draft not in ends and reported < new:
                text.append(newest.draft)
                flight.append(Flight())
        return steps

    def _drafts(self, token: Flight, states: Tensor, gates: Tensor | None, logits: Tensor) -> bool:
        """Whether a row that has ended a loop says what is fed after it, first or anew."""
        loop = token.loops
        if token.draft is None:
            gates = None if gates is None else gates[:loop]
            choice = decide(self.config, states[:loop], gates, logits[:loop], self.total)
            self.margin = min(self.margin, choice.margin)
            stops = choice.met or loop == (self.config.depth if self.config.mode == "fixed" else self.total)
            if stops:
                token.draft, token.depth, token.met = self._best(logits[loop - 1]), loop, choice.met
            return stops
        if not self.config.redraft and loop < self.total:
            return False
        best = self._best(logits[loop - 1])
        redraft = best != token.draft
        if redraft:
            token.draft, token.depth, token.redrafted = best, loop, True
        return redraft

    def _best(self, logits: Tensor) -> int:
        self.margin = min(self.margin, gap(logits))
        return int(logits.argmax())


class DroppingReference:
    """One row at a time with explicit K/V by (layer, loop, position); a reader at loop t takes plane min(t, e_j)."""

    def __init__(self, model64: SharedBlock, config: ExitConfig) -> None:
        self.model, self.config = model64, config
        self.total = config.depth if config.mode == "fixed" else model64.config.num_loops
        self.keys: dict[tuple[int, int, int], Tensor] = {}
        self.values: dict[tuple[int, int, int], Tensor] = {}
        self.exits: list[int] = []

    @torch.no_grad()
    def row(self, hidden: Tensor, position: int, loop: int) -> Tensor:
        """One loop (from 1) of the token at `position`, whose state before it is `hidden` [D]."""
        model = self.model.model
        cos, sin = model.rotary_emb(hidden[None, None], torch.tensor([[position]]))
        for index, layer in enumerate(model.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            shape = (-1, attention.head_dim)
            query = _rotate(attention.q_proj(normed).view(shape), cos[0], sin[0])
            self.keys[index, loop, position] = _rotate(attention.k_proj(normed).view(shape), cos[0], sin[0])
            self.values[index, loop, position] = attention.v_proj(normed).view(shape)
            planes = [min(loop, self.exits[other]) for other in range(position)] + [loop]
            keys = torch.stack([self.keys[index, plane, other] for other, plane in enumerate(planes)])  # [S, H_kv, d]
            values = torch.stack([self.values[index, plane, other] for other, plane in enumerate(planes)])
            groups = attention.num_key_value_groups
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
            weights = (torch.einsum("hd,shd->hs", query, keys) * attention.scaling).softmax(-1)
            attended = torch.einsum("hs,shd->hd", weights, values).reshape(-1)
            names = ("input_layernorm_2", "post_attention_layernorm_2")
            after_attention, after_mlp = (getattr(layer, name, lambda output: output) for name in names)
            hidden = hidden + after_attention(attention.o_proj(attended))
            hidden = hidden + after_mlp(layer.mlp(layer.post_attention_layernorm(hidden)))
        return model.norm(hidden) if norms_each_loop(self.model) else hidden

    @torch.no_grad()
    def read(self, token: int, prompt: bool) -> Decision:
        """Runs one token, to its exit or, in a prompt, to T; leaves `self.logits` for what is read."""
        position = len(self.exits)
        hidden = self.model.model.embed_tokens(torch.tensor(token))
        states: list[Tensor] = []
        for loop in range(1, self.total + 1):
            hidden = self.row(hidden, position, loop)
            states.append(hidden)
            choice = self._decide(states)
            if not prompt and (choice.met or loop == self.total):
                break
        self.exits.append(self.total if prompt else choice.depth)
        self.logits = logits_of(self.model, states[choice.depth - 1])
        return choice

    def _decide(self, states: list[Tensor]) -> Decision:
        stacked = torch.stack(states)
        gate = getattr(self.model.model, "early_exit_gate", None)
        gates = None if gate is None else gate(stacked).squeeze(-1)
        if self.config.mode == "fixed":
            return Decision(len(states), len(states) == self.total, math.inf)
        return decide(self.config, stacked, gates, logits_of(self.model, stacked), self.total)

    def generate(self, ids: list[int], new: int) -> list[Step]:
        for token in ids:
            choice = self.read(token, prompt=True)
        steps = []
        while True:
            margin = min(choice.margin, gap(self.logits))
            steps.append(Step(int(self.logits.argmax()), choice.depth, choice.met, margin, self.logits))
            if len(steps) == new:
                return steps
            choice = self.read(steps[-1].token, prompt=False)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [H, d] by cos and sin [1, d], halves paired."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def finish_rows(depths: list[int], total: int) -> int:
    """Rows of one sequence in `finish`: a token runs beside later ones until the last has been read, T at most."""
    later = depths[1:]
    return sum(min(total, sum(later[k:])) for k in range(len(later)))
