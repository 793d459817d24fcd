"""What a verdict tells of whole answers, and what the switches that act on it change."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from sigma0.api import generate
from sigma0.bench.gate.doubt import LONGEST_ANSWER
from sigma0.bench.verdict.abstention import augrc, aurc, auroc, wrong_among_kept
from sigma0.calibrate.bootstrap import Estimate, bootstrap, clustered_share, saved_share
from sigma0.calibrate.prompts import Prompt
from sigma0.config import ExitConfig, FateConfig
from sigma0.signals.generation import Generation
from sigma0.signals.verdict import DoorPolicy

Floats = npt.NDArray[np.float64]
_BREAK = {"SIGMA0_VERDICT": "1", "SIGMA0_INNER_BREAK": "1"}
# The switches that are on, and what diverges, where that is not as the checkpoint says.
SETTINGS: dict[str, tuple[dict[str, str], FateConfig | None]] = {
    "all off": ({}, None),
    "verdict": ({"SIGMA0_VERDICT": "1"}, None),
    "inner break": (_BREAK, None),
    "inner break, uncalibrated": (_BREAK, FateConfig()),
}
_NAMES = ("SIGMA0_VERDICT", "SIGMA0_INNER_BREAK", "SIGMA0_LADDER", "SIGMA0_ROUTING")
RISK = 0.05


@dataclass(frozen=True)
class Separation:
    """How well a score of doubt tells wrong answers from right ones.

    Attributes:
        auroc: Chance that a wrong answer is doubted more; None where all are right or all wrong.
        aurc: Error rate among the kept, averaged over coverages.
        excess_aurc: AURC less that of an oracle.
        augrc: Chance of a wrong answer that is kept, averaged over coverages.
        coverage: Largest share that can be kept with at most 5 % wrong.
    """

    auroc: float | None
    aurc: float
    excess_aurc: float
    augrc: float
    coverage: float


@dataclass(frozen=True)
class SwitchRow:
    """One setting of the switches.

    Attributes:
        setting: What is on.
        same_text: Share of the answers that are full depth's, text for text.
        right: Share of right answers.
        passes_saved: Over all answers.
        broken: Tokens that stopped for divergence.
        escalated: Share of the answers whose door stays shut; None where there is no verdict.
    """

    setting: str
    same_text: Estimate | None
    right: Estimate | None
    passes_saved: Estimate | None
    broken: int
    escalated: Estimate | None


@dataclass(frozen=True)
class VerdictReport:
    """The bench of one model.

    Attributes:
        model: Its name.
        rule: The exit rule.
        fates: Where its loops spiral and diverge.
        policy: What the converge door asks for.
        answers: How many questions.
        rows: One for each setting of the switches.
        separations: One for each score of doubt.
        kept_right: Share of right answers among those that the converge door lets through.
        opened_for_right: Share of the right answers that it opens for.
        points_more: kept_right less the share of right answers among all, in points of 100.
    """

    model: str
    rule: dict[str, Any]
    fates: dict[str, Any]
    policy: dict[str, Any]
    answers: int
    rows: tuple[SwitchRow, ...]
    separations: dict[str, Separation]
    kept_right: Estimate | None
    opened_for_right: Estimate | None
    points_more: Estimate | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@contextmanager
def switched(setting: dict[str, str]) -> Iterator[None]:
    """The environment with just these switches on."""
    before = {name: os.environ.get(name) for name in _NAMES}
    os.environ.update(dict.fromkeys(_NAMES, "0") | setting)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def fates_of(model: Any, fates: FateConfig | None) -> Iterator[None]:
    """A model with other fates for a while; None leaves its own."""
    before = getattr(model.generation_config, "fate_config", None)
    model.generation_config.fate_config = before if fates is None else fates.to_dict()
    try:
        yield
    finally:
        model.generation_config.fate_config = before


def ask(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: ExitConfig,
    policy: DoorPolicy,
    on_answer: Callable[[], None],
) -> list[Generation]:
    """Every prompt by itself, greedily."""
    found = []
    settings: dict[str, Any] = {"exit_config": config, "policy": policy, "max_new_tokens": LONGEST_ANSWER}
    for prompt in prompts:
        found.append(generate(model, tokenizer, prompt.content, do_sample=False, **settings))
        on_answer()
    return found


def measure(
    model: Any,
    tokenizer: Any,
    name: str,
    prompts: Sequence[Prompt],
    config: ExitConfig,
    policy: DoorPolicy,
    on_answer: Callable[[], None],
) -> VerdictReport:
    """Asks every prompt at full depth, and once under each setting of the switches.

    Args:
        model: A looped model.
        tokenizer: Its fast tokenizer.
        name: Its name.
        prompts: With answers.
        config: The exit rule.
        policy: What the converge door asks for.
        on_answer: Called behind each of `len(prompts) * (1 + len(SETTINGS))` answers.
    """
    with switched({}):
        full = ask(model, tokenizer, prompts, ExitConfig(mode="full"), policy, on_answer)
    runs = {}
    for setting, (environment, fates) in SETTINGS.items():
        with switched(environment), fates_of(model, fates):
            runs[setting] = ask(model, tokenizer, prompts, config, policy, on_answer)
    run = runs["verdict"]
    right = right_of(run, prompts)
    opened = np.array([each.door == "converge" for each in run], dtype=np.float64)

    def points_more(drawn: npt.NDArray[np.int64]) -> float | None:
        kept = opened[drawn] == 1
        return 100 * float(right[drawn][kept].mean() - right[drawn].mean()) if kept.any() else None

    return VerdictReport(
        model=name,
        rule=config.to_dict(),
        fates=model.fate_config.to_dict(),
        policy=policy.to_dict(),
        answers=len(prompts),
        rows=tuple(_row(setting, each, full, prompts, model.num_loops) for setting, each in runs.items()),
        separations={key: separate(values, 1 - right) for key, values in doubts(run).items()},
        kept_right=clustered_share(right * opened, opened),
        opened_for_right=clustered_share(right * opened, right),
        points_more=bootstrap(points_more, len(right)),
    )


def right_of(runs: Sequence[Generation], prompts: Sequence[Prompt]) -> Floats:
    """1 where an answer is the known one, `[n]`."""
    return np.array(
        [run.text.strip() == prompt.answer for run, prompt in zip(runs, prompts, strict=True)], dtype=np.float64
    )


def _row(
    setting: str, runs: Sequence[Generation], full: Sequence[Generation], prompts: Sequence[Prompt], loops: int
) -> SwitchRow:
    ones = np.ones(len(runs))
    later = np.array([len(each.tokens) - 1 for each in runs])
    passes = np.array([each.loop_passes for each in runs])
    same = np.array([each.text == other.text for each, other in zip(runs, full, strict=True)], dtype=np.float64)
    shut = None
    if all(each.verdict is not None for each in runs):
        shut = clustered_share(np.array([each.door != "converge" for each in runs], dtype=np.float64), ones)
    return SwitchRow(
        setting=setting,
        same_text=clustered_share(same, ones),
        right=clustered_share(right_of(runs, prompts), ones),
        passes_saved=saved_share(passes, loops * later),
        broken=sum(token.reason == "divergence" for each in runs for token in each.tokens),
        escalated=shut,
    )


def doubts(runs: Sequence[Generation]) -> dict[str, Floats]:
    """Scores that are high where an answer may be wrong, each `[n]`.

    The verdict's own: whether its door is shut, and then its depth, as a share of T.
    """
    random = Random(0)
    verdicts = [run.verdict for run in runs if run.verdict is not None]
    depths = [verdict.depth / run.total_loops for verdict, run in zip(verdicts, runs, strict=True)]
    told = {
        "verdict": [(run.door != "converge") + depth for run, depth in zip(runs, depths, strict=True)],
        "mean entropy": [sum(token.entropy or 0.0 for token in run.tokens) / len(run.tokens) for run in runs],
        "minimum margin": [1 - min(token.margin or 0.0 for token in run.tokens) for run in runs],
        "length": [float(len(run.tokens)) for run in runs],
        "random": [random.random() for _ in runs],
    }
    return {name: np.array(values, dtype=np.float64) for name, values in told.items()}


def separate(doubt: Floats, wrong: Floats) -> Separation:
    """Figures of one score."""
    area = aurc(doubt, wrong)
    risks = wrong_among_kept(doubt, wrong) / np.arange(1, len(wrong) + 1)
    kept = np.flatnonzero(risks <= RISK)
    return Separation(
        auroc=auroc(doubt, wrong),
        aurc=area,
        excess_aurc=area - aurc(wrong, wrong),
        augrc=augrc(doubt, wrong),
        coverage=float(kept[-1] + 1) / len(wrong) if len(kept) else 0.0,
    )
