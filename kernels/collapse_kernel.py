# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Proximity to collapse in one launch of a Triton kernel: the formulas of `collapse.py`, one program a row."""

import torch
from torch import Tensor

from sigma0.kernels.collapse import (
    ALPHA,
    DISTINCT,
    DROP,
    ECHO,
    ENTROPY,
    ENTROPY_WIDTH,
    FLOOR,
    FULL_ECHO,
    LAG,
    LAGS,
    LOGIT_STATS,
    MARGIN,
    MEAN,
    MOST_CERTAINTY,
    NGRAM,
    PERIODICITY,
    PROXIMITY,
    SHORTEST,
    VARIANCE,
    WARM_UP,
    WINDOW,
    Collapse,
    CollapseRule,
    CollapseState,
)
from sigma0.presence import wants_triton

# Logits of one step; 8 for each thread, so that half precision is read 16 bytes at a time.
BLOCK, WARPS = 2048, 8
# Lags, and ids of the window, that a program compares at once.
CHUNK = 16


def margin_met(logits: Tensor, theta: float | Tensor) -> Tensor:
    """`leads_reference` by the kernel below, without a state."""
    thetas = theta if isinstance(theta, Tensor) else torch.full((len(logits),), theta, device=logits.device)
    if tuple(thetas.shape) != (len(logits),) or thetas.dtype != torch.float32:
        raise ValueError(f"theta must be float32 [{len(logits)}], got {thetas.dtype} {tuple(thetas.shape)}")
    return _launch(logits, None, None, None, CollapseRule(), thetas.contiguous()).met


def collapse(
    logits: Tensor, sampled: Tensor | None, state: CollapseState | None, slots: Tensor | None, rule: CollapseRule
) -> Collapse:
    """`collapse_reference` in one launch of a Triton kernel.

    Raises:
        ValueError: For shapes or dtypes that the kernel does not support.
    """
    return _launch(logits, sampled, state, slots, rule, None)


def _launch(
    logits: Tensor,
    sampled: Tensor | None,
    state: CollapseState | None,
    slots: Tensor | None,
    rule: CollapseRule,
    thetas: Tensor | None,
) -> Collapse:
    """The kernel; with `thetas`, float32 `[B]`, each row has its own threshold in place of the rule's."""
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
            statistics if thetas is None else thetas,
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
            THETAS=thetas is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return Collapse(statistics, token_ids, top, met)


if wants_triton():
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
        thetas_ptr,
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
        THETAS: tl.constexpr,
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
        if THETAS:
            tl.store(met_ptr + row, margin >= tl.load(thetas_ptr + row))
        else:
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
            tl.store(statistics_row + _LAG, lag)
            tl.store(statistics_row + _ECHO, echo)
            tl.store(statistics_row + _DISTINCT, distinct)
            tl.store(statistics_row + _PROXIMITY, 1.0 - repetition * (1.0 - certainty))
        else:
            for statistic in tl.static_range(_DROP, _STATISTICS):
                tl.store(statistics_row + statistic, 0.0)
