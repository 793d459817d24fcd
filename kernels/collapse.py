"""How near a text is to collapse, for all rows at once: one pass over the logits, and the last ids.

With l the logits of a row, p = softmax(l) (a masked logit, -inf, has p = 0), and the id just chosen among the ids:

    entropy      log(sum exp(l)) - sum p l, in nats
    margin       p of the first id - p of the second; ties go to the smaller id
    drop         (mean - entropy) / sqrt(max(variance, FLOOR)), mean and variance exponential over the tokens *before*
                 this one, 0 during the first WARM_UP: a z-score that has already taken in its own token cannot pass
                 sqrt((1 - alpha) / alpha), 2.38 at alpha = 0.15
    periodicity  max over lags p <= 64 of the share of the last max(p, 27) ids that equal the one p back, where there
                 are max(p, 27) + p ids; with it the smallest lag that reaches it. 27 is the largest span with which
                 a loop of any of these periods shows once three periods and 40 ids are out
    echo         share of the 4-grams of the last 128 ids that stood there before; in the proximity a share of 37
                 4-grams at least, those of 40 ids, since a few ids repeat by chance
    distinct     distinct ids among the last 128, over their number

    proximity    1 - (1 - w_p f_p) (1 - w_e f_e) (1 - w_d f_d) (1 - min(w_h f_h + w_m f_m, 1/2)): a noisy-or in which
                 f = clamp((x - low) / (high - low)) of periodicity, echo, 1 - distinct, drop and margin; entropy and
                 margin alone cannot pass 0.5

Bytes for each row: V logits read once and 128 ids; nothing of size V is written.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

WINDOW, LAGS, SHORTEST, GRAM, SETTLED = 128, 64, 27, 4, 37
ALPHA, WARM_UP, FLOOR = 0.15, 8, 0.05
ENTROPY, MARGIN, DROP, PERIODICITY, LAG, ECHO, DISTINCT, PROXIMITY = range(8)
# Logits of one step; 8 for each thread, so that half precision is read 16 bytes at a time.
BLOCK, WARPS = 2048, 8
Numbers = TypeVar("Numbers", Tensor, NDArray[Any])
READINGS = ("entropy", "margin", "drop", "periodicity", "lag", "echo", "distinct", "proximity")


@dataclass(frozen=True)
class Part:
    """One part of the proximity: nothing at `low`, `weight` from `high` on."""

    low: float
    high: float
    weight: float

    def of(self, value: Numbers) -> Numbers:
        """The part's share."""
        return self.weight * ((value - self.low) / (self.high - self.low)).clip(0, 1)


@dataclass(frozen=True)
class CollapseRule:
    """Parts of the proximity, and when `margin` stops a token.

    The parts were fitted (`bench/proximity`), where `sameness`, `drop` and `margin` were found to add hardly anything
    to the first two; they are kept for rules of one's own.

    Attributes:
        periodicity: Of the share that repeats.
        echo: Of the 4-grams seen before.
        sameness: Of 1 - distinct.
        drop: Of the fall of the entropy; together with `margin` at most 1/2.
        margin: Of the lead of the first id.
        theta: Lead at which `margin` is met; 0 leaves the decision to somebody else.
    """

    periodicity: Part = Part(0.222, 1.0, 0.949)
    echo: Part = Part(0.04, 0.644, 0.949)
    sameness: Part = Part(0.391, 0.636, 0.0)
    drop: Part = Part(2.698, 2.793, 0.001)
    margin: Part = Part(0.997, 1.08, 0.025)
    theta: float = 0.0

    def proximity(
        self, periodicity: Numbers, echo: Numbers, sameness: Numbers, drop: Numbers, margin: Numbers
    ) -> Numbers:
        """The noisy-or of the parts, all of one shape: tensors, or arrays on the host."""
        repetition = (
            (1 - self.periodicity.of(periodicity)) * (1 - self.echo.of(echo)) * (1 - self.sameness.of(sameness))
        )
        certainty = (self.drop.of(drop) + self.margin.of(margin)).clip(max=0.5)
        proximity: Numbers = 1 - repetition * (1 - certainty)
        return proximity


@dataclass(frozen=True)
class CollapseState:
    """What is remembered of each sequence, written in place.

    Attributes:
        ids: The last ids in a ring, id number n at n mod 128, int32 `[slots, 128]`.
        lengths: Ids so far, int64 `[slots]`.
        entropy: Exponential mean and variance of the entropy, float32 `[slots, 2]`.
        observed: Entropies taken in, int32 `[slots]`.
    """

    ids: Tensor
    lengths: Tensor
    entropy: Tensor
    observed: Tensor

    @classmethod
    def empty(cls, sequences: int, device: torch.device | str) -> "CollapseState":
        """No ids yet."""
        return cls(
            torch.zeros((sequences, WINDOW), dtype=torch.int32, device=device),
            torch.zeros(sequences, dtype=torch.int64, device=device),
            torch.zeros((sequences, 2), dtype=torch.float32, device=device),
            torch.zeros(sequences, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Collapse:
    """What is told of the rows.

    Attributes:
        statistics: The numbers named in `READINGS`, float32 `[B, 8]`.
        chosen: The id that was taken in, or would be, int64 `[B]`.
        top: The two likeliest ids, int64 `[B, 2]`.
        met: Whether the lead is at least `theta`, bool `[B]`; False where theta is 0.
    """

    statistics: Tensor
    chosen: Tensor
    top: Tensor
    met: Tensor


def collapse_reference(
    logits: Tensor, chosen: Tensor | None, state: CollapseState | None, slots: Tensor | None, rule: CollapseRule
) -> Collapse:
    """The formulas above in plain torch; what a CPU runs.

    Args:
        logits: `[B, V]`, V at least 2; -inf where masked, at least one finite number in each row.
        chosen: Ids just chosen, int64 `[B]`; None takes the likeliest.
        state: Written in place; None takes nothing in, and only entropy and margin are told.
        slots: Row of the state for each row of logits, int64 `[B]`, none twice; None where there is no state.
        rule: Parts and threshold.
    """
    entropy, margin, top, speaks = certainty(logits)
    met = margin >= rule.theta if rule.theta > 0 else torch.zeros_like(margin, dtype=torch.bool)
    taken = top[:, 0] if chosen is None else chosen
    if state is None or slots is None:
        none = torch.zeros_like(margin)
        return Collapse(torch.stack([entropy, margin, *[none] * 6], dim=-1), taken, top, met)
    drop = _fold_entropy(entropy, state, slots, speaks)
    lengths = state.lengths[slots]
    state.ids[slots, lengths % WINDOW] = taken.int()
    state.lengths[slots] = lengths + 1
    periodicity, lag, echo, distinct = repetition_of(state.ids[slots], lengths + 1)
    settled = ((lengths + 1 - GRAM + 1) / SETTLED).clamp(0, 1)
    proximity = rule.proximity(periodicity, echo * settled, 1 - distinct, drop, margin.masked_fill(~speaks, 0.0))
    statistics = torch.stack([entropy, margin, drop, periodicity, lag, echo, distinct, proximity], dim=-1)
    return Collapse(statistics, taken, top, met)


def certainty(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entropy and margin `[B]`, the two likeliest ids `[B, 2]`, and whether the logits are numbers, bool `[B]`.

    What a broken model says is told as unknown: its entropy and margin are NaN.

    Args:
        logits: `[B, V]`, as `collapse_reference` takes them.
    """
    wide = logits.float()
    top = _two_best(wide)  # [B, 2]
    chances = torch.softmax(wide, dim=-1)
    entropy = torch.logsumexp(wide, dim=-1) - (chances * wide.masked_fill(chances == 0, 0.0)).sum(-1)
    entropy = entropy.clamp_min(0.0)
    margin = chances.gather(1, top).diff(dim=-1).neg()[:, 0]
    speaks = wide.amax(dim=-1).isfinite()
    return entropy.masked_fill(~speaks, torch.nan), margin.masked_fill(~speaks, torch.nan), top, speaks


def leads_reference(logits: Tensor, theta: float) -> Tensor:
    """Whether the margin is at least theta, bool `[B]`: all that `margin` needs to know of logits `[B, V]`."""
    best = torch.softmax(logits.float(), dim=-1).topk(2, dim=-1).values
    return best[:, 0] - best[:, 1] >= theta


def _two_best(logits: Tensor) -> Tensor:
    """The two likeliest ids `[B, 2]`, the smaller first where they are equal, as `argmax` has it."""
    first = logits.argmax(dim=-1, keepdim=True)
    best, second = logits.scatter(1, first, -torch.inf).max(dim=-1, keepdim=True)
    # with all others masked, the scattered place is one of the equals
    second = torch.where(best == -torch.inf, (first == 0).long(), second)
    return torch.cat([first, second], dim=-1)


def _fold_entropy(entropy: Tensor, state: CollapseState, slots: Tensor, speaks: Tensor) -> Tensor:
    """The drop of each entropy against those before it, `[B]`; then it is taken in where it `speaks`."""
    mean, variance = state.entropy[slots].unbind(-1)
    observed = state.observed[slots]
    drop = (mean - entropy) / variance.clamp_min(FLOOR).sqrt()
    drop = drop.masked_fill((observed < WARM_UP) | ~speaks, 0.0)
    step = entropy - mean
    first = observed == 0
    new_mean = torch.where(first, entropy, mean + ALPHA * step)
    new_variance = ((1 - ALPHA) * (variance + ALPHA * step * step)).masked_fill(first, 0.0)
    taken_in = torch.stack([torch.where(speaks, new_mean, mean), torch.where(speaks, new_variance, variance)], dim=-1)
    state.entropy[slots] = taken_in
    state.observed[slots] = observed + speaks
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
    grams = WINDOW - GRAM + 1
    whole = torch.stack([same[:, k : k + grams, k : k + grams] for k in range(GRAM)]).all(0)
    echoes = whole.any(-1).sum(-1)
    echo = echoes / (known - GRAM + 1).clamp_min(1)
    return periodicity, lag.float(), echo, distinct


def leads(logits: Tensor, theta: float) -> Tensor:
    """`leads_reference` by the kernel below, which takes nothing in."""
    return collapse(logits, None, None, None, CollapseRule(theta=theta)).met


def collapse(
    logits: Tensor, chosen: Tensor | None, state: CollapseState | None, slots: Tensor | None, rule: CollapseRule
) -> Collapse:
    """`collapse_reference` in one launch of a Triton kernel.

    Raises:
        ValueError: For shapes or dtypes that the kernel does not take.
    """
    rows, vocabulary = logits.shape
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the kernel takes float32, float16 and bfloat16, not {logits.dtype}")
    if vocabulary < 2 or (slots is not None and tuple(slots.shape) != (rows,)) or (state is None) != (slots is None):
        raise ValueError(f"logits {tuple(logits.shape)} need 2 ids at least, and a slot for each row of a state")
    if chosen is not None and (tuple(chosen.shape) != (rows,) or chosen.dtype != torch.int64):
        raise ValueError(f"chosen ids must be int64 [{rows}], got {chosen.dtype} {tuple(chosen.shape)}")
    if state is not None and not all(part.is_contiguous() for part in vars(state).values()):
        raise ValueError("the numbers of a state must lie side by side")
    chosen, slots = (None if index is None else index.contiguous() for index in (chosen, slots))
    device = logits.device
    statistics = torch.empty((rows, 8), dtype=torch.float32, device=device)
    top = torch.empty((rows, 2), dtype=torch.int64, device=device)
    taken = torch.empty(rows, dtype=torch.int64, device=device)
    met = torch.empty(rows, dtype=torch.bool, device=device)
    parts = [rule.periodicity, rule.echo, rule.sameness, rule.drop, rule.margin]
    numbers = [number for part in parts for number in (part.low, 1 / (part.high - part.low), part.weight)]
    if rows:
        _collapse_kernel[(rows,)](
            logits,
            taken if chosen is None else chosen,
            taken if slots is None else slots,
            taken if state is None else state.ids,
            taken if state is None else state.lengths,
            statistics if state is None else state.entropy,
            taken if state is None else state.observed,
            statistics,
            taken,
            top,
            met,
            vocabulary,
            logits.stride(0),
            logits.stride(1),
            rule.theta,
            *numbers,
            CHOOSE=chosen is None,
            STATE=state is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return Collapse(statistics, taken, top, met)


if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _part(value, low, slope, weight):
        return weight * tl.minimum(tl.maximum((value - low) * slope, 0.0), 1.0)

    @triton.jit
    def _at_age(ids, length, age):
        # id number length - 1 - age; a multiple of the window keeps the number positive where there is none
        return tl.load(ids + (length - 1 - age + 512) % 128)

    @triton.jit
    def _collapse_kernel(
        logits,
        chosen,
        slots,
        ids,
        lengths,
        entropies,
        observed,
        statistics,
        taken,
        top,
        met,
        vocabulary,
        row_stride,
        id_stride,
        theta,
        periodicity_low,
        periodicity_slope,
        periodicity_weight,
        echo_low,
        echo_slope,
        echo_weight,
        sameness_low,
        sameness_slope,
        sameness_weight,
        drop_low,
        drop_slope,
        drop_weight,
        margin_low,
        margin_slope,
        margin_weight,
        CHOOSE: tl.constexpr,
        STATE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        start = logits + row * row_stride
        if STATE:
            # All that is remembered is read here: behind the barriers of the reductions below it may be written.
            slot = tl.load(slots + row).to(tl.int64)
            count = tl.load(observed + slot)
            mean = tl.load(entropies + slot * 2)
            variance = tl.load(entropies + slot * 2 + 1)
            length = tl.load(lengths + slot) + 1
        columns = tl.arange(0, BLOCK)
        nobody = 2147483647
        best = -float("inf")
        second = -float("inf")
        best_id = nobody
        second_id = nobody
        total = 0.0
        weighted = 0.0
        for first in range(0, vocabulary, BLOCK):
            index = first + columns
            inside = index < vocabulary
            x = tl.load(start + index.to(tl.int64) * id_stride, mask=inside, other=-float("inf")).to(tl.float32)
            # NaN wins, as it does in torch's argmax, so that some id is chosen whatever a model says
            x = tl.where(x != x, float("inf"), x)
            here = tl.max(x)
            here_id = tl.min(tl.where((x == here) & inside, index, nobody))
            others = tl.where(index == here_id, -float("inf"), x)
            next_best = tl.max(others)
            next_id = tl.min(tl.where((others == next_best) & inside & (index != here_id), index, nobody))
            highest = tl.maximum(best, here)
            # exp(-inf - -inf) would be NaN: as long as nothing finite was seen, the sums are 0 and stay it
            shift = tl.where(highest == -float("inf"), 0.0, highest)
            old = tl.exp(best - shift)
            share = tl.exp(x - shift)
            total = total * old + tl.sum(share)
            weighted = weighted * old + tl.sum(share * tl.where(share > 0, x, 0.0))
            # the second best is the better of the loser of the two firsts and the seconds; ties go to the smaller id
            wins = here > best
            loser = tl.where(wins, best, here)
            loser_id = tl.where(wins, best_id, here_id)
            rival = tl.where(wins, next_best, second)
            rival_id = tl.where(wins, next_id, second_id)
            ahead = (loser > rival) | ((loser == rival) & (loser_id < rival_id))
            second = tl.where(ahead, loser, rival)
            second_id = tl.where(ahead, loser_id, rival_id)
            best_id = tl.where(wins, here_id, tl.where(best_id == nobody, here_id, best_id))
            best = highest
        entropy = tl.maximum(best + tl.log(total) - weighted / total, 0.0)
        margin = (1.0 - tl.exp(second - best)) / total
        speaks = tl.abs(best) < float("inf")
        entropy = tl.where(speaks, entropy, float("nan"))
        margin = tl.where(speaks, margin, float("nan"))
        tl.store(top + row * 2, best_id.to(tl.int64))
        tl.store(top + row * 2 + 1, second_id.to(tl.int64))
        tl.store(met + row, (theta > 0) & (margin >= theta))

        newest = best_id.to(tl.int64) if CHOOSE else tl.load(chosen + row)
        tl.store(taken + row, newest)
        told = statistics + row * 8
        tl.store(told, entropy)
        tl.store(told + 1, margin)
        if STATE:
            drop = tl.where((count >= 8) & speaks, (mean - entropy) / tl.sqrt(tl.maximum(variance, 0.05)), 0.0)
            step = entropy - mean
            new_mean = tl.where(count == 0, entropy, mean + 0.15 * step)
            new_variance = tl.where(count == 0, 0.0, 0.85 * (variance + 0.15 * step * step))
            tl.store(entropies + slot * 2, tl.where(speaks, new_mean, mean))
            tl.store(entropies + slot * 2 + 1, tl.where(speaks, new_variance, variance))
            tl.store(observed + slot, count + speaks.to(tl.int32))

            tl.store(lengths + slot, length)
            ring = ids + slot * 128
            tl.store(ring + (length - 1) % 128, newest.to(tl.int32))
            tl.debug_barrier()
            known = tl.minimum(length, 128)

            ages = tl.arange(0, 128)
            own = _at_age(ring, length, ages)
            periodicity = 0.0
            lag = 0
            for chunk in range(4):
                lags = 1 + chunk * 16 + tl.arange(0, 16)
                spans = tl.maximum(lags, 27)
                back = _at_age(ring, length, tl.minimum(ages[None, :] + lags[:, None], 127))
                equal = (own[None, :] == back) & (ages[None, :] < spans[:, None])
                shares = tl.sum(equal.to(tl.float32), axis=1) / spans
                shares = tl.where(spans + lags <= length, shares, 0.0)
                most = tl.max(shares)
                at = tl.min(tl.where(shares == most, lags, nobody))
                lag = tl.where(most > periodicity, at, lag)
                periodicity = tl.maximum(periodicity, most)

            repeated = tl.zeros([128], dtype=tl.int32)
            echoed = tl.zeros([128], dtype=tl.int32)
            own1 = _at_age(ring, length, tl.minimum(ages + 1, 127))
            own2 = _at_age(ring, length, tl.minimum(ages + 2, 127))
            own3 = _at_age(ring, length, tl.minimum(ages + 3, 127))
            for chunk in range(8):
                older = chunk * 16 + tl.arange(0, 16)
                there = (older[None, :] > ages[:, None]) & (older[None, :] < known)
                same = there & (own[:, None] == _at_age(ring, length, older)[None, :])
                repeated = tl.maximum(repeated, tl.max(same.to(tl.int32), axis=1))
                gram = same & (older[None, :] + 3 < known)
                gram = gram & (own1[:, None] == _at_age(ring, length, tl.minimum(older + 1, 127))[None, :])
                gram = gram & (own2[:, None] == _at_age(ring, length, tl.minimum(older + 2, 127))[None, :])
                gram = gram & (own3[:, None] == _at_age(ring, length, tl.minimum(older + 3, 127))[None, :])
                echoed = tl.maximum(echoed, tl.max(gram.to(tl.int32), axis=1))
            repeats = tl.sum(tl.where(ages < known, repeated, 0)).to(tl.float32)
            distinct = (known - repeats) / known
            echo = tl.sum(echoed).to(tl.float32) / tl.maximum(known - 3, 1)

            repetition = 1.0 - _part(periodicity, periodicity_low, periodicity_slope, periodicity_weight)
            settled = tl.minimum(tl.maximum((known - 3).to(tl.float32) / 37.0, 0.0), 1.0)
            repetition = repetition * (1.0 - _part(echo * settled, echo_low, echo_slope, echo_weight))
            repetition = repetition * (1.0 - _part(1.0 - distinct, sameness_low, sameness_slope, sameness_weight))
            certainty = _part(drop, drop_low, drop_slope, drop_weight)
            certainty = tl.minimum(
                certainty + _part(tl.where(speaks, margin, 0.0), margin_low, margin_slope, margin_weight), 0.5
            )
            tl.store(told + 2, drop)
            tl.store(told + 3, periodicity)
            tl.store(told + 4, lag.to(tl.float32))
            tl.store(told + 5, echo)
            tl.store(told + 6, distinct)
            tl.store(told + 7, 1.0 - repetition * (1.0 - certainty))
        else:
            for place in tl.static_range(2, 8):
                tl.store(told + place, 0.0)
