"""The books of a step on a CPU (`sigma0.kernels.lane_rows`), and whose memory they are."""

import torch

from sigma0.decode.lanes import Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import LaneBooks, LaneTables, RowCount
from sigma0.decode.settings import Program, SequenceSettings
from sigma0.decode.transfer import Ints


def hand_over(
    books: LaneBooks | None, own: Lanes, wanted: SequenceSettings, program: Program, model: LoopedModel
) -> LaneBooks:
    """The books of lanes, with whatever was replaced since the last pass.

    Args:
        books: As they are; None for new ones.
        own: The lanes, always the same; likewise
        wanted: settings of every sequence.
        program: What a pass has to compute.
        model: For the weights of the ends of a loop.
    """
    counts = None if own.exit_state is None else own.exit_state.counts
    paths = own.paths if program.paths else None
    known = None if books is None else books.tables
    if known is None or known.eos is not wanted.eos or known.paths is not paths or known.counts is not counts:
        fixed = own.table, own.hidden, own.gate, counts
        tables = LaneTables(*fixed, paths, wanted.table, wanted.thresholds, wanted.eos)
        books = LaneBooks(tables, own.depth) if books is None else books
        books.take_tables(tables, max(own.window, 1))
    assert books is not None
    books.take_weights(model.plain_weights())
    return books


def row_count(own: Lanes, prompts: Ints, passes: Ints, rows: Ints) -> RowCount:
    """Counts rows of new tokens in lanes; other arguments as `RowCount` takes them."""
    return RowCount(own.table, own.depth, *map(torch.from_numpy, (prompts, passes, rows)))
