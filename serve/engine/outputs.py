"""Output processor: token outputs and request outputs, with the statistics of all requests of a pass together."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from sigma0.config import ExitMode
from sigma0.decode.exits import Reason, exit_reason
from sigma0.decode.lanes import CACHE_POSITION, DIVERGED_FLAG, FORCED_FLAG, MET_FLAG, STAGE, Lanes
from sigma0.decode.logits import Alternative, logprobs_of
from sigma0.decode.ops import FATES, LOGIT_STATS, Fate
from sigma0.decode.repetition import TextStats
from sigma0.decode.stats import Deepest, LoopStatsRecorder
from sigma0.decode.step import EXIT_DEPTH, FED_POSITION, SEQUENCE, STOP_FLAGS, TOKEN
from sigma0.decode.transfer import to_host
from sigma0.serve.engine.messages import EngineRequest, RequestOutput, TokenOutput
from sigma0.serve.engine.request import RequestState
from sigma0.signals.answer import judge_answer
from sigma0.signals.savings import savings
from sigma0.signals.verdict import DoorPolicy, door, explain, patience_for

if TYPE_CHECKING:
    from sigma0.models.hf_generate import DepthGenerationMixin

_ENTROPY, _MARGIN, _PROXIMITY = (LOGIT_STATS.index(name) for name in ("entropy", "margin", "proximity"))
# The first loops of a token have no fate.
_NO_FATE = 2
# How far a context bears a text out; None where nothing can be checked.
LookUp = Callable[[str, Sequence[str]], float | None]
# What a step emits of a row, as `sigma0.decode.step` names its columns.
Line = Sequence[int]
# A new token: its request and its index among the outputs.
Token = tuple[RequestState, int]
# A token that has left its lane: request, slot, cache position, and the loops that it had finished.
Left = tuple[RequestState, int, int, int]


class Known(NamedTuple):
    """What is known of a token at its exit, as `TokenOutput` has it."""

    proximity: float | None = None
    margin: float | None = None
    entropy: float | None = None
    fate: Fate | None = None
    met: bool | None = None  # Whether a rule that stops nothing would have been met
    repetition: float = 0.0  # The part of the proximity that the ids alone decide; 0 where it is not computed


# Of a token that nobody looks at.
UNKNOWN = Known()


@lru_cache
def _reason(mode: ExitMode, why: int) -> Reason:
    return exit_reason(mode, bool(why & MET_FLAG), bool(why & DIVERGED_FLAG), bool(why & FORCED_FLAG))


def _finite(numbers: list[float]) -> list[float] | list[float | None]:
    """Numbers, and None for those that are none."""
    if isfinite(sum(numbers)):
        return numbers
    return [number if isfinite(number) else None for number in numbers]


class Unjudged(NamedTuple):
    """The output of a finished request, as soon as it is judged; nothing of it is the engine's any more."""

    judge: Callable[[LookUp], RequestOutput]  # The output with its verdict, given what looks a text up in a context


class OutputProcessor:
    """Makes outputs of what passes emit.

    Args:
        model: The looped model.
        name: Of the model.
        lanes: Tokens in flight.
        notes: On the loops of tokens; None where neither statistics nor verdicts are wanted.

    Attributes:
        watch: Whether they are.
        texts: Statistics of the ids of texts.
    """

    def __init__(
        self, model: "DepthGenerationMixin", name: str, lanes: Lanes, notes: LoopStatsRecorder[Token] | None
    ) -> None:
        self._lanes, self._notes, self._name = lanes, notes, name
        self._total_loops = model.num_loops
        self._policy: DoorPolicy = model.door_policy
        self._confidence_model = model.confidence_model
        self._patience = patience_for(self._policy, self._total_loops)
        self._left: list[Left] = []
        self._waited = 0
        self.watch = notes is not None
        self.texts = TextStats(model.operations)
        # what it needs is compiled before the first request
        self.texts.text()

    def reset(self) -> None:
        """Forgets tokens that have left their lanes."""
        self._left, self._waited = [], 0
        if self._notes is not None:
            self._notes.reset()

    def known(self, states: Sequence[RequestState], lines: Sequence[Line], logits: Tensor | None) -> list[Known]:
        """What is known of the tokens of one pass, at most one of each request.

        Args:
            states: Their requests.
            lines: What the step emitted of each.
            logits: That each was sampled from, `[N, V]`; None where that is not known.
        """
        exits = self._note_exits(states, lines) if self.watch else []
        token_ids = [line[TOKEN] for line in lines]
        read = self.texts.take([state.text for state in states], token_ids, logits if self.watch else None)
        repetitions = read[-1]
        if not self.watch or logits is None:
            return [Known(repetition=repetition) for repetition in repetitions]
        self._note_fates(exits)
        shadows = self._shadows(states, lines, read[_MARGIN])
        met = map(shadows.get, range(len(states)))
        fates = [FATES[state.fates.item(len(state.outputs))] for state in states]
        known = (read[_PROXIMITY], _finite(read[_MARGIN]), _finite(read[_ENTROPY]), fates, met, repetitions)
        return list(map(Known, *known))

    def output(
        self, state: RequestState, text: str, line: Line, known: Known, logits: Tensor | None, row: int
    ) -> TokenOutput:
        """The output of a token, which adds a text; its row among logits `[K, V]` is what it was sampled from."""
        wanted, token_id = state.request.logprobs, line[TOKEN]
        logprob: float | None = None
        alternatives: tuple[Alternative, ...] = ()
        if wanted is not None:
            assert logits is not None
            logprob, alternatives = logprobs_of(logits[row], token_id, wanted)
        proximity, margin, entropy, fate, met, _ = known
        reason = _reason(state.rule.config.mode, line[STOP_FLAGS])
        return TokenOutput(
            token_id, text, line[EXIT_DEPTH], reason, fate, proximity, margin, entropy, logprob, alternatives,
            self._name, None, met,
        )  # fmt: skip

    def _note_exits(self, states: Sequence[RequestState], lines: Sequence[Line]) -> list[Left]:
        """Notes the tokens of one pass, and which of them run no further than their exits; all of them."""
        exits: list[Left] = []
        for state, line in zip(states, lines, strict=True):
            state.newest_id, depth = line[TOKEN], line[EXIT_DEPTH]
            exits.append((state, line[SEQUENCE], line[FED_POSITION] - 1, depth))
            if depth < self._total_loops and state.leaves_at_exit(len(state.outputs), depth):
                self._left.append(exits[-1])
        return exits

    def _note_fates(self, tokens: Sequence[Left]) -> None:
        """Notes the fates of those tokens that have finished as many loops as a fate needs."""
        assert self._notes is not None
        late = [token for token in tokens if token[3] >= _NO_FATE + self._patience]
        if not late:
            return
        at = [(slot, position) for _, slot, position, _ in late]
        fates = self._notes.mildest_fates(at, [loops for _, _, _, loops in late], self._patience)
        for (state, _, position, _), fate in zip(late, fates, strict=True):
            state.fates[_index(state, position)] = fate

    def _shadows(
        self, states: Sequence[RequestState], lines: Sequence[Line], margins: Sequence[float]
    ) -> dict[int, bool | None]:
        """Whether rules that stop nothing would have been met by tokens, by index."""
        assert self._notes is not None
        rules = {row: state.shadow_rule for row, state in enumerate(states) if state.shadow_rule is not None}
        known = {row: rule.known_without_loops(lines[row][EXIT_DEPTH], margins[row]) for row, rule in rules.items()}
        open_rules = {row: rule for row, rule in rules.items() if rule.is_about_loops}
        if open_rules:
            slots, after, depths = np.array([lines[row] for row in open_rules])[
                :, [SEQUENCE, FED_POSITION, EXIT_DEPTH]
            ].T
            by_gate = all(rule.config.mode == "qexit" for rule in open_rules.values())
            statistics = self._notes.read(slots, after - 1, by_gate)
            for loops, depth, (row, rule) in zip(statistics, depths.tolist(), open_rules.items(), strict=True):
                known[row] = rule.would_have_been_met(loops[:depth], margins[row])
        return known

    def note_left(self, left: Sequence[tuple[RequestState, int, int]]) -> None:
        """Notes tokens that have run all their loops; their states are looked at together, before they are gone.

        Args:
            left: Request, slot and cache position of each.
        """
        self._left += [(*token, self._total_loops) for token in left]
        self._waited += 1
        assert self._notes is not None
        # before the next tokens take their places
        if self._left and self._waited >= self._notes.window - self._total_loops - 1:
            self.flush()

    def flush(self, also: Sequence[Left] = ()) -> None:
        """Looks at the states of all tokens that have left their lanes; before a request loses its slot.

        Args:
            also: Tokens that are still in their lanes, and run no further.
        """
        # those of requests that are over say nothing to anybody
        tokens = [token for token in (*self._left, *also) if not token[0].is_over]
        self._left, self._waited = [], 0
        if not tokens:
            return
        self._note_fates(tokens)
        assert self._notes is not None
        whose = [(state, _index(state, position)) for state, _, position, _ in tokens]
        named = [(token, token[0].id_of(token[1])) for token in whose]
        at = [(slot, position) for _, slot, position, _ in tokens]
        _tell(self._notes.add_deepest(named, at, [loops for _, _, _, loops in tokens]))

    def finish(self, state: RequestState, work: tuple[int, int]) -> RequestOutput:
        """The output of a finished request that still has its slot, without its verdict; given its passes and rows."""
        # what a grammar has not let end is cut, and clients must not take it for whole
        ends = state.collapsed and state.params.grammar is None
        stopped = state.outputs[-1].id in state.eos or state.detokenizer.stopped or ends
        tokens = self._with_final_loops(state) if self.watch else state.outputs
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
            savings=savings([[token.depth for token in tokens]], passes, rows, self._total_loops),
            preemptions=state.entry.preemptions,
            collapsed=state.collapsed,
            times=state.times(),
            prompt=tuple(state.prompt[position] for position in sorted(state.prompt)),
        )

    def judged(self, output: RequestOutput, request: EngineRequest, look_up: LookUp) -> RequestOutput:
        """The output of a finished request with its verdict."""
        policy = self._policy
        verdict = judge_answer(
            output.tokens, self._total_loops, policy, look_up(output.text, request.context), output.collapsed,
            self._confidence_model, request.prompt_ids, output.finish_reason != "stop",
        )  # fmt: skip
        return replace(output, verdict=verdict, door=door(verdict, policy), door_text=explain(verdict, policy))

    def _with_final_loops(self, state: RequestState) -> list[TokenOutput]:
        """The tokens, with what their loops after their exits have added."""
        assert self._notes is not None
        slot, lanes = state.entry.slot, self._lanes
        table = to_host(lanes.table[slot * lanes.depth : (slot + 1) * lanes.depth])
        newest = state.prompt_length - 2 + len(state.outputs)
        loops = table[:, STAGE] % lanes.depth
        current = (table[:, STAGE] < lanes.idle) & (table[:, CACHE_POSITION] <= newest)
        in_flight = zip(table[current, CACHE_POSITION].tolist(), loops[current].tolist(), strict=True)
        self.flush([(state, slot, position, ran) for position, ran in in_flight])
        _tell(self._notes.read_deepest())
        # a token ends with what is read of it in the end
        read = [state.deepest.get(index, Deepest()) for index in range(len(state.outputs))]
        fates = [FATES[code] for code in state.fates[: len(read)].tolist()]
        final = zip(state.outputs, read, fates, strict=True)
        return [TokenOutput(*token[:-4], *deepest)._replace(fate=fate) for token, deepest, fate in final]


def _index(state: RequestState, position: int) -> int:
    """Output index of the token that is read from a cache position."""
    return position - state.prompt_length + 1


def _tell(read: Iterable[tuple[Token, Deepest]]) -> None:
    for (state, index), known in read:
        state.deepest[index] = known
