"""Which drafts stand: the one rule of `verify`.

A draft x was drawn from q at an earlier loop; a deeper loop, at last loop T, reads p:

    greedy      the draft stands where it is the argmax of p, else that argmax takes its place
    sampling    it stands with probability min(1, p(x) / q(x)), else a token is drawn from max(p - q, 0), normalised
                (speculative sampling: arXiv 2211.17192, section 2.3)
"""

import torch
from torch import Tensor


def accept_greedy(drafts: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each draft `[K]` stands, bool `[K]`, and the ids that hold now, given the argmax `[K]` of p."""
    return drafts == read, read


def accept_drawn(drafts: Tensor, p: Tensor, q: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each draft stands, and what the others are drawn from.

    Args:
        drafts: int64 `[K]`.
        p: Distribution of the deeper loop, `[K, V]`.
        q: Distribution that each draft was drawn from, `[K, V]`.
        uniform: Draws in [0, 1), `[K]`.

    Returns:
        bool `[K]`, and `[K, V]`, not normalised.
    """
    stands = uniform * q.gather(1, drafts[:, None])[:, 0] < p.gather(1, drafts[:, None])[:, 0]
    rest = (p - q).clamp_min(0.0)
    # where p and q differ by rounding alone, nothing may be left
    return stands, torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
