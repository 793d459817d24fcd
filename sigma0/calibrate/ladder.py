"""When a small model should hand a token up: a confidence for a rate of hand-ups, or for agreement with the larger one.

Both models share a tokenizer. The larger one continues each prompt greedily; the small one reads the same text, and at
every new token its confidence exp(-entropy) and its choice are noted. Along that text a ladder with `Doubt(below)`
differs from the larger model where the small one's choice is another and its confidence is not below. The unit is a
prompt, its loss the share of its new tokens at which they differ; which thresholds keep the promise is decided by
`sigma0.calibrate.ltt`. A fifth of the prompts has no part in the choice: what the threshold does there is reported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sigma0.calibrate.agreement import check_distinct, held_out, prompts_needed
from sigma0.calibrate.bootstrap import Estimate, clustered_share
from sigma0.calibrate.ltt import passing
from sigma0.ladder.rungs import LocalRung, check_same_tokens

Floats = npt.NDArray[np.float64]
# From "everything goes up" down to "nothing does", evenly in the logit.
CONFIDENCES = tuple(float(f"{1 / (1 + np.exp(-logit)):.4g}") for logit in np.arange(7, -12.05, -0.05))
_SEED = 0


@dataclass(frozen=True)
class DoubtCheck:
    """A threshold on prompts that had no part in its choice; intervals take a prompt's tokens together."""

    prompts: int  # How many
    tokens: int  # New tokens of all of them
    alone: Estimate | None  # Agreement of the small model alone
    handed_up: Estimate | None  # Share of the tokens that go up
    agreement: Estimate | None  # Share that is the larger model's, handed-up ones counted in


@dataclass(frozen=True)
class DoubtCalibration:
    """What was found."""

    below: float | None  # Confidence under which a token goes up; None if none keeps the promise
    handed_up: float | None  # Share of the new tokens that go up there
    agreement: float | None  # Share that is the larger model's there, handed-up ones counted in
    prompts: int  # Prompts that the choice was made on
    tokens: int  # New tokens of all of them
    alone: float  # Agreement of the small model alone
    asked: tuple[str, float]  # "rate" or "agreement", and its value
    confidence: float | None  # With which an agreement is kept; None for a rate
    check: DoubtCheck | None  # What `below` does on other prompts, or None


@dataclass(frozen=True)
class _Reading:
    confidences: Floats
    same: npt.NDArray[np.bool_]


def calibrate_doubt(
    small: LocalRung,
    large: LocalRung,
    prompts: Sequence[tuple[int, ...]],
    rate: float | None = None,
    agreement: float = 0.99,
    confidence: float = 0.95,
    max_new_tokens: int = 64,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> DoubtCalibration:
    """Finds the confidence under which tokens should go up.

    Args:
        small: The lower rung.
        large: The upper one.
        prompts: Ids of prompts; every fifth, after shuffling, is set apart for the check.
        rate: Share of the tokens that should go up; None: as few as keep the agreement.
        agreement: Share of the tokens that must be the larger model's, in (0, 1).
        confidence: With which that is to hold, in (0, 1).
        max_new_tokens: New tokens of each prompt at most.
        on_prompt: Told how many are done.

    Raises:
        ValueError: For different tokenizers, prompts given twice or too few of them, or a share out of range.
    """
    check_same_tokens(small, large)
    check_distinct(prompts)
    for name, value in (("rate", rate), ("agreement", agreement), ("confidence", confidence)):
        if value is not None and not 0 < value < 1:
            raise ValueError(f"{name} {value!r} is not between 0 and 1")
    needed = 2 if rate is not None else prompts_needed(agreement, confidence)[0]
    if len(prompts) < needed:
        asked = "a rate" if rate is not None else f"agreement >= {agreement:g} with confidence {confidence:g}"
        raise ValueError(
            f"{len(prompts)} prompts cannot promise {asked}: it takes {needed} without one difference (a fifth is set "
            "apart for the check); give more, or ask for less"
        )
    order = list(range(len(prompts)))
    Random(_SEED).shuffle(order)
    readings = []
    for done, place in enumerate(order, start=1):
        readings.append(_read(small, large, prompts[place], max_new_tokens))
        on_prompt(done)
    apart = held_out(len(prompts))
    checking, fitting = readings[:apart], readings[apart:]
    confidences = np.concatenate([reading.confidences for reading in fitting])
    same = np.concatenate([reading.same for reading in fitting])
    if rate is not None:
        below: float | None = float(np.quantile(confidences, rate))
    else:
        below = _promised(fitting, 1 - agreement, confidence)
    up = None if below is None else confidences < below
    return DoubtCalibration(
        below=below,
        handed_up=None if up is None else float(up.mean()),
        agreement=None if up is None else float((same | up).mean()),
        prompts=len(fitting),
        tokens=len(confidences),
        alone=float(same.mean()),
        asked=("agreement", agreement) if rate is None else ("rate", rate),
        confidence=confidence if rate is None else None,
        check=None if below is None else _checked(checking, below),
    )


def _checked(readings: Sequence[_Reading], below: float) -> DoubtCheck:
    tokens = [len(reading.same) for reading in readings]
    up = [reading.confidences < below for reading in readings]
    kept = [int((reading.same | high).sum()) for reading, high in zip(readings, up, strict=True)]
    return DoubtCheck(
        prompts=len(readings),
        tokens=sum(tokens),
        alone=clustered_share([int(reading.same.sum()) for reading in readings], tokens),
        handed_up=clustered_share([int(high.sum()) for high in up], tokens),
        agreement=clustered_share(kept, tokens),
    )


def _promised(readings: Sequence[_Reading], risk: float, confidence: float) -> float | None:
    table = [
        [float((~reading.same & (reading.confidences >= below)).mean()) for below in CONFIDENCES]
        for reading in readings
    ]
    losses = np.array(table)  # [prompts, confidences]
    kept = passing(losses, risk, confidence)
    return CONFIDENCES[kept - 1] if kept else None


@torch.no_grad()
def _read(small: LocalRung, large: LocalRung, prompt: tuple[int, ...], max_new_tokens: int) -> _Reading:
    """Confidences and choices of the small model along the larger one's text."""
    ids = torch.tensor([prompt], device=large.model.device)
    exits: dict[str, Any] = {"exit_config": large.exit_config} if large.is_looped and large.exit_config else {}
    text = large.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, **exits
    ).to(small.model.device)
    exit_settings: dict[str, Any] = {"exit_config": small.exit_config} if small.is_looped and small.exit_config else {}
    logits = small.model(text[:, :-1], **exit_settings).logits[0, len(prompt) - 1 :]  # [n, V]
    entropies = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    same = logits.argmax(-1) == text[0, len(prompt) :]
    return _Reading((-entropies).exp().cpu().numpy(), same.cpu().numpy())
