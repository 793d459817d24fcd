"""The token loop of a batch: steps until every sequence has ended. No sequence waits for another one's depth.

A token's reason follows from what became of it. Under `finish` and `drop` it is emitted at its exit. Under `verify`:

    confirmed      a draft whose rule was met, or a re-draft of a deeper loop, that loop T accepts: the rule's own
                   reason (`threshold_met`, `confident`, ...) at the loop of the draft
    overruled      sampled at T, where nothing is left to verify it, after its rule was met too soon: `max_depth`
    never drafted  sampled at T: the rule's reason if it was met there by itself, else `max_depth`
    the first      sampled at T from the prompt's states, unconditionally; the rule's reason if it would have been met
                   at any loop of that position, else `max_depth`, also where the inner break would have stopped it

Tokens reach loop T in order, since each is at least one loop behind the one before it. Only verified tokens are
emitted. After a draft that would end the sequence no token is fed.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from sigma0.config import ExitConfig
from sigma0.decode.compiled import no_progress
from sigma0.decode.exits import ExitRule
from sigma0.decode.grammar.compiled import Grammars
from sigma0.decode.grammar.rows import GrammarRows, may_force
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.lanes import Lanes
from sigma0.decode.logits import BROKEN, NOT_FINITE
from sigma0.decode.model import LoopedModel
from sigma0.decode.python_hooks import HostSampler, sampler_for, split_criteria
from sigma0.decode.repetition import CollapseStop, TextStats
from sigma0.decode.runner import EagerRunner, Step
from sigma0.decode.runners import GraphRunner, choose_runner, open_runner
from sigma0.decode.sampling import DeviceSampler
from sigma0.decode.settings import NO_LIMIT, SequenceExit, SequenceSettings
from sigma0.decode.stats import RunRecord
from sigma0.decode.step import EXIT_DEPTH, SEQUENCE, TOKEN
from sigma0.decode.transfer import Bools, Ints, PendingTokens, to_device, to_host


class Exits(NamedTuple):
    """Where the last prompt token of every sequence was read, all `[B]`, and the logits of that, `[B, V]`.

    At which loop, from 1; whether its rule was met, and whether it was read there because its loop diverged.
    """

    depths: Ints
    met: Bools
    logits: Tensor
    diverged: Bools


@dataclass(frozen=True)
class Emission:
    """A new token of one sequence."""

    sequence: int
    token_id: int
    depth: int  # Loop at which it was read, from 1
    met: bool  # Whether its exit rule was met
    last: bool  # Whether the sequence ends with it
    diverged: bool = False  # Whether it was read where it was because its loop diverged
    forced: bool = False  # Whether it was fed without a reading, as the only id that its grammar allowed


class TokenLoop:
    """Generates the new tokens of a batch whose prompts are in a cache.

    Args:
        model: The looped model.
        cache: Its prompts; no token is in flight.
        rule: When a token may stop.
        config: What becomes of its deeper loops.
        input_ids: Prompt ids `[B, P]`, left-padded; P may be 0 where the prompt came as embeddings.
        positions: Position of the first new token of each sequence, `[B]`.
        logits_processor: As transformers prepared them.
        stopping_criteria: As transformers prepared them.
        generation_config: `do_sample`, `max_length`, pad token, and which scores to keep.
        record: Statistics of the new tokens; None for none.
        grammars: What each sequence follows; None where none follows any.

    Attributes:
        lengths: Ids of each sequence, `[B]`.
        collapse: When a sequence that repeats itself is ended; None never.
        collapsed: Sequences that were ended for it.
        accepted: Under `verify`, for each emitted token of each sequence, whether its draft was accepted; True for a
            token that was sampled at loop T without a draft.
        tail_passes: Under `verify`, passes after the last exit, which only check.
    """

    def __init__(
        self,
        model: LoopedModel,
        cache: DepthCache,
        rule: ExitRule,
        config: ExitConfig,
        input_ids: Tensor,
        positions: Ints,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        record: RunRecord | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        batch, prompt = input_ids.shape
        self.model, self.cache, self.rule, self.record = model, cache, rule, record
        self.verifies = config.after_exit == "verify"
        if model.stages[1] and not self.verifies:
            cache.note_coda(rule.reads_at_full_depth)
        cache.encode(cache.length)
        self.vocabulary = int(model.config.vocab_size)
        self.device = input_ids.device
        self.criteria, self.max_length, self.eos = split_criteria(stopping_criteria)
        pad = generation_config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self.prompt_ids, self.prompt_length = input_ids, prompt
        self.lengths: Ints = np.full(batch, prompt, dtype=np.int64)
        # of the token that is fed next; from cache positions to ids, which lack a prompt given as embeddings; and to
        # positions, which count no pads
        self.cache_positions: Ints = np.full(batch, cache.length, dtype=np.int64)
        self.first_position = cache.length
        self.shift = prompt - cache.length
        self.offsets: Ints = positions - cache.length
        self.new_ids: list[list[int]] = [[] for _ in range(batch)]
        self.collapse: CollapseStop | None = None
        self.collapsed: set[int] = set()
        # for that, and after how many of the newest tokens the proximity was high
        self._text_stats = TextStats(model.operations)
        self._texts, self._high = [self._text_stats.text() for _ in range(batch)], [0] * batch
        self.accepted: list[list[bool]] = [[] for _ in range(batch)]
        self.tail_passes = 0
        self._emitted: Ints = np.zeros(batch, dtype=np.int64)
        self._over: set[int] = set()
        lanes = cache.reserve_lanes(model)
        settings, sampling = cache.reserve_settings()
        self.sampler: DeviceSampler | HostSampler = sampler_for(self, logits_processor, generation_config, sampling)
        self._grammars = None if grammars is None else self._grammar_rows(lanes, grammars, config)
        self.runner = self._runner(lanes, settings, config, getattr(generation_config, "runner", "auto"))

    def _runner(self, lanes: Lanes, settings: SequenceSettings, config: ExitConfig, wanted: str) -> EagerRunner:
        cache, batch = self.cache, len(self.lengths)
        with torch.no_grad():
            drop = config.after_exit == "drop"
            settings.set_exit(range(batch), SequenceExit(self.rule, drop, self.verifies, self.first_position))
            limit = None if self.max_length is None else self.max_length - 1 - self.shift
            settings.set_ends(range(batch), sorted(self.eos), limit)
            ahead = int(self.offsets.max())
            if ahead > 0:
                # a caller may begin to count anywhere; passes only know how many positions there are
                last = int(self.model.config.max_position_embeddings) if limit is None else limit
                self.model.reserve_positions(last + ahead + 1, lanes.hidden)
            python = None if self.sampler.on_device else "ids are chosen by what only Python knows"
            waits = None if self.record is None else "statistics are kept of every token"
            waits = waits if self._grammars is None else "a grammar says of each token which ids may follow"
            chosen = choose_runner(wanted, self.model, python, waits)
            progress = getattr(self.model, "progress", no_progress)
            runner = open_runner(chosen, self.model, lanes, settings, cache, cache.counts, progress, cache.graphs)
            if isinstance(runner, GraphRunner):
                cache.graphs = runner.graphs
            runner.use(settings.program(paths=self.record is not None, masked=self._grammars is not None))
            if self.record is not None:
                self.record.follow(lanes, self.model.gate, self.rule, drop)
        return runner

    def _grammar_rows(self, lanes: Lanes, grammars: Grammars, config: ExitConfig) -> GrammarRows:
        rows = GrammarRows(lanes, self.vocabulary)
        for sequence, grammar in enumerate(grammars.per_sequence):
            if grammar is not None:
                forces = grammars.forces and may_force(self.model, self.rule, config)
                rows.set(sequence, grammar, self.first_position, forces, grammars.limit)
        return rows

    @property
    def sequences(self) -> Tensor:
        """Ids of every sequence, prompt and drafts included, right-padded, int64 `[B, longest]`."""
        return self.ids_up_to(int(self.lengths.max()))

    def broadcast(self, decision: Tensor) -> Tensor:
        """As `Operations` has it."""
        return self.runner.ops.broadcast(decision)

    def ids_up_to(self, length: int) -> Tensor:
        """The first `length` ids of every sequence, right-padded, `[B, length]`."""
        new = length - self.prompt_ids.shape[1]
        rows = torch.tensor([(ids + [self.pad] * new)[:new] for ids in self.new_ids], dtype=torch.int64)
        return torch.cat([self.prompt_ids, rows.view(len(self.new_ids), -1).to(self.device)], 1)

    def run(self, first: Exits) -> Iterator[tuple[Emission, ...]]:
        """Yields the new tokens of each pass in which any appeared.

        Args:
            first: Where the last prompt token of every sequence was read; under `verify` at loop T, `met` where the
                rule would have been met by itself.
        """
        # the interpreter closes a stream that was left early when the names of torch and of this module are gone
        is_finalizing = sys.is_finalizing
        try:
            yield self._begin(first)
            while (emissions := self._step()) is not None:
                if emissions:
                    yield emissions
        finally:
            if not is_finalizing():
                self._close()

    @torch.no_grad()
    def _begin(self, first: Exits) -> tuple[Emission, ...]:
        batch, lanes = len(self.lengths), self.runner.lanes
        ahead = to_device(self.offsets + self.first_position, lanes.device)
        token_ids, over = self.sampler.first(first.logits, ahead, self.prompt_length)
        limit = self.max_length is not None and self.prompt_ids.shape[1] + 1 >= self.max_length
        lines = []
        for sequence, token_id in enumerate(to_host(token_ids).tolist()):
            ends = limit or token_id in self.eos or (over is not None and bool(over[sequence]))
            met, depth, diverged = (int(part[sequence]) for part in (first.met, first.depths, first.diverged))
            why = met | 2 * diverged
            lines.append([1, sequence, token_id, depth, self.first_position, why, ends, 1, 1])
        going = np.array([line[1] for line in lines if not line[6]], dtype=np.int64)
        if len(going):
            index = to_device(going, lanes.device)
            where = torch.full_like(index, self.first_position)
            positions = where + to_device(self.offsets[going], lanes.device)
            current = token_ids.index_select(0, index).clamp_min(0)
            lanes.enter(lanes.lane_of(index, where), self.model.enter(current, positions), where, positions)
        return self._take(Step(np.array(lines, dtype=np.int64), first.logits, batch))

    @torch.no_grad()
    def _step(self) -> tuple[Emission, ...] | None:
        """A step; once all sequences have ended, what is left is not read."""
        if len(self._over) == len(self.lengths):
            return None
        runner, cache = self.runner, self.cache
        longest = cache.length + runner.lag
        if self.max_length is not None:
            longest = max(min(longest, self.max_length - 1 - self.shift), cache.length)
        cache.reserve_positions(longest)
        step = runner.step(longest, self.sampler)
        if step is None:
            return None
        if cache.segments is not None:
            cache.block_lanes(runner.lanes)
        self.tail_passes = 0 if step.decoding else self.tail_passes + 1
        if self.record is not None:
            self.record.after_pass()
        return self._take(step) if len(step.lines) else ()

    def _take(self, step: Step) -> tuple[Emission, ...]:
        """Notes what a step emitted; the tokens that are final."""
        final, lines = [], step.lines.tolist()
        for row, (emitted, sequence, token_id, _, fed_at, _, ends, stands, fresh) in enumerate(lines):
            if sequence in self._over:
                # what was under way when it ended
                continue
            if token_id == BROKEN:
                raise FloatingPointError(NOT_FINITE)
            if fresh:
                new = self.new_ids[sequence]
                new[fed_at - self.first_position :] = [token_id]
                self.lengths[sequence] = self.prompt_ids.shape[1] + len(new)
                self.cache_positions[sequence] = fed_at + (not ends)
                self.cache.extend(fed_at + (not ends))
            if emitted:
                self._emitted[sequence] += 1
                self.accepted[sequence].append(bool(stands))
                final.append(row)
        if self._grammars is not None:
            errors = self._grammars.advance(line for line in lines if line[SEQUENCE] not in self._over)
            for error in errors.values():
                raise error
        output = self._looked_at(step, final) if final else ()
        emissions = []
        for row, proximity in zip(final, output, strict=True):
            _, sequence, token_id, depth, fed_at, why, ends, _, _ = lines[row]
            last = bool(ends) or self._collapses(sequence, proximity, fed_at)
            emissions.append(Emission(sequence, token_id, depth, bool(why & 1), last, bool(why & 2), bool(why & 4)))
        over = [emission.sequence for emission in emissions if emission.last]
        if over:
            self._over.update(over)
            self.runner.lanes.suspend(over)
        return tuple(emissions)

    def _looked_at(self, step: Step, final: list[int]) -> Sequence[float]:
        """Tells the record of final tokens; the proximity of each to collapse, 0 where nobody asks for it."""
        sequences, token_ids, depths = step.lines[final][:, [SEQUENCE, TOKEN, EXIT_DEPTH]].T.tolist()
        if self.record is not None:
            logits = step.logits
            assert logits is not None
            current = logits if len(final) == len(step.lines) else logits[final]
            return self.record.note_tokens(current, sequences, token_ids, depths)
        if self.collapse is None:
            return [0.0] * len(final)
        return self._text_stats.take([self._texts[sequence] for sequence in sequences], token_ids)[-1]

    def _collapses(self, sequence: int, proximity: float, position: int) -> bool:
        """Whether a sequence is ended after a final token, since it repeats itself; what follows is not run on."""
        if self.collapse is None:
            return False
        self._high[sequence] = self._high[sequence] + 1 if proximity >= self.collapse.tau else 0
        if not self.collapse.ends_after(len(self.accepted[sequence]), self._high[sequence]):
            return False
        self.collapsed.add(sequence)
        # others may have fed what was not read yet
        keep: Ints = np.full(len(self.lengths), NO_LIMIT)
        keep[sequence] = position
        lanes = self.runner.lanes
        lanes.drop(to_device(keep, lanes.device))
        return True

    @torch.no_grad()
    def _close(self) -> None:
        """After the last step, or where a run is closed before its end: what was not emitted is taken back.

        The tokens that are in the cache are the prompt's and all emitted ones but the last of each sequence; those of
        sequences that ended early are added as pending, with the pads after them, since a continuation counts them
        as cached.
        """
        lanes, cache = self.runner.lanes, self.cache
        for sequence, emitted in enumerate(self._emitted.tolist()):
            del self.new_ids[sequence][emitted:]
            self.lengths[sequence] = self.prompt_ids.shape[1] + emitted
            self.cache_positions[sequence] = self.first_position + max(emitted - 1, 0)
        lanes.resume()
        # and what each sequence feeds next
        lanes.drop(to_device(self.cache_positions.copy(), lanes.device))
        lanes.stop_decoding()
        end = int(self.cache_positions.max())
        cache.trim(end)
        missing = end - self.cache_positions  # [B]
        if missing.any():
            sequences = np.repeat(np.arange(len(missing)), missing)
            cache_positions = np.concatenate([np.arange(start, end) for start in self.cache_positions.tolist()])
            ids = self.ids_up_to(end + self.shift + 1).cpu().numpy()
            lacking, positions = ids[sequences, cache_positions + self.shift], cache_positions + self.offsets[sequences]
            cache.add_pending(PendingTokens(lacking, sequences, cache_positions, positions))
