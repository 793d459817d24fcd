"""Ids for the rows that a pass has read."""

from sigma0.decode.sampler import processors_for
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from sigma0.decode.accept import accept_drawn
from sigma0.decode.finite import BROKEN
from sigma0.decode.lanes import CACHE_POSITION, DRAFT, STAGE
from sigma0.decode.step import Batch, Looped, sample_greedy
from sigma0.serve.engine.request import RequestState
from sigma0.signals.canary import Tighten


class Sampler:
    """Samples for the sequences of an engine.

    Args:
        slots: S.

    Attributes:
        errors: What broke in a caller's processor, by slot.
    """

    def __init__(self, slots: int) -> None:
        self.errors: dict[int, Exception] = {}
        self._hosted: dict[int, tuple[RequestState, LogitsProcessorList, int | None]] = {}

    @property
    def draws(self) -> bool:
        return any(seed is not None for _, _, seed in self._hosted.values())

    def set(self, slot: int, state: RequestState) -> None:
        params = state.request.sampling
        processors = processors_for(params, state.prompt_length)
        if state.request.on_collapse == "tighten":
            processors.append(Tighten(state.prompt_length))
        seed = None if params.temperature == 0 else (params.seed or 0)
        if processors or seed is not None:
            self._hosted[slot] = state, processors, seed

    def clear(self, slot: int) -> None:
        self._hosted.pop(slot, None)
        self.errors.pop(slot, None)

    def sample(self, batch: Batch, looped: Looped, which: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids `[K]`, `BROKEN` where logits are not finite, and whether drafts stand, bool `[K]`."""
        token_ids = sample_greedy(batch, logits)
        table = looped.table.index_select(0, which)
        stands = table[:, DRAFT] == token_ids
        slots = looped.sequences.index_select(0, which).tolist()
        for row, slot in enumerate(slots):
            if slot in self._hosted and int(token_ids[row]) != BROKEN:
                line, lane, loop = table[row].tolist(), int(looped.lanes[which[row]]), int(looped.loops[which[row]])
                try:
                    token_ids[row], stands[row] = self._one(batch, slot, line, lane, loop, logits[row])
                except Exception as error:
                    self.errors[slot] = error
                    token_ids[row] = BROKEN
        return token_ids, stands

    def _one(
        self, batch: Batch, slot: int, line: list[int], lane: int, loop: int, logits: Tensor
    ) -> tuple[int, bool]:
        state, processors, seed = self._hosted[slot]
        ids = torch.tensor([state.entry.token_ids[: line[CACHE_POSITION] + 1]])
        scores = processors(ids, logits.to(torch.float32, copy=True)[None])
        if seed is None:
            best = int(scores.argmax(-1))
            return best, best == line[DRAFT]
        p = scores.softmax(-1)
        drafted, stands = line[STAGE] >= batch.lanes.depth, torch.zeros(1, dtype=torch.bool)
        weights = p
        if batch.program.verify:
            probs = batch.lanes.remember_probs(p.shape[1])
            if drafted:
                uniform = self._uniform(seed, line[CACHE_POSITION], 2 * loop + 1)
                stands, weights = accept_drawn(torch.tensor([line[DRAFT]]), p, probs[lane][None], uniform)
            probs[lane] = p[0]
        if bool(stands[0]):
            return line[DRAFT], True
        uniform = self._uniform(seed, line[CACHE_POSITION], 2 * loop if drafted else 0)
        total = weights.double().cumsum(-1)
        drawn = int(torch.searchsorted(total[0], uniform.double() * total[0, -1], right=True).clamp_max(p.shape[1] - 1))
        return drawn, False

    def _uniform(self, seed: int, position: int, purpose: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, position, purpose)) % 2**63)
        return torch.rand(1, generator=generator)
