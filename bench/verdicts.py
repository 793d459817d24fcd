"""What a verdict tells of whole answers, and what the switches that act on it change."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from sigma0.bench.abstention import augrc, aurc, auroc, wrong_among_kept
from sigma0.bench.doubt import LONGEST_ANSWER
from sigma0.bench.pocket.data import chat_messages
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.world import draw
from sigma0.estimates import Estimate, ratio
from sigma0.settings import ExitConfig
from sigma0.text import Generation, generate
from sigma0.verdict import DoorPolicy, door

Floats = npt.NDArray[np.float64]
SWITCHES = {"all off": {}, "verdict": {"SIGMA0_VERDICT": "1"}, "inner break": {"SIGMA0_INNER_BREAK": "1"}}
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
        answers: How many questions.
        rows: One for each setting of the switches.
        separations: One for each score of doubt.
        kept_right: Share of right answers among those that the converge door lets through.
        opened_for_right: Share of the right answers that it opens for.
        difference: kept_right less the share of right answers among all, in points of 100.
    """

    model: str
    rule: dict[str, Any]
    answers: int
    rows: tuple[SwitchRow, ...]
    separations: dict[str, Separation]
    kept_right: float | None
    opened_for_right: float | None
    difference: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def questions(n: int, seed: int, hard: bool) -> list[Item]:
    """One question about each of n held-out stories; of the hard half alone where asked."""
    found: list[Item] = []
    index = 0
    while len(found) < n:
        item = draw("test", seed, index, questions=1).items[0]
        index += 1
        if not hard or item.difficulty >= 4:
            found.append(item)
    return found


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


def ask(
    model: Any, tokenizer: Any, items: Sequence[Item], config: ExitConfig, on_answer: Callable[[], None]
) -> list[Generation]:
    """Every item, every other one as chat."""
    found = []
    for place, item in enumerate(items):
        prompt = chat_messages([item])[:1] if place % 2 else item.prompt
        found.append(generate(model, tokenizer, prompt, exit_config=config, max_new_tokens=LONGEST_ANSWER))
        on_answer()
    return found


def measure(
    model: Any, tokenizer: Any, name: str, items: Sequence[Item], policy: DoorPolicy, on_answer: Callable[[], None]
) -> VerdictReport:
    """Asks every item at full depth, and once under each setting of the switches."""
    config = model.resolve_exit_config(None)
    with switched({}):
        full = [each.text for each in ask(model, tokenizer, items, ExitConfig(mode="full"), on_answer)]
    runs = {}
    for setting, environment in SWITCHES.items():
        with switched(environment):
            runs[setting] = ask(model, tokenizer, items, config, on_answer)
    rows = tuple(_row(setting, run, full, items, policy, model.num_loops) for setting, run in runs.items())
    run = runs["verdict"]
    wrong = np.array(
        [each.text.strip() != item.answer for each, item in zip(run, items, strict=True)], dtype=np.float64
    )
    opened = np.array([_opens(each, policy) for each in run])
    right = 1 - wrong
    kept = float(right[opened].mean()) if opened.any() else None
    return VerdictReport(
        model=name,
        rule=config.to_dict(),
        answers=len(items),
        rows=rows,
        separations={key: separate(values, wrong) for key, values in doubts(run, policy).items()},
        kept_right=kept,
        opened_for_right=float(opened[right == 1].mean()) if right.any() else None,
        difference=None if kept is None else 100 * (kept - float(right.mean())),
    )


def _opens(run: Generation, policy: DoorPolicy) -> bool:
    assert run.verdict is not None
    return door(run.verdict, policy) == "converge"


def _row(
    setting: str, run: Sequence[Generation], full: Sequence[str], items: Sequence[Item], policy: DoorPolicy, loops: int
) -> SwitchRow:
    ones = np.ones(len(run))
    later = np.array([len(each.tokens) - 1 for each in run])
    saved = loops * later - np.array([each.loop_passes for each in run])
    shut = None
    if all(each.verdict is not None for each in run):
        shut = ratio(np.array([not _opens(each, policy) for each in run], dtype=np.float64), ones)
    return SwitchRow(
        setting=setting,
        same_text=ratio(
            np.array([each.text == text for each, text in zip(run, full, strict=True)], dtype=np.float64), ones
        ),
        right=ratio(
            np.array(
                [each.text.strip() == item.answer for each, item in zip(run, items, strict=True)], dtype=np.float64
            ),
            ones,
        ),
        passes_saved=ratio(saved, loops * later),
        broken=sum(token.reason == "divergence" for each in run for token in each.tokens),
        escalated=shut,
    )


def doubts(runs: Sequence[Generation], policy: DoorPolicy) -> dict[str, Floats]:
    """Scores that are high where an answer may be wrong, each `[n]`.

    The verdict's own: whether its door is shut, and the share of its tokens whose doors are.
    """
    random = Random(0)
    shut = [
        (not _opens(run, policy))
        + sum(door(token.verdict, policy) != "converge" for token in run.tokens) / len(run.tokens)
        for run in runs
    ]
    told = {
        "verdict": shut,
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
