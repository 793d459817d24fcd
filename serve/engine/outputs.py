"""What is told of new tokens: fates, proximity to collapse, margin and entropy, by slot of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.batch import Bools, Ints
from sigma0.decode.exits import exit_reason
from sigma0.decode.ops import FATES, READINGS, CollapseRule, CollapseState, Fate, Operations
from sigma0.decode.rows import LEADER, Rows
from sigma0.decode.sampler import logprobs_of
from sigma0.decode.stats import read_together
from sigma0.decode.transfer import to_device, to_host
from sigma0.serve.engine.messages import JobDone, TokenTold
from sigma0.serve.engine.request import Running
from sigma0.signals.grounding.check import check
from sigma0.signals.savings import savings
from sigma0.signals.verdict import DoorPolicy, aggregate, door, explain, mildest, of_token, patience_for

_ENTROPY, _MARGIN, _PROXIMITY = (READINGS.index(name) for name in ("entropy", "margin", "proximity"))


@dataclass(frozen=True)
class Read:
    """A token that was settled in a pass.

    Attributes:
        running: Whose.
        token_id: Its id.
        depth: Loop that it was read at.
        met: Whether its rule was met.
        diverged: Whether its loop diverged.
        logits: That it was read from, `[V]`.
        is_last: Whether the text ends with it.
    """

    running: Running
    token_id: int
    depth: int
    met: bool
    diverged: bool
    logits: Tensor
    is_last: bool


class Teller:
    """Statistics of running requests, and how they are told.

    Args:
        model: The looped model.
        name: Of the model.
        slots: Requests that run at most.
        columns: Of the longest text.
        watch: Whether statistics and verdicts are wanted.
    """

    def __init__(self, model: Any, name: str, slots: int, columns: int, watch: bool) -> None:
        self._total_loops: int = model.num_loops
        self._fates = np.zeros((slots, columns, self._total_loops), dtype=np.int8)
        self._met = np.zeros((slots, columns), dtype=np.bool_)
        self._collapse = CollapseState.empty(slots, model.device)
        self._policy: DoorPolicy = model.door_policy
        self._patience = patience_for(self._policy, self._total_loops)
        self._name = name
        self._ops: Operations = model.operations
        self.watch = watch

    def begin(self, running: Running) -> None:
        """Readies a slot for a request, with what is remembered of it from before it was put back."""
        slot = running.entry.slot
        self._fates[slot] = 0 if running.fates is None else running.fates
        self._met[slot] = False if running.met is None else running.met
        for place, tensor in enumerate(vars(self._collapse).values()):
            tensor[slot] = 0 if running.saved is None else running.saved[place]

    def save(self, running: Running, slot: int) -> None:
        """Remembers what a request needs in another slot."""
        # columns that come back out of the prefix cache are not run again
        running.fates, running.met = self._fates[slot].copy(), self._met[slot].copy()
        running.saved = tuple(tensor[slot].clone() for tensor in vars(self._collapse).values())

    def enter(self, running: Running, columns: Ints) -> None:
        """Forgets the loops of columns that come for the first time, or with another token.

        What is only read anew goes through the same loops again, or is found and goes through none.
        """
        first = [column for column in columns.tolist() if running.role(column) == LEADER]
        self._fates[running.entry.slot, first] = 0
        self._met[running.entry.slot, first] = False

    def put(self, rows: Rows, fates: Ints, held: Bools) -> None:
        """What was seen at the end of the loop that rows have just finished.

        Args:
            rows: Behind it.
            fates: Index into `FATES`, 0 where there is none, `[R]`.
            held: Whether the boundary's rule was met, `[R]`.
        """
        self._met[rows.texts[held], rows.columns[held]] = True
        known = np.flatnonzero(fates)
        self._fates[rows.texts[known], rows.columns[known], rows.loops[known] - 1] = fates[known]

    def tell(self, read: Sequence[Read]) -> list[TokenTold]:
        """The tokens of one pass, none twice of a request; their texts are still to be added."""
        numbers: list[list[float]] = [[np.nan] * len(READINGS)] * len(read)
        for each in read:
            each.running.repetition.append(each.token_id)
        if self.watch and read and self._ops.backend != "triton":
            repeated = [each.running.repetition.at(-1) for each in read]
            drops = [each.running.drop for each in read]
            numbers = read_together(torch.stack([each.logits for each in read]), repeated, drops).tolist()
        elif self.watch and read:
            logits = torch.stack([each.logits for each in read])
            chosen = to_device(np.array([each.token_id for each in read]), logits.device)
            slots = to_device(np.array([each.running.entry.slot for each in read]), logits.device)
            told = self._ops.collapse(logits, chosen, self._collapse, slots, CollapseRule())
            numbers = to_host(told.statistics).tolist()
        return [self._token(each, values) for each, values in zip(read, numbers, strict=True)]

    def _token(self, read: Read, values: list[float]) -> TokenTold:
        running = read.running
        count = running.job.logprobs
        logprob, alternatives = (None, ()) if count is None else logprobs_of(read.logits, read.token_id, count)
        return TokenTold(
            id=read.token_id,
            text="",
            depth=read.depth,
            reason=exit_reason(running.rule.config.mode, read.met, read.diverged),
            fate=self._fate(running, len(running.told)),
            proximity=_finite(values[_PROXIMITY]),
            margin=_finite(values[_MARGIN]),
            entropy=_finite(values[_ENTROPY]),
            logprob=logprob,
            alternatives=alternatives,
            rung=self._name,
            would_have_met=self._would_have_met(running, len(running.told), values[_MARGIN]),
        )

    def _fate(self, running: Running, number: int) -> Fate | None:
        """Of a token, the mildest of the last loops of the column that it was read from."""
        known = self._fates[running.entry.slot, running.prompt - 1 + number]
        return mildest([FATES[fate] for fate in known.tolist()], self._patience)

    def _would_have_met(self, running: Running, number: int, margin: float) -> bool | None:
        """Of a token that `full` or `fixed` stopped; see `sigma0.decode.exits.ExitRule.would_have_been_met`."""
        rule = running.unasked
        if rule is None:
            return None
        if rule.needs_logits:
            return True if margin >= rule.threshold and running.rule.last_loop >= rule.min_loops else None
        return bool(self._met[running.entry.slot, running.prompt - 1 + number])

    def done(self, running: Running) -> JobDone:
        """The end of a request that still has its slot."""
        tokens = [replace(token, fate=self._fate(running, place)) for place, token in enumerate(running.told)]
        verdict = opened = text = None
        if self.watch:
            score = check(running.feed.text, running.job.context).score
            parts = [of_token(each.reason, each.depth, each.fate, each.proximity or 0.0) for each in tokens]
            verdict = aggregate(parts, self._policy, score)
            if running.collapsed:
                verdict = verdict.model_copy(update={"reason": "collapse", "converged": False})
            opened, text = door(verdict, self._policy), explain(verdict, self._policy)
        depths = [token.depth for token in tokens]
        ended = running.ends_text(tokens[-1].id) or running.feed.stopped or running.collapsed
        return JobDone(
            text=running.feed.text,
            tokens=tuple(tokens),
            finish_reason="stop" if ended else "length",
            prompt_tokens=running.prompt,
            cached_tokens=running.cached,
            total_loops=self._total_loops,
            passes=running.passes,
            rows=running.rows,
            savings=savings([depths], running.passes, running.rows, self._total_loops),
            verdict=verdict,
            door=opened,
            door_text=text,
            preemptions=running.entry.preemptions,
            collapsed=running.collapsed,
        )


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
