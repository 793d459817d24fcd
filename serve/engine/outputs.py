"""Output processor: token outputs and request outputs, with the statistics of all requests of a pass together."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sigma0.decode.batch import Ints
from sigma0.decode.exits import exit_reason
from sigma0.decode.lanes import CACHE_POSITION, DIVERGED_FLAG, MET_FLAG, STAGE, Lanes
from sigma0.decode.ops import FATES, LOGIT_STATS, STATISTICS, Fate
from sigma0.decode.sampling_params import logprobs_of
from sigma0.decode.stats import PathReader, compute_logit_stats
from sigma0.decode.step import FED_AT, READ_AT, SEQUENCE, TOKEN, WHY
from sigma0.decode.transfer import to_device, to_host
from sigma0.serve.engine.messages import RequestOutput, ServedModel, TokenOutput
from sigma0.serve.engine.request import RequestState
from sigma0.signals.grounding.check import check
from sigma0.signals.savings import savings
from sigma0.signals.verdict import DoorPolicy, aggregate, door, explain, of_token, patience_for

_ENTROPY, _MARGIN, _PROXIMITY = (LOGIT_STATS.index(name) for name in ("entropy", "margin", "proximity"))
Floats = npt.NDArray[np.float32]


class OutputProcessor:
    """Makes outputs of what passes emit.

    Args:
        model: The looped model.
        name: Of the model.
        lanes: Tokens in flight, with their states after every loop if statistics are wanted.
        watch: Whether statistics and verdicts are wanted.
    """

    def __init__(self, model: ServedModel, name: str, lanes: Lanes, watch: bool) -> None:
        self._model, self._lanes, self._name = model, lanes, name
        self._total_loops = model.num_loops
        self._policy: DoorPolicy = model.door_policy
        self._patience = patience_for(self._policy, self._total_loops)
        self._readers: dict[float, PathReader] = {}
        self.watch = watch

    @torch.no_grad()
    def outputs(
        self, states: Sequence[RequestState], lines: Ints, logits: Tensor, left: Ints, owners: Sequence[RequestState]
    ) -> list[TokenOutput]:
        """Token outputs of one pass, at most one of each request; their texts are added by the engine.

        Args:
            states: Request of each token, `[N]`.
            lines: Emitted lines, `[N, 8]`.
            logits: That each was sampled from, `[N, V]`.
            left: Slots and cache positions of tokens that have left their lanes, `[M, 2]`.
            owners: Requests of those.
        """
        repeated = [state.repetition for state in states]
        for repetition, token_id in zip(repeated, lines[:, TOKEN].tolist(), strict=True):
            repetition.append(token_id)
        count = len(states)
        numbers: list[list[float]] = [[np.nan] * len(LOGIT_STATS)] * count
        fates: list[Fate | None] = [None] * count
        statistics: Floats | None = None
        if self.watch:
            tokens = np.stack([lines[:, SEQUENCE], lines[:, FED_AT] - 1], axis=1)
            loops = np.concatenate([lines[:, READ_AT], np.full(len(left), self._total_loops)])
            found = self._observe([*states, *owners], np.concatenate([tokens, left]), loops)
            if count:
                statistics, seen = found[0][:count], found[1][:count]
                fates = [FATES[fate] for fate in self._fates_of(seen, lines[:, READ_AT]).tolist()]
                drops = [state.entropy_drop for state in states]
                numbers = compute_logit_stats(logits, [each.at(-1) for each in repeated], drops).tolist()
        return [
            self._output(state, line, fate, values, logits[row], None if statistics is None else statistics[row])
            for row, (state, line, fate, values) in enumerate(zip(states, lines.tolist(), fates, numbers, strict=True))
        ]

    def _output(
        self,
        state: RequestState,
        line: list[int],
        fate: Fate | None,
        values: list[float],
        logits: Tensor,
        statistics: Floats | None,
    ) -> TokenOutput:
        wanted, depth, token_id, why = state.request.logprobs, line[READ_AT], line[TOKEN], line[WHY]
        logprob, alternatives = (None, ()) if wanted is None else logprobs_of(logits, token_id, wanted)
        would_have_met = None
        if state.shadow_rule is not None and statistics is not None:
            would_have_met = state.shadow_rule.would_have_been_met(statistics[:depth], values[_MARGIN])
        return TokenOutput(
            id=token_id,
            text="",
            depth=depth,
            reason=exit_reason(state.rule.config.mode, bool(why & MET_FLAG), bool(why & DIVERGED_FLAG)),
            fate=fate,
            proximity=_finite(values[_PROXIMITY]),
            margin=_finite(values[_MARGIN]),
            entropy=_finite(values[_ENTROPY]),
            logprob=logprob,
            alternatives=alternatives,
            rung=self._name,
            would_have_met=would_have_met,
        )

    def _observe(self, states: Sequence[RequestState], tokens: Ints, loops: Ints) -> tuple[Floats, Ints]:
        """Statistics of the loops of tokens in or just out of their lanes; the fates are noted with their requests.

        Args:
            states: Request of each token, `[N]`.
            tokens: Slot and cache position of each, `[N, 2]`.
            loops: Loops that each has finished, `[N]`.

        Returns:
            `STATISTICS` of every loop, `[N, T, 8]`, and fates `[N, T]`; undefined past the finished loops.
        """
        if not len(states):
            return np.zeros((0, self._total_loops, len(STATISTICS)), np.float32), np.zeros((0, self._total_loops), int)
        lanes, rule = self._lanes, states[0].rule
        assert lanes.paths is not None
        at = to_device(tokens.T.copy(), lanes.device)
        paths = lanes.paths.index_select(0, lanes.path_index(at[0], at[1]))
        statistics, fates = PathReader(self._model.gate, rule.params(watch=True)).read(paths)
        seen = np.where(np.arange(self._total_loops) < loops[:, None], to_host(fates), 0)
        for state, position, own in zip(states, tokens[:, 1].tolist(), seen.astype(np.int8), strict=True):
            state.fates[position - state.prompt_length + 1] = own
        return to_host(statistics), seen

    def _fates_of(self, fates: Ints, loops: Ints) -> Ints:
        """Fate of tokens: the mildest of their last loops, as `sigma0.signals.verdict.mildest` has it.

        Args:
            fates: Of every loop, 0 where there is none, `[N, T]`.
            loops: Loops that each has finished, `[N]`.
        """
        last = loops[:, None] - 1 - np.arange(self._patience)  # [N, patience]
        # FATES goes from the mildest on, and 0, none, ends it
        found: Ints = np.take_along_axis(fates, np.maximum(last, 0), axis=1).min(axis=1)
        return np.where(last[:, -1] >= 0, found, 0)

    @torch.no_grad()
    def finish(self, state: RequestState, work: tuple[int, int]) -> RequestOutput:
        """The output of a finished request that still has its slot.

        Args:
            state: The request.
            work: Passes with a row of a new token, and its rows in them.
        """
        tokens, verdict, opened, text = state.outputs, None, None, None
        if self.watch:
            tokens = self._with_final_fates(state)
            score = check(state.detokenizer.text, state.request.context).score
            parts = [of_token(token.reason, token.depth, token.fate, token.proximity or 0.0) for token in tokens]
            verdict = aggregate(parts, self._policy, score)
            if state.collapsed:
                verdict = verdict.model_copy(update={"reason": "collapse", "converged": False})
            opened, text = door(verdict, self._policy), explain(verdict, self._policy)
        depths = [token.depth for token in tokens]
        stopped = tokens[-1].id in state.eos or state.detokenizer.stopped or state.collapsed
        passes, rows = work
        return RequestOutput(
            text=state.detokenizer.text,
            tokens=tuple(tokens),
            finish_reason="stop" if stopped else "length",
            prompt_tokens=state.prompt_length,
            cached_tokens=state.cached,
            total_loops=self._total_loops,
            passes=passes,
            rows=rows,
            savings=savings([depths], passes, rows, self._total_loops),
            verdict=verdict,
            door=opened,
            door_text=text,
            preemptions=state.entry.preemptions,
            collapsed=state.collapsed,
        )

    def _with_final_fates(self, state: RequestState) -> list[TokenOutput]:
        """The tokens, with what their loops after their exits have added."""
        slot, lanes = state.entry.slot, self._lanes
        table = to_host(lanes.table[slot * lanes.depth : (slot + 1) * lanes.depth])
        newest = state.prompt_length - 2 + len(state.outputs)
        rows = table[(table[:, STAGE] < lanes.idle) & (table[:, CACHE_POSITION] <= newest)]
        if len(rows):
            tokens = np.stack([np.full(len(rows), slot), rows[:, CACHE_POSITION]], axis=1)
            self._observe([state] * len(rows), tokens, rows[:, STAGE] % lanes.depth)
        fates = state.fates[: len(state.outputs)].astype(np.int64)
        known = fates > 0
        loops = np.where(known.any(axis=1), self._total_loops - known[:, ::-1].argmax(axis=1), 0)
        found = self._fates_of(fates, loops).tolist()
        return [replace(token, fate=FATES[fate]) for token, fate in zip(state.outputs, found, strict=True)]


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
