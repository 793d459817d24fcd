"""Scores of doubt beside each other, and what each feature is worth to the confidence: on answers not fitted on.

With n answers sorted by falling trust and w_k the number of wrong ones among the k most trusted:

    AUROC   chance that a wrong answer is trusted less than a right one, ties counted as one half
    AURC    mean over k of w_k / k: the error rate among the kept, averaged over coverages (Geifman and El-Yaniv, 2017)
    AUGRC   mean over k of w_k / n: the chance of a wrong answer that is kept (Traub et al., arXiv 2407.01032)

Where scores are tied, w_k grows evenly within the tie: what random order gives on average.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from sigma0.api import generate
from sigma0.bench.gate.doubt import LONGEST_ANSWER
from sigma0.calibrate.bootstrap import Estimate, bootstrap, share
from sigma0.calibrate.confidence import Bools
from sigma0.calibrate.doors import DoorCheck, check_policy, judge
from sigma0.calibrate.prompts import Prompt
from sigma0.config import ExitConfig, Messages
from sigma0.signals.answer import evidence_of_read
from sigma0.signals.confidence import ConfidenceModel, transformed
from sigma0.signals.evidence import FEATURES, Floats
from sigma0.signals.generation import Generation
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Abstention:
    """Figures of one score, intervals over answers; no AUROC where all are right or all wrong."""

    auroc: Estimate | None
    aurc: Estimate
    augrc: Estimate


def wrong_among_kept(doubt: Array, wrong: Array) -> Array:
    """w_1 ... w_n for scores of doubt (high: keep back) and errors (0 or 1), both `[n]`."""
    _, group, size = np.unique(doubt, return_inverse=True, return_counts=True)
    per_group = np.bincount(group, weights=wrong, minlength=len(size))
    ends = np.concatenate([[0], np.cumsum(size)])
    totals = np.concatenate([[0.0], np.cumsum(per_group)])
    kept: Array = np.interp(np.arange(1, len(doubt) + 1), ends, totals)
    return kept


def aurc(doubt: Array, wrong: Array) -> float:
    """Area under the risk-coverage curve."""
    return float(np.mean(wrong_among_kept(doubt, wrong) / np.arange(1, len(doubt) + 1)))


def augrc(doubt: Array, wrong: Array) -> float:
    """Area under the generalized risk-coverage curve."""
    return float(np.mean(wrong_among_kept(doubt, wrong)) / len(doubt))


def auroc(doubt: Array, wrong: Array) -> float | None:
    """Area under the receiver operating characteristic, None where all answers are right or all are wrong."""
    bad = wrong.sum()
    if not 0 < bad < len(wrong):
        return None
    # Mann and Whitney's U, a tenth of the time that sklearn's curve takes
    above = rankdata(doubt)[wrong == 1].sum() - bad * (bad + 1) / 2
    return float(above / (bad * (len(wrong) - bad)))


def measure_abstention(doubt: Array, wrong: Array, resamples: int = 1000) -> Abstention:
    """Measure a score of doubt."""
    if len(doubt) != len(wrong) or len(doubt) == 0:
        raise ValueError(f"{len(doubt)} scores for {len(wrong)} answers")
    areas = bootstrap(lambda drawn: aurc(doubt[drawn], wrong[drawn]), len(doubt), resamples)
    general = bootstrap(lambda drawn: augrc(doubt[drawn], wrong[drawn]), len(doubt), resamples)
    assert areas is not None and general is not None
    return Abstention(bootstrap(lambda drawn: auroc(doubt[drawn], wrong[drawn]), len(doubt), resamples), areas, general)


VERDICT = {"SIGMA0_VERDICT": "1"}
_ALL_OFF = dict.fromkeys(("SIGMA0_VERDICT", "SIGMA0_INNER_BREAK", "SIGMA0_LADDER", "SIGMA0_ROUTING"), "0")


@dataclass(frozen=True)
class Answers:
    """Questions with known answers, and what a model says; its door asks for what the policy says."""

    prompts: Sequence[Prompt]
    runs: Sequence[Generation]
    policy: DoorPolicy

    @cached_property
    def right(self) -> Bools:
        """Whether each is the known answer, `[n]`."""
        pairs = zip(self.runs, self.prompts, strict=True)
        return np.array([run.text.strip() == prompt.answer for run, prompt in pairs], dtype=np.bool_)

    @cached_property
    def verdicts(self) -> list[ReasonVerdict]:
        """Of each."""
        return [run.verdict for run in self.runs if run.verdict is not None]

    @cached_property
    def evidence(self) -> Floats:
        """Features of each, `[n, F]`."""
        output = zip(self.runs, self.verdicts, strict=True)
        rows = [evidence_of_read(run.tokens, run.total_loops, verdict.grounded) for run, verdict in output]
        return np.stack([np.full(len(FEATURES), np.nan) if row is None else row for row in rows])

    @cached_property
    def door(self) -> DoorCheck:
        """What the converge door does with them."""
        return check_policy(judge(self.verdicts, self.right, self.policy), self.policy)

    @property
    def strange(self) -> Estimate:
        """Share that is out of calibration."""
        return share(sum(verdict.reason == "out_of_calibration" for verdict in self.verdicts), len(self.runs))

    def part(self, places: slice) -> "Answers":
        """Some of them."""
        return Answers(self.prompts[places], self.runs[places], self.policy)


def switched(setting: dict[str, str]) -> AbstractContextManager[object]:
    """The environment with just these switches on, for as long as the context lasts."""
    return patch.dict(os.environ, _ALL_OFF | setting)


@dataclass(frozen=True)
class VerdictClient:
    """A model that is asked one question after the other, greedily."""

    model: Any  # A looped model
    tokenizer: Any  # Its fast tokenizer
    config: ExitConfig  # The exit rule
    policy: DoorPolicy  # What the converge door asks for
    on_answer: Callable[[], None]  # Called after each answer

    def generations(self, contents: Sequence[str | Messages], config: ExitConfig | None = None) -> list[Generation]:
        """What it says to each text or chat, under the switches as they are; `config` is a rule in place of its own."""
        result = []
        settings: dict[str, Any] = {"exit_config": config or self.config, "policy": self.policy, "do_sample": False}
        for content in contents:
            result.append(generate(self.model, self.tokenizer, content, max_new_tokens=LONGEST_ANSWER, **settings))
            self.on_answer()
        return result

    def answers(self, prompts: Sequence[Prompt], config: ExitConfig | None = None) -> Answers:
        """Answers with verdicts and no other switch; `config` is a rule in place of its own."""
        with switched(VERDICT):
            return Answers(prompts, self.generations([item.content for item in prompts], config), self.policy)


_SHUFFLES = 20
RISK = 0.05
CONFIDENCE = "confidence"
PLAIN = "mean entropy"
# Features that are scores by themselves, by the name that tables give them.
FEATURE_SCORES = {
    PLAIN: "mean_entropy",
    "minimum margin": "most_doubt",
    "mean deepest surprise": "mean_deepest_surprise",
    "most deepest surprise": "most_deepest_surprise",
    "mean depth": "mean_depth",
    "unmet tokens": "mean_unmet",
    "length": "length",
}
RANDOM = "random"


@dataclass(frozen=True)
class Separation:
    """How well a score of doubt tells wrong answers from right ones."""

    auroc: Estimate | None  # Chance that a wrong answer is doubted more; None where all are right or all wrong
    aurc: float  # Error rate among the kept, averaged over coverages
    excess_aurc: float  # AURC less that of an oracle
    augrc: float  # Chance of a wrong answer that is kept, averaged over coverages
    coverage: float  # Largest share that can be kept with at most 5 % wrong


def doubts(answers: Answers) -> dict[str, Floats]:
    """Scores that are high where an answer may be wrong, each `[n]`; those that are not known of all are left out."""
    known = [verdict.confidence for verdict in answers.verdicts]
    output = {CONFIDENCE: np.array([1.0 if item is None else 1 - item for item in known])}
    output |= {name: answers.evidence[:, FEATURES.index(feature)] for name, feature in FEATURE_SCORES.items()}
    output[RANDOM] = np.random.default_rng(0).random(len(known))
    return {name: values for name, values in output.items() if np.isfinite(values).all()}


def separate(doubt: Floats, wrong: Floats) -> Separation:
    """Figures of one score."""
    area = aurc(doubt, wrong)
    risks = wrong_among_kept(doubt, wrong) / np.arange(1, len(wrong) + 1)
    kept = np.flatnonzero(risks <= RISK)
    return Separation(
        auroc=bootstrap(lambda drawn: auroc(doubt[drawn], wrong[drawn]), len(wrong)),
        aurc=area,
        excess_aurc=area - aurc(wrong, wrong),
        augrc=augrc(doubt, wrong),
        coverage=float(kept[-1] + 1) / len(wrong) if len(kept) else 0.0,
    )


def auroc_more(doubt: Floats, other: Floats, wrong: Floats) -> Estimate | None:
    """AUROC of a score less that of another, on the same answers in each resample; None where there is none."""

    def more(drawn: np.ndarray) -> float | None:
        first, second = auroc(doubt[drawn], wrong[drawn]), auroc(other[drawn], wrong[drawn])
        return None if first is None or second is None else first - second

    return bootstrap(more, len(wrong))


@dataclass(frozen=True)
class FeatureUse:
    """One feature."""

    name: str  # Its name
    # Of the feature alone; None where all answers are right or wrong, or where it is not known of all
    auroc: float | None
    stored: bool  # Whether the confidence reads it
    # AUROC that the confidence loses where the feature is shuffled among the answers: mean of 20 shuffles, and
    # the middle 95 % of them. None of one that is not read, or where there is no AUROC
    drop: Estimate | None


def feature_uses(answers: Answers, model: ConfidenceModel | None) -> tuple[FeatureUse, ...]:
    """Every feature, in the order of `FEATURES`; no model reads nothing."""
    wrong = (~answers.right).astype(np.float64)
    result = []
    for name, values in zip(FEATURES, answers.evidence.T, strict=True):
        area = auroc(values, wrong) if np.isfinite(values).all() else None
        read = model is not None and name in model.features
        drop = _drop(answers, model, name) if model is not None and read and area is not None else None
        result.append(FeatureUse(name, area, read, drop))
    return tuple(result)


def _drop(answers: Answers, model: ConfidenceModel, name: str) -> Estimate:
    """Permutation importance (Breiman, 2001)."""
    wrong, weights = (~answers.right).astype(np.float64), np.array(model.weights)
    logs = transformed(answers.evidence[:, [FEATURES.index(item) for item in model.features]])
    # ranked as the confidence ranks: the logistic function and the bias change no rank
    whole, place, rng = auroc(logs @ weights, wrong), model.features.index(name), np.random.default_rng(0)
    drops = []
    for _ in range(_SHUFFLES):
        shuffled = logs.copy()
        shuffled[:, place] = rng.permutation(logs[:, place])
        rest = auroc(shuffled @ weights, wrong)
        assert whole is not None and rest is not None
        drops.append(whole - rest)
    return middle(drops)


def middle(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean, and the middle 95 %."""
    low, high = np.percentile(values, [2.5, 97.5])
    return Estimate(float(np.mean(values)), (float(low), float(high)))
