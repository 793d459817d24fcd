"""From a stated risk to doors: what diverges in a model, and what its verdict must say before an answer is accepted.

Prompts with known answers are continued once each and split at random:

* the first two fifths say where the model's loops ordinarily go (`fit_fates`) and rank the policies of a grid by the
  p-value of "an answer that the converge door lets through is wrong with a chance above the risk";
* the next two fifths test them in that order, each at the full level, down to the first that fails (Learn then Test
  with fixed-sequence testing, arXiv 2110.01052; the ranking from data of its own, arXiv 2210.07913). Of k answers let
  through the wrong ones are Binomial(k, chance), so the p-value is exact: P(Binomial(k, risk) <= wrong ones);
* the last fifth has no part in the choice, and is reported.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import binom
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sigma0.api import TextStream, stream
from sigma0.calibrate.agreement import check_distinct
from sigma0.calibrate.bootstrap import Estimate, share
from sigma0.calibrate.prompts import Prompt, encode_prompts
from sigma0.config import BREAK_AFTER, ExitConfig, FateConfig, switches
from sigma0.decode.ops import FATES
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.signals.trajectory import fates_under
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict, aggregate, door, mildest, patience_for

Bools = npt.NDArray[np.bool_]

GROWTHS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
ANGLES = (60.0, 75.0, 90.0, 105.0, 120.0, 150.0, 180.0)
# Tokens, and answers, of a model's ordinary course that may spiral.
SPIRALLING = 0.05
SPIRAL_SHARES = (0.25, 0.5, 0.75, 1.0)
SATURATED_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
TAUS_C = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
TAUS_G = (0.0, 0.25, 0.5, 0.75, 0.95)
_SEED = 0


@dataclass(frozen=True)
class Answered:
    """One prompt, continued.

    Attributes:
        right: Whether the text is the known answer.
        verdicts: Of its tokens.
        grounded: Of its text.
    """

    right: bool
    verdicts: tuple[ReasonVerdict, ...]
    grounded: float | None


@dataclass(frozen=True)
class DoorCheck:
    """A policy on prompts that had no part in its choice.

    Attributes:
        prompts: How many.
        right: Share of right answers.
        opened: Share of the answers that the converge door lets through.
        right_of_opened: Share of right ones among them; None if there are none.
        opened_of_right: Share of the right answers that it opens for; None if none is right.
    """

    prompts: int
    right: Estimate
    opened: Estimate
    right_of_opened: Estimate | None
    opened_of_right: Estimate | None


@dataclass(frozen=True)
class DoorCalibration:
    """What `calibrate_doors` found.

    Attributes:
        risk: Allowed chance that an answer of the converge door is wrong.
        confidence: With which that was to be kept.
        exit_config: The exit rule that the answers were written under.
        fates: Where loops spiral and diverge.
        prompts: Prompts of the fit, of the test and of the check.
        right: Share of right answers in the fit and the test together.
        passed: Policies that keep the promise.
        tested: Policies that were tested, the one that failed included.
        best: The first policy tested: the safest by the fit, with answers let through and wrong ones, in the test.
        chosen: Of those passed the one that lets most answers through, or None.
        check: What it does on other prompts, or None.
    """

    risk: float
    confidence: float
    exit_config: ExitConfig
    fates: FateConfig
    prompts: tuple[int, int, int]
    right: float
    passed: int
    tested: int
    best: tuple[DoorPolicy, int, int]
    chosen: DoorPolicy | None
    check: DoorCheck | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        policies = {"best": {"policy": self.best[0].to_dict(), "opened": self.best[1], "wrong": self.best[2]}}
        chosen = None if self.chosen is None else self.chosen.to_dict()
        plain = asdict(replace(self, best=None, chosen=None))  # type: ignore[arg-type]
        return {**plain, **policies, "chosen": chosen}


def calibrate_doors(
    model: DepthGenerationMixin,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    risk: float = 0.05,
    confidence: float = 0.95,
    exit_config: ExitConfig | None = None,
    max_new_tokens: int = 64,
    on_prompt: Callable[[int], None] = lambda done: None,
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
        on_prompt: Told how many prompts are done.

    Raises:
        ValueError: For a share out of range, prompts without answers, two that are the same, or too few of them.
    """
    check_promise(len(prompts), risk, confidence)
    if switches().inner_break:
        raise ValueError("SIGMA0_INNER_BREAK=1 changes the very loops that are measured: calibrate without it")
    unknown = [number for number, prompt in enumerate(prompts, start=1) if prompt.answer is None]
    if unknown:
        raise ValueError(f'prompt {unknown[0]} has no "answer": a risk is counted in wrong answers')
    check_distinct(encode_prompts(model, tokenizer, prompts, max_new_tokens))
    config = model.resolve_exit_config(exit_config)
    order = list(range(len(prompts)))
    Random(_SEED).shuffle(order)
    parts = [[prompts[k] for k in order[start:end]] for start, end in _bounds(len(prompts))]
    # what the grid does not vary stays as the model has it, in the runs and in what is stored
    policy = model.door_policy
    before = getattr(model.generation_config, "fate_config", None)
    model.generation_config.fate_config = FateConfig().to_dict()
    done = 0

    def run(prompt: Prompt) -> TextStream:
        nonlocal done
        tokens = stream(
            model, tokenizer, prompt.content, exit_config=config, max_new_tokens=max_new_tokens, verdict=True,
            policy=policy, do_sample=False,
        )  # fmt: skip
        for _ in tokens:
            pass
        done += 1
        on_prompt(done)
        return tokens

    try:
        first = [(run(prompt), prompt) for prompt in parts[0]]
        paths = [tokens.loop_statistics for tokens, _ in first]
        fates = fit_fates(paths, model.dtype, patience_for(policy, model.num_loops))
        fitting = [
            _answered(tokens, prompt, fates_under(path, fates, model.dtype))
            for (tokens, prompt), path in zip(first, paths, strict=True)
        ]
        model.generation_config.fate_config = fates.to_dict()
        testing, checking = ([_answered(run(prompt), prompt) for prompt in part] for part in parts[1:])
    finally:
        model.generation_config.fate_config = before
    base = replace(policy, spiral_share=fit_spiral_share(fitting, policy))
    ranked = rank(fitting, base, risk)
    passed, tested = passing_policies(testing, ranked, risk, confidence)
    chosen = passed[0] if passed else None
    k, wrong = opened_and_wrong(opens(testing, ranked[0]), testing)
    return DoorCalibration(
        risk=risk,
        confidence=confidence,
        exit_config=config,
        fates=fates,
        prompts=(len(fitting), len(testing), len(checking)),
        right=float(np.mean([answer.right for answer in fitting + testing])),
        passed=len(passed),
        tested=tested,
        best=(ranked[0], k, wrong),
        chosen=chosen,
        check=None if chosen is None else check_policy(checking, chosen),
    )


def check_promise(prompts: int, risk: float, confidence: float) -> None:
    """Refuses shares out of range, and fewer prompts than could show the risk without one wrong answer.

    Raises:
        ValueError: Naming what is needed.
    """
    for name, value in (("risk", risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"{name} {value!r} is not between 0 and 1")
    needed = int(np.ceil(np.log(1 - confidence) / np.log(1 - risk)))
    tested = _bounds(prompts)[1][1] - _bounds(prompts)[1][0]
    if tested < needed:
        raise ValueError(
            f"{prompts} prompts cannot promise a risk of at most {risk:g} with confidence {confidence:g}: {needed} "
            f"answers without one wrong would have to be let through, and {tested} are tested (two fifths); give at "
            f"least {int(np.ceil(2.5 * needed)) + 3} prompts, better several times as many"
        )


def _bounds(count: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    first, second = round(0.4 * count), round(0.8 * count)
    return (0, first), (first, second), (second, count)


def _answered(tokens: TextStream, prompt: Prompt, fates: Tensor | None = None) -> Answered:
    """What came of a prompt; with `fates` `[n, T]`, its tokens' verdicts are those of other settings."""
    generation = tokens.generation
    assert generation.grounding is not None and prompt.answer is not None
    verdicts = tuple(token.verdict for token in generation.tokens)
    if fates is not None:
        patience = tokens.patience
        stable = [mildest([FATES[fate] for fate in known if fate], patience) for known in fates.tolist()]
        verdicts = tuple(
            verdict.model_copy(update={"stable": fate}) for verdict, fate in zip(verdicts, stable, strict=True)
        )
    return Answered(generation.text.strip() == prompt.answer.strip(), verdicts, generation.grounding.score)


def fit_fates(paths: Sequence[Tensor], dtype: torch.dtype = torch.float32, patience: int = 2) -> FateConfig:
    """Settings under which a model's ordinary course raises no alarm; never below the defaults.

    The growth is the least on a grid at which no loop diverges `BREAK_AFTER` times running, the angle the least at
    which at most `SPIRALLING` of the tokens spiral in their last loops.

    Args:
        paths: `loop_statistics` of texts, each `[n, T, 8]`.
        dtype: Of the states.
        patience: Loops of which the mildest fate is a token's.
    """
    every = torch.cat(list(paths))

    def breaks(growth: float) -> bool:
        diverging = fates_under(every, FateConfig(growth=growth), dtype) == FATES.index("diverge")
        running = diverging.unfold(-1, min(BREAK_AFTER, diverging.shape[-1]), 1).all(-1)  # [n, T - BREAK_AFTER + 1]
        return bool(running.any())

    growth = next((growth for growth in GROWTHS if not breaks(growth)), GROWTHS[-1])

    def spiralling(angle: float) -> float:
        fates = fates_under(every, FateConfig(growth, angle), dtype)
        last = [mildest([FATES[fate] for fate in known if fate], patience) for known in fates.tolist()]
        known = [fate for fate in last if fate is not None]
        return known.count("spiral") / max(1, len(known))

    angle = next((angle for angle in ANGLES if spiralling(angle) <= SPIRALLING), ANGLES[-1])
    return FateConfig(growth, angle)


def fit_spiral_share(answers: Sequence[Answered], policy_before: DoorPolicy | None = None) -> float:
    """The least share of spiralling tokens on a grid that at most `SPIRALLING` of the answers exceed."""
    for allowed in SPIRAL_SHARES:
        policy = replace(policy_before or DoorPolicy(), spiral_share=allowed)
        fates = [aggregate(answer.verdicts, policy).stable for answer in answers]
        if fates.count("spiral") <= SPIRALLING * len(fates):
            return allowed
    return SPIRAL_SHARES[-1]


def opens(answers: Sequence[Answered], policy: DoorPolicy) -> Bools:
    """Which answers the converge door lets through, bool `[n]`."""
    return np.array(
        [door(aggregate(answer.verdicts, policy, answer.grounded), policy) == "converge" for answer in answers],
        dtype=np.bool_,
    )


def opened_and_wrong(opened: Bools, answers: Sequence[Answered]) -> tuple[int, int]:
    """How many are let through, and how many of them are wrong."""
    wrong = np.array([not answer.right for answer in answers], dtype=np.bool_)
    return int(opened.sum()), int((opened & wrong).sum())


def risk_p_value(opened: int, wrong: int, risk: float) -> float:
    """Exact p-value of "an answer let through is wrong with a chance above `risk`"; 1 where none is."""
    return float(binom.cdf(wrong, opened, risk)) if opened else 1.0


def rank(answers: Sequence[Answered], base: DoorPolicy, risk: float) -> list[DoorPolicy]:
    """The policies of the grid, the safest on these answers first; of equals, the one nearest to the defaults."""
    defaults = DoorPolicy()
    scored = []
    for saturated, tau_c, tau_g in product(SATURATED_SHARES, TAUS_C, TAUS_G):
        policy = replace(base, saturated_share=saturated, tau_c=tau_c, tau_g=tau_g)
        away = abs(tau_c - defaults.tau_c) + abs(tau_g - defaults.tau_g)
        p_value = risk_p_value(*opened_and_wrong(opens(answers, policy), answers), risk)
        scored.append((p_value, away, abs(saturated - defaults.saturated_share), policy))
    return [policy for *_, policy in sorted(scored, key=lambda entry: entry[:3])]


def passing_policies(
    answers: Sequence[Answered], ranked: Sequence[DoorPolicy], risk: float, confidence: float
) -> tuple[list[DoorPolicy], int]:
    """The policies that keep the promise, the one that lets most through first, and how many were tested.

    Of those that let equally many through, the one nearest to the defaults stands first: where the data say nothing
    of a threshold, it stays where it was.
    """
    defaults = DoorPolicy()
    passed: list[tuple[int, float, int, DoorPolicy]] = []
    tested = 0
    for place, policy in enumerate(ranked):
        opened, wrong = opened_and_wrong(opens(answers, policy), answers)
        tested += 1
        if risk_p_value(opened, wrong, risk) > 1 - confidence:
            break
        away = abs(policy.tau_c - defaults.tau_c) + abs(policy.tau_g - defaults.tau_g)
        passed.append((-opened, away, place, policy))
    return [policy for *_, policy in sorted(passed, key=lambda entry: entry[:3])], tested


def check_policy(answers: Sequence[Answered], policy: DoorPolicy) -> DoorCheck:
    """Figures of a policy.

    Raises:
        ValueError: For no answers.
    """
    if not answers:
        raise ValueError("no answers to check a policy on")
    opened = opens(answers, policy)
    right = np.array([answer.right for answer in answers], dtype=np.bool_)
    both, n = int((opened & right).sum()), len(answers)
    return DoorCheck(
        prompts=n,
        right=share(int(right.sum()), n),
        opened=share(int(opened.sum()), n),
        right_of_opened=share(both, int(opened.sum())) if opened.any() else None,
        opened_of_right=share(both, int(right.sum())) if right.any() else None,
    )
