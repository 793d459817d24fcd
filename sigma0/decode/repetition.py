"""Repetition in a text as it is written, an id at a time on the host: what the proximity to collapse is made of.

The same numbers as `sigma0.kernels.collapse.repetition_of` gives for a whole window, kept up to date with each id: the
matches at each lag are counted on, and the 4-grams and ids of the window are counted in and out.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from sigma0.decode.ops import ALPHA, FLOOR, GRAM, LAGS, SETTLED, SHORTEST, WARM_UP, WINDOW, CollapseRule

_LAGS = np.arange(1, LAGS + 1)
_SPANS = np.maximum(_LAGS, SHORTEST)
_WIDE_SPANS = _SPANS.astype(np.float32)
# ids that there must be before a lag counts
_NEEDED = (_SPANS + _LAGS).tolist()
# of the matches that leave each lag's span, where they stand, by the number of the id modulo the lags
_LEAVING = (np.arange(LAGS)[:, None] - _SPANS) % LAGS * LAGS + np.arange(LAGS)
_ALPHA, _REST, _FLOOR = np.float32(ALPHA), np.float32(1 - ALPHA), np.float32(FLOOR)
# no id: ids are at least 0
_NONE = -1


@dataclass(frozen=True)
class Repeated:
    """How much a text repeats itself, as `sigma0.signals.canary.CollapseStats` has it.

    Attributes:
        periodicity: Share of the last ids that repeat at the best lag.
        lag: The smallest lag that reaches it; 0 where nothing repeats.
        echo: Share of the 4-grams of the last 128 ids that stood there before.
        distinct: Distinct ids among them, over their number.
        tokens: Ids so far.
    """

    periodicity: float
    lag: int
    echo: float
    distinct: float
    tokens: int

    @property
    def settled(self) -> float:
        """Share of the echo that counts: a few ids repeat by chance."""
        return min(1.0, max(0.0, (self.tokens - GRAM + 1) / SETTLED))

    def proximity(self, rule: CollapseRule) -> float:
        """The part of the proximity that the ids alone decide, in [0, 1]."""
        calm = 1.0
        for part, value in (
            (rule.periodicity, self.periodicity),
            (rule.echo, self.echo * self.settled),
            (rule.sameness, 1 - self.distinct),
        ):
            calm *= 1 - part.weight * min(1.0, max(0.0, (value - part.low) / (part.high - part.low)))
        return 1 - calm


class Repetition:
    """One text's repetition behind each of its ids, counted when somebody asks: several ids together take less.

    Attributes:
        tokens: Ids so far.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._waiting: list[int] = []
        self._told: list[Repeated] = []
        self._ids = np.full(LAGS + WINDOW, _NONE, dtype=np.int64)
        self._counted = 0
        # whether id n equals the one p back, at [n mod LAGS, p - 1]; and how many do over each lag's span
        self._equal = np.zeros((LAGS, LAGS), dtype=np.int64)
        self._matches = np.zeros(LAGS, dtype=np.int64)
        self._lags = 0
        self._window: deque[int] = deque()
        self._counts: Counter[int] = Counter()
        self._grams: deque[tuple[int, ...]] = deque()
        self._gram_counts: Counter[tuple[int, ...]] = Counter()

    def append(self, token_id: int) -> None:
        """The next id."""
        self._waiting.append(token_id)
        self.tokens += 1

    def at(self, number: int) -> Repeated:
        """Behind the id with this number, from 0; numbers under 0 count from the last."""
        for token_id in self._waiting:
            periodicity, lag = self._periodicity(token_id)
            echo, distinct = self._echo(token_id)
            self._told.append(Repeated(periodicity, lag, echo, distinct, self._counted))
        self._waiting = []
        return self._told[number]

    def _periodicity(self, token_id: int) -> tuple[float, int]:
        number = self._counted
        place = number + LAGS
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.full(len(self._ids), _NONE, dtype=np.int64)])
        row = self._ids[place - LAGS : place][::-1] == token_id  # [LAGS], by lag
        # what leaves a lag's span; it is read before it is written over, since no span is longer than the ring
        self._matches -= self._equal.take(_LEAVING[number % LAGS])
        self._matches += row
        self._equal[number % LAGS] = row
        self._ids[place] = token_id
        self._counted += 1
        while self._lags < LAGS and self._counted >= _NEEDED[self._lags]:
            self._lags += 1
        if not self._lags:
            return 0.0, 0
        shares = self._matches[: self._lags] / _WIDE_SPANS[: self._lags]
        best = int(shares.argmax())
        share = float(np.float32(shares[best]))
        return share, best + 1 if share > 0 else 0

    def _echo(self, token_id: int) -> tuple[float, float]:
        window, counts, grams, gram_counts = self._window, self._counts, self._grams, self._gram_counts
        window.append(token_id)
        counts[token_id] += 1
        if len(window) > WINDOW:
            _count_out(counts, window.popleft())
        if self._counted >= GRAM:
            gram = (window[-4], window[-3], window[-2], window[-1])
            grams.append(gram)
            gram_counts[gram] += 1
            if len(grams) > WINDOW - GRAM + 1:
                _count_out(gram_counts, grams.popleft())
        # all but the oldest of equal 4-grams stood there before
        echoes = len(grams) - len(gram_counts)
        echo = np.float32(echoes) / np.float32(max(1, len(grams)))
        return float(echo), float(np.float32(len(counts)) / np.float32(len(window)))


@dataclass(frozen=True)
class CollapseStop:
    """When a text has collapsed and is ended: where its proximity, of the ids alone, stays high.

    How both were chosen, and what they cost: `python -m sigma0.bench collapse`.

    Attributes:
        tau: Proximity that must be reached behind each of the last `running` ids.
        running: How many those are.
        every: Looked at when the number of ids is a multiple of it.
        rule: Parts of the proximity.
    """

    tau: float = 0.9
    running: int = 16
    every: int = 4
    rule: CollapseRule = field(default_factory=CollapseRule)

    def ends(self, text: Repetition) -> bool:
        """Whether a text is ended behind its last id."""
        if text.tokens % self.every or text.tokens < self.running:
            return False
        return all(text.at(-back).proximity(self.rule) >= self.tau for back in range(1, self.running + 1))


class EntropyDrop:
    """The fall of a text's entropy, token by token, in float32 as `sigma0.kernels.collapse` has it."""

    def __init__(self) -> None:
        self._mean = self._variance = np.float32(0)
        self._observed = 0

    def take(self, entropy: float) -> float:
        """The drop of an entropy against those before it, which it then joins; NaN says nothing."""
        if not math.isfinite(entropy):
            return 0.0
        step = np.float32(entropy) - self._mean
        drop = 0.0
        if self._observed >= WARM_UP:
            drop = float(-step / np.sqrt(max(self._variance, _FLOOR)))
        if self._observed:
            self._variance = _REST * (self._variance + _ALPHA * step * step)
            self._mean = self._mean + _ALPHA * step
        else:
            self._mean = np.float32(entropy)
        self._observed += 1
        return drop


def _count_out(counts: Counter, item: object) -> None:  # type: ignore[type-arg]
    if counts[item] == 1:
        del counts[item]
    else:
        counts[item] -= 1
