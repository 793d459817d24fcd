"""Start states of a recurrence, drawn from (seed, position), so that a row that runs again is the same row.

    s_0 = std * z,  z from a normal distribution cut at three standard deviations (arXiv 2502.05171, section 3)

z is the quantile of a uniform number, which is a hash of seed, position and column.
"""

import math

import torch
from torch import Tensor

from sigma0.decode.sampling import uniform
from sigma0.decode.sampling_params import key_of

CUT = 3.0


def start_states(positions: Tensor, std: float, seed: int, like: Tensor) -> Tensor:
    """States `[..., D]` for positions `[...]`.

    Args:
        positions: int64.
        std: Standard deviation before the cut.
        seed: Of the run.
        like: `[..., D]`, for width, dtype and device.
    """
    width, device = like.shape[-1], like.device
    flat = positions.reshape(-1).to(device)
    keys = torch.tensor([key_of(seed)], device=device).expand(len(flat) * width, 2)
    columns = torch.arange(width, device=device).repeat(len(flat))
    numbers = uniform(keys, flat.repeat_interleave(width), columns).view(-1, width)  # [N, D]
    mass = math.erf(CUT / math.sqrt(2.0))  # within the cut
    states = std * math.sqrt(2.0) * torch.erfinv((2.0 * numbers - 1.0) * mass)
    return states.to(like.dtype).view(*positions.shape, like.shape[-1])
