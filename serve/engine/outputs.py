"""Output processor: per-token exit statistics and repetition scores of running requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.batch import DECODING, Bools, Ints, Rows
from sigma0.decode.exits import exit_reason
from sigma0.decode.ops import FATES, LOGIT_STATS, CollapseRule, CollapseState, Fate, Operations
from sigma0.decode.sampling_params import logprobs_of
from sigma0.decode.stats import compute_logit_stats
from sigma0.decode.transfer import to_device, to_host
from sigma0.serve.engine.messages import RequestOutput, ServedModel, TokenOutput
from sigma0.serve.engine.request import RequestState
from sigma0.signals.grounding.check import check
from sigma0.signals.savings import savings
from sigma0.signals.verdict import DoorPolicy, aggregate, door, explain, mildest, of_token, patience_for

_ENTROPY, _MARGIN, _PROXIMITY = (LOGIT_STATS.index(name) for name in ("entropy", "margin", "proximity"))


@dataclass(frozen=True)
class SampledToken:
    """A token that became final in a pass.

    Attributes:
        state: Its request.
        token_id: Its id.
        depth: Loop that it was sampled at.
        met: Whether its exit rule was met.
        diverged: Whether its loop diverged.
        logits: That it was sampled from, `[V]`.
        is_last: Whether the text ends with it.
    """

    state: RequestState
    token_id: int
    depth: int
    met: bool
    diverged: bool
    logits: Tensor
    is_last: bool


class OutputProcessor:
    """Statistics of running requests, by batch slot, and the outputs made of them.

    Args:
        model: The looped model.
        name: Of the model.
        slots: Number of batch slots.
        positions: Cache positions of the longest sequence.
        watch: Whether statistics and verdicts are wanted.
    """

    def __init__(self, model: ServedModel, name: str, slots: int, positions: int, watch: bool) -> None:
        self._total_loops = model.num_loops
        self._fates = np.zeros((slots, positions, self._total_loops), dtype=np.int8)
        self._met = np.zeros((slots, positions), dtype=np.bool_)
        self._collapse = CollapseState.empty(slots, model.device)
        self._policy: DoorPolicy = model.door_policy
        self._patience = patience_for(self._policy, self._total_loops)
        self._name = name
        self._ops: Operations = model.operations
        self.watch = watch

    def begin(self, state: RequestState) -> None:
        """Initialises the batch slot of a request, with the statistics saved at its preemption if there are any."""
        slot = state.entry.slot
        self._fates[slot] = 0 if state.fates is None else state.fates
        self._met[slot] = False if state.met is None else state.met
        for index, tensor in enumerate(vars(self._collapse).values()):
            tensor[slot] = 0 if state.collapse_state is None else state.collapse_state[index]

    def save(self, state: RequestState, slot: int) -> None:
        """Saves the statistics of a request that is preempted; it may resume in another slot."""
        # positions that are found in the prefix cache are not run again
        state.fates, state.met = self._fates[slot].copy(), self._met[slot].copy()
        state.collapse_state = tuple(tensor[slot].clone() for tensor in vars(self._collapse).values())

    def enter(self, state: RequestState, positions: Ints) -> None:
        """Clears the statistics of positions that enter for the first time, or with another token.

        Positions that are recomputed run the same loops again, or are cached and run none: theirs are kept.
        """
        sampled = [position for position in positions.tolist() if state.role(position) == DECODING]
        self._fates[state.entry.slot, sampled] = 0
        self._met[state.entry.slot, sampled] = False

    def record(self, rows: Rows, fates: Ints, met: Bools) -> None:
        """Records what was seen at the end of the loop that rows have just finished.

        Args:
            rows: After it.
            fates: Index into `FATES`, 0 where there is none, `[R]`.
            met: Whether the loop-end rule was met, `[R]`.
        """
        self._met[rows.batch_slots[met], rows.cache_positions[met]] = True
        known = np.flatnonzero(fates)
        self._fates[rows.batch_slots[known], rows.cache_positions[known], rows.loops[known] - 1] = fates[known]

    def outputs(self, sampled: Sequence[SampledToken]) -> list[TokenOutput]:
        """Token outputs of one pass, at most one of each request; their texts are added by the engine."""
        numbers: list[list[float]] = [[np.nan] * len(LOGIT_STATS)] * len(sampled)
        for token in sampled:
            token.state.repetition.append(token.token_id)
        if self.watch and sampled and self._ops.backend != "triton":
            repeated = [token.state.repetition.at(-1) for token in sampled]
            drops = [token.state.entropy_drop for token in sampled]
            numbers = compute_logit_stats(torch.stack([token.logits for token in sampled]), repeated, drops).tolist()
        elif self.watch and sampled:
            logits = torch.stack([token.logits for token in sampled])
            token_ids = to_device(np.array([token.token_id for token in sampled]), logits.device)
            slots = to_device(np.array([token.state.entry.slot for token in sampled]), logits.device)
            collapse = self._ops.collapse(logits, token_ids, self._collapse, slots, CollapseRule())
            numbers = to_host(collapse.statistics).tolist()
        return [self._output(token, values) for token, values in zip(sampled, numbers, strict=True)]

    def _output(self, token: SampledToken, values: list[float]) -> TokenOutput:
        state = token.state
        count = state.request.logprobs
        logprob, alternatives = (None, ()) if count is None else logprobs_of(token.logits, token.token_id, count)
        return TokenOutput(
            id=token.token_id,
            text="",
            depth=token.depth,
            reason=exit_reason(state.rule.config.mode, token.met, token.diverged),
            fate=self._fate(state, len(state.outputs)),
            proximity=_finite(values[_PROXIMITY]),
            margin=_finite(values[_MARGIN]),
            entropy=_finite(values[_ENTROPY]),
            logprob=logprob,
            alternatives=alternatives,
            rung=self._name,
            would_have_met=self._would_have_met(state, len(state.outputs), values[_MARGIN]),
        )

    def _fate(self, state: RequestState, number: int) -> Fate | None:
        """Fate of a token: the mildest of the last loops of the cache position whose state it was sampled from."""
        known = self._fates[state.entry.slot, state.prompt_length - 1 + number]
        return mildest([FATES[fate] for fate in known.tolist()], self._patience)

    def _would_have_met(self, state: RequestState, number: int, margin: float) -> bool | None:
        """Of a token that `full` or `fixed` stopped; see `sigma0.decode.exits.ExitRule.would_have_been_met`."""
        rule = state.shadow_rule
        if rule is None:
            return None
        if rule.needs_logits:
            return True if margin >= rule.threshold and state.rule.last_loop >= rule.min_loops else None
        return bool(self._met[state.entry.slot, state.prompt_length - 1 + number])

    def finish(self, state: RequestState) -> RequestOutput:
        """The output of a finished request that still has its batch slot."""
        tokens = [replace(token, fate=self._fate(state, number)) for number, token in enumerate(state.outputs)]
        verdict = opened = text = None
        if self.watch:
            score = check(state.detokenizer.text, state.request.context).score
            parts = [of_token(token.reason, token.depth, token.fate, token.proximity or 0.0) for token in tokens]
            verdict = aggregate(parts, self._policy, score)
            if state.collapsed:
                verdict = verdict.model_copy(update={"reason": "collapse", "converged": False})
            opened, text = door(verdict, self._policy), explain(verdict, self._policy)
        depths = [token.depth for token in tokens]
        stopped = state.is_eos(tokens[-1].id) or state.detokenizer.stopped or state.collapsed
        return RequestOutput(
            text=state.detokenizer.text,
            tokens=tuple(tokens),
            finish_reason="stop" if stopped else "length",
            prompt_tokens=state.prompt_length,
            cached_tokens=state.cached,
            total_loops=self._total_loops,
            passes=state.passes,
            rows=state.rows,
            savings=savings([depths], state.passes, state.rows, self._total_loops),
            verdict=verdict,
            door=opened,
            door_text=text,
            preemptions=state.entry.preemptions,
            collapsed=state.collapsed,
        )


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
