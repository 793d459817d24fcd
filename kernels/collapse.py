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

from dataclasses import dataclass
from importlib.util import find_spec
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
# Logits of one step; 8 for each thread, so that half precision is read 16 bytes at a time.
BLOCK, WARPS = 2048, 8
# Lags, and ids of the window, that a program compares at once.
CHUNK = 16


@dataclass(frozen=True)
class Part:
    """One part of the proximity: nothing at `low`, `weight` from `high` on."""

    low: float
    high: float
    weight: float

    def of(self, value: Any) -> Any:
        """The part's share, of a tensor or of an array on the host."""
        return self.weight * ((value - self.low) / (self.high - self.low)).clip(0, 1)


@dataclass(frozen=True)
class CollapseRule:
    """Parts of the proximity, and when `margin` stops a token.

    The parts were fitted (`bench/proximity`), where `sameness`, `drop` and `margin` were found to add hardly anything
    to the first two; they are kept for other rules.

    Attributes:
        periodicity: Of the periodicity.
        echo: Of the echo.
        sameness: Of 1 - distinct.
        drop: Of the drop of the entropy; together with `margin` at most 1/2.
        margin: Of the margin.
        theta: Margin at which an exit by `margin` is met; 0 for none.
    """

    periodicity: Part = Part(0.222, 1.0, 0.949)
    echo: Part = Part(0.04, 0.644, 0.949)
    sameness: Part = Part(0.391, 0.636, 0.0)
    drop: Part = Part(2.698, 2.793, 0.001)
    margin: Part = Part(0.997, 1.08, 0.025)
    theta: float = 0.0

    def proximity(self, periodicity: Any, echo: Any, sameness: Any, drop: Any, margin: Any) -> Any:
        """The noisy-or of the parts, all of one shape: tensors, or arrays on the host."""
        repetition = (
            (1 - self.periodicity.of(periodicity)) * (1 - self.echo.of(echo)) * (1 - self.sameness.of(sameness))
        )
        certainty = (self.drop.of(drop) + self.margin.of(margin)).clip(max=MOST_CERTAINTY)
        return 1 - repetition * (1 - certainty)


@dataclass(frozen=True)
class CollapseState:
    """Per-sequence state, updated in place.

    Attributes:
        ids: The last ids in a ring, id number n at n mod 128, int32 `[slots, 128]`.
        lengths: Ids so far, int64 `[slots]`.
        entropy: Exponential mean and variance of the entropy, float32 `[slots, 2]`.
        observed: Entropies in the mean, int32 `[slots]`.
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
    entropy, margin, top, finite = certainty(logits)
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


def certainty(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entropy and margin `[B]`, the two ids of highest probability `[B, 2]`, and whether logits are finite, bool `[B]`.

    Entropy and margin of logits that are not finite are NaN.

    Args:
        logits: `[B, V]`, as `collapse_reference` takes them.
    """
    wide = logits.float()
    top = _two_best(wide)  # [B, 2]
    probs = torch.softmax(wide, dim=-1)
    entropy = torch.logsumexp(wide, dim=-1) - (probs * wide.masked_fill(probs == 0, 0.0)).sum(-1)
    entropy = entropy.clamp_min(0.0)
    margin = probs.gather(1, top).diff(dim=-1).neg()[:, 0]
    finite = wide.amax(dim=-1).isfinite()
    return entropy.masked_fill(~finite, torch.nan), margin.masked_fill(~finite, torch.nan), top, finite


def leads_reference(logits: Tensor, theta: float) -> Tensor:
    """Whether the margin is at least theta, bool `[B]`: the exit decision of `margin` for logits `[B, V]`."""
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


def leads(logits: Tensor, theta: float) -> Tensor:
    """`leads_reference` by the kernel below, without a state."""
    return collapse(logits, None, None, None, CollapseRule(theta=theta)).met


def collapse(
    logits: Tensor, sampled: Tensor | None, state: CollapseState | None, slots: Tensor | None, rule: CollapseRule
) -> Collapse:
    """`collapse_reference` in one launch of a Triton kernel.

    Raises:
        ValueError: For shapes or dtypes that the kernel does not support.
    """
    rows, vocabulary = logits.shape
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the kernel takes float32, float16 and bfloat16, not {logits.dtype}")
    if vocabulary < 2 or (slots is not None and tuple(slots.shape) != (rows,)) or (state is None) != (slots is None):
        raise ValueError(f"logits {tuple(logits.shape)} need 2 ids at least, and a slot for each row of a state")
    if sampled is not None and (tuple(sampled.shape) != (rows,) or sampled.dtype != torch.int64):
        raise ValueError(f"sampled ids must be int64 [{rows}], got {sampled.dtype} {tuple(sampled.shape)}")
    if state is not None and not all(part.is_contiguous() for part in vars(state).values()):
        raise ValueError("the numbers of a state must lie side by side")
    sampled, slots = (None if index is None else index.contiguous() for index in (sampled, slots))
    device = logits.device
    statistics = torch.empty((rows, len(LOGIT_STATS)), dtype=torch.float32, device=device)
    top = torch.empty((rows, 2), dtype=torch.int64, device=device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    met = torch.empty(rows, dtype=torch.bool, device=device)
    parts = [rule.periodicity, rule.echo, rule.sameness, rule.drop, rule.margin]
    numbers = [number for part in parts for number in (part.low, 1 / (part.high - part.low), part.weight)]
    if rows:
        _collapse_kernel[(rows,)](
            logits,
            token_ids if sampled is None else sampled,
            token_ids if slots is None else slots,
            token_ids if state is None else state.ids,
            token_ids if state is None else state.lengths,
            statistics if state is None else state.entropy,
            token_ids if state is None else state.observed,
            statistics,
            token_ids,
            top,
            met,
            vocabulary,
            logits.stride(0),
            logits.stride(1),
            rule.theta,
            *numbers,
            GREEDY=sampled is None,
            STATE=state is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return Collapse(statistics, token_ids, top, met)


if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    # A kernel reads no global but a constexpr: the constants above, for it.
    _WINDOW, _LAGS, _SHORTEST = tl.constexpr(WINDOW), tl.constexpr(LAGS), tl.constexpr(SHORTEST)
    _NGRAM, _FULL_ECHO, _CHUNK = tl.constexpr(NGRAM), tl.constexpr(FULL_ECHO), tl.constexpr(CHUNK)
    _ALPHA, _WARM_UP, _FLOOR = tl.constexpr(ALPHA), tl.constexpr(WARM_UP), tl.constexpr(FLOOR)
    _MOST_CERTAINTY, _STATISTICS = tl.constexpr(MOST_CERTAINTY), tl.constexpr(len(LOGIT_STATS))
    _ENTROPY, _MARGIN, _DROP = tl.constexpr(ENTROPY), tl.constexpr(MARGIN), tl.constexpr(DROP)
    _PERIODICITY, _LAG, _ECHO = tl.constexpr(PERIODICITY), tl.constexpr(LAG), tl.constexpr(ECHO)
    _DISTINCT, _PROXIMITY = tl.constexpr(DISTINCT), tl.constexpr(PROXIMITY)
    _MEAN, _VARIANCE, _ENTROPY_WIDTH = tl.constexpr(MEAN), tl.constexpr(VARIANCE), tl.constexpr(ENTROPY_WIDTH)
    # Larger than any id, lag or place.
    _NO_ID = tl.constexpr(2**31 - 1)

    @triton.jit
    def _part(value, low, slope, weight):
        return weight * tl.minimum(tl.maximum((value - low) * slope, 0.0), 1.0)

    @triton.jit
    def _at_age(ids_ptr, length, age):
        # id number length - 1 - age; a multiple of the window keeps the number positive where there is none
        return tl.load(ids_ptr + (length - 1 - age + 4 * _WINDOW) % _WINDOW)

    @triton.jit
    def _collapse_kernel(
        logits_ptr,
        sampled_ptr,
        slots_ptr,
        ids_ptr,
        lengths_ptr,
        entropies_ptr,
        observed_ptr,
        statistics_ptr,
        token_ids_ptr,
        top_ptr,
        met_ptr,
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
        GREEDY: tl.constexpr,
        STATE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        row_ptr = logits_ptr + row * row_stride
        if STATE:
            # The whole state is read here: after the barriers of the reductions below it may be written.
            slot = tl.load(slots_ptr + row).to(tl.int64)
            count = tl.load(observed_ptr + slot)
            entropy_slot = entropies_ptr + slot * _ENTROPY_WIDTH
            mean = tl.load(entropy_slot + _MEAN)
            variance = tl.load(entropy_slot + _VARIANCE)
            length = tl.load(lengths_ptr + slot) + 1
        offsets = tl.arange(0, BLOCK)
        best = -float("inf")
        second = -float("inf")
        best_id = _NO_ID
        second_id = _NO_ID
        total = 0.0
        weighted = 0.0
        for first in range(0, vocabulary, BLOCK):
            index = first + offsets
            inside = index < vocabulary
            x = tl.load(row_ptr + index.to(tl.int64) * id_stride, mask=inside, other=-float("inf")).to(tl.float32)
            # NaN wins, as it does in torch's argmax, so that some id is returned for any logits
            x = tl.where(x != x, float("inf"), x)
            block_best = tl.max(x)
            block_id = tl.min(tl.where((x == block_best) & inside, index, _NO_ID))
            others = tl.where(index == block_id, -float("inf"), x)
            next_best = tl.max(others)
            next_id = tl.min(tl.where((others == next_best) & inside & (index != block_id), index, _NO_ID))
            highest = tl.maximum(best, block_best)
            # exp(-inf - -inf) would be NaN: as long as nothing finite was seen, the sums are 0 and stay it
            shift = tl.where(highest == -float("inf"), 0.0, highest)
            old = tl.exp(best - shift)
            share = tl.exp(x - shift)
            total = total * old + tl.sum(share)
            weighted = weighted * old + tl.sum(share * tl.where(share > 0, x, 0.0))
            # the second best is the better of the loser of the two firsts and the seconds; ties go to the smaller id
            wins = block_best > best
            loser = tl.where(wins, best, block_best)
            loser_id = tl.where(wins, best_id, block_id)
            rival = tl.where(wins, next_best, second)
            rival_id = tl.where(wins, next_id, second_id)
            ahead = (loser > rival) | ((loser == rival) & (loser_id < rival_id))
            second = tl.where(ahead, loser, rival)
            second_id = tl.where(ahead, loser_id, rival_id)
            best_id = tl.where(wins, block_id, tl.where(best_id == _NO_ID, block_id, best_id))
            best = highest
        entropy = tl.maximum(best + tl.log(total) - weighted / total, 0.0)
        margin = (1.0 - tl.exp(second - best)) / total
        finite = tl.abs(best) < float("inf")
        entropy = tl.where(finite, entropy, float("nan"))
        margin = tl.where(finite, margin, float("nan"))
        tl.store(top_ptr + row * 2, best_id.to(tl.int64))
        tl.store(top_ptr + row * 2 + 1, second_id.to(tl.int64))
        tl.store(met_ptr + row, (theta > 0) & (margin >= theta))

        newest = best_id.to(tl.int64) if GREEDY else tl.load(sampled_ptr + row)
        tl.store(token_ids_ptr + row, newest)
        statistics_row = statistics_ptr + row * _STATISTICS
        tl.store(statistics_row + _ENTROPY, entropy)
        tl.store(statistics_row + _MARGIN, margin)
        if STATE:
            drop = tl.where((count >= _WARM_UP) & finite, (mean - entropy) / tl.sqrt(tl.maximum(variance, _FLOOR)), 0.0)
            step = entropy - mean
            new_mean = tl.where(count == 0, entropy, mean + step * _ALPHA)
            new_variance = tl.where(count == 0, 0.0, (variance + step * _ALPHA * step) * (1 - _ALPHA))
            tl.store(entropy_slot + _MEAN, tl.where(finite, new_mean, mean))
            tl.store(entropy_slot + _VARIANCE, tl.where(finite, new_variance, variance))
            tl.store(observed_ptr + slot, count + finite.to(tl.int32))

            tl.store(lengths_ptr + slot, length)
            window_ptr = ids_ptr + slot * _WINDOW
            tl.store(window_ptr + (length - 1) % _WINDOW, newest.to(tl.int32))
            tl.debug_barrier()
            known = tl.minimum(length, _WINDOW)

            ages = tl.arange(0, _WINDOW)
            age_ids = _at_age(window_ptr, length, ages)
            periodicity = 0.0
            lag = 0
            for chunk in range(_LAGS // _CHUNK):
                lags = 1 + chunk * _CHUNK + tl.arange(0, _CHUNK)
                spans = tl.maximum(lags, _SHORTEST)
                back = _at_age(window_ptr, length, tl.minimum(ages[None, :] + lags[:, None], _WINDOW - 1))
                equal = (age_ids[None, :] == back) & (ages[None, :] < spans[:, None])
                shares = tl.sum(equal.to(tl.float32), axis=1) / spans
                shares = tl.where(spans + lags <= length, shares, 0.0)
                most = tl.max(shares)
                smallest = tl.min(tl.where(shares == most, lags, _NO_ID))
                lag = tl.where(most > periodicity, smallest, lag)
                periodicity = tl.maximum(periodicity, most)

            repeated = tl.zeros([_WINDOW], dtype=tl.int32)
            echoed = tl.zeros([_WINDOW], dtype=tl.int32)
            age_ids1 = _at_age(window_ptr, length, tl.minimum(ages + 1, _WINDOW - 1))
            age_ids2 = _at_age(window_ptr, length, tl.minimum(ages + 2, _WINDOW - 1))
            age_ids3 = _at_age(window_ptr, length, tl.minimum(ages + 3, _WINDOW - 1))
            for chunk in range(_WINDOW // _CHUNK):
                older = chunk * _CHUNK + tl.arange(0, _CHUNK)
                there = (older[None, :] > ages[:, None]) & (older[None, :] < known)
                same = there & (age_ids[:, None] == _at_age(window_ptr, length, older)[None, :])
                repeated = tl.maximum(repeated, tl.max(same.to(tl.int32), axis=1))
                gram = same & (older[None, :] + _NGRAM - 1 < known)
                gram = gram & (
                    age_ids1[:, None] == _at_age(window_ptr, length, tl.minimum(older + 1, _WINDOW - 1))[None, :]
                )
                gram = gram & (
                    age_ids2[:, None] == _at_age(window_ptr, length, tl.minimum(older + 2, _WINDOW - 1))[None, :]
                )
                gram = gram & (
                    age_ids3[:, None] == _at_age(window_ptr, length, tl.minimum(older + 3, _WINDOW - 1))[None, :]
                )
                echoed = tl.maximum(echoed, tl.max(gram.to(tl.int32), axis=1))
            repeats = tl.sum(tl.where(ages < known, repeated, 0)).to(tl.float32)
            distinct = (known - repeats) / known
            echo = tl.sum(echoed).to(tl.float32) / tl.maximum(known - (_NGRAM - 1), 1)

            repetition = 1.0 - _part(periodicity, periodicity_low, periodicity_slope, periodicity_weight)
            echo_ramp = tl.minimum(tl.maximum((known - (_NGRAM - 1)).to(tl.float32) / _FULL_ECHO, 0.0), 1.0)
            repetition = repetition * (1.0 - _part(echo * echo_ramp, echo_low, echo_slope, echo_weight))
            repetition = repetition * (1.0 - _part(1.0 - distinct, sameness_low, sameness_slope, sameness_weight))
            certainty = _part(drop, drop_low, drop_slope, drop_weight)
            certainty = tl.minimum(
                certainty + _part(tl.where(finite, margin, 0.0), margin_low, margin_slope, margin_weight),
                _MOST_CERTAINTY,
            )
            tl.store(statistics_row + _DROP, drop)
            tl.store(statistics_row + _PERIODICITY, periodicity)
            tl.store(statistics_row + _LAG, lag.to(tl.float32))
            tl.store(statistics_row + _ECHO, echo)
            tl.store(statistics_row + _DISTINCT, distinct)
            tl.store(statistics_row + _PROXIMITY, 1.0 - repetition * (1.0 - certainty))
        else:
            for statistic in tl.static_range(_DROP, _STATISTICS):
                tl.store(statistics_row + statistic, 0.0)
