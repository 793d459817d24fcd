"""What only Python knows: logits processors and stopping criteria that a caller brings, called between two passes.

The step is cut after its reading: the processors see the ids and the logits of the rows that were read, the criteria
the ids with what was sampled, and the rest of the step goes on with their answers. Those that keep state between calls
are refused by name where they are asked more than once about a token.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from sigma0.decode.lanes import CACHE_POSITION, STAGE
from sigma0.decode.logits import flag_broken
from sigma0.decode.prefill import Batch
from sigma0.decode.sampling import DeviceSampler, scripted
from sigma0.decode.sampling_params import SamplingSettings, SequenceSampling, request_seeds, sampling_of
from sigma0.decode.step import LoopOutput, Sampled, Sampler, read
from sigma0.decode.transfer import Ints, to_device, to_host

_DEPTH = 6
_PLAIN = (str, int, float, complex, bool, bytes, type(None), np.generic)
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


class CheckedProcessors(LogitsProcessorList):  # type: ignore[misc]
    """Logits processors of which each has to leave something to choose from."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """As transformers' own.

        Raises:
            ValueError: Naming a processor that leaves a row only minus infinity, or NaN.
        """
        for item in self:
            # before the call, since some processors write in place
            had = scores.amax(-1) > -torch.inf
            scores = LogitsProcessorList([item])(input_ids, scores, **kwargs)
            if bool((had & ~(scores.amax(-1) > -torch.inf)).any()):
                name = getattr(item, "__name__", type(item).__name__)
                raise ValueError(
                    f"{name} leaves no token to choose: all scores of a row are minus infinity, or some are NaN"
                )
        return scores


def rows_are_independent(logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList) -> bool:
    """Whether every processor and criterion is known to treat each row by itself.

    A subclass counts as unknown, since it may do anything.
    """
    return all(type(item) in ROW_WISE_PROCESSORS for item in logits_processor) and all(
        type(item) in ROW_WISE_CRITERIA for item in stopping_criteria
    )


class StateGuard:
    """Watches processors and criteria that are not known to be stateless.

    State is seen in attributes, slots, containers, arrays, tensors and a function's closure, some levels deep; inside a
    compiled object it is not.

    Args:
        items: Logits processors and stopping criteria.
    """

    def __init__(self, items: Sequence[Any] = ()) -> None:
        known = ROW_WISE_PROCESSORS + ROW_WISE_CRITERIA
        self._watched = {type(item) for item in items if type(item) not in known}

    @contextmanager
    def watching(self, item: Any) -> Iterator[None]:
        """Runs a call of `item`.

        Raises:
            ValueError: If the call changed what the item holds.
        """
        if type(item) not in self._watched:
            yield
            return
        before = _fingerprint(item, _DEPTH)
        yield
        if _fingerprint(item, _DEPTH) != before:
            name = getattr(item, "__name__", type(item).__name__)
            raise ValueError(
                f"{name} keeps state between calls, but after_exit='verify' asks it more than once about a token: "
                "leave it out, or use after_exit='finish'"
            )


def _fingerprint(value: Any, depth: int) -> object:
    """Something that differs once a value, or what it holds, was changed."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        # a tensor made in inference mode counts no versions
        return (
            (id(value), value.detach().cpu().numpy().tobytes()) if value.is_inference() else (id(value), value._version)
        )
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if not depth:
        return id(value)
    if isinstance(value, Mapping):
        return tuple((repr(key), _fingerprint(item, depth - 1)) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return type(value), tuple(_fingerprint(item, depth - 1) for item in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(repr, value))
    return id(value), tuple(_fingerprint(item, depth - 1) for item in _held_by(value))


def _held_by(value: Any) -> Iterator[Any]:
    """What an object or a function holds."""
    if isinstance(value, type):
        return
    if isinstance(value, MethodType):
        yield value.__self__
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a variable that has no value yet
                yield None
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def process_rows(
    logits_processor: LogitsProcessorList,
    ids: Tensor,
    sequences: Ints,
    lengths: Ints,
    logits: Tensor,
    guard: StateGuard | None = None,
) -> Tensor:
    """Processed scores of some rows; processors see rows of one length at a time, as rectangular ids.

    Args:
        logits_processor: Prepared for the whole batch.
        ids: Of every sequence, `[B, >= longest]`.
        sequences: Batch index of each row, `[N]`.
        lengths: Ids that each row follows, `[N]`.
        logits: float32 `[N, V]`; not modified.
        guard: Watches the processors, which then see each row by itself.
    """
    scores = torch.empty_like(logits)
    groups = [[row] for row in range(len(lengths))] if guard is not None else _of_one_length(lengths)
    for group in groups:
        rows, current = to_device(np.array(group), ids.device), sequences[group]
        # on a copy, since some processors write in place and the raw logits may be kept
        processed = logits[rows].clone()
        for item in narrowed(logits_processor, current):
            with (guard or StateGuard()).watching(item):
                before = ids[to_device(current, ids.device), : int(lengths[group[0]])]
                processed = CheckedProcessors([item])(before, processed)
        scores[rows] = processed
    return scores


def criteria_met(
    stopping_criteria: StoppingCriteriaList,
    ids: Tensor,
    sequences: Ints,
    lengths: Ints,
    scores: Sequence[Sequence[Tensor]] | None,
    guard: StateGuard | None = None,
) -> Tensor:
    """Whether sequences end, bool `[N]` on the host; criteria, too, see rows of one length at a time.

    As `process_rows` but that new tokens count as ids, given kept scores of every sequence of the batch; None of none.
    """
    over = np.zeros(len(sequences), dtype=np.bool_)
    for group in _of_one_length(lengths):
        rows = sequences[group]
        kept = None
        if scores is not None:
            kept = tuple(torch.stack(step) for step in zip(*[scores[row] for row in rows.tolist()], strict=True))
        current = ids[to_device(rows, ids.device), : int(lengths[group[0]])]
        for item in stopping_criteria:
            with (guard or StateGuard()).watching(item):
                # in a list, since the list turns any return value into a tensor
                over[group] |= StoppingCriteriaList([item])(current, kept).cpu().numpy()
    return torch.from_numpy(over)


def _of_one_length(lengths: Ints) -> list[Ints]:
    """Indices of the rows of each length."""
    return [np.flatnonzero(lengths == length) for length in np.unique(lengths)]


def split_criteria(
    stopping_criteria: StoppingCriteriaList,
) -> tuple[StoppingCriteriaList, int | None, frozenset[int]]:
    """The criteria that must be called, the longest that a sequence may be, and the ids that end it."""
    rest, lengths, eos = StoppingCriteriaList(), [], set()
    for item in stopping_criteria:
        if type(item) is criteria.MaxLengthCriteria:
            lengths.append(int(item.max_length))
        elif type(item) is criteria.EosTokenCriteria:
            eos.update(item.eos_token_id.tolist())
        else:
            rest.append(item)
    return rest, min(lengths) if lengths else None, frozenset(eos)


def narrowed(logits_processor: LogitsProcessorList, sequences: Ints) -> CheckedProcessors:
    """Processors, prepared for the whole batch, as they are for some rows of it, given their batch indices `[N]`.

    Others are a repetition penalty that holds the left padding of each row, and a caller's function, which gets the
    batch index of a single row.
    """
    fitting = CheckedProcessors()
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


class Ids(Protocol):
    """The ids of a token loop, as a choice sees them; attributes as `sigma0.decode.token_loop.TokenLoop` has them."""

    device: torch.device
    lengths: Ints
    shift: int
    max_length: int | None
    eos: frozenset[int]
    criteria: StoppingCriteriaList
    verifies: bool
    vocabulary: int

    @property
    def sequences(self) -> Tensor:
        """Ids of every sequence, drafts included, int64 `[B, longest]`."""

    def ids_up_to(self, length: int) -> Tensor:
        """The first ids of every sequence, right-padded, `[B, length]`."""

    def broadcast(self, decision: Tensor) -> Tensor:
        """As `Operations` has it."""


class HostSampler(Sampler):
    """Calls logits processors and stopping criteria of the caller; the choice itself is greedy or drawn by settings.

    Attributes:
        scores: Processed scores of each sequence's new tokens, each `[V]`; None unless kept.
        raw_logits: As `scores`, before processing.
    """

    def __init__(
        self,
        loop: Ids,
        logits_processor: LogitsProcessorList,
        settings: SamplingSettings,
        keeps_scores: bool,
        keeps_logits: bool,
    ) -> None:
        self._loop, self._processors, self._criteria = loop, logits_processor, loop.criteria
        self._sampler = DeviceSampler(settings, lambda: loop.sequences, loop.shift, loop.broadcast)
        batch = len(loop.lengths)
        self.scores: list[list[Tensor]] | None = [[] for _ in range(batch)] if keeps_scores else None
        self.raw_logits: list[list[Tensor]] | None = [[] for _ in range(batch)] if keeps_logits else None
        # drafts are asked about more than once
        self._guard = StateGuard([*logits_processor, *loop.criteria]) if loop.verifies else None
        self._draft_ends: dict[tuple[int, int], bool] = {}

    def first(self, logits: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """See `DeviceSampler.first`."""
        sequences, lengths = np.arange(len(logits)), np.full(len(logits), length)
        scores = self._process(sequences, lengths, logits)
        self._keep(sequences, logits, scores)
        token_ids = self._sampler.draw_first(scores, positions, logits)
        return token_ids, self._over(sequences, lengths, token_ids)

    def choose(self, batch: Batch, looped: LoopOutput, row_ids: Tensor) -> Sampled:
        """See `sigma0.decode.step.Sampler.choose`."""
        logits = read(batch, looped, row_ids)
        sequences = to_host(looped.sequences.index_select(0, row_ids))
        lengths = to_host(looped.table[:, CACHE_POSITION].index_select(0, row_ids)) + 1 + self._loop.shift
        if batch.program.verify:
            return self._choose_verified(batch, looped, row_ids, logits, sequences, lengths)
        scores = self._process(sequences, lengths, logits)
        self._keep(sequences, logits, scores)
        token_ids = self._chosen(batch, looped, row_ids, scores)[0]
        # flagged on every rank where logits are broken
        token_ids = self._loop.broadcast(flag_broken(token_ids, logits))
        over = self._over(sequences, lengths, token_ids)
        return token_ids, token_ids, self._ends(sequences, lengths, token_ids, over), logits

    def _chosen(self, batch: Batch, looped: LoopOutput, row_ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        endless = scores.isposinf()
        # beside infinite scores nothing else counts
        scores = torch.where(endless.any(-1, keepdim=True), torch.where(endless, 0.0, -torch.inf), scores)
        # nothing can be drawn from NaN: such rows are flagged
        broken = ~scores.amax(dim=-1, keepdim=True).isfinite()
        return self._sampler.draw(batch, looped, row_ids, scores.masked_fill(broken, 0.0))

    def _choose_verified(
        self, batch: Batch, looped: LoopOutput, row_ids: Tensor, logits: Tensor, sequences: Any, lengths: Any
    ) -> Sampled:
        """Row by row, the oldest of a sequence first; what lies after a draft that falls is not asked about."""
        count, depth = len(sequences), batch.lanes.depth
        token_ids, stands, ends = (np.zeros(count, dtype=np.int64) for _ in range(3))
        decodes = to_host(looped.table[:, STAGE].index_select(0, row_ids)) < depth
        final = to_host(looped.loops.index_select(0, row_ids)) >= depth
        fallen: set[int] = set()
        for row in np.argsort(lengths, kind="stable").tolist():
            sequence, length = int(sequences[row]), int(lengths[row])
            if sequence in fallen:
                continue
            here = slice(row, row + 1)
            scores = self._process(sequences[here], lengths[here], logits[here])
            if final[row]:
                self._keep(sequences[here], logits[here], scores)
            index = to_device(np.array([row]), row_ids.device)
            token_id, keeps = self._chosen(batch, looped, row_ids.index_select(0, index), scores)
            if batch.program.forced:
                token_id, keeps = scripted(batch, looped, row_ids.index_select(0, index), token_id, keeps)
            token_id = self._loop.broadcast(flag_broken(token_id, logits[here]))
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
        output = [to_device(part, row_ids.device) for part in (token_ids, stands, ends)]
        return output[0], output[1].bool(), output[2].bool(), logits

    def _process(self, sequences: Any, lengths: Any, logits: Tensor) -> Tensor:
        wide = logits.to(torch.float32, copy=True).to(self._loop.device)
        if not self._processors:
            return wide
        ids = self._loop.ids_up_to(int(lengths.max()))
        return process_rows(self._processors, ids, sequences, lengths, wide, self._guard)

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
        over = criteria_met(self._criteria, ids, sequences, lengths + 1, self.scores, self._guard)
        return self._loop.broadcast(over)

    def _ends(self, sequences: Any, lengths: Any, token_ids: Tensor, over: Tensor | None) -> Tensor:
        """With lengths and EOS ids."""
        loop = self._loop
        limit = np.inf if loop.max_length is None else loop.max_length
        eos = np.isin(to_host(token_ids), sorted(loop.eos))
        ends = torch.from_numpy((lengths + 1 >= limit) | eos)
        return (ends if over is None else ends | over.cpu()).to(token_ids.device)


def sampler_for(
    loop: Ids, logits_processor: LogitsProcessorList, config: GenerationConfig, settings: SamplingSettings
) -> DeviceSampler | HostSampler:
    """The choice that a config and processors ask for, as transformers prepared them; sets the settings of all.

    The step stops for Python only where it must.
    """
    keep, batch = bool(config.return_dict_in_generate), len(loop.lengths)
    scores, logits = keep and bool(config.output_scores), keep and bool(config.output_logits)
    seeds = request_seeds(batch) if config.do_sample else None
    wanted = sampling_of(logits_processor, batch, seeds, loop.vocabulary)
    forbidden = {*(word[-1] for word in wanted[0].bad_words), *wanted[0].eos} if wanted else set()
    # where every id may be forbidden, Python says by which processor
    if wanted and len(forbidden) < loop.vocabulary and not loop.criteria and not scores and not logits:
        settings.set(0, *wanted)
        return DeviceSampler(settings, lambda: loop.sequences, loop.shift, loop.broadcast)
    if seeds is not None:
        settings.set(0, *[SequenceSampling(draws=True, seed=seed) for seed in seeds])
    return HostSampler(loop, logits_processor, settings, scores, logits)
