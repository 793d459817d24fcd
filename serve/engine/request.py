"""State of a running request: generated tokens, sampling, and what it needs to be resumed after preemption."""

from collections import deque
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from sigma0.decode.batch import DECODING, PREFILL, Ints
from sigma0.decode.detokenizer import IncrementalDetokenizer
from sigma0.decode.exits import ExitRule
from sigma0.decode.logits_processors import processors_for
from sigma0.decode.ops import Operations
from sigma0.decode.paged_step import RequestExit
from sigma0.decode.random_numbers import request_seed
from sigma0.decode.repetition import CollapseStop, EntropyDrop, Repetition
from sigma0.decode.step import Exits, TrailingLogits
from sigma0.decode.token_loop import Emission
from sigma0.decode.verify import VerifiedLoop
from sigma0.serve.engine.messages import EngineRequest, ServedModel, TokenOutput
from sigma0.serve.engine.scheduler import SequenceEntry
from sigma0.signals.canary import Tighten


@dataclass(frozen=True)
class SuspendedRow:
    """A row that was in flight at preemption; it waits until every position before it is recomputed.

    Attributes:
        loops: Loops that it had finished.
        role: As `sigma0.decode.batch` names them.
    """

    loops: int
    role: int


class RequestState:
    """A request that was submitted, from the queue to its last token.

    Args:
        entry: Its sequence in the scheduler.
        request: The request.
        rule: Its exit rule.
        detokenizer: Of its text.
        eos: Ids that end the text.
        model: The looped model.
        watch: Whether statistics of its tokens are wanted.

    Attributes:
        prompt_length: Ids of the prompt.
        drops: Whether rows leave at their exits (`drop`).
        shadow_rule: Under `full` and `fixed`, the model's own exit rule, which is evaluated without stopping tokens;
            None under any other mode, or without statistics.
        request_exit: What a pass needs to decide its rows.
        outputs: Tokens so far.
        token_ids: Of every cache position that has entered or is about to enter, draft tokens included.
        pending: Cache positions that enter the next pass.
        exit_depths: Loop after which the row of each new token left, by cache position; only under `drop`.
        suspended: Rows that were in flight at preemption, by cache position; empty once they are resumed.
        recompute_until: Positions whose K/V are recomputed after preemption without sampling again.
        passes: Passes with a row of a new token.
        rows: Rows of new tokens.
        cached: Cache positions of the prompt that were found in the prefix cache.
        collapse_state: Collapse statistics, kept here while it is preempted.
        fates: Fates of its loops, kept here while it is preempted.
        met: Whether its positions met the loop-end rule, kept here while it is preempted.
        repetition: Repetition statistics of the new tokens.
        entropy_drop: Statistics of the entropy at the new tokens.
        collapsed: Whether it was ended because it repeats itself.
    """

    def __init__(
        self,
        entry: SequenceEntry,
        request: EngineRequest,
        rule: ExitRule,
        detokenizer: IncrementalDetokenizer,
        eos: frozenset[int],
        model: ServedModel,
        watch: bool,
    ) -> None:
        self.entry = entry
        self.request = request
        self.rule = rule
        self.detokenizer = detokenizer
        self.prompt_length = len(request.prompt_ids)
        self.drops = request.exit_config.after_exit == "drop"
        self.shadow_rule: ExitRule | None = model.counterfactual_rule(request.exit_config) if watch else None
        evaluated = rule if self.shadow_rule is None else self.shadow_rule
        verifies = request.exit_config.after_exit == "verify"
        self.request_exit = RequestExit(rule, evaluated.params(watch), verifies, self.prompt_length)
        self.outputs: list[TokenOutput] = []
        self.token_ids = entry.token_ids
        self.pending: deque[int] = deque()
        self.exit_depths: dict[int, int] = {}
        self.suspended: dict[int, SuspendedRow] = {}
        self.recompute_until = 0
        self.passes = 0
        self.rows = 0
        self.cached = 0
        self.collapse_state: tuple[Tensor, ...] | None = None
        self.fates: npt.NDArray[np.int8] | None = None
        self.met: npt.NDArray[np.bool_] | None = None
        self._eos = eos
        self._model = model
        self._device = model.device
        self._processors = processors_for(request.sampling, self.prompt_length)
        if request.on_collapse == "tighten":
            self._processors.append(Tighten(self.prompt_length))
        self._collapse = CollapseStop() if request.on_collapse == "stop" else None
        self.repetition = Repetition()
        self.entropy_drop = EntropyDrop()
        self.collapsed = False
        self._generator = None
        if request.sampling.temperature != 0.0:
            seed = request_seed(request.sampling.seed)
            self._generator = torch.Generator(device=model.device).manual_seed(seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the argmax of the logits, with no processors."""
        return not self._processors and self._generator is None

    @property
    def is_recomputing(self) -> bool:
        """Whether rows that were in flight at preemption are still being recomputed."""
        return bool(self.suspended)

    def target_loops(self, position: int) -> int:
        """Loop after which the row of a cache position leaves, or is suspended."""
        row = self.suspended.get(position)
        return row.loops if row is not None else self.exit_depths.get(position, self.rule.last_loop)

    def is_checked(self, position: int, loops: int) -> bool:
        """Whether a draft token is verified at a loop; never without `verify`."""
        return False

    def role(self, position: int) -> int:
        """Role of the row of a cache position as it enters."""
        first_sampled = max(self.prompt_length - 1, self.recompute_until)
        return PREFILL if self.is_recomputing or position < first_sampled else DECODING

    def sample(self, logits: Tensor) -> int:
        """The next id, given logits `[V]`; for requests that are not simply greedy."""
        ids = torch.tensor([self.token_ids], device=self._device)
        scores = self._processors(ids, logits.to(torch.float32, copy=True)[None])
        if self._generator is None:
            return int(scores.argmax(-1))
        return int(torch.multinomial(torch.softmax(scores, dim=-1)[0], 1, generator=self._generator))

    def is_last(self, token_id: int) -> bool:
        """Whether an id that is about to be output ends the text."""
        return token_id in self._eos or len(self.outputs) + 1 >= self.request.max_new_tokens

    def collapses(self) -> bool:
        """Whether the text ends with the newest id because it repeats itself."""
        self.collapsed = self._collapse is not None and self._collapse.ends(self.repetition)
        return self.collapsed

    def is_eos(self, token_id: int) -> bool:
        """Whether an id ends the text."""
        return token_id in self._eos

    def append(self, token_id: int) -> None:
        """Feeds a token back: its cache position enters the next pass."""
        self.pending.append(len(self.token_ids))
        self.token_ids.append(token_id)

    def suspend(self, positions: Ints, loops: Ints, roles: Ints) -> None:
        """Notes the rows in flight at preemption, and what must be recomputed before they are resumed."""
        in_flight = zip(positions.tolist(), loops.tolist(), roles.tolist(), strict=True)
        # preempted again while it recomputes, it still has the older rows to resume
        rows = {position: SuspendedRow(loop, role) for position, loop, role in in_flight if role != PREFILL}
        self.suspended = {**rows, **self.suspended}
        entered = len(self.token_ids) - len(self.pending)
        self.recompute_until = entered if self.outputs and not self.suspended else 0
        self.entry.prefill_end = entered
        exact = self.prompt_length if self.drops else entered
        self.entry.cacheable = min(exact if self.outputs else self.prompt_length - 1, entered, *self.suspended)

    def resume(self) -> dict[int, SuspendedRow]:
        """The suspended rows, once all of them are recomputed; they are suspended no longer."""
        rows, self.suspended = self.suspended, {}
        return rows


class _EngineWave:
    """The part of a wave that `VerifiedLoop` uses, over the rows of the engine."""

    def __init__(self, state: "VerifiedRequestState", rule: ExitRule, ops: Operations) -> None:
        self._state = state
        self.rule = rule
        self.ops = ops
        self.record = None
        self.cache = SimpleNamespace(length=state.prompt_length)

    def enter(self, token_ids: Tensor, sequences: Ints, cache_positions: Ints, positions: Ints) -> None:
        """Feeds a draft or verified token back."""
        assert int(cache_positions[0]) == len(self._state.token_ids)
        self._state.append(int(token_ids[0]))

    def drop_from(self, sequence: int, cache_position: int) -> None:
        """Rejects the draft tokens from a cache position on."""
        self._state.reject_from(cache_position)


class VerifiedRequestState(RequestState):
    """A request under `verify`: draft tokens at the exits, output once loop T accepts them.

    Takes what `RequestState` takes.

    Attributes:
        rejected_from: First cache position that was rejected since the engine looked; None where none was.
    """

    def __init__(
        self,
        entry: SequenceEntry,
        request: EngineRequest,
        rule: ExitRule,
        detokenizer: IncrementalDetokenizer,
        eos: frozenset[int],
        model: ServedModel,
        watch: bool,
    ) -> None:
        super().__init__(entry, request, rule, detokenizer, eos, model, watch)
        self.rejected_from: int | None = None
        self._first_met: bool | None = None
        max_length = self.prompt_length + request.max_new_tokens
        config = GenerationConfig(do_sample=self._generator is not None, max_length=max_length)
        config._pad_token_tensor = None
        criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
        if eos:
            criteria.append(EosTokenCriteria(sorted(eos)))
        self.loop = VerifiedLoop(
            _EngineWave(self, rule, model.operations),
            torch.tensor([request.prompt_ids], device=self._device),
            np.array([self.prompt_length]),
            self._processors,
            criteria,
            config,
        )
        if self._generator is not None:
            self.loop.generators = [self._generator]

    def is_checked(self, position: int, loops: int) -> bool:
        """At loop T; at every loop, where tokens may be drafted again."""
        return position >= self.prompt_length and (self.request.exit_config.redraft or loops == self.rule.total_loops)

    def target_loops(self, position: int) -> int:
        """Every row runs to loop T."""
        row = self.suspended.get(position)
        return self.rule.total_loops if row is None else row.loops

    def reject_from(self, position: int) -> None:
        """Drops the ids from a cache position on; the engine drops their rows."""
        del self.token_ids[position:]
        self.pending = deque(kept for kept in self.pending if kept < position)
        self.rejected_from = position if self.rejected_from is None else min(self.rejected_from, position)

    def note_first(self, met: bool, diverged: bool) -> None:
        """Notes how the rule stands after a loop of the last prompt position, from which the first token is sampled.

        The first token is sampled at loop T whatever the rule says; its reason is where it would have stopped first,
        as of any other token. Loops that are recomputed after a preemption give the same again.

        Args:
            met: Whether the rule is met there.
            diverged: Whether the loop would have stopped it there unmet.
        """
        if self._first_met is None and (met or diverged):
            self._first_met = met

    def verify(self, exits: Exits | None, trailing: TrailingLogits | None) -> list[tuple[Emission, Tensor]]:
        """The tokens that become final with one pass, each with the logits it was sampled from.

        Args:
            exits: Logits of rows that stop in this pass; None where none does.
            trailing: Logits of draft tokens that are verified in this pass; None where none is.
        """
        if not self.outputs and exits is not None:
            return self.loop.begin(replace(exits, met=np.array([bool(self._first_met)])))
        return self.loop.take(exits, trailing)
