"""Ids for the rows that a pass has read, for all requests together on the device.

Processors that only Python knows (`on_collapse="tighten"`) run on the host for the rows of their own request.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from sigma0.decode.finite import BROKEN, flag_broken
from sigma0.decode.lanes import CACHE_POSITION, DRAFT
from sigma0.decode.row_sampling import sample_rows
from sigma0.decode.sampler import process
from sigma0.decode.sampling import judged
from sigma0.decode.sampling_settings import SamplingProgram, SamplingSettings, SequenceSampling
from sigma0.decode.step import Looped, read, sample_greedy
from sigma0.decode.step_batch import Batch
from sigma0.decode.transfer import to_host


class EngineSampler:
    """Samples for the sequences of an engine.

    Args:
        slots: S.
        longest: Ids of the longest sequence.
        device: Where the logits are.

    Attributes:
        program: What sampling has to compute.
        errors: What broke in a processor on the host, by slot.
    """

    def __init__(self, slots: int, longest: int, device: torch.device) -> None:
        self.program = SamplingProgram()
        self.errors: dict[int, Exception] = {}
        self._settings = SamplingSettings(slots, device)
        with torch.inference_mode(False):
            # one more than the longest: what is sampled behind it is written there
            self._ids = torch.zeros((slots, longest + 2), dtype=torch.int64, device=device)
        self._hosted: dict[int, LogitsProcessor] = {}

    def set(
        self, slot: int, sampling: SequenceSampling, ids: Sequence[int], hosted: LogitsProcessor | None = None
    ) -> None:
        """Sets how the ids of a slot are sampled.

        Args:
            slot: Which.
            sampling: Its settings.
            ids: Its ids so far.
            hosted: A processor that runs on the host after the others.
        """
        self._settings.set(slot, sampling)
        self._ids[slot, : len(ids)] = torch.tensor(ids, device=self._ids.device)
        if hosted is not None:
            self._hosted[slot] = hosted
        self.program = self._settings.program()

    def clear(self, slot: int) -> None:
        """Forgets a slot."""
        self._settings.clear(slot)
        self._hosted.pop(slot, None)
        self.errors.pop(slot, None)
        self.program = self._settings.program()

    @property
    def on_device(self) -> bool:
        """Whether nothing but tensors takes part."""
        return not self._hosted

    @property
    def takes_best(self) -> bool:
        """Whether the likeliest ids are taken."""
        return self.program.is_greedy and not self._hosted

    @property
    def draws(self) -> bool:
        """Whether some ids are drawn."""
        return self.program.draws

    @property
    def fixed(self) -> Hashable:
        """What a compiled choice takes for constant."""
        return self.program

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that it reads and writes."""
        return *self._settings.tensors, self._ids

    def choose(self, batch: Batch, looped: Looped, which: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """See `sigma0.decode.runner.Choice.choose`."""
        logits = read(batch, looped, which)
        token_ids, stands = self.sample(batch, looped, which, logits)
        if batch.program.forced:
            token_ids, stands = judged(batch, looped, which, token_ids, stands)
        return token_ids, stands, None, logits

    def sample(self, batch: Batch, looped: Looped, which: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Samples for rows that were read.

        Args:
            batch: What the pass worked on.
            looped: Its rows.
            which: Those that were read, int64 `[K]`.
            logits: `[K, V]`.

        Returns:
            Ids `[K]`, `BROKEN` where logits are not finite, and whether the drafts among them stand, bool `[K]`.
        """
        table = looped.table.index_select(0, which)
        drafts = table[:, DRAFT]
        if self.program.is_greedy and not self._hosted:
            token_ids = sample_greedy(batch, logits)
            return token_ids, token_ids == drafts
        sequences = looped.sequences.index_select(0, which)
        lengths = table[:, CACHE_POSITION] + 1
        scores = process(self._settings, self.program, logits, sequences, self._ids, lengths)
        for slot, processor in self._hosted.items():
            scores = self._on_host(slot, processor, scores, sequences, lengths)
        token_ids, stands = sample_rows(batch, looped, which, self._settings, self.program, scores)
        token_ids = flag_broken(token_ids, logits)
        for slot in self.errors:
            token_ids = token_ids.masked_fill(sequences == slot, BROKEN)
        # rows of nobody's lane are written where nothing is read
        owned = looped.lanes.index_select(0, which) < batch.lanes.count
        self._ids[sequences, torch.where(owned, lengths, self._ids.shape[1] - 1)] = token_ids
        return token_ids, stands

    def _on_host(
        self, slot: int, processor: LogitsProcessor, scores: Tensor, sequences: Tensor, lengths: Tensor
    ) -> Tensor:
        """The scores, those of one slot processed on the host; what breaks there ends its request alone."""
        scores = scores.clone()
        for row, own in enumerate(to_host(sequences).tolist()):
            if own != slot:
                continue
            try:
                ids = self._ids[slot : slot + 1, : int(lengths[row])]
                scores[row] = processor(ids, scores[row : row + 1])[0]
            except Exception as error:
                self.errors[slot] = error
        return scores
