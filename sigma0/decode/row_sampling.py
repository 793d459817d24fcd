"""Ids for the rows that a pass has read, and which drafts among them stand: for the library and the server alike."""

import torch
from torch import Tensor

from sigma0.decode.accept import accept_drawn
from sigma0.decode.lanes import DRAFT, POSITION, STAGE
from sigma0.decode.random_numbers import OWN_DRAW, check_purpose, redraw_purpose
from sigma0.decode.sampler import distribution, draw, draw_uniform
from sigma0.decode.sampling_settings import SamplingProgram, SamplingSettings
from sigma0.decode.step import Looped
from sigma0.decode.step_batch import Batch


def sample_rows(
    batch: Batch, looped: Looped, which: Tensor, settings: SamplingSettings, program: SamplingProgram, scores: Tensor
) -> tuple[Tensor, Tensor]:
    """What rows say: a new id, or whether the draft that was read from them earlier stands.

    Where sequences that draw and greedy ones share a pass, the rule for distributions is the greedy rule too: all of
    p and q lies on one id.

    Args:
        batch: What the pass worked on.
        looped: Its rows.
        which: Those that were read, int64 `[K]`.
        settings: Of every sequence.
        program: What they ask for.
        scores: Processed, float32 `[K, V]`.

    Returns:
        Ids `[K]`, and whether they are the drafts that they were before, bool `[K]`.
    """
    table, sequences = looped.table.index_select(0, which), looped.sequences.index_select(0, which)
    drafts, positions = table[:, DRAFT], table[:, POSITION] + 1
    broadcast = batch.ops.broadcast
    if not (batch.program.verify and program.draws):
        token_ids = broadcast(draw(settings, program, scores, sequences, positions, OWN_DRAW))
        return token_ids, drafts == token_ids
    lanes, loops = looped.lanes.index_select(0, which), looped.loops.index_select(0, which)
    drafted = table[:, STAGE] >= batch.lanes.depth
    kept, p = batch.lanes.remember_probs(scores.shape[1]), distribution(settings, program, scores, sequences)
    test = draw_uniform(settings, sequences, positions, check_purpose(loops))
    stands, rest = accept_drawn(drafts.clamp_min(0), p, kept.index_select(0, lanes), test)
    remember(kept, lanes, p, ~drafted, stands)
    sources = torch.where(drafted[:, None], rest.log(), scores)
    purposes = torch.where(drafted, redraw_purpose(loops), OWN_DRAW)
    drawn = draw(settings, program, sources, sequences, positions, purposes)
    stands = broadcast(stands & drafted)
    return broadcast(torch.where(stands, drafts, drawn)), stands


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
