"""Asking a model of pocket's world under other switches, and what is known of its answers."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np

from sigma0.api import generate
from sigma0.bench.gate.doubt import LONGEST_ANSWER
from sigma0.calibrate.bootstrap import Estimate, share
from sigma0.calibrate.confidence import Bools
from sigma0.calibrate.doors import DoorCheck, check_policy, judge
from sigma0.calibrate.prompts import Prompt
from sigma0.config import ExitConfig, Messages
from sigma0.signals.answer import evidence_of_read
from sigma0.signals.evidence import FEATURES, Floats
from sigma0.signals.generation import Generation
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict

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
        told = zip(self.runs, self.verdicts, strict=True)
        rows = [evidence_of_read(run.tokens, run.total_loops, verdict.grounded) for run, verdict in told]
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
class Asker:
    """A model that is asked one question after the other, greedily."""

    model: Any  # A looped model
    tokenizer: Any  # Its fast tokenizer
    config: ExitConfig  # The exit rule
    policy: DoorPolicy  # What the converge door asks for
    on_answer: Callable[[], None]  # Called after each answer

    def generations(self, contents: Sequence[str | Messages], config: ExitConfig | None = None) -> list[Generation]:
        """What it says to each text or chat, under the switches as they are; `config` is a rule in place of its own."""
        found = []
        settings: dict[str, Any] = {"exit_config": config or self.config, "policy": self.policy, "do_sample": False}
        for content in contents:
            found.append(generate(self.model, self.tokenizer, content, max_new_tokens=LONGEST_ANSWER, **settings))
            self.on_answer()
        return found

    def answers(self, prompts: Sequence[Prompt], config: ExitConfig | None = None) -> Answers:
        """Answers with verdicts and no other switch; `config` is a rule in place of its own."""
        with switched(VERDICT):
            return Answers(prompts, self.generations([each.content for each in prompts], config), self.policy)
