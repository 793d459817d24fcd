"""State of a request from the queue to its last token."""

from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sigma0.decode.detokenizer import IncrementalDetokenizer
from sigma0.decode.exits import ExitRule
from sigma0.decode.grammar.compiled import CompiledGrammar
from sigma0.decode.grammar.rows import may_force
from sigma0.decode.logits import logprobs_of
from sigma0.decode.repetition import CollapseStop, Text
from sigma0.decode.sampling_params import SequenceSampling, request_seed
from sigma0.decode.sequences import SequenceParams, Suspended
from sigma0.decode.settings import SequenceExit
from sigma0.decode.stats import Deepest
from sigma0.serve.engine.messages import EngineRequest, PromptToken, SlotView, Times, TokenOutput
from sigma0.serve.engine.scheduler import SequenceEntry
from sigma0.signals.canary import Tighten

if TYPE_CHECKING:
    from sigma0.models.hf_generate import DepthGenerationMixin

_STOP = CollapseStop()


class RequestState:
    """A request that was submitted.

    Args:
        entry: Its sequence in the scheduler.
        request: The request.
        detokenizer: Of its text.
        eos: Ids that end the text.
        model: The looped model.
        watch: Whether statistics of its tokens are wanted.
        text: What is kept of its ids for statistics, before the first one.
        grammar: What its answer follows; None for nothing.

    Attributes:
        params: What it asks of the batch.
        shadow_rule: Under `full` and `fixed`, the model's own exit rule, which is evaluated without stopping tokens;
            None under any other mode, or without statistics.
        outputs: Tokens so far.
        fates: Of each token so far, index into `sigma0.decode.ops.FATES`, int8 `[new]`.
        deepest: What the head says of tokens after their last loops, by index; without those that wait for it.
        newest_id: Of the token that comes next among the outputs, where its pass has emitted it.
        prompt: Log-probabilities of the prompt's ids, by position, where they are requested.
        suspended: What was in flight at preemption; None of nothing.
        cached: Cache positions of the prompt that were found in the prefix cache.
        stops: Whether it is ended where it repeats itself.
        collapsed: Whether it was ended because it repeats itself.
        is_over: Whether it was removed: finished, failed or cancelled.
    """

    def __init__(
        self,
        entry: SequenceEntry,
        request: EngineRequest,
        detokenizer: IncrementalDetokenizer,
        eos: frozenset[int],
        model: "DepthGenerationMixin",
        watch: bool,
        text: Text,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        self.entry, self.request, self.detokenizer, self.eos, self.text = entry, request, detokenizer, eos, text
        self.rule: ExitRule = model.exit_rule(request.exit_config)
        self.prompt_length = length = len(request.prompt_ids)
        sampling, after = request.sampling, request.exit_config.after_exit
        seed = 0 if sampling.temperature == 0 else request_seed(sampling.seed)
        self.params = SequenceParams(
            entry.key,
            SequenceExit(self.rule, after == "drop", after == "verify", length, prompt_in_lanes=True),
            request.max_new_tokens,
            sorted(eos),
            SequenceSampling.of(sampling, seed, length),
            Tighten(length) if request.on_collapse == "tighten" else None,
            grammar,
            grammar is not None and may_force(model, self.rule, request.exit_config),
            request.prompt_logprobs is not None,
        )
        self.shadow_rule: ExitRule | None = model.counterfactual_rule(request.exit_config) if watch else None
        self.outputs: list[TokenOutput] = []
        self.fates: npt.NDArray[np.int8] = np.zeros(request.max_new_tokens, dtype=np.int8)
        self.deepest: dict[int, Deepest] = {}
        self.newest_id = -1
        self.prompt: dict[int, PromptToken] = {}
        self.suspended: Suspended | None = None
        self.cached = 0
        self.stops = request.on_collapse == "stop"
        self.collapsed = self.is_over = False
        self._queued = monotonic()
        self._admitted: float | None = None
        self._began: float | None = None
        # newest ids after each of which the text was near to collapse
        self._high = 0

    def admit(self, cached: int) -> None:
        """Called when it is first admitted, with the cache positions that were found in the prefix cache."""
        self.cached, self._admitted = cached, monotonic()

    def add(self, token: TokenOutput) -> None:
        """Adds a token."""
        if not self.outputs:
            self._began = monotonic()
        self.outputs.append(token)

    def times(self) -> Times:
        """Its times, where it ends now."""
        now = monotonic()
        admitted, began = self._admitted or now, self._began or now
        return Times(admitted - self._queued, began - admitted, now - began)

    def view(self) -> SlotView:
        """What is shown of it."""
        entry, config = self.entry, self.request.exit_config
        runs = entry.slot >= 0
        return SlotView(
            id=self.request.id,
            state="waiting" if not runs else "decode" if self.outputs else "prefill",
            lane=entry.slot if runs else None,
            prompt_tokens=self.prompt_length,
            new_tokens=len(self.outputs),
            max_new_tokens=self.request.max_new_tokens,
            pages=len(entry.blocks),
            exit=config.mode,
            after_exit=config.after_exit,
            depth=self.outputs[-1].depth if self.outputs else None,
            preemptions=entry.preemptions,
            seconds=monotonic() - self._queued,
        )

    def leaves_at_exit(self, index: int, depth: int) -> bool:
        """Whether the token of an output index runs no loop after its exit at a depth."""
        if self.params.exit.verify:
            return False
        return depth >= self.rule.last_loop or (self.params.exit.drop and index > 0)

    def id_of(self, index: int) -> int:
        """The token of an output index, whose pass has emitted it."""
        return self.outputs[index].id if index < len(self.outputs) else self.newest_id

    def note_prompt(self, positions: Sequence[int], logits: Tensor) -> None:
        """Keeps the log-probabilities of the ids after positions of the prompt, of which the logits `[N, V]` are."""
        wanted = self.request.prompt_logprobs
        assert wanted is not None
        for position, row in zip(positions, logits, strict=True):
            token_id = self.request.prompt_ids[position + 1]
            self.prompt[position + 1] = PromptToken(token_id, *logprobs_of(row, token_id, wanted))

    def collapses(self, proximity: float) -> bool:
        """Whether the text ends with the newest id, which is not among the outputs yet, because it repeats itself.

        Args:
            proximity: Of the ids alone, this one included.
        """
        self._high = self._high + 1 if proximity >= _STOP.tau else 0
        self.collapsed = _STOP.ends_after(len(self.outputs) + 1, self._high)
        return self.collapsed
