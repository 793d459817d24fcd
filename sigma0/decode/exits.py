"""When a token may stop looping.

Loop states of one token are h_1 ... h_T, after the loop's norm; D_t = h_t - h_{t-1}. The step from the embedding to
h_1 is left out. A rule is *met* at the first loop t where (arXiv 2510.25741 section 3 for `qexit`, arXiv 2509.23314 for
`accel`):

    qexit     sum_{j<=t} l_j * prod_{i<j} (1 - l_i) >= q          with l_j = sigmoid(gate(h_j)); never met at q = 1
    converge  |D_t| / |h_{t-1}| < eps                             from t = 2
    accel     |D_t - D_{t-1}| / |h_{t-1}| < eps and |D_t| <= 0.9 |D_{t-1}|, on `patience` loops running, from t = 3
    margin    p_(1) - p_(2) >= theta                              with p = softmax(head(h_t))
    others    the criteria of Huginn, below

With `accel_scale="steps"`, `accel` is |D_t - D_{t-1}| / (|D_t| + |D_{t-1}|) < eps without the second condition.
`full` and `fixed` are never met: their tokens stop because they reached their loop. The very same code decides for the
rows of a live pass and for the rows of a run-all-loops forward.

Huginn's criteria (arXiv 2502.05171, section 6) work for any looped model. After loop t, with state s_t, logits z_t and
p_t = softmax(z_t), a token stops at the first loop where

    entropy-diff      |H_t - H_{t-1}| < delta, H = - sum p log(p + 1e-10), H_0 = 100
    latent-diff       |s_t - s_{t-1}| / |s_t| < delta, s_0 what loop 1 starts from
    cosine            1 - cos(s_t, s_{t-1}) < delta; never after a zero state
    kl                sum p_{t-1} (log p_{t-1} - log p_t) < delta, p_0 uniform
    minp-kl           the same after probabilities under a tenth of the largest are set to 1 / V, and all renormalised
    argmax-stability  the argmax has stayed the same `stable` times running, so never before loop `stable` + 1

in float32. `Criteria` keeps what the next loop is compared with, a row for each token. Any mixture is decided at once.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sigma0.config import BREAK_AFTER, RULE_DEFAULTS, ExitConfig, ExitMode, FateConfig
from sigma0.decode.ops import (
    DIVERGED,
    MET,
    SHRINK,
    STATISTICS,
    ExitParams,
    ExitState,
    leads_reference,
    no_broadcast,
    observe,
)

CRITERIA = ("entropy-diff", "latent-diff", "cosine", "kl", "minp-kl", "argmax-stability")
OF_STATES = frozenset({"latent-diff", "cosine"})
OF_LOGITS = frozenset(CRITERIA) - OF_STATES
_FIRST_ENTROPY, _TINY, _SHARE = 100.0, 1e-10, 0.1

Reason = Literal[
    "threshold_met",
    "fixed_point",
    "accel_fixed_point",
    "confident",
    "fixed",
    "max_depth",
    "collapse",
    "divergence",
    "ungrounded",
    "out_of_calibration",
    "forced",
]
REASON_WHEN_MET: dict[ExitMode, Reason] = {
    "qexit": "threshold_met",
    "converge": "fixed_point",
    "accel": "accel_fixed_point",
    "margin": "confident",
    "entropy-diff": "confident",
    "latent-diff": "fixed_point",
    "cosine": "fixed_point",
    "kl": "confident",
    "minp-kl": "confident",
    "argmax-stability": "confident",
}

CHANGE, BEND, GAIN, HAZARD = (STATISTICS.index(name) for name in ("change", "bend", "gain", "hazard"))


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
                of_states = name in OF_STATES
                value = self._of_states(name, states) if of_states else self._of_logits(name, slots, first, logits)
                current = value >= delta if name == "argmax-stability" else value < delta
                met = met | (current & (mode == CRITERIA.index(name)))
        return met

    def _of_states(self, name: str, states: tuple[Tensor, Tensor]) -> Tensor:
        before, after = states[0].float(), states[1].float()
        length = torch.linalg.vector_norm(after, dim=-1)
        if name == "latent-diff":
            value: Tensor = torch.linalg.vector_norm(after - before, dim=-1) / length
        else:
            # 0 / 0 after a zero state is no number, and below no threshold
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


def exit_reason(mode: ExitMode, met: bool, diverged: bool = False, forced: bool = False) -> Reason:
    """Why a token stopped.

    Its rule was met, its loop diverged, it reached T without (`max_depth`), was `fixed`, or a grammar left one id.
    """
    if forced:
        return "forced"
    if diverged:
        return "divergence"
    if mode in ("full", "fixed"):
        return "fixed"
    return REASON_WHEN_MET[mode] if met else "max_depth"


@dataclass(frozen=True)
class ScriptedExits:
    """Exits and judgements given beforehand in place of a rule's and a model's; after its end it is repeated."""

    exits: tuple[int, ...]  # Loop at which each token that is fed back stops
    # Loop from which on a draft of `verify` is accepted, for each of them; empty where the model judges
    settled: tuple[int, ...] = ()
    stride: int = 0  # How much further each next sequence of a batch begins

    def tensors(self, sequences: int) -> tuple[Tensor, Tensor | None]:
        """`exits` and `settled` of every sequence, int64 `[S, n]`."""
        first = self.stride * torch.arange(sequences)[:, None]
        index = (torch.arange(len(self.exits)) + first) % len(self.exits)
        return torch.tensor(self.exits)[index], torch.tensor(self.settled)[index] if self.settled else None


class ExitRule:
    """An `ExitConfig` for a model of T loops.

    Args:
        config: The rule and its thresholds; the library's where they are not set.
        total_loops: T, the loops at full depth.
        inner_break: Whether a loop that diverges stops its token.
        fates: What diverges.

    Attributes:
        fixed_depth: The loop that every token stops at, None where that is not known beforehand.
        last_loop: The loop that no token goes beyond.
        min_loops: The first loop that a token may stop at.
        needs_logits: Whether the head is read at every loop.
        criterion: Index into `CRITERIA`; None for rules of another kind.
        threshold: Its q, theta, eps, delta or stable; 1.0 for `full` and `fixed`, which read none.
        patience: Loops running on which `accel` must hold.
        break_after: Loops running that diverge and stop a token; 0 never.
        script: Given exits; None for none.

    Raises:
        ValueError: If `config` names a depth above T.
    """

    def __init__(
        self, config: ExitConfig, total_loops: int, inner_break: bool = False, fates: FateConfig | None = None
    ) -> None:
        config = config.filled()
        self.config = config
        self.script: ScriptedExits | None = None
        self.threshold = 1.0 if config.threshold is None else config.threshold
        self.fates = fates or FateConfig()
        self.break_after = BREAK_AFTER if inner_break else 0
        self.total_loops = total_loops
        self.fixed_depth = config.stops_at(total_loops)
        self.last_loop = total_loops if self.fixed_depth is None else self.fixed_depth
        self.min_loops = min(config.min_loops, total_loops)
        self.criterion = CRITERIA.index(config.mode) if config.mode in CRITERIA else None
        self.needs_logits = config.mode == "margin" or config.mode in OF_LOGITS
        self.patience: int = config.patience or RULE_DEFAULTS["accel"]["patience"]

    def params(self, watch: bool) -> ExitParams:
        """Parameters of the exit decision at the end of a loop; under `margin` the logits decide instead.

        Under `watch` statistics of the loop states are computed too.
        """
        config = self.config
        mode: str = config.mode if config.mode in ("qexit", "converge", "accel") else "none"
        if mode == "accel" and config.accel_scale == "steps":
            mode = "accel-steps"
        return ExitParams(
            mode,
            1.0 if mode == "none" else self.threshold,
            self.last_loop,
            patience=self.patience,
            min_loops=self.min_loops,
            watch=watch,
            growth=self.fates.growth,
            spiral=math.radians(self.fates.spiral),
            break_after=self.break_after,
        )

    @property
    def is_known_beforehand(self) -> bool:
        """Whether every token's exit is known without looking at its states."""
        return self.fixed_depth is not None and not self.break_after

    @property
    def reads_at_full_depth(self) -> bool:
        """Whether every token is read at loop T."""
        return self.is_known_beforehand and self.fixed_depth == self.total_loops

    @property
    def is_about_loops(self) -> bool:
        """Whether statistics of loops decide it: not those of a margin, nor where no gate can reach q."""
        return (
            self.config.mode != "margin"
            and self.criterion is None
            and not (self.config.mode == "qexit" and self.threshold >= 1)
        )

    def known_without_loops(self, depth: int, margin: float | None) -> bool | None:
        """`would_have_been_met` where `is_about_loops` is False, of a token that was read at a depth."""
        if self.criterion is not None:
            return None
        if self.config.mode == "margin":
            return True if margin is not None and margin >= self.threshold and depth >= self.min_loops else None
        return False

    def would_have_been_met(self, loops: npt.NDArray[np.float32], margin: float | None) -> bool | None:
        """Whether a token that `full` or `fixed` stopped would have met this rule by the loop it was read at.

        None where that is not known: under `margin`, where a loop before may have met it, and for criteria.

        Args:
            loops: `sigma0.decode.ops.STATISTICS` of the loops up to there, `[t, 8]`.
            margin: Top-1 minus top-2 probability where it was sampled.
        """
        mode, late = self.config.mode, slice(self.min_loops - 1, None)
        if not self.is_about_loops:
            return self.known_without_loops(len(loops), margin)
        if mode == "qexit":
            mass, survival = np.float32(0.0), np.float32(1.0)
            cumulative = np.zeros(len(loops), dtype=np.float32)
            for loop, hazard in enumerate(loops[:, HAZARD]):
                mass, survival = mass + hazard * survival, survival * (np.float32(1.0) - hazard)
                cumulative[loop] = mass
            return bool((cumulative[late] >= self.threshold).any())
        if mode == "converge":
            close = loops[:, CHANGE] < self.threshold
            close[:1] = False
            return bool(close[late].any())
        return self._would_meet_accel(loops, late)

    def _would_meet_accel(self, loops: npt.NDArray[np.float32], late: slice) -> bool:
        """`accel` out of statistics; those of its older form are made out of the newer one's."""
        change, bend, gain = loops[:, CHANGE], loops[:, BEND], loops[:, GAIN]
        if self.config.accel_scale == "steps":
            # |D_t| and |D_{t-1}| over |h_{t-1}| are change and change / gain
            both = change + np.divide(change, gain, out=np.zeros_like(change), where=gain > 0)
            holds = bend < self.threshold * both
        else:
            holds = (bend < self.threshold) & (gain <= SHRINK)
        holds[:2] = False
        streak, streaks = 0, []
        for here in holds.tolist():
            streak = streak + 1 if here else 0
            streaks.append(streak >= self.patience)
        return any(streaks[late])

    def met_in_prompt(self, met: Tensor, loop: int) -> Tensor:
        """Whether tokens of a prompt stop by the rule, bool `[N]`, all after the same loop."""
        return met & (loop >= self.min_loops)


@dataclass(frozen=True)
class Selection:
    """The state at the exit of each position."""

    hidden: Tensor  # `[B, S, D]`
    depths: Tensor  # Its loop, from 1, int64 `[B, S]`
    met: Tensor  # Whether the rule was met there, bool `[B, S]`
    diverged: Tensor  # Whether it was read there because its loop diverged, bool `[B, S]`


def select_exits(
    rule: ExitRule,
    loop_states: Tensor,
    gate_logits: Tensor | None,
    head: Callable[[Tensor], Tensor],
    broadcast: Callable[[Tensor], Tensor] = no_broadcast,
    at_full_depth: bool = False,
    start: Tensor | None = None,
) -> Selection:
    """Picks an exit for every position of a run of all loops.

    Args:
        rule: When a token may stop.
        loop_states: h_1 ... h_T, `[T, B, S, D]`.
        gate_logits: `[T, B, S]`; None where the model has no gate.
        head: Output head, called once for each loop if the rule reads logits.
        broadcast: As `Operations` has it.
        at_full_depth: Read every position at loop T, as `verify` does; `met` still says whether the rule would have
            been met by itself. A divergence stops nothing then, and is not reported.
        start: What loop 1 starts from, `[B, S, D]`, which criteria over states read.
    """
    assert start is not None or rule.config.mode not in OF_STATES, "a criterion over states begins at loop 1"
    total, batch, length, width = loop_states.shape
    flat = loop_states.reshape(total, batch * length, width)  # [T, N, D]
    rows = flat.shape[1]
    depths = torch.full((rows,), total, dtype=torch.int64, device=flat.device)
    met = torch.zeros(rows, dtype=torch.bool, device=flat.device)
    diverged = torch.zeros_like(met)
    if not rule.is_known_beforehand:
        params = rule.params(watch=False)
        kept = width if params.watches else 0
        state = ExitState.empty(rows, kept, flat.dtype, flat.device)
        slots = torch.arange(rows, device=flat.device)
        meter: Criteria | None = None
        for loop in range(1, total + 1):
            with torch.no_grad():
                hidden = flat[loop - 1].detach()
                gates = no_gate_logits(hidden) if gate_logits is None else gate_logits[loop - 1].detach().reshape(rows)
                loop_end = observe(hidden, flat[max(loop - 2, 0)].detach(), gates, state, slots, params)
                here = loop_end.decisions == MET
                logits = head(hidden) if rule.needs_logits else None
                if rule.criterion is not None:
                    before = (hidden if start is None else start.reshape(rows, -1)) if loop == 1 else flat[loop - 2]
                    meter = meter or Criteria(rows, 0 if logits is None else logits.shape[-1], flat.device)
                    mode = torch.full_like(slots, rule.criterion)
                    delta = torch.full_like(slots, rule.threshold, dtype=torch.float32)
                    first = torch.full_like(met, loop == 1)
                    states = before.detach(), hidden
                    here = meter.decide((rule.config.mode,), mode, delta, slots, first, states, logits)
                elif logits is not None:
                    here = leads_reference(logits, rule.threshold)
            here = rule.met_in_prompt(here, loop) & (rule.fixed_depth is None)
            broken = (loop_end.decisions == DIVERGED) & ~here & (loop < rule.last_loop)
            depths = torch.where((here | broken) & ~(met | diverged), loop, depths)
            met, diverged = met | (here & ~diverged), diverged | (broken & ~met)
    if at_full_depth:
        depths, diverged = torch.full_like(depths, total), torch.zeros_like(diverged)
    depths, met, diverged = broadcast(depths), broadcast(met), broadcast(diverged)
    index = (depths - 1).view(1, rows, 1).expand(1, rows, width)
    selected = flat.gather(0, index).view(batch, length, width)
    return Selection(selected, *(flag.view(batch, length) for flag in (depths, met, diverged)))


def no_gate_logits(hidden: Tensor) -> Tensor:
    """Logits `[R]` of a gate that never leaves, for states `[R, D]` of a model without one: its hazard is 0."""
    return torch.full((len(hidden),), -math.inf, dtype=hidden.dtype, device=hidden.device)


def exit_probabilities(gate_logits: Tensor) -> Tensor:
    """p_t = l_t * prod_{j<t} (1 - l_j), the last loop taking the rest of the mass (arXiv 2510.25741 section 3).

    Args:
        gate_logits: `[T, ...]`.

    Returns:
        float32 `[T, ...]`, summing to 1 over T.
    """
    hazard = torch.sigmoid(gate_logits.float())
    survival = torch.ones_like(hazard[0])
    probabilities = []
    for loop in range(len(hazard) - 1):
        probabilities.append(hazard[loop] * survival)
        survival = survival * (1.0 - hazard[loop])
    return torch.stack([*probabilities, survival])
