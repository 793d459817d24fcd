"""Depths and doubts given beforehand in place of a rule and a model's mind: real runs whose course is known.

A token stops at its given exit, though the gate is read and its probabilities are summed as `qexit` does, so that the
cost of deciding is there. Where a trace also says from which loop on a token's readout is right (its *settled* loop),
`verify` judges by that: a proposal that was read at or behind it stands, an earlier one is withdrawn at the first loop
behind it that is read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from sigma0.config import ExitConfig
from sigma0.decode.batch import Bools, Ints
from sigma0.decode.exits import ExitRule
from sigma0.decode.token_loop import DirectLoop, Emission, TokenLoop
from sigma0.decode.verify import Proposal, Row, VerifiedLoop


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Trace:
    """The course of the tokens of a text; behind its end it is repeated.

    Attributes:
        total_loops: T.
        exits: Loop at which each new token that is fed back stops, in [1, T].
        settled: Loop from which on the head reads what it reads at T, in [1, T]; empty where it is left to the model.
        prompt: Loop at which the last token of a prompt is read; T if None.
    """

    total_loops: int
    exits: tuple[int, ...]
    settled: tuple[int, ...] = ()
    prompt: int | None = None

    def __post_init__(self) -> None:
        if not self.exits:
            raise ValueError("a trace needs the exit of one token at least")
        if self.settled and len(self.settled) != len(self.exits):
            raise ValueError(f"{len(self.exits)} exits, but {len(self.settled)} settled loops")
        for loop in (*self.exits, *self.settled, self.prompt or self.total_loops):
            if not 1 <= loop <= self.total_loops:
                raise ValueError(f"loop {loop} of the trace is not one of 1 to {self.total_loops}")

    def of(self, sequence: int, token: int) -> int:
        """Where a token's course stands in the trace: each sequence of a batch starts at another place."""
        return (token + 7 * sequence) % len(self.exits)

    def scaled(self, total_loops: int) -> "Trace":
        """The same course for another number of loops, rounded up; a proposal that was wrong stays wrong."""

        def fit(loop: int) -> int:
            return -(-loop * total_loops // self.total_loops)

        exits, settled = [fit(loop) for loop in self.exits], [fit(loop) for loop in self.settled]
        for place, (early, right) in enumerate(zip(self.exits, self.settled, strict=False)):
            if early < right and total_loops > 1:
                exits[place] = min(exits[place], total_loops - 1)
                settled[place] = max(settled[place], exits[place] + 1)
        prompt = None if self.prompt is None else fit(self.prompt)
        return Trace(total_loops, tuple(exits), tuple(settled), prompt)


class ReplayRule(ExitRule):
    """Stops each token at the loop that a trace says.

    Args:
        trace: For this model's number of loops.
        config: What becomes of the tokens behind their exits; its rule is not used.

    Attributes:
        first_columns: Column of the first new token that is fed, of each sequence; told by the loop.
    """

    def __init__(self, trace: Trace, config: ExitConfig) -> None:
        gate = ExitConfig(mode="qexit", after_exit=config.after_exit, redraft=config.redraft)
        super().__init__(gate, trace.total_loops)
        self.trace = trace
        self.first_columns: Ints | None = None

    def met(self, met: Bools, sequences: Ints, columns: Ints, loops: Ints) -> Bools:
        """Met at the token's own exit; of a prompt's tokens where no loop told of any."""
        if self.first_columns is None:
            return loops >= (self.trace.prompt or self.total_loops)
        tokens = zip(sequences.tolist(), (columns - self.first_columns[sequences]).tolist(), strict=True)
        exits: Ints = np.array([self.trace.exits[self.trace.of(*token)] for token in tokens], dtype=np.int64)
        return loops >= exits

    def met_in_prompt(self, met: Tensor, loop: int) -> Tensor:
        """Met at the loop that the trace says for prompts."""
        return torch.full_like(met, loop >= (self.trace.prompt or self.total_loops))


class _Told(TokenLoop):
    """Tells a `ReplayRule` where the new tokens begin."""

    def enter(self, emissions: Sequence[Emission]) -> None:
        """As it was, once the rule knows."""
        rule = self.wave.rule
        if isinstance(rule, ReplayRule) and rule.first_columns is None:
            rule.first_columns = self.columns.copy()
        super().enter(emissions)


class ReplayedLoop(_Told, DirectLoop):
    """A token loop whose tokens stop where a trace says."""


class ReplayedVerifiedLoop(_Told, VerifiedLoop):
    """`verify` whose proposals stand or fall as a trace says; the model's own judgement is passed and ignored."""

    def _judge(
        self, sequence: int, place: int, depth: int, proposal: Proposal, row: Row, scores: Tensor | None
    ) -> tuple[int, bool]:
        judged = super()._judge(sequence, place, depth, proposal, row, scores)
        rule = self.wave.rule
        if not isinstance(rule, ReplayRule) or not rule.trace.settled:
            return judged
        # The token at `place` is read from the one before it, which was fed as new token number place - prompt - 1.
        settled = rule.trace.settled[rule.trace.of(sequence, place - self._prompt - 1)]
        return proposal.token_id, not proposal.depth < settled <= depth


@contextmanager
def replaying(model: Any, trace: Trace) -> Iterator[None]:
    """Lets a model's tokens go the way of a trace, whatever exit rule it is called with.

    Raises:
        ValueError: If the trace is for another number of loops.
    """
    if trace.total_loops != model.num_loops:
        raise ValueError(f"the trace is for {trace.total_loops} loops, the model has {model.num_loops}")
    model.exit_rule = partial(ReplayRule, trace)
    model.direct_loop, model.verified_loop = ReplayedLoop, ReplayedVerifiedLoop
    try:
        yield
    finally:
        del model.exit_rule, model.direct_loop, model.verified_loop
