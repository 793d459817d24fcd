"""Depths given beforehand in place of a rule: the baselines run for real, so that their passes are counted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from sigma0.exits import ExitRule, ExitState
from sigma0.settings import ExitConfig


class ReplayRule(ExitRule):
    """Stops each token of one sequence, in order, at a depth given beforehand.

    Args:
        depths: Loops from 1 to T, one for each new token; tokens behind the last run to T.
        total_loops: T.
    """

    def __init__(self, depths: Sequence[int], total_loops: int) -> None:
        super().__init__(ExitConfig(mode="qexit", q=1.0), total_loops)
        self.needs_gate = False
        self._depths = chain(depths, repeat(total_loops))

    def start(self, hidden: Tensor) -> ExitState:
        """The depth of the next token, kept as its streak."""
        if hidden.shape[0] != 1:
            raise ValueError(f"{hidden.shape[0]} rows at once: depths are replayed for one sequence at a time")
        return ExitState(streak=torch.tensor([next(self._depths)], device=hidden.device))

    def observe(
        self,
        state: ExitState,
        loop: Tensor,
        hidden: Tensor,
        gate_logits: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> tuple[ExitState, Tensor]:
        """Met at the token's own depth."""
        assert state.streak is not None
        return state, loop >= state.streak


@contextmanager
def replaying(model: Any, depths: Sequence[int]) -> Iterator[None]:
    """Lets a model stop its tokens at given depths, whatever exit settings it is called with."""
    rule = ReplayRule(depths, model.num_loops)
    model.exit_rule = lambda _config: rule
    try:
        yield
    finally:
        del model.exit_rule
