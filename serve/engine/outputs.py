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
from sigma0.decode.ops import FATES, LOGIT_STATS, Fate
from sigma0.decode.sampling_params import Alternative, logprobs_of
from sigma0.decode.stats import compute_logit_stats
from sigma0.decode.step import FED_AT, READ_AT, SEQUENCE, TOKEN, WHY
from sigma0.decode.transfer import to_host
from sigma0.serve.engine.loop_notes import LoopNotes
from sigma0.serve.engine.messages import RequestOutput, ServedModel, TokenOutput
from sigma0.serve.engine.request import RequestState
from sigma0.signals.grounding.check import check
from sigma0.signals.savings import savings
from sigma0.signals.verdict import DoorPolicy, aggregate, door, explain, of_token, patience_for

_ENTROPY, _MARGIN, _PROXIMITY = (LOGIT_STATS.index(name) for name in ("entropy", "margin", "proximity"))
# The first loops of a token have no fate.
_NO_FATE = 2
_UNKNOWN = (np.nan, np.nan, np.nan)
Floats = npt.NDArray[np.float32]
# A token that has left its lane: request, slot and cache position.
Left = tuple[RequestState, int, int]


class OutputProcessor:
    """Makes outputs of what passes emit.

    Args:
        model: The looped model.
        name: Of the model.
        lanes: Tokens in flight.
        notes: On the loops of tokens; None where neither statistics nor verdicts are wanted.
    """

    def __init__(self, model: ServedModel, name: str, lanes: Lanes, notes: LoopNotes | None) -> None:
        self._lanes, self._notes, self._name = lanes, notes, name
        self._total_loops = model.num_loops
        self._policy: DoorPolicy = model.door_policy
        self._patience = patience_for(self._policy, self._total_loops)
        self._left: list[Left] = []
        self._waited = 0
        self.watch = notes is not None

    @torch.no_grad()
    def outputs(
        self,
        states: Sequence[RequestState],
        lines: Ints,
        logits: Tensor | None,
        left: Sequence[Left],
    ) -> list[TokenOutput]:
        """Token outputs of one pass, at most one of each request; their texts are added by the engine.

        Args:
            states: Request of each token, `[N]`.
            lines: Emitted lines, `[N, 9]`.
            logits: That each was sampled from, `[N, V]`; None where there is no token.
            left: Tokens that have left their lanes.
        """
        if not self.watch or logits is None:
            self._passed(left)
            for state, token_id in zip(states, lines[:, TOKEN].tolist(), strict=True):
                state.repetition.append(token_id)
            return [self._output(states[row], line, logits, row) for row, line in enumerate(lines.tolist())]
        repeated = []
        for state, token_id in zip(states, lines[:, TOKEN].tolist(), strict=True):
            state.repetition.append(token_id)
            repeated.append(state.repetition.at(-1))
        statistics = compute_logit_stats(logits, repeated, [state.entropy_drop for state in states])
        certain = statistics[:, [_PROXIMITY, _MARGIN, _ENTROPY]].tolist()
        loops = self._loops_of(states, lines, [values[1] for values in certain])
        # those that were read at the last loop are known already
        final = set(lines[lines[:, READ_AT] == self._total_loops, SEQUENCE].tolist())
        self._passed([each for each in left if each[1] not in final])
        return [
            self._output(state, line, logits, row, (values[0], values[1], values[2]), loops.get(row, (None, None)))
            for row, (state, line, values) in enumerate(zip(states, lines.tolist(), certain, strict=True))
        ]

    def _output(
        self,
        state: RequestState,
        line: list[int],
        logits: Tensor | None,
        row: int,
        certain: tuple[float, float, float] = _UNKNOWN,
        loops: tuple[Fate | None, bool | None] = (None, None),
    ) -> TokenOutput:
        wanted, token_id, why = state.request.logprobs, line[TOKEN], line[WHY]
        logprob: float | None = None
        alternatives: tuple[Alternative, ...] = ()
        if wanted is not None:
            assert logits is not None
            logprob, alternatives = logprobs_of(logits[row], token_id, wanted)
        return TokenOutput(
            id=token_id,
            text="",
            depth=line[READ_AT],
            reason=exit_reason(state.rule.config.mode, bool(why & MET_FLAG), bool(why & DIVERGED_FLAG)),
            fate=loops[0],
            proximity=_finite(certain[0]),
            margin=_finite(certain[1]),
            entropy=_finite(certain[2]),
            logprob=logprob,
            alternatives=alternatives,
            rung=self._name,
            would_have_met=loops[1],
        )

    def _loops_of(
        self, states: Sequence[RequestState], lines: Ints, margins: Sequence[float]
    ) -> dict[int, tuple[Fate | None, bool | None]]:
        """What the loops of emitted tokens say: fate, and whether a rule that stops nothing would have been met."""
        # with fewer loops a token has no fate yet
        late = lines[:, READ_AT] >= _NO_FATE + self._patience
        late |= np.array([state.shadow_rule is not None for state in states])
        rows: Ints = np.flatnonzero(late)
        if not len(rows):
            return {}
        depths, own = lines[rows, READ_AT], [states[row] for row in rows.tolist()]
        statistics, fates = self._observe(own, lines[rows, SEQUENCE], lines[rows, FED_AT] - 1, depths)
        found = self._fates_of(fates, depths).tolist()
        loops: dict[int, tuple[Fate | None, bool | None]] = {}
        for index, (row, state, depth) in enumerate(zip(rows.tolist(), own, depths.tolist(), strict=True)):
            met = None
            if state.shadow_rule is not None:
                met = state.shadow_rule.would_have_been_met(statistics[index, :depth], margins[row])
            loops[row] = FATES[found[index]], met
        return loops

    def _passed(self, left: Sequence[Left]) -> None:
        """Notes tokens that have run all their loops; their states are looked at together, before they are gone."""
        if not self.watch:
            return
        self._left += left
        self._waited += 1
        assert self._notes is not None
        # before the next tokens take their places
        if self._left and self._waited >= self._notes.window - self._total_loops - 1:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Looks at the states of all tokens that have left their lanes; before a request loses its slot."""
        left, self._left, self._waited = self._left, [], 0
        if left:
            states, slots, positions = zip(*left, strict=True)
            self._observe(states, np.array(slots), np.array(positions), np.full(len(left), self._total_loops))

    def _observe(
        self, states: Sequence[RequestState], slots: Ints, positions: Ints, loops: Ints
    ) -> tuple[Floats, Ints]:
        """Statistics of the loops of tokens in or out of their lanes; the fates are noted with their requests.

        Args:
            states: Request of each token, `[N]`.
            slots: Slot of each, `[N]`.
            positions: Cache position of each, `[N]`.
            loops: Loops that each has finished, `[N]`.

        Returns:
            `STATISTICS` of every loop, `[N, T, 8]`, and fates `[N, T]`; undefined past the finished loops.
        """
        assert self._notes is not None
        statistics, fates = self._notes.read(slots, positions)
        seen = np.where(np.arange(self._total_loops) < loops[:, None], fates, 0)
        for state, position, own in zip(states, positions.tolist(), seen.astype(np.int8), strict=True):
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
            self.flush()
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
            slots = np.full(len(rows), slot)
            self._observe([state] * len(rows), slots, rows[:, CACHE_POSITION], rows[:, STAGE] % lanes.depth)
        fates = state.fates[: len(state.outputs)].astype(np.int64)
        known = fates > 0
        loops = np.where(known.any(axis=1), self._total_loops - known[:, ::-1].argmax(axis=1), 0)
        found = self._fates_of(fates, loops).tolist()
        return [replace(token, fate=FATES[fate]) for token, fate in zip(state.outputs, found, strict=True)]


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
