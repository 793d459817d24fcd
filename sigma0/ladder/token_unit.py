"""Single tokens that go up: the larger model keeps its K/V and catches up on the ids it missed.

A token begins at the lowest rung, or at the rung where its sequence is parked. If the policy fires on its signs, the
next rung prefills the missed ids and writes the token instead; both models are fed that token next, so nothing is
rolled back. All sequences of a batch step together: their texts have the same length, so a forward of a rung covers all
of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.exits import Reason
from sigma0.decode.ops import Fate
from sigma0.decode.transfer import Bools
from sigma0.ladder.budget import BudgetTracker, Spending
from sigma0.ladder.reader import Look, Reader
from sigma0.ladder.token_sampler import TokenSampler
from sigma0.ladder.trail import Decision, Outcome, Spent, Trail, reason_up
from sigma0.ladder.triggers import Hysteresis, Parking, Signs, Trigger
from sigma0.signals.canary import CollapseCanary
from sigma0.signals.verdict import of_token


@dataclass(frozen=True)
class Written:
    """A token of one sequence."""

    sequence: int  # Batch index
    token_id: int  # Its id
    rung: int  # Index of the rung that wrote it, 0 the lowest
    depth: int  # Exit depth; 0 of a model without loops
    reason: Reason | None  # Exit reason; None of a model without loops
    fate: Fate | None  # Of its loops so far
    proximity: float  # Repetition score of the text before it
    margin: float | None  # Top-1 probability minus top-2; None for logits that are not finite
    entropy: float | None  # Nats
    why: str | None  # Reason for leaving the lowest rung; None if it stayed there
    aborted: bool  # Whether the budget kept it from going up further


@dataclass
class _Unit:
    """A token on its way up."""

    sequence: int
    rung: int
    parked: bool
    climbed: bool = False
    why: str | None = None
    aborted: bool = False
    token_id: int = 0
    signs: Signs | None = None


@dataclass(frozen=True)
class _Facts:
    """Statistics of the logits of one forward, on the host, each `[B]`; None for logits that are not finite."""

    entropy: list[float | None]
    margin: list[float | None]
    likeliest: list[int]

    @classmethod
    def of(cls, logits: Tensor) -> "_Facts":
        probs = torch.softmax(logits.float(), dim=-1)  # [B, V]
        best = probs.topk(2, dim=-1).values
        rows = torch.stack([torch.special.entr(probs).sum(-1), best[:, 0] - best[:, 1]])
        entropy, margin = ([_number(value) for value in row] for row in rows.tolist())
        return cls(entropy, margin, logits.argmax(-1).tolist())


@dataclass
class Batch:
    """Texts so far, all of one length."""

    ids: Tensor  # `[B, S]`, left-padded, on the CPU
    mask: Tensor  # 0 at pads and after an end, `[B, S]`
    prompt: int = field(init=False)  # Length of the prompts
    ended: Bools = field(init=False)  # Sequences that are over, bool `[B]`

    def __post_init__(self) -> None:
        self.prompt = self.ids.shape[1]
        self.ended = np.zeros(len(self.ids), dtype=np.bool_)

    @property
    def padded(self) -> bool:
        """Whether the mask has zeros."""
        return bool((self.mask == 0).any())

    def append(self, token_ids: Tensor) -> None:
        """Appends an id to each sequence `[B]`; those of ended sequences are masked."""
        going = torch.from_numpy(~self.ended).to(self.mask)
        self.ids = torch.cat([self.ids, token_ids[:, None]], dim=1)
        self.mask = torch.cat([self.mask, going[:, None]], dim=1)


class TokenUnit:
    """Writes a batch of texts token by token over several models with one tokenizer.

    Args:
        readers: One for each rung, the lowest first.
        batch: Prompts.
        choosers: From logits to ids, one for each rung.
        policy: What goes up.
        hysteresis: How long a larger model stays.
        purse: What may be spent.
        trail: Takes the decisions.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        batch: Batch,
        choosers: Sequence[TokenSampler],
        policy: Trigger,
        hysteresis: Hysteresis,
        purse: BudgetTracker,
        trail: Trail,
    ) -> None:
        self.readers = readers
        self.batch = batch
        self.purse = purse
        self._choosers = choosers
        self._policy = policy
        self._parking = Parking(hysteresis)
        self._trail = trail
        self._device = readers[0].model.device
        self._canary = CollapseCanary(len(batch.ids), device=self._device)
        self._proximity = [0.0] * len(batch.ids)
        self._looks: dict[int, Look] = {}
        self._facts: dict[int, _Facts] = {}
        self._reserved: dict[int, Spending] = {}

    def run(self) -> Iterator[tuple[Written, ...]]:
        """Yields a token of every sequence that has not ended; the caller marks ends in `batch.ended`.

        Ends early where the budget does not allow the lowest rung's next step.
        """
        while not self.batch.ended.all():
            written = self._step()
            if written is None:
                return
            yield written
            self._feed(written)

    def fate_of(self, rung: str, sequence: int, number: int) -> Fate | None:
        """The fate of a new token's loops as far as they have been run by now; None where that is not kept.

        Args:
            rung: Name of the rung that wrote it.
            sequence: Batch index.
            number: Of the token, from 0.
        """
        (reader,) = (candidate for candidate in self.readers if candidate.rung.name == rung)
        return reader.fate_of(sequence, self.batch.prompt + number - 1)

    def _step(self) -> tuple[Written, ...] | None:
        """The next token of every going sequence; None if the budget is gone."""
        for memo in (self._looks, self._facts, self._reserved):
            memo.clear()
        units = []
        for sequence in np.flatnonzero(~self.batch.ended).tolist():
            rung = self._parking.start(sequence)
            units.append(_Unit(sequence, rung, parked=rung > 0))
        # the lowest rung's step first: what is reserved for parked tokens must not starve the others
        starved = self._starved([unit for unit in units if unit.rung == 0])
        for unit in units:
            self._admit(unit)
        starved += self._starved([unit for unit in units if unit.rung == 0 and unit not in starved])
        for unit in starved:
            self.batch.ended[unit.sequence] = True
        going = [unit for unit in units if unit not in starved]
        for rung in range(len(self.readers)):
            here = [unit for unit in going if unit.rung == rung]
            if here and not self._look(rung):
                return None
            for unit in here:
                self._resolve(unit)
        return tuple(self._written(unit) for unit in going) or None

    def _starved(self, units: "list[_Unit]") -> "list[_Unit]":
        """Those that begin at the lowest rung, if not even its step is allowed; their texts are over."""
        return units if units and not self._look(0) else []

    def _admit(self, unit: _Unit) -> None:
        """Reserves the cost of a token that begins above the lowest rung; if refused, it begins at the lowest."""
        if not unit.parked:
            return
        spending, lacking = self._ask(unit.rung, 1)
        if lacking is None:
            self._pay_token(unit.rung)
            return
        self._decide(unit, "abort", "parked", spending, lacking)
        unit.rung, unit.parked, unit.aborted = 0, False, True

    def _ask(self, rung: int, large_tokens: int) -> tuple[Spending, str | None]:
        """The most that writing a token at a rung above costs, and the limit that forbids it; else it is reserved."""
        spending = Spending(large_tokens=large_tokens)
        forecast = Spending() if rung in self._looks else self._forecast(rung)
        for reserved in [forecast, *(step for other, step in self._reserved.items() if other != rung)]:
            spending = spending.plus(reserved)
        lacking = self.purse.lacks(spending, _kind(rung))
        if lacking is None and rung not in self._looks:
            self._reserved[rung] = forecast
        return spending, lacking

    def _pay_token(self, rung: int) -> None:
        """For a token above the lowest rung; after its decision in the trail, which came before the payment."""
        self._pay(rung, Spending(large_tokens=1), "token", 0.0)

    def _forecast(self, rung: int) -> Spending:
        step = self.readers[rung].forecast(self.batch.mask)
        return step if rung else Spending(loop_passes=step.loop_passes)

    def _look(self, rung: int) -> bool:
        """Runs a rung's forward; False if the budget refuses the lowest rung's. Above, it was reserved already."""
        if rung in self._looks:
            return True
        forecast = self._forecast(rung)
        if rung == 0:
            spending = forecast
            for reserved in self._reserved.values():
                spending = spending.plus(reserved)
            if self.purse.lacks(spending, _kind(rung)) is not None:
                return False
        reader, began, batch = self.readers[rung], perf_counter(), self.batch
        before = reader.passes
        try:
            look = reader.read(batch.ids, batch.mask, batch.ended, batch.padded)
        except torch.OutOfMemoryError:
            # what was read counts, and recomputing it is paid for like any other step
            self._pay(rung, forecast, _kind(rung), perf_counter() - began)
            reader.drop()
            forecast, before = self._forecast(rung), reader.passes
            if self.purse.lacks(forecast, _kind(rung)) is not None:
                return False
            look = reader.read(batch.ids, batch.mask, batch.ended, batch.padded)
        self._looks[rung] = look
        self._facts[rung] = _Facts.of(self._looks[rung].logits)
        passes = reader.passes - before
        assert passes <= forecast.loop_passes, f"{passes} passes where {forecast.loop_passes} were asked for"
        self._reserved.pop(rung, None)
        cost = Spending(loop_passes=passes, catch_up_tokens=forecast.catch_up_tokens)
        self._pay(rung, cost, _kind(rung), perf_counter() - began)
        return True

    def _resolve(self, unit: _Unit) -> None:
        """Writes a token at its rung, or hands it up."""
        unit.signs = self._signs(unit)
        why = reason_up(self._policy, unit.signs, "token")
        is_top = unit.rung == len(self.readers) - 1
        outcome: Outcome = "stay" if unit.parked else "top_rung" if why is not None and is_top else "accept"
        spending = lacking = None
        if why is not None and not is_top:
            spending, lacking = self._ask(unit.rung + 1, int(unit.rung == 0))
            if lacking is None:
                self._decide(unit, "hand_up", why, spending)
                if unit.rung == 0:
                    self._pay_token(1)
                unit.rung, unit.parked, unit.climbed, unit.why = unit.rung + 1, False, True, unit.why or why
                return
            outcome, unit.aborted = "abort", True
        unit.token_id = self._choose(unit)
        self._decide(unit, outcome, why, spending, lacking, unit.token_id)

    def _signs(self, unit: _Unit) -> Signs:
        look, facts, sequence = self._looks[unit.rung], self._facts[unit.rung], unit.sequence
        verdict = of_token(
            look.reasons[sequence], look.depths[sequence], look.fates[sequence], self._proximity[sequence],
            facts.entropy[sequence],
        )  # fmt: skip
        return Signs(sequence, self._position, verdict, facts.entropy[sequence], facts.margin[sequence])

    @property
    def _position(self) -> int:
        return self.batch.ids.shape[1] - self.batch.prompt

    def _choose(self, unit: _Unit) -> int:
        chooser = self._choosers[unit.rung]
        if chooser.is_greedy:
            return self._facts[unit.rung].likeliest[unit.sequence]
        ids = self.batch.ids[unit.sequence][self.batch.mask[unit.sequence] > 0]
        return chooser.sample(ids, self._looks[unit.rung].logits[unit.sequence], unit.sequence)

    def _written(self, unit: _Unit) -> Written:
        signs = unit.signs
        assert signs is not None
        self._parking.wrote(unit.sequence, unit.rung, unit.climbed, signs.margin)
        return Written(
            sequence=unit.sequence,
            token_id=unit.token_id,
            rung=unit.rung,
            depth=int(signs.verdict.depth),
            reason=signs.verdict.reason,
            fate=signs.verdict.stable,
            proximity=signs.verdict.proximity,
            margin=signs.margin,
            entropy=signs.entropy,
            why=unit.why or ("parked" if unit.parked else None),
            aborted=unit.aborted,
        )

    def _feed(self, written: Sequence[Written]) -> None:
        """Appends the tokens and updates the repetition scores of their texts."""
        token_ids = torch.zeros(len(self.batch.ids), dtype=torch.int64)
        over = torch.ones(len(token_ids), dtype=torch.bool)
        # heads may be padded to different widths over one vocabulary
        widest = max(look.logits.shape[-1] for look in self._looks.values())
        logits = torch.full((len(token_ids), widest), -torch.inf, device=self._device)
        logits[:, 0] = 0.0
        for token in written:
            row = self._looks[token.rung].logits[token.sequence]
            token_ids[token.sequence], over[token.sequence] = token.token_id, False
            logits[token.sequence, : len(row)] = row.to(logits)
        self._proximity = self._canary.observe(logits, token_ids, over).proximity.tolist()
        self.batch.append(token_ids)

    def _decide(
        self,
        unit: _Unit,
        outcome: Outcome,
        why: str | None,
        limit: Spending | None = None,
        lacking: str | None = None,
        token_id: int | None = None,
    ) -> None:
        signs = None if unit.signs is None else unit.signs.to_dict()
        self._trail.lines.append(
            Decision(unit.sequence, self._position, unit.rung, signs, why, outcome, limit, lacking, token_id)
        )

    def _pay(self, rung: int, cost: Spending, step: str, seconds: float) -> None:
        self.purse.pay(cost, step, seconds)
        self._trail.lines.append(Spent(rung, step, cost, seconds))


def _kind(rung: int) -> str:
    return f"read {rung}"


def _number(value: float) -> float | None:
    """None for NaN and infinity."""
    return value if np.isfinite(value) else None
