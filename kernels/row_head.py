"""The output head of the rows of a pass, an id from each and its margin, without writing the logits `[R, V]`.

With l = x W^T of a normed row x, rounded to the model's dtype, p = softmax(l) and a temperature c of the row's own:

    id       argmax l where c = 0, else argmax(l / c + g) with g the Gumbel noise of (seed, position, purpose, id), a
             draw from softmax(l / c); the smallest id of equals; -1 where max l is NaN or infinite
    margin   p of the first id - p of the second (`collapse.py`), NaN where max l is NaN or infinite

A program of the first kernel reads its ids' rows of the weight and says the best of each row of the pass; the second
kernel takes the best of those, in one order whatever R is. Bytes: V D b of weights once, D b and twice 20 V / I for
each row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.kernels.collapse import certainty
from sigma0.kernels.counter_noise import gumbel
from sigma0.kernels.row_product import LIBRARY, ROW_TILE, check_product, launch_options, tiling_of
from sigma0.presence import wants_triton

# Tiles that the second kernel takes at least: four for each thread, which are read side by side.
FEWEST_TILES = 512
# What replaces an id that was sampled from logits that are not finite (`decode.finite`).
BROKEN = -1
# What a program says of each row, side by side: the largest logit, the next, the sum of exp(l - largest), and the
# largest score.
BEST, SECOND, TOTAL, SCORE, PARTS = range(5)


@dataclass(frozen=True)
class RowDraws:
    """How ids are drawn.

    Attributes:
        temperatures: c, float32 `[R]`; 0 for the argmax.
        keys: `key_of` each row's seed, int64 `[R, 2]`.
        positions: Position of the id that is drawn, int64 `[R]`.
        purposes: What each draw is for (`decode.random_numbers`), int64 `[R]`.
    """

    temperatures: Tensor
    keys: Tensor
    positions: Tensor
    purposes: Tensor


@dataclass(frozen=True)
class HeadOutput:
    """What the head says.

    Attributes:
        token_ids: int64 `[R]`, `BROKEN` where the largest logit is not finite.
        margins: float32 `[R]`, of the probabilities at temperature 1.
    """

    token_ids: Tensor
    margins: Tensor


def row_head_reference(hidden: Tensor, weight: Tensor, draws: RowDraws | None) -> HeadOutput:
    """The formulas above in plain torch.

    Args:
        hidden: x `[R, D]`.
        weight: W `[V, D]`, of two ids at least.
        draws: How ids are drawn; None for the argmax of every row.
    """
    logits = torch.nn.functional.linear(hidden, weight).float()  # [R, V]
    scores = logits
    if draws is not None:
        noise = gumbel(draws.keys, draws.positions, draws.purposes, len(weight))
        warm = (draws.temperatures > 0)[:, None]
        scores = logits / torch.where(warm, draws.temperatures[:, None], 1.0) + noise * warm
    finite = logits.amax(dim=-1).isfinite()
    _, margins = certainty(logits)
    token_ids = torch.where(finite, scores.argmax(dim=-1), BROKEN)
    return HeadOutput(token_ids, margins.masked_fill(~finite, torch.nan))


def row_head(hidden: Tensor, weight: Tensor, draws: RowDraws | None) -> HeadOutput:
    """`row_head_reference` in two launches of Triton kernels; in a compiled graph the operator `sigma0::row_head`.

    Arguments and result are the reference's.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernels do not support.
    """
    run = torch.ops.sigma0.row_head if torch.compiler.is_compiling() else _launch
    parts = () if draws is None else (draws.temperatures, draws.keys, draws.positions, draws.purposes)
    token_ids, margins = run(hidden, weight, *(parts or (None,) * 4))
    return HeadOutput(token_ids, margins)


def _launch(
    hidden: Tensor,
    weight: Tensor,
    temperatures: Tensor | None,
    keys: Tensor | None,
    positions: Tensor | None,
    purposes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_product(hidden, weight)
    rows, width = hidden.shape
    vocabulary, device = len(weight), hidden.device
    if vocabulary < 2:
        raise ValueError(f"a margin needs 2 ids at least, got {vocabulary}")
    wanted = ((torch.float32, (rows,)), (torch.int64, (rows, 2)), (torch.int64, (rows,)), (torch.int64, (rows,)))
    drawn = [part.contiguous() for part in (temperatures, keys, positions, purposes) if part is not None]
    if drawn and tuple((part.dtype, tuple(part.shape)) for part in drawn) != wanted:
        shapes = [(part.dtype, tuple(part.shape)) for part in drawn]
        raise ValueError(f"draws of {rows} rows are temperatures, keys, positions and purposes, got {shapes}")
    tiling = tiling_of(hidden, weight)
    tiles = triton.cdiv(vocabulary, tiling.outputs)
    parts = torch.empty((rows, PARTS, tiles), dtype=torch.float32, device=device)
    ids = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    margins = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return token_ids, margins
    _row_head_kernel[(triton.cdiv(rows, ROW_TILE), tiles)](
        hidden,
        weight,
        *(drawn or (parts, ids, ids, ids)),
        parts,
        ids,
        rows,
        width,
        vocabulary,
        tiles,
        hidden.stride(0),
        DRAWS=bool(drawn),
        IDS=tiling.outputs,
        STEP=tiling.step,
        UPCAST=upcasts(_row_head_kernel, hidden.dtype),
        **launch_options(hidden.device),
        **tiling.options,
    )
    block = max(FEWEST_TILES, triton.next_power_of_2(tiles))
    _row_head_join_kernel[(rows,)](
        parts, ids, token_ids, margins, tiles, TILES=block, num_warps=join_warps(block), **launch_options(hidden.device)
    )  # fmt: skip
    return token_ids, margins


def join_warps(block: int) -> int:
    """Warps that join the tiles: as many as have registers for them."""
    return min(16, max(4, block // 256))


def _output_shapes(
    hidden: Tensor,
    weight: Tensor,
    temperatures: Tensor | None,
    keys: Tensor | None,
    positions: Tensor | None,
    purposes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows = hidden.shape[0]
    return hidden.new_empty(rows, dtype=torch.int64), hidden.new_empty(rows, dtype=torch.float32)


LIBRARY.define(  # type: ignore[no-untyped-call]
    "row_head(Tensor hidden, Tensor weight, Tensor? temperatures, Tensor? keys, Tensor? positions, Tensor? purposes) "
    "-> (Tensor, Tensor)"
)
LIBRARY.impl("row_head", _launch, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("sigma0::row_head", _output_shapes, lib=LIBRARY)

if wants_triton():
    import triton
    import triton.language as tl

    from sigma0.kernels.counter_noise import counter_word, gumbel_of_words
    from sigma0.kernels.row_product import product, rows_of_tile, upcasts

    # A kernel reads no global but a constexpr: the constants above, for it.
    _ROW_TILE, _BROKEN, _PARTS = tl.constexpr(ROW_TILE), tl.constexpr(BROKEN), tl.constexpr(PARTS)
    _BEST, _SECOND, _TOTAL, _SCORE = tl.constexpr(BEST), tl.constexpr(SECOND), tl.constexpr(TOTAL), tl.constexpr(SCORE)
    # Larger than any id or tile.
    _NO_ID = tl.constexpr(2**31 - 1)

    @triton.jit
    def _best_of(scores, ids, inside):
        """The largest score of each row, and the smallest id that has it."""
        best = tl.max(scores, axis=1)
        return best, tl.min(tl.where((scores == best[:, None]) & inside, ids, _NO_ID), axis=1)

    @triton.jit(do_not_specialize=["rows"])
    def _row_head_kernel(
        hidden_ptr,
        weight_ptr,
        temperatures_ptr,
        keys_ptr,
        positions_ptr,
        purposes_ptr,
        parts_ptr,
        ids_ptr,
        rows,
        width,
        vocabulary,
        tiles,
        hidden_row_stride,
        DRAWS: tl.constexpr,
        IDS: tl.constexpr,
        STEP: tl.constexpr,
        UPCAST: tl.constexpr,
        PDL: tl.constexpr,
    ):
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        row, there = rows_of_tile(tl.program_id(0), rows)
        tile = tl.program_id(1)
        numbers = tile * IDS + tl.arange(0, IDS)
        total = product(
            hidden_ptr, row * hidden_row_stride, there, weight_ptr, numbers, numbers < vocabulary, width, 0, width,
            STEP, UPCAST, PDL,
        )  # fmt: skip
        ids = numbers[None, :]
        inside = ids < vocabulary
        logits = total.to(weight_ptr.dtype.element_ty).to(tl.float32)
        # NaN wins, as it does in torch's argmax, so that it is seen
        logits = tl.where(logits != logits, float("inf"), logits)
        logits = tl.where(inside, logits, -float("inf"))
        best, best_id = _best_of(logits, ids, inside)
        second = tl.max(tl.where(ids == best_id[:, None], -float("inf"), logits), axis=1)
        # exp(-inf - -inf) would be NaN: where nothing is finite, the sum is 0
        shift = tl.where(best == -float("inf"), 0.0, best)
        share = tl.sum(tl.exp(logits - shift[:, None]), axis=1)
        score = best
        score_id = best_id
        if DRAWS:
            temperature = tl.load(temperatures_ptr + row, mask=there, other=0.0)
            position = tl.load(positions_ptr + row, mask=there, other=0)
            purpose = tl.load(purposes_ptr + row, mask=there, other=0)
            first_word = counter_word(tl.load(keys_ptr + 2 * row, mask=there, other=0), position, purpose)
            second_word = counter_word(tl.load(keys_ptr + 2 * row + 1, mask=there, other=0), position, purpose)
            noise = gumbel_of_words(first_word[:, None], second_word[:, None], ids)
            warm = temperature > 0
            divisor = tl.where(warm, temperature, 1.0)
            # rounded as torch rounds a quotient
            scores = tl.div_rn(logits, tl.broadcast_to(divisor[:, None], [_ROW_TILE, IDS])) + noise
            score, score_id = _best_of(tl.where(warm[:, None] & inside, scores, logits), ids, inside)
        parts_row = parts_ptr + row * _PARTS * tiles + tile
        tl.store(parts_row + _BEST * tiles, best, mask=there)
        tl.store(parts_row + _SECOND * tiles, second, mask=there)
        tl.store(parts_row + _TOTAL * tiles, share, mask=there)
        tl.store(parts_row + _SCORE * tiles, score, mask=there)
        tl.store(ids_ptr + row * tiles + tile, score_id, mask=there)

    @triton.jit
    def _row_head_join_kernel(
        parts_ptr, ids_ptr, token_ids_ptr, margins_ptr, tiles, TILES: tl.constexpr, PDL: tl.constexpr
    ):
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.program_id(0).to(tl.int64)
        tile = tl.arange(0, TILES)
        there = tile < tiles
        parts_row = parts_ptr + row * _PARTS * tiles + tile
        best = tl.load(parts_row + _BEST * tiles, mask=there, other=-float("inf"))
        second = tl.load(parts_row + _SECOND * tiles, mask=there, other=-float("inf"))
        share = tl.load(parts_row + _TOTAL * tiles, mask=there, other=0.0)
        score = tl.load(parts_row + _SCORE * tiles, mask=there, other=-float("inf"))
        ids = tl.load(ids_ptr + row * tiles + tile, mask=there, other=_NO_ID)
        highest = tl.max(best)
        finite = tl.abs(highest) < float("inf")
        holder = tl.min(tl.where(best == highest, tile, _NO_ID))
        # the second best is the holder's own, or another tile's first
        runner_up = tl.max(tl.where(tile == holder, second, best))
        shift = tl.where(finite, highest, 0.0)
        total = tl.sum(share * tl.exp(best - shift))
        margin = (1.0 - tl.exp(runner_up - shift)) / total
        token_id = tl.min(tl.where(score == tl.max(score), ids, _NO_ID))
        tl.store(token_ids_ptr + row, tl.where(finite, token_id, _BROKEN).to(tl.int64))
        tl.store(margins_ptr + row, tl.where(finite, margin, float("nan")))
