"""Proximity of sequences to collapse, for all rows at once: one pass over the logits, and the last ids.

With l the logits of a row, p = softmax(l) (a masked logit, -inf, has p = 0), and the id just sampled among the ids:

    entropy      log(sum exp(l)) - sum p l, in nats
    margin       p of the first id - p of the second; ties go to the smaller id
    drop         (mean - entropy) / sqrt(max(variance, FLOOR)), mean and variance exponential over the tokens *before*
                 this one, 0 during the first WARM_UP: a z-score that includes its own token cannot pass
                 sqrt((1 - alpha) / alpha), 2.38 at alpha = 0.15
    periodicity  max over lags p <= 64 of the share of the last max(p, 27) ids that equal the one p back, where there
                 are max(p, 27) + p ids; and the smallest lag that reaches it. 27 is the largest span with which
                 a loop of any of these periods shows once three periods and 40 ids are out
    echo         share of the 4-grams of the last 128 ids that occur among them before; in the proximity a share of 37
                 4-grams at least, those of 40 ids, since a few ids repeat by chance
    distinct     distinct ids among the last 128, over their number

    proximity    1 - (1 - w_p f_p) (1 - w_e f_e) (1 - w_d f_d) (1 - min(w_h f_h + w_m f_m, 1/2)): a noisy-or in which
                 f = clamp((x - low) / (high - low)) of periodicity, echo, 1 - distinct, drop and margin; entropy and
                 margin alone cannot pass 0.5

Bytes for each row: V logits read once and 128 ids; nothing of size V is written.
"""

from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Ids that are looked at, lags among them, ids that a lag is measured over at least, ids of an n-gram, and the number of
# n-grams from which on their echo has its full weight.
WINDOW, LAGS, SHORTEST, NGRAM, FULL_ECHO = 128, 64, 27, 4, 37
# Of the exponential mean and variance of the entropy: rate, tokens before it counts, and least variance.
ALPHA, WARM_UP, FLOOR = 0.15, 8, 0.05
# Bound on the share of entropy and margin in the proximity.
MOST_CERTAINTY = 0.5
LOGIT_STATS = ("entropy", "margin", "drop", "periodicity", "lag", "echo", "distinct", "proximity")
ENTROPY, MARGIN, DROP, PERIODICITY, LAG, ECHO, DISTINCT, PROXIMITY = range(len(LOGIT_STATS))
# Places in a slot's `entropy`.
MEAN, VARIANCE, ENTROPY_WIDTH = range(3)


@dataclass(frozen=True)
class Part:
    """One part of the proximity: nothing at `low`, `weight` from `high` on."""

    low: float
    high: float
    weight: float

    def of(self, value: Any) -> Any:
        """The part's share, of a tensor or of an array on the host."""
        return self.weight * ((value - self.low) / (self.high - self.low)).clip(0, 1)

    def of_number(self, value: float) -> float:
        """`of` one number."""
        return self.weight * min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


@dataclass(frozen=True)
class CollapseRule:
    """Parts of the proximity, and when `margin` stops a token.

    The parts were fitted (`bench/proximity`), where `sameness`, `drop` and `margin` were found to add hardly anything
    to the first two; they are kept for other rules.
    """

    periodicity: Part = Part(0.222, 1.0, 0.949)  # Of the periodicity
    echo: Part = Part(0.04, 0.644, 0.949)  # Of the echo
    sameness: Part = Part(0.391, 0.636, 0.0)  # Of 1 - distinct
    drop: Part = Part(2.698, 2.793, 0.001)  # Of the drop of the entropy; together with `margin` at most 1/2
    margin: Part = Part(0.997, 1.08, 0.025)  # Of the margin
    theta: float = 0.0  # Margin at which an exit by `margin` is met; 0 for none

    @property
    def numbers(self) -> "array[float]":
        """Low, high and weight of each part, in this order."""
        return _numbers(self)

    def proximity(self, periodicity: Any, echo: Any, sameness: Any, drop: Any, margin: Any) -> Any:
        """The noisy-or of the parts, all of one shape: tensors, or arrays on the host."""
        repetition = (
            (1 - self.periodicity.of(periodicity)) * (1 - self.echo.of(echo)) * (1 - self.sameness.of(sameness))
        )
        certainty = (self.drop.of(drop) + self.margin.of(margin)).clip(max=MOST_CERTAINTY)
        return 1 - repetition * (1 - certainty)

    def of_numbers(self, periodicity: float, echo: float, sameness: float, drop: float, margin: float) -> float:
        """`proximity` of one sequence, in Python's own numbers."""
        repetition = 1 - self.periodicity.of_number(periodicity)
        repetition *= (1 - self.echo.of_number(echo)) * (1 - self.sameness.of_number(sameness))
        certainty = min(MOST_CERTAINTY, self.drop.of_number(drop) + self.margin.of_number(margin))
        return 1 - repetition * (1 - certainty)


@lru_cache
def _numbers(rule: CollapseRule) -> "array[float]":
    parts = (rule.periodicity, rule.echo, rule.sameness, rule.drop, rule.margin)
    return array("d", [number for part in parts for number in (part.low, part.high, part.weight)])


@dataclass(frozen=True)
class CollapseState:
    """Per-sequence state, updated in place."""

    ids: Tensor  # The last ids in a ring, id number n at n mod 128, int32 `[slots, 128]`
    lengths: Tensor  # Ids so far, int64 `[slots]`
    entropy: Tensor  # Exponential mean and variance of the entropy, float32 `[slots, 2]`
    observed: Tensor  # Entropies in the mean, int32 `[slots]`

    @classmethod
    def empty(cls, sequences: int, device: torch.device | str) -> "CollapseState":
        """No ids yet."""
        return cls(
            torch.zeros((sequences, WINDOW), dtype=torch.int32, device=device),
            torch.zeros(sequences, dtype=torch.int64, device=device),
            torch.zeros((sequences, ENTROPY_WIDTH), dtype=torch.float32, device=device),
            torch.zeros(sequences, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Collapse:
    """Result for B rows.

    Attributes:
        statistics: The numbers named in `LOGIT_STATS`, float32 `[B, 8]`.
        token_ids: The sampled id, or the argmax without one, int64 `[B]`.
        top: The two ids of highest probability, int64 `[B, 2]`.
        met: Whether the margin is at least `theta`, bool `[B]`; False where theta is 0.
    """

    statistics: Tensor
    token_ids: Tensor
    top: Tensor
    met: Tensor


def collapse_reference(
    logits: Tensor, sampled: Tensor | None, state: CollapseState | None, slots: Tensor | None, rule: CollapseRule
) -> Collapse:
    """The formulas above in plain torch; the CPU path.

    Args:
        logits: `[B, V]`, V at least 2; -inf where masked, at least one finite number in each row.
        sampled: Ids just sampled, int64 `[B]`; None for the argmax.
        state: Updated in place; with None only entropy and margin are computed.
        slots: State slot of each row of logits, int64 `[B]`, all different; None without a state.
        rule: Parts and threshold.
    """
    entropy, margin = certainty(logits)
    top, finite = _two_best(logits.float()), entropy.isfinite()
    met = margin >= rule.theta if rule.theta > 0 else torch.zeros_like(margin, dtype=torch.bool)
    token_ids = top[:, 0] if sampled is None else sampled
    if state is None or slots is None:
        none = torch.zeros_like(margin)
        return Collapse(torch.stack([entropy, margin, *[none] * 6], dim=-1), token_ids, top, met)
    drop = _fold_entropy(entropy, state, slots, finite)
    lengths = state.lengths[slots]
    state.ids[slots, lengths % WINDOW] = token_ids.int()
    state.lengths[slots] = lengths + 1
    periodicity, lag, echo, distinct = repetition_of(state.ids[slots], lengths + 1)
    echo_weight = ((lengths + 1 - NGRAM + 1) / FULL_ECHO).clamp(0, 1)
    proximity = rule.proximity(periodicity, echo * echo_weight, 1 - distinct, drop, margin.masked_fill(~finite, 0.0))
    statistics = torch.stack([entropy, margin, drop, periodicity, lag, echo, distinct, proximity], dim=-1)
    return Collapse(statistics, token_ids, top, met)


def certainty(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy and margin, float32 `[B]`; NaN of logits that are not finite.

    Args:
        logits: `[B, V]`, as `collapse_reference` takes them.
    """
    probs = torch.softmax(logits.float(), dim=-1)
    best = probs.topk(2, dim=-1).values
    return torch.special.entr(probs).sum(-1), best[:, 0] - best[:, 1]


def leads_reference(logits: Tensor, theta: float | Tensor) -> Tensor:
    """Whether the margin is at least theta, bool `[B]`: the exit decision of `margin`.

    Args:
        logits: `[B, V]`.
        theta: Of all rows, or of each, float32 `[B]`.
    """
    best = torch.softmax(logits.float(), dim=-1).topk(2, dim=-1).values
    return best[:, 0] - best[:, 1] >= theta


def _two_best(logits: Tensor) -> Tensor:
    """The two ids of highest probability `[B, 2]`, the smaller first where they are equal, as for `argmax`."""
    first = logits.argmax(dim=-1, keepdim=True)
    best, second = logits.scatter(1, first, -torch.inf).max(dim=-1, keepdim=True)
    # with all others masked, the scattered index is one of the equals
    second = torch.where(best == -torch.inf, (first == 0).long(), second)
    return torch.cat([first, second], dim=-1)


def _fold_entropy(entropy: Tensor, state: CollapseState, slots: Tensor, finite: Tensor) -> Tensor:
    """The drop of each entropy against those before it, `[B]`; then a finite one joins the mean."""
    mean, variance = state.entropy[slots].unbind(-1)
    observed = state.observed[slots]
    drop = (mean - entropy) / variance.clamp_min(FLOOR).sqrt()
    drop = drop.masked_fill((observed < WARM_UP) | ~finite, 0.0)
    step = entropy - mean
    first = observed == 0
    new_mean = torch.where(first, entropy, mean + ALPHA * step)
    new_variance = ((1 - ALPHA) * (variance + ALPHA * step * step)).masked_fill(first, 0.0)
    means = torch.where(finite, new_mean, mean)
    variances = torch.where(finite, new_variance, variance)
    state.entropy[slots] = torch.stack([means, variances], dim=-1)
    state.observed[slots] = observed + finite
    return drop


def repetition_of(ring: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """periodicity, its lag, echo and distinct share, each float32 `[B]`.

    Args:
        ring: The last ids, id number n at n mod 128, `[B, 128]`.
        lengths: Ids so far, int64 `[B]`.
    """
    device = ring.device
    ages = torch.arange(WINDOW, device=device)
    known = lengths.clamp_max(WINDOW)  # [B]
    ids = ring.gather(1, (lengths[:, None] - 1 - ages) % WINDOW)  # [B, W], newest first
    lags = torch.arange(1, LAGS + 1, device=device)
    spans = lags.clamp_min(SHORTEST)  # [P]
    back = (ages + lags[:, None]).clamp_max(WINDOW - 1)  # [P, W]
    equal = (ids[:, None] == ids[:, back]) & (ages < spans[:, None])
    shares = torch.where(lengths[:, None] >= spans + lags, equal.sum(-1) / spans, 0.0)  # [B, P]
    periodicity = shares.amax(dim=-1)
    lag = torch.where(shares == periodicity[:, None], lags, LAGS + 1).amin(dim=-1)
    lag = torch.where(periodicity > 0, lag, 0)
    older = ages[:, None] < ages  # [a, b]: b lies before a
    there = (ages < known[:, None])[:, None]  # [B, 1, W]
    same = (ids[:, :, None] == ids[:, None]) & older & there  # [B, a, b]
    seen = same.any(-1) & (ages < known[:, None])
    distinct = (known - seen.sum(-1)) / known.clamp_min(1)
    grams = WINDOW - NGRAM + 1
    whole = torch.stack([same[:, k : k + grams, k : k + grams] for k in range(NGRAM)]).all(0)
    echoes = whole.any(-1).sum(-1)
    echo = echoes / (known - NGRAM + 1).clamp_min(1)
    return periodicity, lag.float(), echo, distinct
