"""Random recurrence: how a Raven of the micro-world is built, and the loss of one batch of its training.

As Huginn's authors do it (arXiv 2502.05171, section 3.3): the number of loops of a batch is drawn, gradients go through
the last of them only, and the loss is read behind the last one. The lessons with hints come before that and run few
loops, all of them with gradients.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.data import Batch
from sigma0.bench.pocket.tokenizer import MAX_LENGTH
from sigma0.models.raven_causal import RavenForCausalLM
from sigma0.models.raven_config import RavenConfig
from sigma0.models.start_states import start_states


class TrainingPlan(Protocol):
    """What a recipe says of the model and of its loss; `recipe.Recipe` has it all."""

    @property
    def seed(self) -> int:
        """See `recipe.Recipe`."""

    @property
    def width(self) -> int:
        """See `recipe.Recipe`."""

    @property
    def intermediate(self) -> int:
        """See `recipe.Recipe`."""

    @property
    def heads(self) -> int:
        """See `recipe.Recipe`."""

    @property
    def loops(self) -> int:
        """See `recipe.Recipe`."""

    @property
    def rope_theta(self) -> float:
        """See `recipe.Recipe`."""

    @property
    def init_std(self) -> float:
        """See `recipe.Recipe`."""

    @property
    def answer_weight(self) -> float:
        """See `recipe.Recipe`."""

    @property
    def subject_weight(self) -> float:
        """See `recipe.Recipe`."""

    def on_trails(self, step: int) -> bool:
        """See `recipe.Recipe`."""

    def train_loops(self, step: int) -> int:
        """See `recipe.Recipe`."""


@dataclass(frozen=True)
class Recurrence:
    """What a Raven needs beside the settings that it shares with one looped layer.

    Attributes:
        mean: Mean of the Poisson distribution's rate; the loops of a batch are one more than what it gives.
        spread: Standard deviation of the logarithm of the rate.
        backprop: Loops at the end of a batch that gradients go through.
        drawn: Share of the rows that start from drawn states in the last lesson; the others, and all rows of the
            lessons before it, start from zero.
        reads: Loops of a batch with hints that are read, at most; the first and the last are among them.
        adapter: What the adapter lets through of state and injection at the start. More of the state: a look-up that
            asks for what is injected finds the same word at every loop.
        prelude: Layers of the prelude.
        core: Layers of the core.
        coda: Layers of the coda.
    """

    mean: float = 8.0
    spread: float = 0.5
    backprop: int = 6
    drawn: float = 0.25
    reads: int = 4
    adapter: tuple[float, float] = (0.9, 0.3)
    prelude: int = 1
    core: int = 1
    coda: int = 1

    def __post_init__(self) -> None:
        for name in ("backprop", "core"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)!r} is below 1")
        if self.mean <= 0 or self.spread < 0:
            raise ValueError(f"mean {self.mean!r} and spread {self.spread!r} are no log-normal Poisson distribution")
        if not 0 <= self.drawn <= 1:
            raise ValueError(f"drawn {self.drawn!r} is not a share between 0 and 1")
        if self.reads < 2:
            raise ValueError(f"reads {self.reads!r} is below 2, the first and the last loop")

    def draw(self, rng: Random, most: int) -> int:
        """Loops of one batch, from 1 to `most`."""
        rate = math.exp(rng.gauss(math.log(self.mean) - self.spread**2 / 2, self.spread))
        # Knuth's method: uniform numbers multiplied until they fall below exp(-rate)
        count, product, floor = 0, rng.random(), math.exp(-rate)
        while product > floor:
            count += 1
            product *= rng.random()
        return min(count + 1, most)

    def read_at(self, rng: Random, loops: int) -> list[int]:
        """The loops, counted from 1, that are read of a batch with hints that runs so many."""
        between = rng.sample(range(2, loops), min(self.reads - 2, max(0, loops - 2)))
        return sorted({1, loops, *between})


def build_raven(recipe: TrainingPlan, recurrence: Recurrence, tokenizer: PreTrainedTokenizerFast) -> RavenForCausalLM:
    """Build the untrained model, weights from the recipe's seed.

    The scaled embedding starts at standard deviation 1 and the adapter near shares of state and injection, so that a
    loop that has learned nothing keeps what it was given.
    """
    config = RavenConfig(
        # it knows questions of its world, and no words about them
        sigma0_prompts="bare",
        block_layout="sandwich",
        qk_bias=True,
        n_embd=recipe.width,
        n_heads=recipe.heads,
        n_layers=recurrence.prelude + recurrence.core + recurrence.coda,
        n_layers_in_prelude=recurrence.prelude,
        n_layers_in_recurrent_block=recurrence.core,
        n_layers_in_coda=recurrence.coda,
        intermediate_size=recipe.intermediate,
        vocab_size=len(tokenizer),
        block_size=MAX_LENGTH,
        mean_recurrence=round(recurrence.mean),
        mean_backprop_depth=recurrence.backprop,
        recurrence=recipe.loops,
        rope_base=recipe.rope_theta,
        tie_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = RavenForCausalLM(config)
    draw = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("qk_bias"):
                weight.zero_()
            elif weight.dim() == 2:
                embeds = name.endswith("wte.weight")
                weight.normal_(std=1 / config.embed_scale if embeds else recipe.init_std, generator=draw)
            else:
                weight.fill_(1.0)
        shares = torch.tensor(recurrence.adapter).repeat_interleave(recipe.width)
        model.transformer.adapter.weight += torch.eye(recipe.width).repeat(1, 2) * shares
    return model


def recurrent_loss(
    model: RavenForCausalLM, batch: Batch, recipe: TrainingPlan, recurrence: Recurrence, step: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Loss of the batch of a step, and which answer tokens are right where it was read.

    With hints, loop t is asked for step t of the way to an answer, and the first loop, everywhere, whom or what the
    sentence is about, as in `train.loop_loss`; only some loops are read, since each reading costs a coda.

    Returns:
        The loss, a scalar; right, bool [L, N] over the N answer tokens of the batch in reading order; and the L loops,
        counted from 1, that were read.
    """
    rng = Random(f"recurrence/{recipe.seed}/{step}")
    trails = recipe.on_trails(step)
    loops = recipe.train_loops(step) if trails else recurrence.draw(rng, recipe.loops)
    read = recurrence.read_at(rng, loops) if trails else [loops]
    output = model.transformer(
        input_ids=batch.ids,
        use_cache=False,
        num_loops=loops,
        loops_without_grad=0 if trails else max(0, loops - recurrence.backprop),
        initial_state=None if trails else _drawn_states(model, batch, recurrence, recipe.seed, step),
    )
    before = [model.transformer.read_prompt(output.loop_states[loop - 1], None, None) for loop in read[:-1]]
    states = torch.stack([*before, output.last_hidden_state])[:, :, :-1].flatten(1, 2)  # [L, B(S-1), D]
    targets = batch.ids[:, 1:].flatten()
    answer = batch.answer[:, 1:].flatten()
    other = batch.real[:, 1:].flatten() & ~answer
    logits = model.lm_head(states[:, answer])  # [L, N, V]
    goal = targets[answer].expand(len(read), -1)
    places = (torch.tensor(read) - 1).clamp(max=batch.trails.shape[1] - 1)
    asked = batch.trails.T[places] if trails else goal  # [L, N]
    losses = functional.cross_entropy(logits.flatten(0, 1), asked.flatten(), reduction="none").view(len(read), -1)
    weights = torch.tensor(read) / sum(read)
    rest = functional.cross_entropy(model.lm_head(states[-1, other]), targets[other], reduction="sum")
    total = recipe.answer_weight * (weights[:, None] * losses).sum() + rest
    loss = total / (recipe.answer_weight * answer.sum() + other.sum())
    if trails:
        about = batch.subjects[:, :-1].flatten()
        told = about >= 0
        hint = functional.cross_entropy(model.lm_head(states[0, told]), about[told])
        loss = loss + recipe.subject_weight * hint
    return loss, logits.argmax(-1) == goal, read


def _drawn_states(
    model: RavenForCausalLM, batch: Batch, recurrence: Recurrence, seed: int, step: int
) -> torch.Tensor | None:
    """Start states `[B, S, D]`: drawn at their published size for a share of the rows, zero for the others."""
    rows, length = batch.ids.shape
    count = round(rows * recurrence.drawn)
    if count == 0:
        return None
    config = model.config
    states = torch.zeros(rows, length, config.n_embd)
    places = torch.arange(count * length).view(count, length)
    # the last rows: the first ones of a batch are in chat form
    states[rows - count :] = start_states(places, config.state_std, (seed << 32) + step, states)
    return states
