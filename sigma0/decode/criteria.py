"""Exit criteria of Huginn (arXiv 2502.05171, section 6) for any looped model: how much a loop has changed.

After loop t, with state s_t, logits z_t and p_t = softmax(z_t), a token stops at the first loop where

    entropy-diff      |H_t - H_{t-1}| < delta, H = - sum p log(p + 1e-10), H_0 = 100
    latent-diff       |s_t - s_{t-1}| / |s_t| < delta, s_0 what loop 1 starts from
    cosine            1 - cos(s_t, s_{t-1}) < delta; never behind a zero state
    kl                sum p_{t-1} (log p_{t-1} - log p_t) < delta, p_0 uniform
    minp-kl           the same after probabilities under a tenth of the largest are set to 1 / V, and all renormalised
    argmax-stability  the argmax has stayed the same `stable` times running, so never before loop `stable` + 1

in float32. `Criteria` keeps what the next loop is compared with, a row for each token; the same code decides for the
rows of a live pass and for those of a run of all loops. Any mixture of criteria is decided at once.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

CRITERIA = ("entropy-diff", "latent-diff", "cosine", "kl", "minp-kl", "argmax-stability")
OF_STATES = frozenset({"latent-diff", "cosine"})
OF_LOGITS = frozenset(CRITERIA) - OF_STATES
_FIRST_ENTROPY, _TINY, _SHARE = 100.0, 1e-10, 0.1


class Criteria:
    """What criteria over logits keep of tokens between two loops.

    The last row belongs to nobody: what must not change anything is written there.

    Args:
        rows: Tokens at the same time.
        vocabulary: V; 0 where no criterion keeps a distribution.
        device: Where they are.

    Attributes:
        numbers: Entropy, and how often running the argmax has stayed the same, float32 `[N + 1, 2]`.
        best: The argmax, int64 `[N + 1]`.
        log_probs: Logarithms of the distribution, float32 `[N + 1, V]`.
        cut: The same as `minp-kl` takes it, `[N + 1, V]`.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.numbers = torch.zeros((rows + 1, 2), dtype=torch.float32, device=device)
            self.best = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
            self.log_probs = torch.zeros((rows + 1, vocabulary), dtype=torch.float32, device=device)
            self.cut = torch.zeros((rows + 1, vocabulary), dtype=torch.float32, device=device)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, a row for each token."""
        return self.numbers, self.best, self.log_probs, self.cut

    def decide(
        self,
        modes: Collection[str],
        mode: Tensor,
        delta: Tensor,
        slots: Tensor,
        first: Tensor,
        states: tuple[Tensor, Tensor],
        logits: Tensor | None,
    ) -> Tensor:
        """Whether each row stops after its loop, bool `[R]`; keeps what the next loop is compared with.

        Args:
            modes: Criteria in use.
            mode: Index into `CRITERIA` of each row, -1 for none, int64 `[R]`.
            delta: Threshold of each row, `stable` for `argmax-stability`, float32 `[R]`.
            slots: Row of the state for each, the last for those that count for nobody, int64 `[R]`.
            first: Whether it was the first loop, bool `[R]`.
            states: Before and after the loop, `[R, D]` each.
            logits: After the loop, `[R, V]`; None where no criterion reads them.
        """
        met = torch.zeros_like(first)
        for name in CRITERIA:
            if name in modes:
                value = (
                    self._of_states(name, states) if name in OF_STATES else self._of_logits(name, slots, first, logits)
                )
                own = value >= delta if name == "argmax-stability" else value < delta
                met = met | (own & (mode == CRITERIA.index(name)))
        return met

    def _of_states(self, name: str, states: tuple[Tensor, Tensor]) -> Tensor:
        before, after = states[0].float(), states[1].float()
        length = torch.linalg.vector_norm(after, dim=-1)
        if name == "latent-diff":
            value: Tensor = torch.linalg.vector_norm(after - before, dim=-1) / length
        else:
            # 0 / 0 behind a zero state is no number, and below no threshold
            value = 1.0 - (after * before).sum(-1) / (length * torch.linalg.vector_norm(before, dim=-1))
        return value

    def _of_logits(self, name: str, slots: Tensor, first: Tensor, logits: Tensor | None) -> Tensor:
        assert logits is not None, "a criterion over logits reads the head at every loop"
        if name == "argmax-stability":
            return self._stayed(slots, first, logits.argmax(-1))
        log_probs = logits.float().log_softmax(-1)  # [R, V]
        if name == "entropy-diff":
            probs = log_probs.exp()
            entropy = -(probs * (probs + _TINY).log()).sum(-1)
            kept = self.numbers[:, 0].index_select(0, slots)
            before = torch.where(first, torch.full_like(kept, _FIRST_ENTROPY), kept)
            self.numbers[:, 0].index_copy_(0, slots, entropy)
            return (entropy - before).abs()
        table = self.log_probs
        if name == "minp-kl":
            table, probs = self.cut, log_probs.exp()
            probs = torch.where(
                probs < _SHARE * probs.amax(-1, keepdim=True), torch.full_like(probs, 1.0 / probs.shape[1]), probs
            )
            log_probs = (probs / probs.sum(-1, keepdim=True)).log()
        kept = table.index_select(0, slots)
        before = torch.where(first[:, None], torch.full_like(kept, -math.log(kept.shape[1])), kept)
        table.index_copy_(0, slots, log_probs)
        return (before.exp() * (before - log_probs)).sum(-1)

    def _stayed(self, slots: Tensor, first: Tensor, best: Tensor) -> Tensor:
        same = (best == self.best.index_select(0, slots)) & ~first
        stayed = (self.numbers[:, 1].index_select(0, slots) + 1.0) * same
        self.best.index_copy_(0, slots, best)
        self.numbers[:, 1].index_copy_(0, slots, stayed)
        return stayed
