"""Repetition scores of sequences while they are decoded, and the logits processors and criteria that act on them.

The formulas are in `kernels/collapse.py`. `CollapseCanary.observe` takes logits and ids; `processor` and `criterion`
fit the canary into any transformers model's `generate`.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, StoppingCriteria

from sigma0.decode.ops import LOGIT_STATS, Backend, CollapseRule, CollapseState, operations
from sigma0.decode.repetition import TextStats

# Ids that decide whether a call continues the text of the one before it.
_COMPARED = 128
_END_ALPHA = 0.05


@dataclass(frozen=True)
class CollapseStats:
    """Repetition statistics at the last token of each sequence, each float32 `[B]`."""

    proximity: Tensor  # Repetition score in [0, 1]; entropy and margin alone cannot pass 0.5
    periodicity: Tensor  # Share of the last ids that repeat at the best lag up to 64
    echo: Tensor  # Share of the 4-grams of the last 128 ids that occurred before
    distinct: Tensor  # Distinct ids among them, over their number
    entropy: Tensor  # Of the distribution, nats
    entropy_drop: Tensor  # Its fall against the mean so far, in standard deviations; 0 in the first tokens
    margin: Tensor  # Top-1 probability minus top-2


@dataclass(frozen=True)
class LimitStatus:
    """Sequences near their limit of new tokens, each `[B]`."""

    share: Tensor  # New tokens over the limit
    end_chance: Tensor  # Exponential mean of the probability of EOS; NaN where no EOS id is known
    running_out: Tensor  # At least nine tenths of the limit, and less than one EOS expected in the tokens that are left


@dataclass(frozen=True)
class Adaptation:
    """Bounds of the changes to the scores."""

    begin: float = 0.4  # Proximity from which on scores are changed; in full at 1
    penalty: float = 1.3  # Greatest repetition penalty
    temperature: float = 1.5  # Greatest temperature
    end_bias: float = 5.0  # Greatest bias added to the EOS scores near the limit of new tokens
    eps_factor: float = 0.5  # Factor of `tighten` on eps, after a divergence
    least_eps: float = 1e-3  # Least eps of `tighten`

    def __post_init__(self) -> None:
        if not 0 <= self.begin < 1 or self.penalty < 1 or self.temperature < 1 or self.end_bias < 0:
            raise ValueError(
                f"begin lies in [0, 1), penalty and temperature from 1, end_bias from 0; got {self.begin}, "
                f"{self.penalty}, {self.temperature} and {self.end_bias}"
            )
        if not 0 < self.eps_factor <= 1 or self.least_eps <= 0:
            raise ValueError(f"eps_factor lies in (0, 1], least_eps above 0; got {self.eps_factor}, {self.least_eps}")

    def strength(self, proximity: float) -> float:
        """Share of the bounds at a proximity, in [0, 1]."""
        return min(1.0, max(0.0, (proximity - self.begin) / (1 - self.begin)))

    def soften(self, recent: Tensor, scores: Tensor, strength: float) -> Tensor:
        """Scores `[1, V]` under a share of the penalty, on recent ids `[1, N]`, and of the temperature."""
        penalty = RepetitionPenaltyLogitsProcessor(1 + strength * (self.penalty - 1))
        softer: Tensor = penalty(recent, scores) / (1 + strength * (self.temperature - 1))
        return softer


@dataclass
class Actions:
    """Counts of the changes to the scores of one sequence."""

    softened: int = 0  # Tokens sampled under a higher penalty and temperature
    strongest: float = 0.0  # Greatest share of the bounds used, in [0, 1]
    ends_pushed: int = 0  # Tokens sampled with a bias on EOS


@dataclass
class _Pending:
    """Logits of the token that is sampled next."""

    logits: Tensor
    length: int


class CollapseCanary:
    """Repetition scores of a batch, token by token.

    Args:
        batch_size: B.
        rule: Weights of the proximity.
        eos_token_id: EOS id, or several; None if unknown.
        device: Of the logits; the state is kept there.
        backend: "torch", "triton" or "auto", as in `sigma0.load`.

    Attributes:
        actions: The changes of `processor(adapt=True)`, for each sequence.
    """

    def __init__(
        self,
        batch_size: int = 1,
        rule: CollapseRule | None = None,
        eos_token_id: int | list[int] | None = None,
        device: str | torch.device = "cpu",
        backend: Backend = "auto",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.batch_size = batch_size
        self.rule = rule or CollapseRule()
        ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        self.device = torch.device(device)
        self._ends = torch.tensor(ends, dtype=torch.int64, device=self.device)
        self._ops = operations(backend, self.device)
        self.reset()

    def reset(self) -> None:
        """Starts over with empty sequences."""
        self._state = CollapseState.empty(self.batch_size, self.device)
        self._indices = torch.arange(self.batch_size, device=self.device)
        self._end_chance = torch.full((self.batch_size,), torch.nan, device=self.device)
        self._stats = torch.zeros((self.batch_size, len(LOGIT_STATS)), device=self.device)
        self.actions = [Actions() for _ in range(self.batch_size)]
        self._last: CollapseStats | None = None

    @property
    def tokens(self) -> Tensor:
        """Tokens observed of each sequence, int64 `[B]`."""
        return self._state.lengths

    @property
    def last(self) -> CollapseStats | None:
        """Statistics at the last token; None before the first."""
        return self._last

    def observe(self, logits: Tensor, ids: Tensor, over: Tensor | None = None) -> CollapseStats:
        """Takes in one token of every sequence.

        Args:
            logits: The logits that the ids were sampled from, `[B, V]`.
            ids: The sampled ids, int64 `[B]`.
            over: Sequences that have ended, bool `[B]`: their statistics stay.

        Raises:
            ValueError: For another shape or dtype.
        """
        if logits.dim() != 2 or logits.shape[0] != self.batch_size or tuple(ids.shape) != (self.batch_size,):
            raise ValueError(
                f"{self.batch_size} sequences need logits [B, V] and ids [B], got {tuple(logits.shape)} and "
                f"{tuple(ids.shape)}"
            )
        if ids.dtype != torch.int64:
            raise ValueError(f"ids must be int64, got {ids.dtype}")
        logits, ids = logits.detach().to(self.device), ids.to(self.device)
        going = self._indices if over is None else self._indices[~over.to(self.device)]
        if len(going):
            self._stats[going] = self._ops.collapse(
                logits[going], ids[going], self._state, going, self.rule
            ).statistics  # [N, 8]
        values = dict(zip(LOGIT_STATS, self._stats.clone().unbind(-1), strict=True))
        values["entropy_drop"] = values.pop("drop")
        self._last = CollapseStats(**{field.name: values[field.name] for field in fields(CollapseStats)})
        self._note_end_chance(logits[going], going)
        return self._last

    def _note_end_chance(self, logits: Tensor, going: Tensor) -> None:
        if not len(self._ends):
            return
        now = torch.softmax(logits.float(), dim=-1)[:, self._ends].sum(-1)
        before = self._end_chance[going]
        known = torch.where(before.isnan(), now, before + _END_ALPHA * (now - before))
        # NaN logits leave the mean as it is
        self._end_chance[going] = torch.where(now.isnan(), before, known)

    def reorder(self, parents: Tensor) -> None:
        """Reorders the state like beams; `actions` keep their batch index.

        Args:
            parents: Batch index that each sequence continues, int64 `[B]`.
        """
        parents = parents.to(self.device)
        self._state = CollapseState(
            **{field.name: getattr(self._state, field.name)[parents] for field in fields(self._state)}
        )
        self._end_chance, self._stats = self._end_chance[parents], self._stats[parents]

    def run_out(self, limit: int) -> LimitStatus:
        """Each sequence's status against a limit of new tokens.

        Raises:
            ValueError: For a limit under 1.
        """
        if limit < 1:
            raise ValueError(f"a limit is at least 1, got {limit}")
        left = (limit - self.tokens).clamp_min(1)
        share = self.tokens / limit
        unlikely = self._end_chance.isnan() | (self._end_chance * left < 1)
        return LimitStatus(share, self._end_chance.clone(), (share >= 0.9) & unlikely)

    def processor(
        self, adapt: bool = False, limit: int | None = None, bounds: Adaptation | None = None
    ) -> "CanaryProcessor":
        """A logits processor that observes, and with `adapt` changes the scores within bounds.

        Args:
            adapt: Raise repetition penalty and temperature with the proximity; near `limit` bias the scores to EOS if
                it is unlikely.
            limit: New tokens at most.
            bounds: Bounds of the changes.
        """
        return CanaryProcessor(self, (bounds or Adaptation()) if adapt else None, limit)

    def criterion(self, watch: "CanaryProcessor", tau: float = 0.5) -> "CollapseCriterion":
        """A stopping criterion for sequences whose proximity has reached `tau`.

        Args:
            watch: The processor of the same run, which gets the logits.
            tau: Proximity that ends a sequence.
        """
        return CollapseCriterion(watch, tau)


class CanaryProcessor(LogitsProcessor):  # type: ignore[misc]
    """A canary as a logits processor of `generate`.

    Reordered beams are followed. A call whose ids do not continue those of the last call starts a new run; so does each
    call of a decoder that takes several tokens at a time (assisted generation, prompt lookup), where the canary
    therefore observes nothing. Sequences that have ended, by EOS or by `CollapseCriterion`, are neither observed nor
    changed any further; for one that another criterion ends, its pads are observed too.

    Args:
        canary: Observes every token.
        bounds: Bounds of the changes; None leaves the scores unchanged.
        limit: New tokens at most.
    """

    def __init__(self, canary: CollapseCanary, bounds: Adaptation | None, limit: int | None) -> None:
        self.canary = canary
        self.bounds = bounds
        self.limit = limit
        self._pending: _Pending | None = None
        self._tail: Tensor | None = None
        self._length = 0
        self._over: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Observes the last token and returns scores `[B, V]`, changed within the bounds."""
        self.catch_up(input_ids)
        self._pending = _Pending(scores.detach().clone(), input_ids.shape[1])
        return scores if self.bounds is None else self._adapted(input_ids, scores)

    def catch_up(self, input_ids: Tensor) -> CollapseStats | None:
        """Observes the last token of ids `[B, S]`, if it is new."""
        parents = self._parents(input_ids)
        if parents is None:
            self.canary.reset()
            self._pending = self._over = None
        else:
            self._follow(parents)
            pending = self._pending
            if pending is not None and input_ids.shape[1] == pending.length + 1:
                self._observe(pending.logits, input_ids[:, -1])
                self._pending = None
        self._remember(input_ids)
        return self.canary.last

    def _observe(self, logits: Tensor, ids: Tensor) -> None:
        self.canary.observe(logits, ids, self._over)
        if len(self.canary._ends):
            self.end(torch.isin(ids.to(self.canary.device), self.canary._ends))

    def _parents(self, input_ids: Tensor) -> Tensor | None:
        """Batch index whose ids each row continues, int64 `[B]`; None for a new run."""
        tail, length = self._tail, input_ids.shape[1]
        if tail is None or input_ids.shape[0] != tail.shape[0] or length not in (self._length, self._length + 1):
            return None
        before = input_ids[:, : self._length][:, -_COMPARED:]
        if before.shape != tail.shape:
            return None
        rows = torch.arange(len(tail), device=tail.device)
        if bool((before == tail).all()):
            return rows
        same = (before[:, None] == tail[None]).all(-1)  # [B, B]
        return same.int().argmax(-1) if bool(same.any(-1).all()) else None

    def _follow(self, parents: Tensor) -> None:
        """Reorders the state like the beams."""
        if bool((parents == torch.arange(len(parents), device=parents.device)).all()):
            return
        self.canary.reorder(parents)
        if self._pending is not None:
            self._pending.logits = self._pending.logits[parents.to(self._pending.logits.device)]
        if self._over is not None:
            self._over = self._over[parents.to(self._over.device)]

    def end(self, ended: Tensor) -> None:
        """Marks sequences, bool `[B]`, as ended: from now on they are fed pads."""
        ended = ended.to(self.canary.device)
        self._over = ended if self._over is None else self._over | ended

    def _remember(self, input_ids: Tensor) -> None:
        self._tail, self._length = input_ids[:, -_COMPARED:].clone(), input_ids.shape[1]

    @property
    def over(self) -> Tensor:
        """Sequences that have ended, bool `[B]`."""
        none = torch.zeros(self.canary.batch_size, dtype=torch.bool, device=self.canary.device)
        return none if self._over is None else self._over

    def _adapted(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert self.bounds is not None
        stats = self.canary.last
        if stats is None:
            return scores
        bounds, over = self.bounds, self.over.tolist()
        strengths = ((stats.proximity - bounds.begin) / (1 - bounds.begin)).clamp(0, 1).tolist()
        adapted = scores.clone()
        for row, strength in enumerate(strengths):
            if strength > 0 and not over[row]:
                recent = input_ids[row : row + 1, -min(_COMPARED, int(self.canary.tokens[row])) :]
                adapted[row] = bounds.soften(recent, adapted[row : row + 1], strength)[0]
                self.canary.actions[row].softened += 1
                self.canary.actions[row].strongest = max(self.canary.actions[row].strongest, strength)
        return self._pushed(adapted, over)

    def _pushed(self, scores: Tensor, over: list[bool]) -> Tensor:
        """Scores with a bias on EOS that grows over the last tenth of the limit."""
        assert self.bounds is not None
        if self.limit is None or not len(self.canary._ends):
            return scores
        run_out = self.canary.run_out(self.limit)
        for row, running_out in enumerate(run_out.running_out.tolist()):
            if running_out and not over[row]:
                pressed = min(1.0, (float(run_out.share[row]) - 0.9) / 0.1 + 0.1)
                scores[row, self.canary._ends.to(scores.device)] += pressed * self.bounds.end_bias
                self.canary.actions[row].ends_pushed += 1
        return scores


class CollapseCriterion(StoppingCriteria):  # type: ignore[misc]
    """Ends the sequences whose proximity has reached a threshold.

    Args:
        watch: The processor of the same run.
        tau: The threshold.
    """

    def __init__(self, watch: CanaryProcessor, tau: float) -> None:
        if not 0 < tau <= 1:
            raise ValueError(f"tau lies in (0, 1], got {tau}")
        self.watch = watch
        self.tau = tau

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which sequences end, bool `[B]`."""
        stats = self.watch.catch_up(input_ids)
        if stats is None:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        fired = (stats.proximity >= self.tau) & ~self.watch.over
        self.watch.end(fired)
        return fired.to(input_ids.device)


class Tighten(LogitsProcessor):  # type: ignore[misc]
    """Raises repetition penalty and temperature with the proximity, within bounds.

    The change depends on the ids alone and is computed from them at each call, so that `verify` may process the same
    token more than once. The text differs from the one without it, also where depth is lossless: exact is then that the
    same scores are processed in the same way.

    Args:
        prompt: Length of the prompt, whose ids do not count.
        bounds: Bounds of the changes.
        rule: Weights of the proximity, of which those of the ids alone are used.
    """

    def __init__(self, prompt: int, bounds: Adaptation | None = None, rule: CollapseRule | None = None) -> None:
        self._prompt = prompt
        self._bounds = bounds or Adaptation()
        self._rule = rule or CollapseRule()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The changed scores `[B, V]` after ids `[B, S]`."""
        adapted, stats = scores, TextStats(operations("auto", torch.device("cpu")), self._rule)
        for row, ids in enumerate(input_ids[:, self._prompt :].tolist()):
            # as far back as the counts of the last id reach
            last = ids[-2 * _COMPARED :]
            proximities = stats.take([stats.text()] * len(last), last)[-1] if last else [0.0]
            strength = self._bounds.strength(proximities[-1])
            if strength > 0:
                adapted = adapted.clone() if adapted is scores else adapted
                recent = input_ids[row : row + 1, self._prompt :][:, -_COMPARED:]
                adapted[row] = self._bounds.soften(recent, adapted[row : row + 1], strength)[0]
        return adapted


def tighten(eps: float, bounds: Adaptation | None = None) -> float:
    """Eps of `converge` or `accel` after a divergence: smaller within bounds, so that tokens stop later."""
    bounds = bounds or Adaptation()
    return max(min(eps, bounds.least_eps), eps * bounds.eps_factor)
