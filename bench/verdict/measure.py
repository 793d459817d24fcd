"""The bench of verdicts on one model: scores, door, features, switches, shifts and strange prompts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np

from sigma0.bench.verdict.asking import Answers, Asker
from sigma0.bench.verdict.features import FeatureUse, feature_uses
from sigma0.bench.verdict.scores import CONFIDENCE, PLAIN, Separation, auroc_more, doubts, separate
from sigma0.bench.verdict.shifts import ShiftRow, shift_answers, shift_rows
from sigma0.bench.verdict.strange import FORMS, StrangePrompt, StrangeRow, strange_rows
from sigma0.bench.verdict.switches import SETTINGS, SwitchRow, switch_rows
from sigma0.calibrate.bootstrap import Estimate, bootstrap
from sigma0.calibrate.doors import DoorCheck, check_policy, judge
from sigma0.calibrate.prompts import Prompt
from sigma0.signals.confidence import ConfidenceModel
from sigma0.signals.verdict import DoorPolicy, DoorRule

# Questions of the settings of the switches, at most.
SWITCH_ANSWERS = 500


@dataclass(frozen=True)
class RuleRow:
    """What the converge door lets through under one rule of a policy.

    Attributes:
        door: Of the answers.
        points_more: Share of right answers among those let through, less that among all, in points of 100; None where
            none is let through.
    """

    door: DoorCheck
    points_more: Estimate | None


@dataclass(frozen=True)
class VerdictReport:
    """The bench of one model.

    Attributes:
        model: Its name.
        rule: The exit rule.
        fates: Where its loops spiral and diverge.
        policy: What the converge door asks for.
        allowed: Risk that it was calibrated for.
        weights: Of the confidence, by feature; None where it is exp(-mean entropy).
        answers: How many questions.
        separations: One for each score of doubt.
        auroc_more: AUROC of the confidence less that of mean entropy.
        rules: Under either rule, with the thresholds of the policy, on the same answers.
        features: What each is worth.
        switches: One for each setting of the switches.
        shifts: The door on questions as calibrated, which are those above, and under every shift.
        strange: Strange prompts by kind and form.
    """

    model: str
    rule: dict[str, Any]
    fates: dict[str, Any]
    policy: dict[str, Any]
    allowed: float
    weights: dict[str, float] | None
    answers: int
    separations: dict[str, Separation]
    auroc_more: Estimate | None
    rules: dict[DoorRule, RuleRow]
    features: tuple[FeatureUse, ...]
    switches: tuple[SwitchRow, ...]
    shifts: tuple[ShiftRow, ...]
    strange: tuple[StrangeRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def measure(
    asker: Asker, name: str, prompts: Sequence[Prompt], strange: Sequence[StrangePrompt], seed: int, allowed: float
) -> VerdictReport:
    """Asks everything that the report is of.

    Args:
        asker: The model.
        name: Its name.
        prompts: With answers; every other one a chat.
        strange: Prompts that are not of its world.
        seed: Of the stories of the shifts.
        allowed: Risk that its door was calibrated for.
    """
    answers, model = asker.answers(prompts), asker.model.confidence_model
    wrong, scores = (~answers.right).astype(np.float64), doubts(answers)
    return VerdictReport(
        model=name,
        rule=asker.config.to_dict(),
        fates=asker.model.fate_config.to_dict(),
        policy=asker.policy.to_dict(),
        allowed=allowed,
        weights=_weights(model),
        answers=len(prompts),
        separations={score: separate(values, wrong) for score, values in scores.items()},
        auroc_more=auroc_more(scores[CONFIDENCE], scores[PLAIN], wrong),
        rules={rule: _row(answers, replace(asker.policy, rule=rule)) for rule in get_args(DoorRule)},
        features=feature_uses(answers, model),
        switches=switch_rows(asker, prompts[:SWITCH_ANSWERS]),
        shifts=shift_rows(asker, answers, _shifted(len(prompts)), seed),
        strange=strange_rows(asker, strange),
    )


def asked(prompts: int, strange: int) -> int:
    """How many answers `measure` takes, for a progress bar."""
    switches = min(prompts, SWITCH_ANSWERS) * (1 + len(SETTINGS))
    return prompts + switches + shift_answers(_shifted(prompts)) + strange * len(FORMS)


def _shifted(prompts: int) -> int:
    """Questions of each shift."""
    return max(1, prompts // 2)


def _weights(model: ConfidenceModel | None) -> dict[str, float] | None:
    return None if model is None else dict(zip(model.features, model.weights, strict=True))


def _row(answers: Answers, policy: DoorPolicy) -> RuleRow:
    right, judged = answers.right, judge(answers.verdicts, answers.right, policy)
    opened = judged.opens(policy)

    def more(drawn: np.ndarray) -> float | None:
        kept = opened[drawn]
        return 100 * float(right[drawn][kept].mean() - right[drawn].mean()) if kept.any() else None

    return RuleRow(check_policy(judged, policy), bootstrap(more, len(right)))
