"""Depths and doubts given beforehand in place of a rule and a model's mind: real runs whose course is known.

A token stops at its given exit, though the gate is read and its probabilities are summed as `qexit` does, so that the
cost of deciding is there. Where a trace also says from which loop on a token's readout is right (its *settled* loop),
`verify` judges by that: a draft that was read at or after it is accepted, an earlier one rejected at the first loop
after it that is read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from sigma0.config import ExitConfig
from sigma0.decode.exits import ExitRule, ScriptedExits

# How much further in its trace each next sequence of a batch begins.
STRIDE = 7


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Trace:
    """The course of the tokens of a text; after its end it is repeated."""

    total_loops: int  # T
    exits: tuple[int, ...]  # Loop at which each new token that is fed back stops, in [1, T]
    # Loop from which on the head reads what it reads at T, in [1, T]; empty where it is left to the model
    settled: tuple[int, ...] = ()
    prompt: int | None = None  # Loop at which the last token of a prompt is read; T if None

    def __post_init__(self) -> None:
        if not self.exits:
            raise ValueError("a trace needs the exit of one token at least")
        if self.settled and len(self.settled) != len(self.exits):
            raise ValueError(f"{len(self.exits)} exits, but {len(self.settled)} settled loops")
        for loop in (*self.exits, *self.settled, self.prompt or self.total_loops):
            if not 1 <= loop <= self.total_loops:
                raise ValueError(f"loop {loop} of the trace is not one of 1 to {self.total_loops}")

    def scaled(self, total_loops: int) -> "Trace":
        """The same course for another number of loops, rounded up; a draft that was wrong stays wrong."""

        def fit(loop: int) -> int:
            return -(-loop * total_loops // self.total_loops)

        exits, settled = [fit(loop) for loop in self.exits], [fit(loop) for loop in self.settled]
        for index, (early, right) in enumerate(zip(self.exits, self.settled, strict=False)):
            if early < right and total_loops > 1:
                exits[index] = min(exits[index], total_loops - 1)
                settled[index] = max(settled[index], exits[index] + 1)
        prompt = None if self.prompt is None else fit(self.prompt)
        return Trace(total_loops, tuple(exits), tuple(settled), prompt)


class ReplayRule(ExitRule):
    """Stops each token at the loop that a trace for this model says; of the config its rule is not used."""

    def __init__(self, trace: Trace, config: ExitConfig) -> None:
        gate = ExitConfig(mode="qexit", after_exit=config.after_exit, redraft=config.redraft)
        super().__init__(gate, trace.total_loops)
        self.trace = trace
        self.script = ScriptedExits(trace.exits, trace.settled, STRIDE)

    def met_in_prompt(self, met: Tensor, loop: int) -> Tensor:
        """Met at the loop that the trace says for prompts."""
        return torch.full_like(met, loop >= (self.trace.prompt or self.total_loops))


@contextmanager
def replaying(model: Any, trace: Trace) -> Iterator[None]:
    """Lets a model's tokens go the way of a trace, whatever exit rule it is called with."""
    if trace.total_loops != model.num_loops:
        raise ValueError(f"the trace is for {trace.total_loops} loops, the model has {model.num_loops}")
    model.exit_rule = partial(ReplayRule, trace)
    try:
        yield
    finally:
        del model.exit_rule
