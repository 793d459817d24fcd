"""The token loop over a wave: sample, emit, enter, advance. No sequence waits for another one's depth."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from sigma0.decode.batch import Ints, PendingTokens
from sigma0.decode.finite import check_sampled, flag_broken
from sigma0.decode.ops import CollapseRule
from sigma0.decode.repetition import CollapseStop, Repetition
from sigma0.decode.step import Exits, Wave
from sigma0.decode.transfer import to_device, to_host

# What these return for a row depends on that row alone, so they may be called on any part of the batch.
ROW_WISE_PROCESSORS: tuple[type, ...] = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
    processors.ExponentialDecayLengthPenalty,
    processors.LogitNormalization,
    processors.InfNanRemoveLogitsProcessor,
)
ROW_WISE_CRITERIA: tuple[type, ...] = (
    criteria.MaxLengthCriteria,
    criteria.EosTokenCriteria,
    criteria.StopStringCriteria,
    criteria.MaxTimeCriteria,
)


def rows_are_independent(logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList) -> bool:
    """Whether every processor and criterion is known to treat each row by itself.

    A subclass counts as unknown, since it may do anything.
    """
    return all(type(item) in ROW_WISE_PROCESSORS for item in logits_processor) and all(
        type(item) in ROW_WISE_CRITERIA for item in stopping_criteria
    )


@dataclass(frozen=True)
class Emission:
    """A new token of one sequence.

    Attributes:
        sequence: Batch index.
        token_id: The token.
        depth: Loop at which it was read, from 1.
        met: Whether its exit rule was met.
        last: Whether the sequence ends with it.
        diverged: Whether it was read where it was because its loop diverged.
    """

    sequence: int
    token_id: int
    depth: int
    met: bool
    last: bool
    diverged: bool = False


class TokenLoop(ABC):
    """Base of the token loops over a wave: the ids so far, and lengths and positions of every sequence.

    Args:
        wave: The decoder; no row of its cache is decoding.
        input_ids: Prompt ids `[B, P]`, left-padded; P may be 0 where the prompt came as embeddings.
        positions: Position of the first new token of each sequence, `[B]`.
        logits_processor: As transformers prepared them.
        stopping_criteria: As transformers prepared them.
        generation_config: `do_sample`, `max_length`, pad token, and which scores to keep.

    Attributes:
        ids: Prompt and new tokens, the pad token where nothing was written, `[B, >= length]`.
        lengths: Ids of each sequence, `[B]`.
        record: Statistics of the new tokens; None for none.
        repetition: Repetition among the final new tokens of each sequence.
        collapse: When a sequence that repeats itself is ended; None never.
        collapsed: Sequences that were ended for it.
        scores: Processed scores of each sequence's new tokens, each `[V]`; empty unless asked for.
        raw_logits: As `scores`, before processing.
    """

    def __init__(
        self,
        wave: Wave,
        input_ids: Tensor,
        positions: Ints,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
    ) -> None:
        batch, prompt = input_ids.shape
        self.wave = wave
        self.device = input_ids.device
        self.processors = logits_processor
        self.criteria, self.max_length, self.eos = _split_criteria(stopping_criteria)
        pad = generation_config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        room = generation_config.max_length if self.max_length is None else self.max_length
        # never an inference tensor: what was begun under torch.inference_mode may go on outside of it
        with torch.inference_mode(False):
            self.ids = torch.full((batch, max(room, prompt + 1)), self.pad, dtype=input_ids.dtype, device=self.device)
        self.ids[:, :prompt] = input_ids
        self.lengths: Ints = np.full(batch, prompt, dtype=np.int64)
        self.cache_positions: Ints = np.full(batch, wave.cache.length, dtype=np.int64)
        self._shift = prompt - wave.cache.length  # from cache positions to ids, which lack a prompt given as embeddings
        self.positions = positions.copy()
        self._prompt = prompt
        keep = bool(generation_config.return_dict_in_generate)
        self.scores: list[list[Tensor]] | None = _per_sequence(batch, keep and generation_config.output_scores)
        self.raw_logits: list[list[Tensor]] | None = _per_sequence(batch, keep and generation_config.output_logits)
        self.record = wave.record
        self.repetition = [Repetition() for _ in range(batch)]
        self.collapse: CollapseStop | None = None
        self.collapsed: set[int] = set()
        self.generators = _generators(batch, self.device) if generation_config.do_sample else None

    @property
    def sequences(self) -> Tensor:
        """Prompts and new tokens so far, right-padded, `[B, longest]`."""
        return self.ids[:, : int(self.lengths.max())]

    @abstractmethod
    def run(self, first: Exits) -> Iterator[tuple[Emission, ...]]:
        """Yields the new tokens of each pass in which any appeared.

        Args:
            first: The exits of the last prompt token of every sequence.
        """

    def observe(self, sequences: Ints, indices: Ints, logits: Tensor, token_ids: Tensor | None) -> Tensor | None:
        """Records the statistics of new tokens, where a kernel computes them with the argmax.

        Args:
            sequences: Batch indices, none twice, `[N]`.
            indices: Index of each among the new tokens of its sequence, from 0, `[N]`.
            logits: `[N, V]`.
            token_ids: Their ids `[N]`; None for the argmax.

        Returns:
            The ids; `token_ids` itself without a record or a kernel.
        """
        if self.record is None or self.wave.ops.backend != "triton":
            return token_ids
        at = to_device(np.stack([sequences, indices]), self.record.device)
        sampled = None if token_ids is None else token_ids.to(self.record.device)
        output = self.wave.ops.collapse(
            logits.detach().to(self.record.device), sampled, self.record.collapse, at[0], CollapseRule()
        )
        self.record.put_logit_stats(output, at[0], at[1], int(indices.max()))
        return output.token_ids

    def note(self, sequences: Ints, logits: Tensor) -> None:
        """Notes the logits of each sequence's last final token for its statistics, where no kernel has computed them.

        Args:
            sequences: Batch indices, none twice, `[N]`.
            logits: `[N, V]`.
        """
        if self.record is not None and self.wave.ops.backend != "triton":
            indices = np.array([self.repetition[sequence].tokens - 1 for sequence in sequences.tolist()])
            self.record.note_logits(logits, sequences, indices, self.repetition)

    def collapses(self, sequence: int) -> bool:
        """Whether a sequence is ended after its last final token, since it repeats itself."""
        if self.collapse is None or not self.collapse.ends(self.repetition[sequence]):
            return False
        self.collapsed.add(sequence)
        return True

    @torch.no_grad()
    def enter(self, emissions: Sequence[Emission]) -> None:
        """Feeds emitted tokens back; they run loop 1 in the next pass."""
        if not emissions:
            return
        sequences = np.array([emission.sequence for emission in emissions], dtype=np.int64)
        token_ids = to_device(np.array([emission.token_id for emission in emissions]), self.device)
        self.wave.enter(token_ids, sequences, self.cache_positions[sequences], self.positions[sequences])
        self.cache_positions[sequences] += 1
        self.positions[sequences] += 1

    def _note_pending(self) -> None:
        """Adds the pending tokens of sequences that ended early to the cache: the last token, then pads.

        A continuation counts them as cached.
        """
        end = self.wave.cache.length
        missing = end - self.cache_positions  # [B]
        if not missing.any():
            return
        sequences = np.repeat(np.arange(len(missing)), missing)
        offsets = np.concatenate([np.arange(count) for count in missing])
        cache_positions = self.cache_positions[sequences] + offsets
        token_ids = self.ids.cpu().numpy()[sequences, cache_positions + self._shift]
        self.wave.cache.add_pending(
            PendingTokens(token_ids, sequences, cache_positions, self.positions[sequences] + offsets)
        )

    def _make_room(self, cache_positions: int) -> None:
        if cache_positions > self.ids.shape[1]:
            with torch.inference_mode(False):
                larger = self.ids.new_full((self.ids.shape[0], 2 * cache_positions), self.pad)
                larger[:, : self.ids.shape[1]] = self.ids
            self.ids = larger


class DirectLoop(TokenLoop):
    """Emits each token at its exit."""

    def run(self, first: Exits) -> Iterator[tuple[Emission, ...]]:
        """Yields the new tokens of each pass in which any appeared.

        Args:
            first: The exits of the last prompt token of every sequence.
        """
        exits: Exits | None = first
        try:
            while exits is not None:
                emissions = self.emit(exits)
                yield emissions
                going = [emission for emission in emissions if not emission.last]
                self.enter(going)
                exits = self.next_exits()
        finally:
            self.wave.resume()
            self._note_pending()

    @torch.no_grad()
    def emit(self, exits: Exits) -> tuple[Emission, ...]:
        """Samples a token for each exit, stores it and checks the stopping criteria."""
        sampled = self.wave.ops.broadcast(flag_broken(self._sample(exits), exits.logits))
        lengths = self.lengths[exits.sequences]
        self._make_room(int(lengths.max()) + 1)
        at = to_device(np.stack([exits.sequences, lengths]), self.device)
        self.ids[at[0], at[1]] = sampled
        self.lengths[exits.sequences] += 1
        token_ids = to_host(sampled).tolist()
        check_sampled(token_ids)
        for sequence, token_id in zip(exits.sequences.tolist(), token_ids, strict=True):
            self.repetition[sequence].append(token_id)
        self.note(exits.sequences, exits.logits)
        ended = self._ended(exits.sequences.tolist(), token_ids)
        emissions = tuple(
            Emission(int(sequence), token_id, int(depth), bool(met), last, bool(diverged))
            for sequence, token_id, depth, met, last, diverged in zip(
                exits.sequences, token_ids, exits.depths, exits.met, ended, exits.diverged, strict=True
            )
        )
        over = np.array([emission.sequence for emission in emissions if emission.last], dtype=np.int64)
        if len(over):
            self.wave.suspend(over)
        return emissions

    @torch.no_grad()
    def next_exits(self) -> Exits | None:
        """Advances until some token exits; None once no row is decoding."""
        while self.wave.has_decoding:
            exits = self.wave.advance()
            if exits is not None:
                return exits
        return None

    def _sample(self, exits: Exits) -> Tensor:
        """Ids `[N]`, on the device of the ids so far."""
        indices = self.lengths[exits.sequences] - self._prompt
        if not self.processors and self.generators is None and self.scores is None and self.raw_logits is None:
            argmax = self.observe(exits.sequences, indices, exits.logits, None)
            return (exits.logits.argmax(dim=-1) if argmax is None else argmax).to(self.device)
        logits = exits.logits.to(torch.float32, copy=True).to(self.device)  # [N, V]
        scores = self._process(exits.sequences, logits)
        for kept, values in ((self.raw_logits, logits), (self.scores, scores)):
            if kept is not None:
                for sequence, row in zip(exits.sequences.tolist(), values, strict=True):
                    kept[sequence].append(row)
        if self.generators is None:
            sampled = scores.argmax(dim=-1)
        else:
            # nothing can be drawn from NaN: such rows are flagged by the caller
            broken = ~logits.amax(dim=-1, keepdim=True).isfinite()
            scores = scores.masked_fill(broken, 0.0)
            draws = [
                torch.multinomial(row, 1, generator=self.generators[sequence])
                for sequence, row in zip(exits.sequences.tolist(), torch.softmax(scores, dim=-1), strict=True)
            ]
            sampled = torch.cat(draws)
        self.observe(exits.sequences, indices, exits.logits, sampled)
        return sampled

    def _process(self, sequences: Ints, logits: Tensor) -> Tensor:
        """Processors see rows of one length at a time, as rectangular ids."""
        if not self.processors:
            return logits
        scores = torch.empty_like(logits)
        lengths = self.lengths[sequences]
        for length in np.unique(lengths).tolist():
            group = np.flatnonzero(lengths == length)
            rows = to_device(group, self.device)
            ids = self.ids[to_device(sequences[group], self.device), :length]
            # on a copy, since some processors write in place and the raw logits may be kept
            scores[rows] = narrowed(self.processors, sequences[group])(ids, logits[rows].clone())
        return scores

    def _ended(self, sequences: list[int], token_ids: list[int]) -> list[bool]:
        by_criteria = (
            self._call_criteria(np.array(sequences, dtype=np.int64)) if self.criteria else [False] * len(sequences)
        )
        lengths = self.lengths[sequences].tolist()
        limit = self.max_length
        return [
            stop or token_id in self.eos or (limit is not None and length >= limit) or self.collapses(sequence)
            for sequence, stop, token_id, length in zip(sequences, by_criteria, token_ids, lengths, strict=True)
        ]

    def _call_criteria(self, sequences: Ints) -> list[bool]:
        """Criteria, like processors, see rows of one length at a time."""
        over = np.zeros(len(sequences), dtype=np.bool_)
        lengths = self.lengths[sequences]
        for length in np.unique(lengths).tolist():
            group = np.flatnonzero(lengths == length)
            rows = sequences[group]
            scores = None
            if self.scores is not None:
                kept = [self.scores[row] for row in rows.tolist()]
                scores = tuple(torch.stack(step) for step in zip(*kept, strict=True))
            ids = self.ids[to_device(rows, self.device), :length]
            over[group] = self.criteria(ids, scores).cpu().numpy()
        over = to_host(self.wave.ops.broadcast(torch.from_numpy(over)))
        return over.tolist()  # type: ignore[no-any-return]


def narrowed(logits_processor: LogitsProcessorList, sequences: Ints) -> LogitsProcessorList:
    """The processors as they are for some rows of the batch.

    Args:
        logits_processor: Prepared for the whole batch.
        sequences: Batch indices of the rows, `[N]`.

    Returns:
        The same list, but for a repetition penalty that holds the left padding of each row, and for a caller's
        function, which gets the batch index of a single row.
    """
    fitting = LogitsProcessorList()
    for item in logits_processor:
        padding = getattr(item, "prompt_ignore_length", None)
        if isinstance(padding, Tensor):
            item = copy(item)
            item.prompt_ignore_length = padding[torch.from_numpy(sequences).to(padding.device)]
        elif type(item) is processors.PrefixConstrainedLogitsProcessor and len(sequences) == 1:
            item = copy(item)
            item._prefix_allowed_tokens_fn = partial(_of_sequence, item._prefix_allowed_tokens_fn, int(sequences[0]))
        fitting.append(item)
    return fitting


def _of_sequence(allowed: Callable[[int, Tensor], list[int]], sequence: int, _row: int, ids: Tensor) -> list[int]:
    """A caller's function, called with the sequence's index in the whole batch."""
    return allowed(sequence, ids)


def _split_criteria(stopping_criteria: StoppingCriteriaList) -> tuple[StoppingCriteriaList, int | None, frozenset[int]]:
    """Length and EOS are checked on the host for free; the rest is called."""
    rest, lengths, eos = StoppingCriteriaList(), [], set()
    for item in stopping_criteria:
        if type(item) is criteria.MaxLengthCriteria:
            lengths.append(int(item.max_length))
        elif type(item) is criteria.EosTokenCriteria:
            eos.update(item.eos_token_id.tolist())
        else:
            rest.append(item)
    return rest, min(lengths) if lengths else None, frozenset(eos)


def _per_sequence(batch: int, wanted: bool | None) -> list[list[Tensor]] | None:
    return [[] for _ in range(batch)] if wanted else None


def _generators(batch: int, device: torch.device) -> list[torch.Generator]:
    """One generator for each sequence, so that its draws do not depend on the depths of the others."""
    seeds = torch.randint(0, 2**63 - 1, (batch,)).tolist()
    return [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
