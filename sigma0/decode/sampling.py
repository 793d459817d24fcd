"""How a step chooses ids: the argmax, draws on the device, or with what only Python knows."""

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from sigma0.decode.accept import accept_greedy
from sigma0.decode.batch import Ints
from sigma0.decode.finite import flag_broken
from sigma0.decode.host_stepped import CheckedProcessors, is_over, narrowed, process_rows
from sigma0.decode.lanes import CACHE_POSITION, DEPTH, DRAFT, STAGE
from sigma0.decode.logits_processors import sampling_of
from sigma0.decode.random_numbers import OWN_DRAW, request_seeds
from sigma0.decode.row_sampling import sample_rows
from sigma0.decode.sampler import draw, process
from sigma0.decode.sampling_settings import SamplingSettings, SequenceSampling
from sigma0.decode.settings import PROMPT
from sigma0.decode.state_guard import StateGuard
from sigma0.decode.step import Choice as StepChoice
from sigma0.decode.step import Chosen, Looped, read, sample_greedy
from sigma0.decode.step_batch import Batch
from sigma0.decode.transfer import to_device, to_host


@dataclass(frozen=True)
class First:
    """Rows of the last prompt tokens.

    Attributes:
        sequences: int64 `[B]`.
        positions: Position of the token that is sampled, int64 `[B]`.
    """

    sequences: Tensor
    positions: Tensor


class Ids(Protocol):
    """The ids of a token loop, as a choice sees them.

    Attributes:
        device: Where they are.
        lengths: Ids of each sequence, `[B]`, on the host.
        prompt_length: Ids of the prompts.
        shift: From cache positions to ids.
        max_length: Ids of a sequence at most; None for no limit.
        eos: Ids that end a sequence.
        criteria: Stopping criteria that must be called.
        verifies: Whether drafts are checked.
        vocabulary: V of the head.
    """

    device: torch.device
    lengths: Ints
    prompt_length: int
    shift: int
    max_length: int | None
    eos: frozenset[int]
    criteria: StoppingCriteriaList
    verifies: bool
    vocabulary: int

    @property
    def ids(self) -> Tensor:
        """Ids of every sequence, drafts included, int64 `[B, longest]`."""

    def ids_up_to(self, length: int) -> Tensor:
        """The first ids of every sequence, right-padded, `[B, length]`."""

    def broadcast(self, decision: Tensor) -> Tensor:
        """As `Operations` has it."""


class Choice(StepChoice, Protocol):
    """Chooses ids for the rows of a step, and before it for the last prompt tokens."""

    def first(self, logits: Tensor, rows: First) -> tuple[Tensor, Tensor | None]:
        """Ids `[B]` behind the prompts, given logits `[B, V]`, and what criteria say of them, bool `[B]` or None."""


class Device:
    """Chooses on the device: the argmax, or a draw, of processed scores.

    Args:
        loop: The token loop, for its ids.
        settings: Of every sequence.
    """

    def __init__(self, loop: "Ids", settings: SamplingSettings) -> None:
        self._loop = loop
        self._settings = settings
        self.program = settings.program()
        self._broadcast = loop.broadcast

    @property
    def on_device(self) -> bool:
        """Whether nothing but tensors takes part: ids so far are kept by Python."""
        return not self.program.reads_ids

    @property
    def takes_best(self) -> bool:
        """Whether the likeliest ids are taken."""
        return self.program.is_greedy

    @property
    def draws(self) -> bool:
        """Whether ids are drawn."""
        return self.program.draws

    @property
    def fixed(self) -> Hashable:
        """What a compiled choice takes for constant."""
        return self.program, self._loop.shift

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it reads."""
        return self._settings.tensors

    def first(self, logits: Tensor, rows: First) -> tuple[Tensor, Tensor | None]:
        """See `Choice.first`."""
        lengths = torch.full_like(rows.positions, self._loop.prompt_length)
        scores = self._processed(logits, rows.sequences, lengths)
        return self.draw_first(scores, rows, logits), None

    def draw_first(self, scores: Tensor, rows: First, logits: Tensor) -> Tensor:
        """Ids `[B]` behind the prompts, given processed scores `[B, V]`; `BROKEN` where logits are not finite."""
        token_ids = draw(self._settings, self.program, scores, rows.sequences, rows.positions, OWN_DRAW)
        return self._broadcast(flag_broken(token_ids, logits))

    def choose(self, batch: Batch, looped: Looped, which: Tensor) -> Chosen:
        """See `sigma0.decode.runner.Choice.choose`."""
        logits = read(batch, looped, which)
        if self.program.is_greedy:
            token_ids = sample_greedy(batch, logits)
            stands = token_ids
            if batch.program.verify:
                stands, token_ids = accept_greedy(looped.table[:, DRAFT].index_select(0, which), token_ids)
        else:
            sequences = looped.sequences.index_select(0, which)
            lengths = looped.table[:, CACHE_POSITION].index_select(0, which) + (1 + self._loop.shift)
            token_ids, stands = self.draw(batch, looped, which, self._processed(logits, sequences, lengths))
            token_ids = self._broadcast(flag_broken(token_ids, logits))
        if batch.program.forced:
            token_ids, stands = judged(batch, looped, which, token_ids, stands)
        return token_ids, stands, None, logits

    def draw(self, batch: Batch, looped: Looped, which: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Ids `[K]` by processed scores `[K, V]`, and which drafts stand."""
        return sample_rows(batch, looped, which, self._settings, self.program, scores)

    def _processed(self, logits: Tensor, sequences: Tensor, lengths: Tensor) -> Tensor:
        ids = self._loop.ids if self.program.reads_ids else None
        return process(self._settings, self.program, logits, sequences, ids, lengths)


class Host:
    """Calls logits processors and stopping criteria of the caller; the choice itself is greedy or drawn.

    Args:
        loop: The token loop, for its ids.
        logits_processor: As transformers prepared them.
        stopping_criteria: Beside lengths and EOS ids.
        device: Chooses by the processed scores.
        keeps_scores: Whether processed scores are kept.
        keeps_logits: Whether logits are kept.

    Attributes:
        scores: Processed scores of each sequence's new tokens, each `[V]`; None unless kept.
        raw_logits: As `scores`, before processing.
    """

    on_device, takes_best, draws, fixed, tensors = False, False, False, None, ()

    def __init__(
        self,
        loop: "Ids",
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        device: Device,
        keeps_scores: bool,
        keeps_logits: bool,
    ) -> None:
        self._loop = loop
        self._processors = logits_processor
        self._criteria = stopping_criteria
        self._device = device
        batch = len(loop.lengths)
        self.scores: list[list[Tensor]] | None = [[] for _ in range(batch)] if keeps_scores else None
        self.raw_logits: list[list[Tensor]] | None = [[] for _ in range(batch)] if keeps_logits else None
        self._guard = StateGuard([*logits_processor, *stopping_criteria])
        self._draft_ends: dict[tuple[int, int], bool] = {}

    def first(self, logits: Tensor, rows: First) -> tuple[Tensor, Tensor | None]:
        """See `Choice.first`."""
        sequences, lengths = np.arange(len(logits)), self._loop.lengths.copy()
        scores = self._process(sequences, lengths, logits)
        self._keep(sequences, logits, scores)
        token_ids = self._device.draw_first(scores, rows, logits)
        return token_ids, self._over(sequences, lengths, token_ids)

    def choose(self, batch: Batch, looped: Looped, which: Tensor) -> Chosen:
        """See `sigma0.decode.runner.Choice.choose`."""
        logits = read(batch, looped, which)
        sequences = to_host(looped.sequences.index_select(0, which))
        lengths = to_host(looped.table[:, CACHE_POSITION].index_select(0, which)) + 1 + self._loop.shift
        if batch.program.verify:
            return self._choose_verified(batch, looped, which, logits, sequences, lengths)
        scores = self._process(sequences, lengths, logits)
        self._keep(sequences, logits, scores)
        token_ids = self._chosen(batch, looped, which, scores)[0]
        token_ids = self._flag(token_ids, logits)
        over = self._over(sequences, lengths, token_ids)
        return token_ids, token_ids, self._ends(sequences, lengths, token_ids, over), logits

    def _chosen(self, batch: Batch, looped: Looped, which: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        endless = scores.isposinf()
        # beside infinite scores nothing else counts
        scores = torch.where(endless.any(-1, keepdim=True), torch.where(endless, 0.0, -torch.inf), scores)
        # nothing can be drawn from NaN: such rows are flagged
        broken = ~scores.amax(dim=-1, keepdim=True).isfinite()
        return self._device.draw(batch, looped, which, scores.masked_fill(broken, 0.0))

    def _flag(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        """The ids, flagged on every rank where logits are broken."""
        return self._loop.broadcast(flag_broken(token_ids, logits))

    def _choose_verified(
        self, batch: Batch, looped: Looped, which: Tensor, logits: Tensor, sequences: Any, lengths: Any
    ) -> Chosen:
        """Row by row, the oldest of a sequence first; what lies behind a draft that falls is not asked about."""
        count, depth = len(sequences), batch.lanes.depth
        token_ids, stands, ends = (np.zeros(count, dtype=np.int64) for _ in range(3))
        decodes = to_host(looped.table[:, STAGE].index_select(0, which)) < depth
        final = to_host(looped.loops.index_select(0, which)) >= depth
        fallen: set[int] = set()
        for row in np.argsort(lengths, kind="stable").tolist():
            sequence, length = int(sequences[row]), int(lengths[row])
            if sequence in fallen:
                continue
            here = slice(row, row + 1)
            scores = self._process(sequences[here], lengths[here], logits[here])
            if final[row]:
                self._keep(sequences[here], logits[here], scores)
            index = to_device(np.array([row]), which.device)
            token_id, keeps = self._chosen(batch, looped, which.index_select(0, index), scores)
            if batch.program.forced:
                token_id, keeps = judged(batch, looped, which.index_select(0, index), token_id, keeps)
            token_id = self._flag(token_id, logits[here])
            over = self._over(sequences[here], lengths[here], token_id)
            ended = bool(self._ends(sequences[here], lengths[here], token_id, over)[0])
            draft_ends = self._draft_ends.get((sequence, length))
            # a criterion may change its mind about a draft that stands
            keeps_end = bool(keeps[0]) and (decodes[row] or not final[row] or draft_ends in (None, ended))
            token_ids[row], stands[row], ends[row] = int(token_id[0]), keeps_end, ended
            if not decodes[row] and not keeps_end:
                fallen.add(sequence)
            if decodes[row] or not keeps_end:
                self._draft_ends[sequence, length] = ended
        chosen = (to_device(part, which.device) for part in (token_ids, stands.astype(np.bool_), ends.astype(np.bool_)))
        told = tuple(chosen)
        return told[0], told[1], told[2], logits

    def _process(self, sequences: Any, lengths: Any, logits: Tensor) -> Tensor:
        wide = logits.to(torch.float32, copy=True).to(self._loop.device)
        if not self._processors:
            return wide
        ids = self._loop.ids_up_to(int(lengths.max()))
        if not self._loop.verifies:
            return process_rows(self._processors, ids, sequences, lengths, wide)
        scores = [wide[row : row + 1] for row in range(len(wide))]
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            for item in narrowed(self._processors, np.array([sequence])):
                with self._guard.watching(item):
                    scores[row] = CheckedProcessors([item])(ids[[sequence], :length], scores[row].clone())
        return torch.cat(scores)

    def _keep(self, sequences: Any, logits: Tensor, scores: Tensor) -> None:
        for kept, values in ((self.raw_logits, logits.float()), (self.scores, scores)):
            if kept is not None:
                for sequence, row in zip(sequences.tolist(), values, strict=True):
                    kept[sequence].append(row)

    def _over(self, sequences: Any, lengths: Any, token_ids: Tensor) -> Tensor | None:
        """What the criteria say once the new ids stand behind the others."""
        if not self._criteria:
            return None
        ids = self._loop.ids_up_to(int(lengths.max()) + 1)
        rows = torch.from_numpy(sequences)
        ids[rows, torch.from_numpy(lengths)] = token_ids.to(ids.device)
        over = torch.zeros(len(sequences), dtype=torch.bool)
        for item in self._criteria:
            with self._guard.watching(item) if self._loop.verifies else nullcontext():
                # in a list, since the list turns any return value into a tensor
                over |= is_over(StoppingCriteriaList([item]), ids, sequences, lengths + 1, self.scores)
        return self._loop.broadcast(over)

    def _ends(self, sequences: Any, lengths: Any, token_ids: Tensor, over: Tensor | None) -> Tensor:
        """With lengths and EOS ids."""
        loop = self._loop
        limit = np.inf if loop.max_length is None else loop.max_length
        eos = np.isin(to_host(token_ids), sorted(loop.eos))
        ends = torch.from_numpy((lengths + 1 >= limit) | eos)
        return (ends if over is None else ends | over.cpu()).to(token_ids.device)


def judged(batch: Batch, looped: Looped, which: Tensor, token_ids: Tensor, stands: Tensor) -> tuple[Tensor, Tensor]:
    """Judgements that are given beforehand, where the settings hold some, in place of the model's."""
    settled = batch.settings.settled
    if settled is None:
        return token_ids, stands
    table, sequences = looped.table.index_select(0, which), looped.sequences.index_select(0, which)
    first = batch.settings.table[:, PROMPT].index_select(0, sequences)
    right = settled[sequences, (table[:, CACHE_POSITION] - first) % settled.shape[1]]
    decodes = table[:, STAGE] < batch.lanes.depth
    stands = (table[:, DEPTH] >= right) | (looped.loops.index_select(0, which) < right)
    return torch.where(decodes, token_ids, table[:, DRAFT]), stands


def choice_for(
    loop: "Ids", logits_processor: LogitsProcessorList, config: GenerationConfig, settings: SamplingSettings
) -> Choice:
    """The choice that a generation config asks for; the step stops for Python only where it must.

    Args:
        loop: For its ids.
        logits_processor: As transformers prepared them.
        config: As transformers prepared it.
        settings: Of every sequence, none of which is set; changed.
    """
    keep, batch = bool(config.return_dict_in_generate), len(loop.lengths)
    scores, logits = keep and bool(config.output_scores), keep and bool(config.output_logits)
    seeds = request_seeds(batch) if config.do_sample else None
    wanted = sampling_of(logits_processor, batch, seeds, loop.vocabulary)
    forbidden = {*(word[-1] for word in wanted[0].bad_words), *wanted[0].eos} if wanted else set()
    # where every id may be forbidden, Python says by which processor
    if wanted and len(forbidden) < loop.vocabulary and not loop.criteria and not scores and not logits:
        settings.set(0, *wanted)
        return Device(loop, settings)
    if seeds is not None:
        settings.set(0, *[SequenceSampling(draws=True, seed=seed) for seed in seeds])
    return Host(loop, logits_processor, loop.criteria, Device(loop, settings), scores, logits)
