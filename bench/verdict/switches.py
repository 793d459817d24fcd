"""What the switches that act on a verdict change."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sigma0.bench.verdict.asking import VERDICT, Asker, fates_of, right_of, switched
from sigma0.calibrate.bootstrap import Estimate, clustered_share, saved_share, share
from sigma0.calibrate.prompts import Prompt
from sigma0.config import ExitConfig, FateConfig
from sigma0.signals.generation import Generation

_BREAK = {**VERDICT, "SIGMA0_INNER_BREAK": "1"}
# The switches that are on, and what diverges, where that is not as the checkpoint says.
SETTINGS: dict[str, tuple[dict[str, str], FateConfig | None]] = {
    "all off": ({}, None),
    "verdict": (VERDICT, None),
    "inner break": (_BREAK, None),
    "inner break, uncalibrated": (_BREAK, FateConfig()),
}


@dataclass(frozen=True)
class SwitchRow:
    """One setting of the switches.

    Attributes:
        setting: What is on.
        answers: How many.
        same_text: Share of the answers that are full depth's, text for text.
        right: Share of right answers.
        passes_saved: Over all answers.
        broken: Tokens that stopped for divergence.
        escalated: Share of the answers whose door stays shut; None where there is no verdict.
    """

    setting: str
    answers: int
    same_text: Estimate
    right: Estimate
    passes_saved: Estimate | None
    broken: int
    escalated: Estimate | None


def switch_rows(asker: Asker, prompts: Sequence[Prompt]) -> tuple[SwitchRow, ...]:
    """Asks every prompt at full depth, and once under each setting of the switches.

    Args:
        asker: The model.
        prompts: With answers.
    """
    contents = [prompt.content for prompt in prompts]
    with switched({}):
        full = asker.generations(contents, ExitConfig(mode="full"))
    rows = []
    for setting, (environment, fates) in SETTINGS.items():
        with switched(environment), fates_of(asker.model, fates):
            rows.append(_row(setting, asker.generations(contents), full, prompts, asker.model.num_loops))
    return tuple(rows)


def _row(
    setting: str, runs: Sequence[Generation], full: Sequence[Generation], prompts: Sequence[Prompt], loops: int
) -> SwitchRow:
    n = len(runs)
    later = np.array([len(each.tokens) - 1 for each in runs])
    passes = np.array([each.loop_passes for each in runs])
    shut = None
    if all(each.verdict is not None for each in runs):
        shut = clustered_share([float(each.door != "converge") for each in runs], np.ones(n))
    return SwitchRow(
        setting=setting,
        answers=n,
        same_text=share(sum(each.text == other.text for each, other in zip(runs, full, strict=True)), n),
        right=share(int(right_of(runs, prompts).sum()), n),
        passes_saved=saved_share(passes, loops * later),
        broken=sum(token.reason == "divergence" for each in runs for token in each.tokens),
        escalated=shut,
    )
