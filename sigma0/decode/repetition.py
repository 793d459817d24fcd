"""Repetition among the ids of a sequence, updated id by id on the host; the main part of the proximity to collapse.

The same numbers as `sigma0.kernels.collapse.repetition_of` computes from a whole window, kept incrementally: matches at
each lag, and the 4-grams and ids that enter and leave the window.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from operator import truediv

import numpy as np

from sigma0.decode.ops import ALPHA, FLOOR, FULL_ECHO, LAGS, NGRAM, SHORTEST, WARM_UP, WINDOW, CollapseRule

# By lag, from 1: ids that it is measured over, and ids that there must be before it counts.
_SPANS = [max(lag, SHORTEST) for lag in range(1, LAGS + 1)]
_NEEDED = [span + lag for lag, span in enumerate(_SPANS, start=1)]


@dataclass(frozen=True)
class Repeated:
    """Repetition of a sequence after one id; fields as in `sigma0.signals.canary.CollapseStats`.

    Attributes:
        periodicity: Share of the last ids that repeat at the best lag.
        lag: The smallest lag that reaches it; 0 where nothing repeats.
        echo: Share of the 4-grams of the last 128 ids that stood there before.
        distinct: Distinct ids among the last 128, over their number.
        tokens: Ids so far.
    """

    periodicity: float
    lag: int
    echo: float
    distinct: float
    tokens: int

    @property
    def echo_weight(self) -> float:
        """Weight of the echo: below 1 for short sequences, where a few ids repeat by chance."""
        return min(1.0, max(0.0, (self.tokens - NGRAM + 1) / FULL_ECHO))

    def proximity(self, rule: CollapseRule, drop: float = 0.0, margin: float = 0.0) -> float:
        """The proximity in [0, 1]; without drop and margin, the part of it that the ids alone decide."""
        return rule.of_numbers(self.periodicity, self.echo * self.echo_weight, 1 - self.distinct, drop, margin)


class Repetition:
    """Repetition of one sequence after each of its ids, counted on access: several ids at once are cheaper.

    Attributes:
        tokens: Ids so far.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._waiting: list[int] = []
        self._states: list[Repeated] = []
        self._counted = 0
        # where each id stood; how many ids equal the one p back over the span of lag p, at p - 1; and which of these
        # equalities leave their spans with an id to come
        self._places: dict[int, deque[int]] = {}
        self._matches = [0] * LAGS
        self._leaving: dict[int, list[int]] = {}
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
        """Repetition after the id with this index, from 0; a negative index counts from the last."""
        for token_id in self._waiting:
            periodicity, lag = self._periodicity(token_id)
            echo, distinct = self._echo(token_id)
            self._states.append(Repeated(periodicity, lag, echo, distinct, self._counted))
        self._waiting = []
        return self._states[number]

    def _periodicity(self, token_id: int) -> tuple[float, int]:
        number, matches, leaving = self._counted, self._matches, self._leaving
        for lag in leaving.pop(number, ()):
            matches[lag - 1] -= 1
        places = self._places.setdefault(token_id, deque(maxlen=LAGS))
        for place in reversed(places):
            lag = number - place
            if lag > LAGS:
                break
            matches[lag - 1] += 1
            leaving.setdefault(number + _SPANS[lag - 1], []).append(lag)
        places.append(number)
        self._counted += 1
        while self._lags < LAGS and self._counted >= _NEEDED[self._lags]:
            self._lags += 1
        shares = list(map(truediv, matches[: self._lags], _SPANS))
        best = max(shares, default=0.0)
        return (_rounded(best), shares.index(best) + 1) if best else (0.0, 0)

    def _echo(self, token_id: int) -> tuple[float, float]:
        window, counts, grams, gram_counts = self._window, self._counts, self._grams, self._gram_counts
        window.append(token_id)
        counts[token_id] += 1
        if len(window) > WINDOW:
            _count_out(counts, window.popleft())
        if self._counted >= NGRAM:
            gram = (window[-4], window[-3], window[-2], window[-1])
            grams.append(gram)
            gram_counts[gram] += 1
            if len(grams) > WINDOW - NGRAM + 1:
                _count_out(gram_counts, grams.popleft())
        # all but the oldest of equal 4-grams stood there before
        echoes = len(grams) - len(gram_counts)
        return _rounded(echoes / max(1, len(grams))), _rounded(len(counts) / len(window))


@dataclass(frozen=True)
class CollapseStop:
    """When a sequence has collapsed and is ended: its proximity, of the ids alone, stays high.

    How both were chosen, and what they cost: `python -m sigma0.bench collapse`.

    Attributes:
        tau: Proximity that must be reached after each of the last `running` ids.
        running: Number of consecutive ids.
        every: Checked when the number of ids is a multiple of it.
        rule: Parts of the proximity.
    """

    tau: float = 0.9
    running: int = 16
    every: int = 4
    rule: CollapseRule = field(default_factory=CollapseRule)

    def ends(self, repetition: Repetition) -> bool:
        """Whether a sequence is ended after its last id."""
        if repetition.tokens % self.every or repetition.tokens < self.running:
            return False
        return all(repetition.at(-back).proximity(self.rule) >= self.tau for back in range(1, self.running + 1))

    def ends_after(self, tokens: int, high: int) -> bool:
        """As `ends`, of a sequence of so many ids after the last `high` of which the proximity reached tau."""
        return high >= self.running and tokens % self.every == 0


class EntropyDrop:
    """Drop of a sequence's entropy, token by token, as in `sigma0.kernels.collapse`."""

    def __init__(self) -> None:
        self._mean = self._variance = 0.0
        self._observed = 0

    def take(self, entropy: float) -> float:
        """The drop of an entropy against those before it, which it then joins; 0 for NaN, which is left out."""
        if not math.isfinite(entropy):
            return 0.0
        step = entropy - self._mean
        drop = 0.0
        if self._observed >= WARM_UP:
            drop = -step / math.sqrt(max(self._variance, FLOOR))
        if self._observed:
            self._variance = (1 - ALPHA) * (self._variance + ALPHA * step * step)
            self._mean += ALPHA * step
        else:
            self._mean = entropy
        self._observed += 1
        return drop


def _rounded(share: float) -> float:
    """To float32, as the kernel has it."""
    return float(np.float32(share))


def _count_out(counts: Counter, item: object) -> None:  # type: ignore[type-arg]
    if counts[item] == 1:
        del counts[item]
    else:
        counts[item] -= 1
