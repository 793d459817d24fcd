"""Asking a model of pocket's world under other switches, and what is known of its answers."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sigma0.api import generate
from sigma0.bench.gate.doubt import LONGEST_ANSWER
from sigma0.calibrate.confidence import Bools
from sigma0.calibrate.doors import DoorCheck, check_policy, judge
from sigma0.calibrate.prompts import Prompt
from sigma0.config import ExitConfig, FateConfig, Messages
from sigma0.signals.answer import evidence_of_read
from sigma0.signals.evidence import FEATURES, Floats
from sigma0.signals.generation import Generation
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict

VERDICT = {"SIGMA0_VERDICT": "1"}
_NAMES = ("SIGMA0_VERDICT", "SIGMA0_INNER_BREAK", "SIGMA0_LADDER", "SIGMA0_ROUTING")


@dataclass(frozen=True)
class Answers:
    """Questions with known answers, and what a model says.

    Attributes:
        prompts: The questions.
        runs: The answers, with verdicts.
        policy: What their door asks for.
    """

    prompts: Sequence[Prompt]
    runs: Sequence[Generation]
    policy: DoorPolicy

    @cached_property
    def right(self) -> Bools:
        """Whether each is the known answer, `[n]`."""
        return right_of(self.runs, self.prompts)

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
    def strange(self) -> Bools:
        """Which are out of calibration, `[n]`."""
        return np.array([verdict.reason == "out_of_calibration" for verdict in self.verdicts], dtype=np.bool_)

    def part(self, places: slice) -> "Answers":
        """Some of them."""
        return Answers(self.prompts[places], self.runs[places], self.policy)


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


@dataclass(frozen=True)
class Asker:
    """A model that is asked one question after the other, greedily.

    Attributes:
        model: A looped model.
        tokenizer: Its fast tokenizer.
        config: The exit rule.
        policy: What the converge door asks for.
        on_answer: Called behind each answer.
    """

    model: Any
    tokenizer: Any
    config: ExitConfig
    policy: DoorPolicy
    on_answer: Callable[[], None]

    def generations(self, contents: Sequence[str | Messages], config: ExitConfig | None = None) -> list[Generation]:
        """What it says to each, under the switches as they are.

        Args:
            contents: Texts to go on with, or chats.
            config: An exit rule in place of its own.
        """
        found = []
        settings: dict[str, Any] = {"exit_config": config or self.config, "policy": self.policy}
        for content in contents:
            found.append(
                generate(self.model, self.tokenizer, content, max_new_tokens=LONGEST_ANSWER, do_sample=False,
                         **settings)
            )  # fmt: skip
            self.on_answer()
        return found

    def answers(self, prompts: Sequence[Prompt], config: ExitConfig | None = None) -> Answers:
        """Answers with verdicts and no other switch; arguments as `generations` has them."""
        with switched(VERDICT):
            return Answers(prompts, self.generations([each.content for each in prompts], config), self.policy)


def right_of(runs: Sequence[Generation], prompts: Sequence[Prompt]) -> Bools:
    """Whether each answer is the known one, `[n]`."""
    return np.array(
        [run.text.strip() == prompt.answer for run, prompt in zip(runs, prompts, strict=True)], dtype=np.bool_
    )
