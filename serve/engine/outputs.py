"""Output processor: token outputs and request outputs, with the statistics of all requests of a pass together."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

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
# Proximity, margin, entropy, fate, and whether a rule that stops nothing would have been met.
Known = tuple[float | None, float | None, float | None, Fate | None, bool | None]
_UNKNOWN: Known = (None, None, None, None, None)
# A token that was sampled: its request, what it adds to the text, and its line of the step.
Emitted = tuple[RequestState, str, Sequence[int]]
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
        self._fewest = _NO_FATE + self._patience
        self._left: list[Left] = []
        self._waited = 0
        self.watch = notes is not None

    @torch.no_grad()
    def outputs(self, emitted: Sequence[Emitted], logits: Tensor | None, left: Sequence[Left]) -> list[TokenOutput]:
        """Token outputs of one pass, at most one of each request.

        Args:
            emitted: The tokens, N of them.
            logits: That each was sampled from, `[N, V]`; None where there is no token.
            left: Tokens that have left their lanes.
        """
        known = [_UNKNOWN] * len(emitted)
        if self.watch and logits is not None:
            known = self._known(emitted, logits)
        tokens, told = [], zip(emitted, known, strict=True)
        for row, ((state, text, line), (proximity, margin, entropy, fate, met)) in enumerate(told):
            wanted, token_id, why = state.request.logprobs, line[TOKEN], line[WHY]
            logprob: float | None = None
            alternatives: tuple[Alternative, ...] = ()
            if wanted is not None:
                assert logits is not None
                logprob, alternatives = logprobs_of(logits[row], token_id, wanted)
            reason = exit_reason(state.rule.config.mode, bool(why & MET_FLAG), bool(why & DIVERGED_FLAG))
            tokens.append(
                TokenOutput(
                    id=token_id,
                    text=text,
                    depth=line[READ_AT],
                    reason=reason,
                    fate=fate,
                    proximity=proximity,
                    margin=margin,
                    entropy=entropy,
                    logprob=logprob,
                    alternatives=alternatives,
                    rung=self._name,
                    would_have_met=met,
                )
            )
        self._passed(left)
        return tokens

    def _known(self, emitted: Sequence[Emitted], logits: Tensor) -> list[Known]:
        """What is known of emitted tokens at their exits."""
        repeated = [state.repetition.at(-1) for state, _, _ in emitted]
        statistics = compute_logit_stats(logits, repeated, [state.entropy_drop for state, _, _ in emitted]).tolist()
        late = [(state, line) for state, _, line in emitted if line[READ_AT] >= self._fewest]
        if late:
            read = [(state, line[SEQUENCE], line[FED_AT] - 1) for state, line in late]
            self._note_fates(read, [line[READ_AT] for _, line in late])
        fates = [FATES[state.fates[len(state.outputs)]] for state, _, _ in emitted]
        met = self._shadows(emitted, [row[_MARGIN] for row in statistics])
        return [
            (row[_PROXIMITY], _finite(row[_MARGIN]), _finite(row[_ENTROPY]), fates[index], met.get(index))
            for index, row in enumerate(statistics)
        ]

    def _note_fates(self, read: Sequence[Left], loops: Sequence[int]) -> None:
        """Notes the fates of tokens that have finished so many loops, at least as many as a fate needs."""
        assert self._notes is not None
        slots, positions = np.array([(slot, position) for _, slot, position in read]).T
        last = self._notes.last_fates(slots, positions, np.array(loops), self._patience)
        for (state, _, position), codes in zip(read, last, strict=True):
            # FATES goes from the mildest on
            state.fates[position - state.prompt_length + 1] = min(codes)

    def _shadows(self, emitted: Sequence[Emitted], margins: Sequence[float]) -> dict[int, bool | None]:
        """Whether rules that stop nothing would have been met by emitted tokens, by index."""
        assert self._notes is not None
        rules = {row: state.shadow_rule for row, (state, _, _) in enumerate(emitted) if state.shadow_rule is not None}
        if not rules:
            return {}
        slots, behind, depths = np.array([emitted[row][2] for row in rules])[:, [SEQUENCE, FED_AT, READ_AT]].T
        statistics = to_host(self._notes.read(slots, behind - 1)[0])
        return {
            row: rule.would_have_been_met(loops[:depth], margins[row])
            for loops, depth, (row, rule) in zip(statistics, depths.tolist(), rules.items(), strict=True)
        }

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
    def flush(self, also: Sequence[Left] = (), loops: Sequence[int] = ()) -> None:
        """Looks at the states of all tokens that have left their lanes; before a request loses its slot.

        Args:
            also: Tokens that are still in their lanes.
            loops: That each of them has finished, at least as many as a fate needs.
        """
        left, ran = [*self._left, *also], [*[self._total_loops] * len(self._left), *loops]
        self._left, self._waited = [], 0
        if left:
            self._note_fates(left, ran)

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
        loops = table[:, STAGE] % lanes.depth
        own = (table[:, STAGE] < lanes.idle) & (table[:, CACHE_POSITION] <= newest) & (loops >= self._fewest)
        self.flush([(state, slot, each) for each in table[own, CACHE_POSITION].tolist()], loops[own].tolist())
        fates = [FATES[code] for code in state.fates[: len(state.outputs)].tolist()]
        return [
            token if token.fate == fate else replace(token, fate=fate)
            for token, fate in zip(state.outputs, fates, strict=True)
        ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
