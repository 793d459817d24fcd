"""From a stated risk to a confidence and a door: which answers may be accepted without asking anybody else.

Prompts with known answers are continued once each and split at random:

* the first fifth says where the model's loops ordinarily go (`fit_fates`), fits the confidence by cross-fitting
  (`fit_confidence`), and ranks the thresholds of the door (`doors.rank`);
* the next three fifths test them in that order (`doors.passing_policies`): what can be promised is limited by them;
* the last fifth has no part in the choice, and is reported. Beside it stands the door on exp(-mean entropy) that the
  same prompts and tests give.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sigma0.api import TextStream, stream
from sigma0.calibrate.agreement import check_distinct
from sigma0.calibrate.confidence import FOLDS, Bools, FeatureFigure, FittedConfidence, fit_confidence
from sigma0.calibrate.doors import DoorCheck, Judged, check_policy, fit_vetoes, judge, loosest, passing_policies, rank
from sigma0.calibrate.fates import fit_fates, fit_spiral_share, token_fates
from sigma0.calibrate.prompts import Prompt, encode_prompts
from sigma0.config import ExitConfig, FateConfig, switches
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.signals.answer import plain_verdict, under_model
from sigma0.signals.confidence import ConfidenceModel
from sigma0.signals.evidence import Floats, evidence_of
from sigma0.signals.tokens import Token
from sigma0.signals.verdict import DoorPolicy, DoorRule, ReasonVerdict, patience_for

# Of the prompts; the rest is the check's. Power comes from the test, and the fit needs only to find where to begin.
FIT_SHARE, TEST_SHARE = 0.2, 0.6
_SEED = 0


@dataclass(frozen=True)
class Answered:
    """One prompt, continued."""

    right: bool  # Whether the text is the known answer
    tokens: tuple[Token, ...]  # Of the answer, with their statistics
    grounded: float | None  # Of its text
    collapsed: bool  # Whether it was ended because it repeated itself
    prompt_ids: tuple[int, ...]  # Of the prompt
    total_loops: int  # T

    @cached_property
    def evidence(self) -> Floats:
        """Its features, `[F]`."""
        return evidence_of(self.tokens, self.total_loops, self.grounded)

    def verdict(self, policy: DoorPolicy, model: ConfidenceModel | None) -> ReasonVerdict:
        """What the library says of it under a policy and a confidence."""
        # as `judge_answer`, with what does not depend on the confidence worked out once
        if policy not in self._plain:
            self._plain[policy] = plain_verdict(self.tokens, policy, self.grounded, self.collapsed)
        plain = self._plain[policy]
        return plain if model is None else under_model(plain, self.evidence, model, self.prompt_ids)

    @cached_property
    def _plain(self) -> dict[DoorPolicy, ReasonVerdict]:
        return {}


@dataclass(frozen=True)
class DoorCalibration:
    """What `calibrate_doors` found."""

    risk: float  # Allowed chance that an answer of the converge door is wrong
    confidence: float  # With which that was to be kept
    labels: str  # What right means: `answers`, `full-depth` or the name of a larger model
    exit_config: ExitConfig  # The exit rule that the answers were written under
    fates: FateConfig  # Where loops spiral and diverge
    prompts: tuple[int, int, int]  # Prompts of the fit, of the test and of the check
    right: float  # Share of right answers in the fit and the test together
    # The fitted confidence; None where too few answers of the fit were right, or wrong, and the door stands on
    # exp(-mean entropy)
    confidence_model: ConfidenceModel | None
    features: tuple[FeatureFigure, ...]  # What each feature is worth, by cross-fitting
    passed: int  # Policies that keep the promise
    tested: int  # Policies that were tested, the one that failed included
    # The first policy tested: by the fit the most likely to pass. With answers let through and wrong ones, in the
    # test
    best: tuple[DoorPolicy, int, int]
    chosen: DoorPolicy | None  # Of those passed the one that lets most answers through, or None
    check: DoorCheck | None  # What it does on other prompts, or None
    by_entropy: DoorCheck | None  # What the door on exp(-mean entropy) does there, or None where none keeps the promise

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; of the pairs that prompts had only their number."""
        policies = {"best": {"policy": self.best[0].to_dict(), "opened": self.best[1], "wrong": self.best[2]}}
        chosen = None if self.chosen is None else self.chosen.to_dict()
        plain = asdict(replace(self, best=None, chosen=None))  # type: ignore[arg-type]
        if self.confidence_model is not None:
            pairs = self.confidence_model.pairs
            plain["confidence_model"]["pairs"] = None if pairs is None else len(pairs)
        return {**plain, **policies, "chosen": chosen}


@dataclass(frozen=True)
class ChosenDoor:
    """A door out of the answers of a fit and of a test."""

    fitted: FittedConfidence | None  # The confidence that it reads; None for exp(-mean entropy)
    ranked: list[DoorPolicy]  # The policies in the order of their test
    passed: list[DoorPolicy]  # Those that keep the promise
    tested: int  # How many were tested
    judged: Judged  # The answers of the test

    @property
    def model(self) -> ConfidenceModel | None:
        """The confidence, if one was fitted."""
        return None if self.fitted is None else self.fitted.model


def calibrate_doors(
    model: DepthGenerationMixin,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    risk: float = 0.05,
    confidence: float = 0.95,
    exit_config: ExitConfig | None = None,
    max_new_tokens: int = 64,
    labels: str = "answers",
    on_prompt: Callable[[int], None] = lambda done: None,
    rule: DoorRule | None = None,
) -> DoorCalibration:
    """Finds the policy that lets most answers through of which at most `risk` are wrong.

    An answer is right if it is the known one, but for white space around it. Prompts are taken for independent draws
    from what the model will be asked; they are continued greedily, one at a time.

    Args:
        model: A looped model.
        tokenizer: Its fast tokenizer.
        prompts: With answers.
        risk: In (0, 1).
        confidence: In (0, 1).
        exit_config: By default as the checkpoint says.
        max_new_tokens: New tokens of each prompt at most.
        labels: Where the answers come from, for the report.
        on_prompt: Told how many prompts are done.
        rule: Of the door; by default the checkpoint's.

    Raises:
        ValueError: For a share out of range, prompts without answers, two that are the same, or too few of them.
    """
    check_promise(len(prompts), risk, confidence)
    config = model.resolve_exit_config(exit_config)
    parts, fates = answer_all(model, tokenizer, prompts, config, max_new_tokens, on_prompt)
    fitting, testing, checking = parts
    share_of_spirals = fit_spiral_share([[token.fate for token in answer.tokens] for answer in fitting])
    base = replace(model.door_policy, spiral_share=share_of_spirals, rule=rule or model.door_policy.rule)
    door = choose_door(fitting, testing, base, risk, confidence)
    plain = choose_door(fitting, testing, replace(base, rule="confidence"), risk, confidence, fit=False)
    best = door.ranked[0]
    return DoorCalibration(
        risk=risk,
        confidence=confidence,
        labels=labels,
        exit_config=config,
        fates=fates,
        prompts=(len(fitting), len(testing), len(checking)),
        right=float(np.mean([answer.right for answer in fitting + testing])),
        confidence_model=door.model,
        features=() if door.fitted is None else door.fitted.figures,
        passed=len(door.passed),
        tested=door.tested,
        best=(best, *door.judged.opened_and_wrong(best)),
        chosen=door.passed[-1] if door.passed else None,
        check=_checked(checking, door),
        by_entropy=_checked(checking, plain),
    )


def answer_all(
    model: DepthGenerationMixin,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    config: ExitConfig,
    max_new_tokens: int,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> tuple[tuple[list[Answered], list[Answered], list[Answered]], FateConfig]:
    """Continues every prompt once; the three parts, in random order, and the fates that the first says.

    Args:
        model: As `calibrate_doors` has them all.
        tokenizer: Its fast tokenizer.
        prompts: With answers.
        config: The exit rule.
        max_new_tokens: New tokens of each prompt at most.
        on_prompt: Told how many prompts are done.

    Raises:
        ValueError: For prompts without answers, or two that are the same, or with the inner break on.
    """
    if switches().inner_break:
        raise ValueError("SIGMA0_INNER_BREAK=1 changes the very loops that are measured: calibrate without it")
    unknown = [number for number, prompt in enumerate(prompts, start=1) if prompt.answer is None]
    if unknown:
        raise ValueError(
            f'prompt {unknown[0]} has no "answer": a risk is counted in wrong answers; without any, take full depth\'s '
            "with --labels full-depth"
        )
    ids = encode_prompts(model, tokenizer, prompts, max_new_tokens)
    check_distinct(ids)
    order = list(range(len(prompts)))
    Random(_SEED).shuffle(order)
    before = getattr(model.generation_config, "fate_config", None)
    model.generation_config.fate_config = FateConfig().to_dict()
    done = 0

    def run(place: int) -> tuple[Tensor, Answered]:
        """Loop statistics and answer; the stream and its K/V are let go."""
        nonlocal done
        tokens = stream(
            model, tokenizer, prompts[place].content, exit_config=config, max_new_tokens=max_new_tokens, verdict=True,
            do_sample=False,
        )  # fmt: skip
        tokens.finish()
        done += 1
        on_prompt(done)
        return tokens.loop_statistics, _answered(tokens, prompts[place], ids[place])

    try:
        first, second, third = (order[start:end] for start, end in split(len(prompts)))
        ran = [run(place) for place in first]
        patience = patience_for(model.door_policy, model.num_loops)
        fates = fit_fates([path for path, _ in ran], model.dtype, patience)
        fitting = []
        for path, answer in ran:
            known = zip(answer.tokens, token_fates(path, fates, model.dtype, patience), strict=True)
            fitting.append(replace(answer, tokens=tuple(replace(token, fate=fate) for token, fate in known)))
        model.generation_config.fate_config = fates.to_dict()
        testing, checking = ([run(place)[1] for place in part] for part in (second, third))
    finally:
        model.generation_config.fate_config = before
    return (fitting, testing, checking), fates


def _answered(tokens: TextStream, prompt: Prompt, prompt_ids: tuple[int, ...]) -> Answered:
    generation = tokens.generation
    assert generation.grounding is not None and prompt.answer is not None
    return Answered(
        generation.text.strip() == prompt.answer.strip(),
        generation.tokens,
        generation.grounding.score,
        generation.stop_reason == "collapse",
        prompt_ids,
        generation.total_loops,
    )


def choose_door(
    fitting: Sequence[Answered],
    testing: Sequence[Answered],
    base: DoorPolicy,
    risk: float,
    confidence: float,
    fit: bool = True,
) -> ChosenDoor:
    """Fits a confidence and tests its thresholds; a certificate's own in their place.

    Args:
        fitting: Answers of the fit.
        testing: Answers of the test.
        base: What is neither fitted nor tested.
        risk: Allowed.
        confidence: With which it is to be kept.
        fit: Whether a confidence is fitted; else it is exp(-mean entropy).
    """
    right = _right(fitting)
    fitted = None
    if fit and min(right.sum(), (~right).sum()) >= FOLDS:
        evidence = np.stack([answer.evidence for answer in fitting])
        # None where nothing tells them apart
        fitted = fit_confidence(evidence, right, [answer.prompt_ids for answer in fitting])
    model = None if fitted is None else fitted.model
    verdicts = [answer.verdict(base, model) for answer in fitting]
    policy = fit_vetoes(verdicts, right, base)
    # a verdict's reason names what its thresholds find: the tested ones find nothing by themselves
    output = loosest(policy) if policy.rule == "certificate" else policy
    ranking = judge([answer.verdict(output, model) for answer in fitting], right, policy)
    if fitted is not None:
        ranking = replace(ranking, confidence=fitted.cross_fitted)
    ranked = rank(ranking, policy, risk, confidence, len(testing))
    tested = judge([answer.verdict(output, model) for answer in testing], _right(testing), policy)
    return ChosenDoor(fitted, ranked, *passing_policies(tested, ranked, risk, confidence), tested)


def _right(answers: Sequence[Answered]) -> Bools:
    return np.array([answer.right for answer in answers], dtype=np.bool_)


def _checked(answers: Sequence[Answered], door: ChosenDoor) -> DoorCheck | None:
    if not door.passed:
        return None
    policy = door.passed[-1]
    return check_policy(judge([item.verdict(policy, door.model) for item in answers], _right(answers), policy), policy)


def check_promise(prompts: int, risk: float, confidence: float) -> None:
    """Refuses shares out of range, and fewer prompts than could show the risk without one wrong answer.

    Raises:
        ValueError: Naming what is needed.
    """
    for name, value in (("risk", risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"{name} {value!r} is not between 0 and 1")
    needed = int(np.ceil(np.log(1 - confidence) / np.log(1 - risk)))
    tested = split(prompts)[1][1] - split(prompts)[1][0]
    if tested < needed:
        raise ValueError(
            f"{prompts} prompts cannot promise a risk of at most {risk:g} with confidence {confidence:g}: {needed} "
            f"answers without one wrong would have to be let through, and {tested} are tested (three fifths); give at "
            f"least {int(np.ceil(needed / TEST_SHARE)) + 3} prompts, better several times as many"
        )


def split(count: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Where the prompts of the fit, of the test and of the check begin and end."""
    first, second = round(FIT_SHARE * count), round((FIT_SHARE + TEST_SHARE) * count)
    return (0, first), (first, second), (second, count)
