"""Levels beside L0 on the same items: accuracy with intervals, paired tests, and what it took."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sigma0.bench.strategyqa.runner import LevelRun
from sigma0.bench.strategyqa.statistics import holm, majority, mcnemar, rate
from sigma0.calibrate.bootstrap import Estimate
from sigma0.reason.messages import Usage

BASELINE = "L0"
# under so many items, differences of 10 points are noise
FEW = 200


@dataclass(frozen=True)
class Score:
    """How a level did.

    Attributes:
        level: Its name.
        variant: What tells it from others of its name.
        labels: What it used of labels: none, those of items that it was seeded from, or each item's own behind its
            prediction.
        n: Items.
        accuracy: Share of right answers; a miss is wrong.
        majority: Share of the commoner label.
        misses: Items without an answer, by the step that failed.
        against: The level that it is held against.
        difference: Accuracy less that of `against` on the same items; None for that one, and where it was not run.
        p_value: Of McNemar's test against it on the same items, as it is.
        p_holm: The same, corrected for all levels of the run by Holm's method.
        calls: Questions for each item.
        usage: Of all items.
        doors: That verdicts on answers opened.
        cached: Share of questions that came from the cache.
    """

    level: str
    variant: str
    labels: str
    n: int
    accuracy: Estimate
    majority: float
    misses: dict[str, int]
    against: str
    difference: float | None
    p_value: float | None
    p_holm: float | None
    calls: float
    usage: Usage
    doors: dict[str, int]
    cached: float


def score(runs: Sequence[LevelRun], against: str = BASELINE) -> list[Score]:
    """The scores of some levels.

    Args:
        runs: On items of one set; each may have gone through fewer of them.
        against: Name of the level that the others are held against: the first of it that there is.
    """
    base = next((run for run in runs if run.level == against), None)
    right = {} if base is None else {each.qid: each.right for each in base.answered}
    pairs = [
        [] if run is base else [(right[each.qid], each.right) for each in run.answered if each.qid in right]
        for run in runs
    ]
    raw = {str(place): mcnemar(*zip(*found, strict=True)).p for place, found in enumerate(pairs) if found}
    corrected = holm(raw)
    return [
        _score(run, against, found, raw.get(str(place)), corrected.get(str(place)))
        for place, (run, found) in enumerate(zip(runs, pairs, strict=True))
    ]


def _score(
    run: LevelRun, against: str, pairs: Sequence[tuple[bool, bool]], raw: float | None, corrected: float | None
) -> Score:
    n = len(run.answered)
    asked = sum(len(each.purposes) for each in run.answered)
    hits = rate(run.right, n)
    return Score(
        level=run.level,
        variant=run.variant,
        labels=run.labels,
        n=n,
        accuracy=Estimate(hits.value, (hits.low, hits.high)),
        majority=majority([each.label for each in run.answered]).value,
        misses=dict(run.misses),
        against=against,
        difference=sum(own - base for base, own in pairs) / len(pairs) if pairs else None,
        p_value=raw,
        p_holm=corrected,
        calls=asked / n,
        usage=run.usage,
        doors=dict(Counter(door for each in run.answered for door in each.doors)),
        cached=sum(each.cached for each in run.answered) / asked if asked else 0.0,
    )
