"""Huginn's published adaptive decoding (arXiv 2502.05171, section 6), to compare with: one text at a time, as written.

It differs from ours in two ways. A pass reads its criterion for the whole of the prompt at once, so all positions of
the prompt stop together; and its cache keeps what was computed and no more:

    full        at loop t a token sees those tokens before it that ran loop t themselves: the others are holes
    latest-m4   a token that stopped early stands in with the K/V of its last loop

Neither is what a run of all loops sees; ours is (`sigma0.decode`). The criteria, read after each loop at the last
position, stop where they fall below a threshold (Huginn's `generate_with_adaptive_compute`):

    entropy-diff      |H(p) - H(p before)|, H = - sum p log(p + 1e-10), 100 before loop 1
    latent-diff       |s - s before| / |s|, the mean over the positions of the pass
    cosine            1 - cos(s, s before), likewise; NaN after a zero state
    kl                KL(p before || p), from the uniform distribution on
    minp-kl           the same after probabilities under a tenth of the largest are set to 1 / V, and all renormalised
    argmax-stability  how often running the argmax has stayed the same; stops where it reaches the threshold
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from sigma0.models.raven_causal import RavenForCausalLM

Criterion = Literal["entropy-diff", "latent-diff", "cosine", "kl", "minp-kl", "argmax-stability"]
Policy = Literal["full", "latest-m4"]
_OF_STATES = ("latent-diff", "cosine")


@dataclass
class _Pass:
    """K/V by plane of the tokens of one pass, `[1, H, S, d]` each, and the loops that it ran."""

    planes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    loops: int = 0


class _Cache:
    """Takes the place of a `DepthCache` in the forward of a model, with what the published policies leave.

    Args:
        layers: K/V layers of a loop.
        loops: T.
        policy: What stands in for loops that a token did not run.
    """

    def __init__(self, layers: int, loops: int, policy: Policy) -> None:
        self._layers, self._core, self._policy = layers, layers * loops, policy
        self.passes: list[_Pass] = []

    def update(self, keys: Tensor, values: Tensor, plane: int) -> tuple[Tensor, Tensor]:
        """Keeps K/V of the newest pass, in place of those of an earlier reading; what is seen, `[1, H, S', d]` each."""
        newest = self.passes[-1]
        newest.planes[plane] = keys, values
        if plane < self._core:
            newest.loops = max(newest.loops, plane // self._layers + 1)
        parts = [part for earlier in self.passes[:-1] if (part := self._of(earlier, plane)) is not None]
        parts.append((keys, values))
        return torch.cat([part[0] for part in parts], dim=2), torch.cat([part[1] for part in parts], dim=2)

    def _of(self, earlier: _Pass, plane: int) -> tuple[Tensor, Tensor] | None:
        if self._policy == "latest-m4" and plane < self._core:
            loop, layer = divmod(plane, self._layers)
            plane = min(loop, earlier.loops - 1) * self._layers + layer
        return earlier.planes.get(plane)


@dataclass(frozen=True)
class PublishedRun:
    """What the published code does."""

    tokens: Tensor  # New ids, int64 `[N]`
    steps: Tensor  # Loops of the pass that each came from, `[N]`
    values: Tensor  # The criterion after each loop, float32 `[N, T]`; NaN after the exit
    logits: Tensor  # That each was read from, `[N, V]`


@torch.no_grad()
def generate_as_published(
    model: RavenForCausalLM,
    prompt: Tensor,
    new_tokens: int,
    criterion: Criterion,
    threshold: float,
    policy: Policy = "full",
) -> PublishedRun:
    """Greedy decoding after a prompt `[P]`, which is one pass.

    Raises:
        ValueError: For an unknown criterion or policy.
    """
    run = _Run(model, criterion, threshold, policy)
    ids = prompt
    for _ in range(new_tokens):
        run.step(ids)
        ids = run.logits[-1].argmax()[None]
    return run.result()


@torch.no_grad()
def read_as_published(
    model: RavenForCausalLM, ids: Tensor, criterion: Criterion, threshold: float, policy: Policy = "full"
) -> PublishedRun:
    """A text `[S]` read token by token, each with an exit of its own; `tokens` are the argmax after each.

    Raises:
        ValueError: For an unknown criterion or policy.
    """
    run = _Run(model, criterion, threshold, policy)
    for token in ids:
        run.step(token[None])
    return run.result()


class _Run:
    def __init__(self, model: RavenForCausalLM, criterion: Criterion, threshold: float, policy: Policy) -> None:
        if criterion not in get_args(Criterion):
            raise ValueError(f"criterion is one of {', '.join(get_args(Criterion))}, got {criterion!r}")
        if policy not in get_args(Policy):
            raise ValueError(f"policy is {' or '.join(get_args(Policy))}, got {policy!r}")
        self._model, self._criterion, self._threshold = model, criterion, threshold
        self._cache = _Cache(model.num_block_layers, model.num_loops, policy)
        self._position = 0
        self.steps: list[int] = []
        self.values: list[Tensor] = []
        self.logits: list[Tensor] = []

    def step(self, ids: Tensor) -> None:
        """One pass over ids `[S]`."""
        model, cache, total = self._model.transformer, self._cache, self._model.num_loops
        cache.passes.append(_Pass())
        positions = torch.arange(self._position, self._position + len(ids), device=ids.device)[None]
        self._position += len(ids)
        injected = model.run_prelude(model.embed(ids[None]), positions, cache)  # [1, S, D]
        state = model.start(injected, positions)
        values = torch.full((total,), torch.nan)
        meter = _Meter(self._criterion, state, self._model.config.vocab_size)
        logits: Tensor | None = None
        for loop in range(total):
            state = model.run_core(state, injected, positions, loop, cache)
            if self._criterion not in _OF_STATES:
                logits = self._read(state, positions)
            values[loop] = value = meter.value(state, logits)
            met = value >= self._threshold if self._criterion == "argmax-stability" else value < self._threshold
            if met:
                break
        self.steps.append(loop + 1)
        self.values.append(values)
        self.logits.append(self._read(state, positions) if logits is None else logits)

    def _read(self, state: Tensor, positions: Tensor) -> Tensor:
        """Logits `[V]` after the last position."""
        read = self._model.transformer.run_coda(state, None, self._cache, positions)
        return self._model.read_states(read[0, -1])

    def result(self) -> PublishedRun:
        logits = torch.stack(self.logits)
        return PublishedRun(logits.argmax(-1), torch.tensor(self.steps), torch.stack(self.values), logits)


class _Meter:
    """A criterion over the loops of one pass.

    Args:
        criterion: Which.
        start: State before loop 1, `[1, S, D]`.
        vocabulary: V.
    """

    def __init__(self, criterion: Criterion, start: Tensor, vocabulary: int) -> None:
        self._criterion = criterion
        self._state = start
        self._entropy = torch.tensor(100.0)
        self._log_probs = torch.full((vocabulary,), -math.log(vocabulary))
        self._best, self._stayed = -1, 0

    def value(self, state: Tensor, logits: Tensor | None) -> float:
        """The criterion after one loop more."""
        before, self._state = self._state, state
        if self._criterion == "latent-diff":
            return float(((state - before).norm(dim=-1) / state.norm(dim=-1)).mean())
        if self._criterion == "cosine":
            product = (state * before).sum(-1)
            return float((1.0 - product / (state.norm(dim=-1) * before.norm(dim=-1))).mean())
        assert logits is not None
        if self._criterion == "argmax-stability":
            best = int(logits.argmax())
            self._stayed = self._stayed + 1 if best == self._best else 0
            self._best = best
            return float(self._stayed)
        log_probs = logits.float().log_softmax(-1)
        probs = log_probs.exp()
        if self._criterion == "entropy-diff":
            entropy = -(probs * (probs + 1e-10).log()).sum()
            change, self._entropy = (entropy - self._entropy).abs(), entropy
            return float(change)
        if self._criterion == "minp-kl":
            probs = torch.where(probs < 0.1 * probs.max(), 1.0 / len(probs), probs)
            log_probs = (probs / probs.sum()).log()
        earlier, self._log_probs = self._log_probs, log_probs
        return float((earlier.exp() * (earlier - log_probs)).sum())
