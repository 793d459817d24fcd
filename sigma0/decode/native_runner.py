"""The runner of a CPU where the functions in C++ were built: a step is two calls, and the output head between them.

Everything that it does `EagerRunner` does in torch, in some hundred operations over a few numbers each; what these
functions do not know (rules over differences, criteria, grammars, preludes and codas) it leaves to that one.
"""

import torch
from torch import Tensor

from sigma0.decode.attention import RowIndices
from sigma0.decode.lanes import Lanes
from sigma0.decode.logits import BROKEN
from sigma0.decode.ops import Block, LaneBooks, LaneTables, RowCount, RowPlaces, Settled
from sigma0.decode.prefill import Prefill
from sigma0.decode.runner import NOTHING, EagerRunner, Step
from sigma0.decode.settings import Program
from sigma0.decode.step import Choice, Looped, run_block
from sigma0.decode.step_batch import Batch
from sigma0.decode.transfer import Ints, to_host


class NativeRunner(EagerRunner):
    """Runs steps in C++; arguments as `EagerRunner` takes them."""

    def use(self, program: Program) -> None:
        """See `EagerRunner.use`; weights are looked at now, and whenever planes have moved, and in no pass between."""
        super().use(program)
        self._books: LaneBooks | None = None
        self._over: Batch | None = None
        self._held: tuple[object, ...] = ()
        # every pass reads the head of tokens that decode, and of drafts with them
        self._whole = program.verify and program.redrafts
        self._knows = self.model.stages == (0, 0) and not (
            program.modes or program.watch or program.criteria or program.breaks or program.masked
        )

    def step(self, longest: int, choice: Choice, beside: Prefill | None = None) -> Step | None:
        """See `EagerRunner.step`."""
        if not self._knows:
            return super().step(longest, choice, beside)
        batch, settings, lanes = self.batch(longest), self.settings, self.lanes
        held = self._held
        if (
            batch is not self._over
            or held[0] is not settings.eos
            or held[1] is not settings.exits
            or held[2] is not lanes.paths
        ):
            self._hand_over(batch)
            if not self._knows:
                return super().step(longest, choice, beside)
        books = self._books
        assert books is not None
        took = not beside and books.has_block
        if took and books.has_head and choice.takes_best and not self.program.forced:
            settled = books.step(BROKEN)
            if settled is not None:
                return self._told(batch, books, settled)
        elif took and books.loop():
            return self._settled(batch, books, books.rows(books.count).states, choice) if books.count else None
        live = books.count if took else books.start()
        return self._settled(batch, books, self._looped(batch, books, beside), choice) if live or beside else None

    def _told(self, batch: Batch, books: LaneBooks, settled: Settled) -> Step | None:
        """A step that has run to its end."""
        if not books.count:
            return None
        self._count(books)
        self._embed(batch, settled)
        lines = settled.lines
        return Step(lines, books.logits(settled.kept) if len(lines) else None, books.decoding)

    def _count(self, books: LaneBooks) -> None:
        program, counts = self.program, self.counts
        counts.passes += 1
        counts.rows += books.count
        if program.margin:
            counts.head_rows += books.decoding
        if not program.margin or program.verify:
            counts.head_rows += books.read_rows

    def _looped(self, batch: Batch, books: LaneBooks, beside: Prefill | None) -> Tensor:
        """States `[R, W]` of the rows that were taken, after a loop in torch of them and of the prefill beside them."""
        rows = books.rows(books.count)
        at = RowIndices(rows.sequences, rows.cache_positions, rows.positions, rows.planes)
        if beside:
            self.counts.prompt_rows += len(beside)
        _, raw = run_block(batch, rows.previous, at, beside or None)
        return books.end(raw if books.norms else batch.model.norm(raw))

    def _settled(self, batch: Batch, books: LaneBooks, states: Tensor, choice: Choice) -> Step:
        """What follows from a loop."""
        program, decoding, logits = batch.program, books.decoding, None
        if program.margin:
            logits = batch.model.read(states if self._whole else states[:decoding]).float()
            books.lead(logits)
        self._count(books)
        if program.drops and not books.has_block:
            self._leave(self._rows_of(books, states, logits))
        reads = books.reads
        if not len(reads):
            return Step(NOTHING, None, decoding)
        if choice.takes_best and not program.forced:
            of_all = logits is not None and (self._whole or not program.verify)
            if logits is None or not of_all:
                some = states if len(reads) == len(states) else states.index_select(0, reads)
                logits = batch.model.read(some).float()
            settled = books.settle_best(logits, of_all, BROKEN)
        else:
            looped = self._rows_of(books, states, logits)
            token_ids, stands, ends, logits = choice.choose(batch, looped, reads)
            settled, of_all = books.settle(reads, token_ids, stands, ends), False
        self._embed(batch, settled)
        kept: Ints = settled.kept
        if of_all:
            kept = to_host(reads)[kept]
        return Step(settled.lines, logits, decoding, None if len(kept) == len(logits) else kept)

    def _embed(self, batch: Batch, settled: Settled) -> None:
        """Embeds what the books have only noted."""
        if settled.fed is not None:
            lanes, token_ids, positions = settled.fed
            batch.lanes.hidden.index_copy_(0, lanes, batch.model.enter(token_ids, positions))

    def _rows_of(self, books: LaneBooks, states: Tensor, logits: Tensor | None) -> Looped:
        own = books.rows(books.count)
        reads = torch.zeros(len(states), dtype=torch.bool).index_fill_(0, books.reads, True)
        return Looped(own.lanes, own.lines, own.sequences, own.loops, states, books.codes, reads, logits, seen=True)

    def _hand_over(self, batch: Batch) -> None:
        """Takes all memory and weights as they are now."""
        lanes, settings, model, program = self.lanes, self.settings, self.model, batch.program
        self._over, self._held = batch, (settings.eos, settings.exits, lanes.paths)
        counts = None if lanes.exit_state is None else lanes.exit_state.counts
        paths = lanes.paths if program.paths else None
        fixed = lanes.table, lanes.hidden, lanes.gate, counts
        tables = LaneTables(*fixed, paths, settings.table, settings.thresholds, settings.eos, settings.exits)
        books = LaneBooks(tables, lanes.depth) if self._books is None else self._books
        books.take_tables(tables, max(lanes.window, 1))
        books.take_weights(model.plain_weights())
        self._knows = books.gates or not program.gate
        if self._knows:
            asked = program.verify, program.prompts, program.gate, program.margin, self._whole, program.drops
            books.take_program(*asked, self._block(batch, books))
            self._books = books

    def _block(self, batch: Batch, books: LaneBooks) -> Block | None:
        """The layers in one call, where nothing but their weights makes them what they are."""
        lanes, place = batch.lanes, batch.placement
        if batch.ops.run_block is None or not books.norms:
            return None
        plain = batch.model.plain_block(batch.longest, lanes.hidden)
        if plain is None:
            return None
        layers, shape, tables = plain
        planes = [(own.flat_keys, own.flat_values) for own in batch.layers[: len(layers)]]
        count = (place.total - 1) // place.size
        none = lanes.table[:0, 0]
        places = RowPlaces(none, none, none, count, place.blocks, place.starts, place.seen)
        return Block(layers, shape, planes, tables, places)


def row_count(own: Lanes, prompts: Ints, passes: Ints, rows: Ints) -> RowCount:
    """Counts rows of new tokens in lanes; other arguments as `RowCount` takes them."""
    return RowCount(own.table, own.depth, *map(torch.from_numpy, (prompts, passes, rows)))
