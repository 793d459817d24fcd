"""The bench of verdicts on one model: scores, door, features, switches, shifts and strange prompts.

A promise of a risk is one for questions like those of the calibration: shifts are the same door where questions or
decoding are others. `strange.jsonl` holds 50 questions of general knowledge, 50 pieces of code to go on with, 50
stories of the world with words that it does not have (other names; other things, places and cities; or all of them),
and 50 held-out stories of it with their words shuffled. They were written or drawn for this bench. Each is asked as a
plain text and as a chat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import numpy as np

from sigma0.bench.core.conditions import Strict
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.pocket.world import Mix
from sigma0.bench.verdict import scores as scoring
from sigma0.bench.verdict.scores import auroc_more
from sigma0.calibrate.bootstrap import Estimate, bootstrap, clustered_share, saved_share, share
from sigma0.calibrate.doors import DoorCheck, check_policy, judge
from sigma0.calibrate.prompts import Prompt
from sigma0.config import ExitConfig, FateConfig
from sigma0.jsonl import read_lines
from sigma0.signals.verdict import DoorPolicy, DoorRule

# Questions of the settings of the switches, at most.
SWITCH_ANSWERS = 500
_BREAK = {**scoring.VERDICT, "SIGMA0_INNER_BREAK": "1"}
# The switches that are on, and what diverges, where that is not as the checkpoint says.
SETTINGS: dict[str, tuple[dict[str, str], FateConfig | None]] = {
    "all off": ({}, None),
    "verdict": (scoring.VERDICT, None),
    "inner break": (_BREAK, None),
    "inner break, uncalibrated": (_BREAK, FateConfig()),
}
# Settings of `micro_world` under which questions are drawn otherwise.
MIXES: dict[str, dict[str, Any]] = {
    "hard half": {"hard": True},
    "short stories": {"hardest": 2},
    "longest stories": {"difficulty": 6},
    "places alone": {"mix": Mix(families=0, ages=0)},
    "families alone": {"mix": Mix(moves=0, ages=0)},
    "ages alone": {"mix": Mix(moves=0, families=0)},
    "yes or no alone": {"mix": Mix(binary=1)},
}
SAME = "as calibrated"
DROPPED = 'after_exit="drop"'
STRANGE = Path(__file__).parent / "strange.jsonl"
ALL = "all"
FORMS = ("plain", "chat")


class StrangePrompt(Strict):
    """One line of the file: what is strange about a text, and the text."""

    kind: str
    prompt: str


@dataclass(frozen=True)
class RuleRow:
    """What the converge door lets through under one rule of a policy."""

    door: DoorCheck  # Of the answers
    # Share of right answers among those let through, less that among all, in points of 100; None where none is
    # let through
    points_more: Estimate | None


@dataclass(frozen=True)
class SwitchRow:
    """One setting of the switches."""

    setting: str  # What is on
    answers: int  # How many
    same_text: Estimate  # Share of the answers that are full depth's, text for text
    right: Estimate  # Share of right answers
    passes_saved: Estimate | None  # Over all answers
    broken: int  # Tokens that stopped for divergence
    escalated: Estimate | None  # Share of the answers whose door stays shut; None where there is no verdict


@dataclass(frozen=True)
class ShiftRow:
    """The door under one shift: what is other than in the calibration, and the share of answers out of calibration."""

    shift: str
    door: DoorCheck
    strange: Estimate

    def kept(self, allowed: float) -> Literal["yes", "no", "open"]:
        """Whether at most the allowed share of what is let through is wrong: `open` where the interval says neither."""
        if self.door.right_of_opened is None:
            return "yes"
        low, high = self.door.right_of_opened.interval
        return "yes" if low >= 1 - allowed else "no" if high < 1 - allowed else "open"


@dataclass(frozen=True)
class StrangeRow:
    """Strange prompts of one kind, or of all."""

    kind: str  # Which
    form: str  # `plain` or `chat`
    prompts: int  # How many
    shut: Estimate  # Share whose door stays shut
    strange: Estimate  # Share that is out of calibration
    doubted: Estimate  # Share whose confidence would keep it shut by itself


@dataclass(frozen=True)
class VerdictReport:
    """The bench of one model."""

    model: str  # Its name
    rule: dict[str, Any]  # The exit rule
    fates: dict[str, Any]  # Where its loops spiral and diverge
    policy: dict[str, Any]  # What the converge door asks for
    allowed: float  # Risk that it was calibrated for
    weights: dict[str, float] | None  # Of the confidence, by feature; None where it is exp(-mean entropy)
    answers: int  # How many questions
    separations: dict[str, scoring.Separation]  # One for each score of doubt
    auroc_more: Estimate | None  # AUROC of the confidence less that of mean entropy
    rules: dict[DoorRule, RuleRow]  # Under either rule, with the thresholds of the policy, on the same answers
    features: tuple[scoring.FeatureUse, ...]  # What each is worth
    switches: tuple[SwitchRow, ...]  # One for each setting of the switches
    shifts: tuple[ShiftRow, ...]  # The door on questions as calibrated, which are those above, and under every shift
    strange: tuple[StrangeRow, ...]  # Strange prompts by kind and form


def measure(
    client: scoring.VerdictClient,
    name: str,
    prompts: Sequence[Prompt],
    strange: Sequence[StrangePrompt],
    seed: int,
    allowed: float,
) -> VerdictReport:
    """Asks everything that the report is of."""
    answers, model = client.answers(prompts), client.model.confidence_model
    wrong, scores = (~answers.right).astype(np.float64), scoring.doubts(answers)
    return VerdictReport(
        model=name,
        rule=client.config.to_dict(),
        fates=client.model.fate_config.to_dict(),
        policy=client.policy.to_dict(),
        allowed=allowed,
        weights=None if model is None else dict(zip(model.features, model.weights, strict=True)),
        answers=len(prompts),
        separations={score: scoring.separate(values, wrong) for score, values in scores.items()},
        auroc_more=auroc_more(scores[scoring.CONFIDENCE], scores[scoring.PLAIN], wrong),
        rules={rule: _rule_row(answers, replace(client.policy, rule=rule)) for rule in get_args(DoorRule)},
        features=scoring.feature_uses(answers, model),
        switches=_switch_rows(client, prompts[:SWITCH_ANSWERS]),
        shifts=_shift_rows(client, answers, _shifted(len(prompts)), seed),
        strange=strange_rows(client, strange),
    )


def asked(prompts: int, strange: int) -> int:
    """How many answers `measure` takes, for a progress bar."""
    switches = min(prompts, SWITCH_ANSWERS) * (1 + len(SETTINGS))
    return prompts + switches + _shifted(prompts) * (len(MIXES) + 1) + strange * len(FORMS)


def _shifted(prompts: int) -> int:
    """Questions of each shift."""
    return max(1, prompts // 2)


def _rule_row(answers: scoring.Answers, policy: DoorPolicy) -> RuleRow:
    right, judged = answers.right, judge(answers.verdicts, answers.right, policy)
    opened = judged.opens(policy)

    def more(drawn: np.ndarray) -> float | None:
        kept = opened[drawn]
        return 100 * float(right[drawn][kept].mean() - right[drawn].mean()) if kept.any() else None

    return RuleRow(check_policy(judged, policy), bootstrap(more, len(right)))


def _switch_rows(client: scoring.VerdictClient, prompts: Sequence[Prompt]) -> tuple[SwitchRow, ...]:
    """Asks every prompt at full depth, and once under each setting of the switches."""
    contents, stored = [prompt.content for prompt in prompts], client.model.generation_config
    with scoring.switched({}):
        full = client.generations(contents, ExitConfig(mode="full"))
    rows = []
    for setting, (environment, fates) in SETTINGS.items():
        output = getattr(stored, "fate_config", None) if fates is None else fates.to_dict()
        with scoring.switched(environment), patch.object(stored, "fate_config", output, create=True):
            answers = scoring.Answers(prompts, client.generations(contents), client.policy)
        runs, n = answers.runs, len(answers.runs)
        most = np.array([item.total_loops * (len(item.tokens) - 1) for item in runs])
        shut = None
        if len(answers.verdicts) == n:
            shut = clustered_share([float(item.door != "converge") for item in runs], np.ones(n))
        row = SwitchRow(
            setting=setting,
            answers=n,
            same_text=share(sum(item.text == other.text for item, other in zip(runs, full, strict=True)), n),
            right=share(int(answers.right.sum()), n),
            passes_saved=saved_share([item.loop_passes for item in runs], most),
            broken=sum(token.reason == "divergence" for item in runs for token in item.tokens),
            escalated=shut,
        )
        rows.append(row)
    return tuple(rows)


def _shift_rows(client: scoring.VerdictClient, answers: scoring.Answers, n: int, seed: int) -> tuple[ShiftRow, ...]:
    """The door on questions as calibrated, every other one a chat, and under every shift."""
    parts = {SAME: answers, "plain texts alone": answers.part(slice(0, None, 2))}
    if len(answers.runs) > 1:
        parts["chats alone"] = answers.part(slice(1, None, 2))
    parts |= {name: client.answers(list(micro_world(n, "test", seed, **mix))) for name, mix in MIXES.items()}
    parts[DROPPED] = client.answers(answers.prompts[:n], replace(client.config, after_exit="drop"))
    return tuple(ShiftRow(name, part.door, part.strange) for name, part in parts.items())


def read_strange(file: Path = STRANGE) -> list[StrangePrompt]:
    """Reads strange prompts."""
    return read_lines(file, StrangePrompt.model_validate_json, "strange prompt")


def strange_rows(client: scoring.VerdictClient, prompts: Sequence[StrangePrompt]) -> tuple[StrangeRow, ...]:
    """Asks every prompt in both forms; rows of each kind, then of all."""
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    rows = []
    for form in FORMS:
        texts = [item.prompt for item in prompts]
        with scoring.switched(scoring.VERDICT):
            runs = client.generations([item if form == "plain" else _chat(item) for item in texts])
        for kind in (*kinds, ALL):
            output = [run for run, item in zip(runs, prompts, strict=True) if kind in (item.kind, ALL)]
            answers, least = scoring.Answers((), output, client.policy), client.policy.min_confidence
            shut = share(sum(run.door != "converge" for run in output), len(output))
            doubted = sum(item.confidence is None or item.confidence < least for item in answers.verdicts)
            rows.append(StrangeRow(kind, form, len(output), shut, answers.strange, share(doubted, len(output))))
    return tuple(rows)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
