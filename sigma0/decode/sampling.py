"""How a step chooses ids: the argmax, draws on the device, or with what only Python knows."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from sigma0.decode.accept import accept_drawn, accept_greedy
from sigma0.decode.finite import flag_broken
from sigma0.decode.host_stepped import is_over, narrowed, process
from sigma0.decode.lanes import CACHE_POSITION, DEPTH, DRAFT, POSITION, STAGE
from sigma0.decode.logits_processors import sampling_of
from sigma0.decode.random_numbers import OWN_DRAW, check_purpose, redraw_purpose, request_seeds
from sigma0.decode.sampler import distribution, draw, draw_uniform
from sigma0.decode.sampler import process as process_on_device
from sigma0.decode.sampling_settings import SamplingProgram, SamplingSettings, SequenceSampling
from sigma0.decode.state_guard import StateGuard
from sigma0.decode.step import Batch, Looped, read, sample_greedy
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


Chosen = tuple[Tensor, Tensor, Tensor | None, Tensor]


class Choice(Protocol):
    """Chooses ids."""

    def first(self, logits: Tensor, rows: First) -> tuple[Tensor, Tensor | None]:
        """Ids `[B]` behind the prompts, given logits `[B, V]`, and what criteria say of them, bool `[B]` or None."""

    def choose(self, batch: Batch, looped: Looped, which: Tensor) -> Chosen:
        """What is read from rows.

        Args:
            batch: Model, lanes and settings.
            looped: The rows of a pass.
            which: Those that are read, int64 `[K]`.

        Returns:
            Ids `[K]`; which drafts stand, bool `[K]`; which sequences end by criteria, bool `[K]`, None where the
            settings alone say it; and the logits `[K, V]`.
        """


class Greedy:
    """The argmax."""

    def __init__(self, broadcast: Any) -> None:
        self._broadcast = broadcast

    def first(self, logits: Tensor, rows: First) -> tuple[Tensor, Tensor | None]:
        """See `Choice.first`."""
        return self._broadcast(flag_broken(logits.argmax(-1), logits)), None

    def choose(self, batch: Batch, looped: Looped, which: Tensor) -> Chosen:
        """See `Choice.choose`."""
        logits = read(batch, looped, which)
        token_ids = sample_greedy(batch, logits)
        if not batch.program.verify:
            return token_ids, token_ids, None, logits
        drafts = looped.table[:, DRAFT].index_select(0, which)
        stands, token_ids = accept_greedy(drafts, token_ids)
        return *forced(batch, looped, which, token_ids, stands), None, logits


class Sampled:
    """Processes and draws on the device.

    Args:
        rows: Of every sequence.
        program: What they ask for, nothing that depends on the ids so far.
        broadcast: As `Operations` has it.
    """

    def __init__(self, rows: SamplingSettings, program: SamplingProgram, broadcast: Any) -> None:
        self._rows = rows
        self._program = program
        self._broadcast = broadcast

    def _process(self, logits: Tensor, sequences: Tensor) -> Tensor:
        return process_on_device(self._rows, self._program, logits, sequences, None, sequences)

    def first(self, logits: Tensor, rows: First) -> tuple[Tensor, Tensor | None]:
        """See `Choice.first`."""
        scores = self._process(logits, rows.sequences)
        token_ids = draw(self._rows, self._program, scores, rows.sequences, rows.positions, OWN_DRAW)
        return self._broadcast(flag_broken(token_ids, logits)), None

    def choose(self, batch: Batch, looped: Looped, which: Tensor) -> Chosen:
        """See `Choice.choose`."""
        logits = read(batch, looped, which)
        scores = self._process(logits, looped.sequences.index_select(0, which))
        token_ids, stands = self.draw(batch, looped, which, scores)
        return *forced(batch, looped, which, flag_broken(token_ids, logits), stands), None, logits

    def draw(self, batch: Batch, looped: Looped, which: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Ids `[K]` by scores `[K, V]`, and which drafts stand."""
        table, loops = looped.table.index_select(0, which), looped.loops.index_select(0, which)
        sequences, positions = looped.sequences.index_select(0, which), table[:, POSITION] + 1
        if not batch.program.verify:
            token_ids = draw(self._rows, self._program, scores, sequences, positions, OWN_DRAW)
            return self._broadcast(token_ids), token_ids
        lanes = looped.lanes.index_select(0, which)
        kept = batch.lanes.remember_probs(scores.shape[1])
        p = distribution(self._rows, self._program, scores, sequences)
        drafts, decodes = table[:, DRAFT], table[:, STAGE] < batch.lanes.depth
        test = draw_uniform(self._rows, sequences, positions, check_purpose(loops))
        stands, rest = accept_drawn(drafts.clamp_min(0), p, kept.index_select(0, lanes), test)
        purposes = torch.where(decodes, OWN_DRAW, redraw_purpose(loops))
        sources = torch.where(decodes[:, None], scores, rest.log())
        drawn = draw(self._rows, self._program, sources, sequences, positions, purposes)
        remember(kept, lanes, p, decodes, stands)
        stands = self._broadcast(stands)
        return self._broadcast(torch.where(stands & ~decodes, drafts, drawn)), stands


def remember(kept: Tensor, rows: Tensor, p: Tensor, decodes: Tensor, stands: Tensor) -> None:
    """Notes what each draft follows now: a new one p, and one that stood the test follows p after it, too.

    Args:
        kept: Distributions of all lanes, `[S T + 1, V]`; written.
        rows: Lanes, `[K]`.
        p: `[K, V]`.
        decodes: Which rows drew a draft, bool `[K]`.
        stands: Which drafts stand, bool `[K]`.
    """
    kept.index_copy_(0, rows, p)


class Host:
    """Calls logits processors and stopping criteria of the caller; the choice itself is greedy or drawn.

    Args:
        loop: The token loop, for its ids.
        logits_processor: As transformers prepared them.
        stopping_criteria: Beside lengths and EOS ids.
        drawn: Draws; None for greedy sampling.
        keeps_scores: Whether processed scores are kept.
        keeps_logits: Whether logits are kept.

    Attributes:
        scores: Processed scores of each sequence's new tokens, each `[V]`; None unless kept.
        raw_logits: As `scores`, before processing.
    """

    def __init__(
        self,
        loop: Any,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        drawn: Sampled | None,
        keeps_scores: bool,
        keeps_logits: bool,
    ) -> None:
        self._loop = loop
        self._processors = logits_processor
        self._criteria = stopping_criteria
        self._drawn = drawn
        batch = len(loop.lengths)
        self.scores: list[list[Tensor]] | None = [[] for _ in range(batch)] if keeps_scores else None
        self.raw_logits: list[list[Tensor]] | None = [[] for _ in range(batch)] if keeps_logits else None
        self._guard = StateGuard([*logits_processor, *stopping_criteria])
        self._draft_ends: dict[tuple[int, int], bool] = {}

    def first(self, logits: Tensor, rows: First) -> tuple[Tensor, Tensor | None]:
        """See `Choice.first`."""
        sequences = np.arange(len(logits))
        lengths = self._loop.lengths.copy()
        scores = self._process(sequences, lengths, logits)
        self._keep(sequences, logits, scores)
        token_ids, _ = self._sample(scores, rows)
        token_ids = self._flag(token_ids, logits)
        return token_ids, self._over(sequences, lengths, token_ids)

    def _sample(self, scores: Tensor, rows: First) -> tuple[Tensor, Tensor | None]:
        broadcast = self._loop.runner.ops.broadcast
        return (broadcast(scores.argmax(-1)), None) if self._drawn is None else self._drawn.first(scores, rows)

    def _flag(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        """The ids, flagged on every rank where logits are broken."""
        flagged: Tensor = self._loop.runner.ops.broadcast(flag_broken(token_ids, logits))
        return flagged

    def choose(self, batch: Batch, looped: Looped, which: Tensor) -> Chosen:
        """See `Choice.choose`."""
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
        if self._drawn is not None:
            broken = ~scores.amax(dim=-1, keepdim=True).isfinite()
            return self._drawn.draw(batch, looped, which, scores.masked_fill(broken, 0.0))
        token_ids = batch.ops.broadcast(scores.argmax(-1))
        stands, _ = accept_greedy(looped.table[:, DRAFT].index_select(0, which), token_ids)
        return token_ids, stands

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
            token_id, keeps = forced(batch, looped, which.index_select(0, index), token_id, keeps)
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
            return process(self._processors, ids, sequences, lengths, wide)
        scores = [wide[row : row + 1] for row in range(len(wide))]
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            for item in narrowed(self._processors, np.array([sequence])):
                with self._guard.watching(item):
                    scores[row] = item(ids[[sequence], :length], scores[row].clone())
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
            with self._guard.watching(item) if self._loop.verifies else _nothing():
                # in a list, since the list turns any return value into a tensor
                over |= is_over(StoppingCriteriaList([item]), ids, sequences, lengths + 1, self.scores)
        broadcast: Tensor = self._loop.runner.ops.broadcast(over)
        return broadcast

    def _ends(self, sequences: Any, lengths: Any, token_ids: Tensor, over: Tensor | None) -> Tensor:
        """With lengths and EOS ids."""
        loop = self._loop
        limit = np.inf if loop.max_length is None else loop.max_length
        eos = np.isin(to_host(token_ids), sorted(loop.eos))
        ends = torch.from_numpy((lengths + 1 >= limit) | eos)
        return (ends if over is None else ends | over.cpu()).to(token_ids.device)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def forced(batch: Batch, looped: Looped, which: Tensor, token_ids: Tensor, stands: Tensor) -> tuple[Tensor, Tensor]:
    """Given judgements, where the settings hold some, in place of those of the model."""
    settled = batch.settings.settled
    if settled is None:
        return token_ids, stands
    table, sequences = looped.table.index_select(0, which), looped.sequences.index_select(0, which)
    token = (table[:, CACHE_POSITION] - batch.settings.table[sequences, 6]) % settled.shape[1]
    right, loops = settled[sequences, token], looped.loops.index_select(0, which)
    decodes = table[:, STAGE] < batch.lanes.depth
    stands = ~((table[:, DEPTH] < right) & (right <= loops))
    return torch.where(decodes, token_ids, table[:, DRAFT]), stands


def choice_for(loop: Any, logits_processor: LogitsProcessorList, config: GenerationConfig) -> Choice:
    """The choice that a generation config asks for; the step stops for Python only where it must."""
    keep = bool(config.return_dict_in_generate)
    scores, logits = keep and bool(config.output_scores), keep and bool(config.output_logits)
    broadcast, batch, device = loop.runner.ops.broadcast, len(loop.lengths), loop.runner.lanes.device
    seeds = request_seeds(batch) if config.do_sample else None
    told = sampling_of(logits_processor, batch, seeds)
    rows = SamplingSettings(batch, device)
    if told is not None:
        rows.set(0, *told)
    program = rows.program()
    if told is None or program.reads_ids or program.min_length or loop.criteria or scores or logits:
        drawn = None
        if seeds is not None:
            rows.set(0, *(SequenceSampling(draws=True, seed=seed) for seed in seeds))
            drawn = Sampled(rows, rows.program(), broadcast)
        return Host(loop, logits_processor, loop.criteria, drawn, scores, logits)
    return Greedy(broadcast) if program.is_greedy else Sampled(rows, program, broadcast)
