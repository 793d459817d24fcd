"""Confidence in an answer: the calibrated probability that it is right, out of its evidence.

With features x_i of doubt (`sigma0.signals.evidence`), weights w_i >= 0 and a bias b,

    z_i        = log(x_i + 1e-4)
    confidence = 1 / (1 + exp(sum_i w_i z_i - b))

so that more doubt never gives more confidence. `sigma0 calibrate --objective risk` fits it and stores it as plain
numbers. Without it the confidence of a text is exp(-mean entropy), the best of the scores that need no fit
(`sigma0.signals.verdict`).

What lies outside of what the fit saw is *out of calibration*: a feature beyond its range there, or a prompt with more
new pairs of neighbouring ids than all but few prompts of the calibration had.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated, ClassVar

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as checked

from sigma0.config import Stored
from sigma0.errors import LONGEST, one_line_constructor
from sigma0.signals.evidence import FEATURES, Floats

_FLOOR = 1e-4
# A pair of ids as one number: no vocabulary has so many.
_IDS = 1 << 24

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@one_line_constructor
@checked(frozen=True, config=ConfigDict(extra="forbid"))
class ConfidenceModel(Stored):
    """A fitted confidence, and what it was fitted on.

    Attributes:
        features: Names of those that are read.
        weights: Of each, at least 0.
        bias: b.
        most: Of each feature, the greatest value in calibration.
        longest: Most tokens of an answer there.
        pairs: Pairs of neighbouring ids in its prompts, as `pair_codes` has them; None where prompts share too few to
            tell one from another.
        most_new: Share of new pairs that few prompts there exceed.
        deciles: Of the confidence there, nine, ascending: what drift is measured against.
        answers: On how many answers it was fitted.
        auroc: Chance that a wrong answer gets less confidence than a right one, by cross-fitting there; None where all
            were right or wrong.
        brier: Mean squared difference of confidence and right or wrong, likewise.
        calibration_error: Mean difference of confidence and share of right answers, over tenths of the answers,
            likewise.
    """

    stored_as: ClassVar[str] = "confidence_model"

    features: tuple[str, ...]
    weights: tuple[Positive, ...]
    bias: Finite
    most: tuple[Positive, ...]
    longest: Annotated[int, Field(ge=1, lt=_IDS)]
    pairs: tuple[Annotated[int, Field(ge=0)], ...] | None
    most_new: Share
    deciles: tuple[Share, ...]
    answers: Annotated[int, Field(ge=1)]
    auroc: Share | None
    brier: Share
    calibration_error: Share

    @model_validator(mode="after")
    def _fits_together(self) -> "ConfidenceModel":
        unknown = [name for name in self.features if name not in FEATURES]
        if unknown:
            name = unknown[0][:LONGEST]
            raise ValueError(f"confidence_model reads {name!r}, which is no feature: {', '.join(FEATURES)}")
        if not self.features or not len(self.features) == len(self.weights) == len(self.most):
            raise ValueError(
                f"confidence_model has {len(self.features)} features, {len(self.weights)} weights and {len(self.most)} "
                "ranges: as many of each, and at least one"
            )
        if len(self.deciles) != 9 or list(self.deciles) != sorted(self.deciles):
            raise ValueError(
                f"deciles of confidence_model are nine rising numbers, got {len(self.deciles)}: {self.deciles[:9]}"
            )
        return self

    @cached_property
    def _columns(self) -> list[int]:
        return [FEATURES.index(name) for name in self.features]

    @cached_property
    def _pair_set(self) -> frozenset[int]:
        return frozenset(self.pairs or ())

    def confidence(self, evidence: Floats) -> float | None:
        """Probability that an answer is right; None where a feature is not known.

        Args:
            evidence: Of the answer, `[F]`.
        """
        doubt = float(np.dot(transformed(evidence[self._columns]), self.weights)) - self.bias
        if math.isnan(doubt):
            return None
        return 1 / (1 + math.exp(min(doubt, 700.0)))

    def strangeness(self, evidence: Floats, prompt_ids: Sequence[int]) -> str | None:
        """Why an answer is out of calibration, in words; None if it is not.

        Args:
            evidence: Of the answer, `[F]`.
            prompt_ids: Of its prompt.
        """
        for name, value, most in zip(self.features, evidence[self._columns].tolist(), self.most, strict=True):
            if value > most:
                return f"{name} of {value:.3g} is beyond the {most:.3g} of the calibration"
        if (tokens := evidence[FEATURES.index("length")]) > self.longest:
            return f"its {tokens:.0f} tokens are beyond the {self.longest} of the calibration"
        if self.pairs is None:
            return None
        share = new_share(prompt_ids, self._pair_set)
        if share > self.most_new:
            return f"{share:.0%} of the prompt's pairs of words are new to the calibration"
        return None


def transformed(features: Floats) -> Floats:
    """The logarithms z of features, of any shape."""
    logs: Floats = np.log(features + _FLOOR)
    return logs


def pair_codes(ids: Sequence[int]) -> list[int]:
    """Each pair of neighbouring ids as one number, first * 2^24 + second."""
    return [first * _IDS + second for first, second in pairwise(ids)]


def new_share(ids: Sequence[int], known: frozenset[int]) -> float:
    """Share of the pairs of neighbouring ids that are not among `known`; 0 without pairs."""
    codes = pair_codes(ids)
    return sum(code not in known for code in codes) / len(codes) if codes else 0.0
