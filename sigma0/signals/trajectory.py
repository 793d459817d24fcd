"""How loop states move: the stability spectrum of a path, statistics of a token's loops, and the Jacobian's radius.

The spectrum comes from the path of a token: with D_k = h_k - h_{k-1}, the least-squares fit D_s ~ a D_{s-1}
+ b D_{s-2} over all triples, and the larger root of z^2 = a z + b (dynamic mode decomposition of order 2; formulas in
`kernels/gram.py`). It estimates the loop map along that path and proves nothing about it. `jacobian_radius` is exact at
one state: the largest |eigenvalue| of dF/dh, with F one loop of one position and all other K/V fixed.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigma0.config import FateConfig
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import FATES, KEPT, PARALLEL, STATISTICS, TORCH, Fate, Fit, Steps, fate_of, solve

FEWEST = 4


@dataclass(frozen=True)
class Spectrum:
    """The larger root of each path."""

    radius: Tensor  # |z|, `[N]`; 0 where the path does not move
    angle: Tensor  # |arg z| in [0, pi], `[N]`
    # |D_s - a D_{s-1} - b D_{s-2}| / |D_s| over the triples, in [0, 1], `[N]`; 1 where there is no fit. The fit
    # counts up to 0.5
    residual: Tensor


@dataclass(frozen=True)
class LoopStats:
    """Statistics of one loop of one token; undefined ones are 0, the residual 1."""

    loop: int  # From 1
    change: float  # |D_t| / |h_{t-1}|
    bend: float  # |D_t - D_{t-1}| / |h_{t-1}|
    gain: float  # |D_t| / |D_{t-1}|
    turning: float  # Angle between D_t and D_{t-1}, radians
    radius: float  # Of the spectrum so far
    angle: float  # Of the spectrum so far, radians
    residual: float  # Of the spectrum so far
    hazard: float  # sigmoid(gate(h_t))
    fate: Fate | None  # Convergence class; None with fewer than two differences

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def spectrum(states: Tensor) -> Spectrum:
    """The spectrum of paths of loop states; it does not change when they are scaled.

    Args:
        states: Consecutive loop states `[N, K, D]`, oldest first, K at least 4.

    Raises:
        ValueError: For another shape.
    """
    if states.dim() != 3 or states.shape[1] < FEWEST:
        raise ValueError(f"loop states are [N, K >= {FEWEST}, D], got {tuple(states.shape)}")
    wide = states.detach().double()
    differences = wide[:, 1:] - wide[:, :-1]  # [N, K - 1, D]
    # so that squares neither vanish nor overflow; by the last but one where it moves: the newest fit divides by it
    scale = differences[:, -2].abs().amax(-1)
    scale = torch.where(scale > 0, scale, differences.abs().amax(dim=(1, 2)).clamp_min(1e-300))
    differences = differences / scale[:, None, None]
    gram = differences @ differences.transpose(1, 2)  # [N, K - 1, K - 1]
    same, next_one, second = (gram.diagonal(offset, 1, 2) for offset in (0, 1, 2))
    p11, p22, whole = same[:, 1:-1].sum(-1), same[:, :-2].sum(-1), same[:, 2:].sum(-1)
    p12, r1, r2 = next_one[:, :-1].sum(-1), next_one[:, 1:].sum(-1), second.sum(-1)
    g11, g22, g12 = same[:, -2], same[:, -3], next_one[:, -2]
    both = g11 * g22
    first = (both - g12 * g12 < PARALLEL * both) | (p11 * p22 - p12 * p12 <= 0)
    total = torch.where(first, same[:, -1], whole)
    none = (g11 <= 0) | (total <= 0)
    fit = solve(first, none, p11, p12, p22, torch.where(first, next_one[:, -1], r1), r2, g11, total)
    return Spectrum(*(part.to(states.dtype) for part in (fit.radius, fit.angle, fit.residual)))


def loop_stats(statistics: Tensor, fates: Tensor) -> tuple[LoopStats, ...]:
    """The loops that a token ran, out of the output of `generate(..., output_statistics=True)`.

    Args:
        statistics: `out.loop_statistics[b, i]`, `[T, 8]`.
        fates: `out.loop_fates[b, i]`, `[T]`.

    Raises:
        ValueError: For another shape.
    """
    if statistics.dim() != 2 or statistics.shape[1] != len(STATISTICS) or len(fates) != len(statistics):
        raise ValueError(f"one token's [T, {len(STATISTICS)}] and [T], got {tuple(statistics.shape)} and {len(fates)}")
    ran = int(statistics[:, 0].isfinite().sum())
    rows = zip(statistics[:ran].tolist(), fates[:ran].tolist(), strict=True)
    return tuple(
        LoopStats(loop=loop, fate=FATES[fate], **dict(zip(STATISTICS, row, strict=True)))
        for loop, (row, fate) in enumerate(rows, start=1)
    )


def fates_under(statistics: Tensor, config: FateConfig, dtype: torch.dtype = torch.float32) -> Tensor:
    """The fates of recorded loops under other thresholds.

    Args:
        statistics: `out.loop_statistics`, `[..., T, 8]`; NaN where no loop was run.
        config: Thresholds of spiralling and diverging.
        dtype: Of the states; changes under its rounding noise count as none.

    Returns:
        Index into `sigma0.decode.ops.FATES`, int64 `[..., T]`; 0 where there is none.
    """
    ran = statistics[..., 0].isfinite()
    change, bend, gain, turning, radius, angle, residual, _ = statistics.double().nan_to_num(0.0).unbind(-1)
    lengths = _lengths(change, gain)
    fates = torch.zeros_like(ran, dtype=torch.int64)
    for index in range(2, statistics.shape[-2]):
        kept = lengths[..., max(1, index - KEPT + 1) : index].amax(-1)
        size, here = lengths[..., index], (..., index)
        growth = torch.where(kept > 0, size / kept.clamp_min(1e-300), 0.0)
        steps = Steps(size, lengths[..., index - 1], change[here], bend[here], gain[here], growth, turning[here])
        turns = (angle[here] > 0) & (angle[here] < math.pi - 1e-6)
        fit = Fit(radius[here], angle[here], residual[here], turns)
        # |h_t| is near |h_{t-1}|; it only scales the rounding noise
        norm = torch.where(change[here] > 0, size / change[here].clamp_min(1e-300), torch.inf)
        count = torch.full_like(size, index, dtype=torch.int32)
        fates[here] = fate_of(steps, fit, count, norm, dtype, config.growth, math.radians(config.spiral)).long()
    return fates * ran


def _lengths(change: Tensor, gain: Tensor) -> Tensor:
    """|D_t| in units of |h_1|, `[..., T]`, from the recorded quotients; 0 at t = 1.

    By the gains if the step before moved. After a standstill the state is that of the last move, and the change is
    relative to it.
    """
    lengths = torch.zeros_like(change)
    norm = torch.ones_like(change[..., 0])  # near |h_{t-1}|
    for index in range(1, change.shape[-1]):
        before = lengths[..., index - 1]
        lengths[..., index] = torch.where(before > 0, before * gain[..., index], change[..., index] * norm)
        moved = (lengths[..., index] > 0) & (change[..., index] > 0)
        norm = torch.where(moved, lengths[..., index] / change[..., index].clamp_min(1e-300), norm)
    return lengths


class _OnePosition:
    """Replaces the rows of a pass: one position whose K/V come from its state, the others' from a plane."""

    # what has derivatives
    ops = TORCH

    def __init__(self, cache: DepthCache, plane: int, position: int) -> None:
        self._cache, self._plane = cache, plane
        self._position = position
        self.longest = position + 1

    def positions(self, device: torch.device) -> Tensor:
        """The position, `[1]`."""
        return torch.tensor([self._position], device=device)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Softmax attention `[1, H, d]` over the cache before the position and the position itself."""
        planes = self._cache.planes[layer]
        past = slice(0, self._position)
        repeats = query.shape[1] // keys.shape[1]
        all_keys = torch.cat([planes.keys[self._plane, 0, :, past].to(keys), keys.transpose(0, 1)], dim=1)
        all_values = torch.cat([planes.values[self._plane, 0, :, past].to(values), values.transpose(0, 1)], dim=1)
        all_keys, all_values = (part.repeat_interleave(repeats, dim=0) for part in (all_keys, all_values))  # [H, S, d]
        scores = torch.einsum("hd,hsd->hs", query[0], all_keys) * scaling
        return torch.einsum("hs,hsd->hd", scores.softmax(-1), all_values)[None]


def jacobian_radius(
    model: LoopedModel,
    hidden: Tensor,
    cache: DepthCache,
    plane: int,
    position: int,
    tolerance: float = 1e-4,
    injected: Tensor | None = None,
) -> float:
    """Spectral radius of one loop at a state: Arnoldi iteration on Jacobian-vector products.

    Slow, for diagnosis: about 20 to 60 products, each a forward and a tangent of one position.

    Args:
        model: A looped model; its parameters should be float32 or float64.
        hidden: h_t `[D]`, the state that goes into the loop.
        cache: The K/V of one unpadded sequence at full depth.
        plane: The loop, counted from 0, whose plane the position attends to.
        position: Index of the position; it attends to the cache before it.
        tolerance: Relative, of the eigenvalue.
        injected: What every loop reads beside its state, `[D]`, of a model with a prelude.

    Raises:
        ValueError: For a state of another shape, or a cache that does not hold the position's past.
    """
    from scipy.sparse.linalg import LinearOperator, eigs

    if hidden.dim() != 1 or hidden.shape[0] < 3:
        raise ValueError(f"one state [D], got {tuple(hidden.shape)}")
    if cache.batch != 1 or cache.length < position or not 0 <= plane < (cache.depth or 0):
        raise ValueError(
            f"a cache of one sequence with {position} columns and plane {plane}; this one holds {cache.batch} "
            f"sequences, {cache.length} columns and {cache.depth} planes"
        )
    rows: Any = _OnePosition(cache, plane, position)

    def loop(state: Tensor) -> Tensor:
        # without gradients the norm may be one that has no derivative
        with torch.enable_grad():
            whole = state if injected is None else torch.cat([state, injected])
            mapped: Tensor = model.norm(model.loop(whole[None], rows))[0, : len(state)]
        return mapped

    state = hidden.detach()

    def product(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        tangent = torch.from_numpy(np.ascontiguousarray(vector, dtype=np.float64).reshape(-1)).to(state)
        moved = torch.func.jvp(loop, (state,), (tangent,))[1]
        moved_vector: np.ndarray[Any, Any] = moved.detach().double().cpu().numpy()
        return moved_vector

    size = hidden.shape[0]
    start = np.random.default_rng(0).standard_normal(size)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    values = eigs(operator, k=1, which="LM", v0=start, tol=tolerance, return_eigenvectors=False)
    return float(np.abs(values).max())
