"""Collapse of a text while it is written: how near each sequence is to running in circles, and what may be done.

The reading is that of `kernels/collapse.py`, where the formulas stand. `CollapseCanary.observe` takes logits and ids;
`processor` and `criterion` fit the canary into any transformers model's `generate`.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, StoppingCriteria

from sigma0.decode.ops import READINGS, Backend, CollapseRule, CollapseState, operations
from sigma0.decode.repetition import Repetition

# Ids that decide whether a call continues the text of the one before it.
_COMPARED = 128
_END_ALPHA = 0.05


@dataclass(frozen=True)
class Reading:
    """What the last token of each sequence told, each float32 `[B]`.

    Attributes:
        proximity: In [0, 1]; entropy and margin alone cannot pass 0.5.
        periodicity: Share of the last ids that repeat at the best lag up to 64.
        echo: Share of the 4-grams of the last 128 ids that stood there before.
        distinct: Distinct ids among them, over their number.
        entropy: Of the distribution, nats.
        entropy_drop: Its fall against the mean so far, in standard deviations; 0 in the first tokens.
        margin: Lead of the likeliest id.
    """

    proximity: Tensor
    periodicity: Tensor
    echo: Tensor
    distinct: Tensor
    entropy: Tensor
    entropy_drop: Tensor
    margin: Tensor


@dataclass(frozen=True)
class RunOut:
    """How a text stands towards its limit, each `[B]`.

    Attributes:
        share: Tokens out, over the limit.
        end_chance: Exponential mean of the probability of an end; NaN where no end token is known.
        running_out: At least nine tenths out, and an end less likely than once in the tokens that are left.
    """

    share: Tensor
    end_chance: Tensor
    running_out: Tensor


@dataclass(frozen=True)
class Adaptation:
    """Bounds of what the canary may do to the scores.

    Attributes:
        begin: Proximity from which on it acts; in full at 1.
        penalty: Repetition penalty at most.
        temperature: Temperature at most.
        end_bias: Added to the end token's score at most, while a text runs out to its limit.
        eps_factor: What `tighten` multiplies eps by, on a divergence.
        least_eps: Below which `tighten` does not go.
    """

    begin: float = 0.4
    penalty: float = 1.3
    temperature: float = 1.5
    end_bias: float = 5.0
    eps_factor: float = 0.5
    least_eps: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 <= self.begin < 1 or self.penalty < 1 or self.temperature < 1 or self.end_bias < 0:
            raise ValueError(
                f"begin lies in [0, 1), penalty and temperature from 1, end_bias from 0; got {self.begin}, "
                f"{self.penalty}, {self.temperature} and {self.end_bias}"
            )
        if not 0 < self.eps_factor <= 1 or self.least_eps <= 0:
            raise ValueError(f"eps_factor lies in (0, 1], least_eps above 0; got {self.eps_factor}, {self.least_eps}")

    def strength(self, proximity: float) -> float:
        """Share of the bounds that a proximity asks for, in [0, 1]."""
        return min(1.0, max(0.0, (proximity - self.begin) / (1 - self.begin)))

    def soften(self, recent: Tensor, scores: Tensor, strength: float) -> Tensor:
        """Scores `[1, V]` under a share of the penalty, on recent ids `[1, N]`, and of the temperature."""
        penalty = RepetitionPenaltyLogitsProcessor(1 + strength * (self.penalty - 1))
        softer: Tensor = penalty(recent, scores) / (1 + strength * (self.temperature - 1))
        return softer


@dataclass
class Actions:
    """What was done to one sequence.

    Attributes:
        softened: Tokens chosen under a higher penalty and temperature.
        strongest: Share of the bounds that was used at most, in [0, 1].
        ends_pushed: Tokens chosen with a bias towards the end.
    """

    softened: int = 0
    strongest: float = 0.0
    ends_pushed: int = 0


@dataclass
class _Pending:
    """Logits that a token is about to be chosen from."""

    logits: Tensor
    length: int


class CollapseCanary:
    """Reads each sequence's last token.

    Args:
        batch_size: B.
        rule: Parts of the proximity.
        eos_token_id: End token, or several; None where unknown.
        device: Where logits are; the state is kept there.
        backend: As `sigma0.load` takes it.

    Attributes:
        actions: What `processor(adapt=True)` did, for each sequence.
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
        """Forgets all texts."""
        self._state = CollapseState.empty(self.batch_size, self.device)
        self._slots = torch.arange(self.batch_size, device=self.device)
        self._end_chance = torch.full((self.batch_size,), torch.nan, device=self.device)
        self._told = torch.zeros((self.batch_size, len(READINGS)), device=self.device)
        self.actions = [Actions() for _ in range(self.batch_size)]
        self._last: Reading | None = None

    @property
    def tokens(self) -> Tensor:
        """Tokens observed of each sequence, int64 `[B]`."""
        return self._state.lengths

    @property
    def last(self) -> Reading | None:
        """The last reading; None before the first token."""
        return self._last

    def observe(self, logits: Tensor, ids: Tensor, over: Tensor | None = None) -> Reading:
        """Takes in one token of every sequence.

        Args:
            logits: What they were chosen from, `[B, V]`.
            ids: The ids just chosen, int64 `[B]`.
            over: Sequences that have ended, bool `[B]`: their reading stays what it was.

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
        going = self._slots if over is None else self._slots[~over.to(self.device)]
        if len(going):
            self._told[going] = self._ops.collapse(
                logits[going], ids[going], self._state, going, self.rule
            ).statistics  # [N, 8]
        values = dict(zip(READINGS, self._told.clone().unbind(-1), strict=True))
        values["entropy_drop"] = values.pop("drop")
        self._last = Reading(**{each.name: values[each.name] for each in fields(Reading)})
        self._note_end_chance(logits[going], going)
        return self._last

    def _note_end_chance(self, logits: Tensor, going: Tensor) -> None:
        if not len(self._ends):
            return
        now = torch.softmax(logits.float(), dim=-1)[:, self._ends].sum(-1)
        before = self._end_chance[going]
        known = torch.where(before.isnan(), now, before + _END_ALPHA * (now - before))
        # logits that are no numbers say nothing of an end
        self._end_chance[going] = torch.where(now.isnan(), before, known)

    def reorder(self, parents: Tensor) -> None:
        """Every sequence goes on from another one's past, as beams do; what was done to them is kept by place.

        Args:
            parents: Batch index of each past, int64 `[B]`.
        """
        parents = parents.to(self.device)
        self._state = CollapseState(
            **{each.name: getattr(self._state, each.name)[parents] for each in fields(self._state)}
        )
        self._end_chance, self._told = self._end_chance[parents], self._told[parents]

    def run_out(self, limit: int) -> RunOut:
        """How each text stands towards a limit of new tokens.

        Raises:
            ValueError: For a limit under 1.
        """
        if limit < 1:
            raise ValueError(f"a limit is at least 1, got {limit}")
        left = (limit - self.tokens).clamp_min(1)
        share = self.tokens / limit
        unlikely = self._end_chance.isnan() | (self._end_chance * left < 1)
        return RunOut(share, self._end_chance.clone(), (share >= 0.9) & unlikely)

    def processor(self, adapt: bool = False, limit: int | None = None, bounds: Adaptation | None = None) -> "Watch":
        """A logits processor that observes, and with `adapt` acts within bounds.

        Args:
            adapt: On rising proximity raise repetition penalty and temperature; near `limit` with no end in sight push
                towards the end.
            limit: New tokens at most, for that.
            bounds: How far it may go.
        """
        return Watch(self, (bounds or Adaptation()) if adapt else None, limit)

    def criterion(self, watch: "Watch", tau: float = 0.5) -> "Collapsed":
        """A stopping criterion: the sequences whose proximity has reached `tau`.

        Args:
            watch: The processor of the same run, which sees the logits.
            tau: Proximity that ends a sequence.
        """
        return Collapsed(watch, tau)


class Watch(LogitsProcessor):  # type: ignore[misc]
    """A canary inside `generate`.

    Reordered beams are followed. A call that does not go on from the texts before it is another run, and begins anew;
    so does each call of a decoder that takes several tokens at a time (assisted generation, prompt lookup), where the
    canary therefore notices nothing. Sequences that have ended, by an end token or by `Collapsed`, are neither read nor
    acted on any further; one that another criterion ends is read on in its pads.

    Args:
        canary: Is told of every token.
        bounds: How far it may act; None only watches.
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
        """Observes the last token, then hands on scores `[B, V]`, changed where it acts."""
        self.catch_up(input_ids)
        self._pending = _Pending(scores.detach().clone(), input_ids.shape[1])
        return scores if self.bounds is None else self._adapted(input_ids, scores)

    def catch_up(self, input_ids: Tensor) -> Reading | None:
        """Takes in the last token of ids `[B, S]`, if it is new."""
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
        """Which text so far each row goes on from, int64 `[B]`; None where this is another run."""
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
        """Takes over reordered beams."""
        if bool((parents == torch.arange(len(parents), device=parents.device)).all()):
            return
        self.canary.reorder(parents)
        if self._pending is not None:
            self._pending.logits = self._pending.logits[parents.to(self._pending.logits.device)]
        if self._over is not None:
            self._over = self._over[parents.to(self._over.device)]

    def end(self, ended: Tensor) -> None:
        """Some sequences, bool `[B]`, are over: what they are fed from now on is no text."""
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
        reading = self.canary.last
        if reading is None:
            return scores
        bounds, over = self.bounds, self.over.tolist()
        strengths = ((reading.proximity - bounds.begin) / (1 - bounds.begin)).clamp(0, 1).tolist()
        adapted = scores.clone()
        for row, strength in enumerate(strengths):
            if strength > 0 and not over[row]:
                recent = input_ids[row : row + 1, -min(_COMPARED, int(self.canary.tokens[row])) :]
                adapted[row] = bounds.soften(recent, adapted[row : row + 1], strength)[0]
                self.canary.actions[row].softened += 1
                self.canary.actions[row].strongest = max(self.canary.actions[row].strongest, strength)
        return self._pushed(adapted, over)

    def _pushed(self, scores: Tensor, over: list[bool]) -> Tensor:
        """A bias towards the end, growing over the last tenth of the limit."""
        assert self.bounds is not None
        if self.limit is None or not len(self.canary._ends):
            return scores
        told = self.canary.run_out(self.limit)
        for row, running_out in enumerate(told.running_out.tolist()):
            if running_out and not over[row]:
                pressed = min(1.0, (float(told.share[row]) - 0.9) / 0.1 + 0.1)
                scores[row, self.canary._ends.to(scores.device)] += pressed * self.bounds.end_bias
                self.canary.actions[row].ends_pushed += 1
        return scores


class Collapsed(StoppingCriteria):  # type: ignore[misc]
    """Ends the sequences whose proximity has reached a threshold.

    Args:
        watch: The processor of the same run.
        tau: The threshold.
    """

    def __init__(self, watch: Watch, tau: float) -> None:
        if not 0 < tau <= 1:
            raise ValueError(f"tau lies in (0, 1], got {tau}")
        self.watch = watch
        self.tau = tau

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which sequences end, bool `[B]`."""
        reading = self.watch.catch_up(input_ids)
        if reading is None:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        fired = (reading.proximity >= self.tau) & ~self.watch.over
        self.watch.end(fired)
        return fired.to(input_ids.device)


class Tighten(LogitsProcessor):  # type: ignore[misc]
    """On rising proximity raises repetition penalty and temperature, within bounds.

    What it does depends on the ids alone and is reckoned anew from them at each call, so that `verify` may ask it about
    the same token more than once. The text is another one than without it, also where depth is lossless: what is exact
    then is that the same scores are processed in the same way.

    Args:
        prompt: Ids of the prompt, which do not count.
        bounds: How far it may go.
        rule: Parts of the proximity, of which those of the ids alone count.
    """

    def __init__(self, prompt: int, bounds: Adaptation | None = None, rule: CollapseRule | None = None) -> None:
        self._prompt = prompt
        self._bounds = bounds or Adaptation()
        self._rule = rule or CollapseRule()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` behind ids `[B, S]`."""
        adapted = scores
        for row, ids in enumerate(input_ids[:, self._prompt :].tolist()):
            text = Repetition()
            # as far back as the counts of the last id reach
            for token_id in ids[-2 * _COMPARED :]:
                text.append(token_id)
            strength = self._bounds.strength(text.at(-1).proximity(self._rule)) if ids else 0.0
            if strength > 0:
                adapted = adapted.clone() if adapted is scores else adapted
                recent = input_ids[row : row + 1, self._prompt :][:, -_COMPARED:]
                adapted[row] = self._bounds.soften(recent, adapted[row : row + 1], strength)[0]
        return adapted


def tighten(eps: float, bounds: Adaptation | None = None) -> float:
    """Eps of `converge` or `accel` after a divergence: smaller, so that tokens stop later, within bounds."""
    bounds = bounds or Adaptation()
    return max(min(eps, bounds.least_eps), eps * bounds.eps_factor)
