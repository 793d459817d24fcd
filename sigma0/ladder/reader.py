"""A local model with its K/V, which prefills what it missed of a text and returns the next logits."""

import inspect
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sigma0.config import ExitConfig
from sigma0.decode.exits import Reason, exit_reason
from sigma0.decode.ops import FATES, Fate
from sigma0.decode.stats import RunRecord
from sigma0.decode.transfer import Bools, to_host
from sigma0.ladder.budget import Spending
from sigma0.ladder.rungs import LocalRung
from sigma0.models.cache_name import cache_argument
from sigma0.models.looped_causal import PROMPT_CHUNK
from sigma0.signals.verdict import mildest


@dataclass(frozen=True)
class Look:
    """A model's output after the last id of every sequence."""

    logits: Tensor  # `[B, V]`
    depths: list[int]  # Exit depths `[B]`; 0 without loops
    reasons: list[Reason | None]  # Exit reasons; None without loops
    fates: list[Fate | None]  # Of the loops that were run; None where unknown


class Reader:
    """Prefills only the ids that are not cached yet; all sequences of a batch together.

    Args:
        rung: The model.
        exit_config: For a looped model; by default its checkpoint's.
        watch: Whether fates are recorded.

    Raises:
        ValueError: For `after_exit="verify"`, which takes tokens back.
    """

    def __init__(self, rung: LocalRung, exit_config: ExitConfig | None, watch: bool) -> None:
        self.rung = rung
        self.model = rung.model
        self.config = self.model.resolve_exit_config(exit_config or rung.exit_config) if rung.is_looped else None
        if self.config is not None and self.config.after_exit == "verify":
            raise ValueError(
                f"rung {rung.name!r}: after_exit='verify' takes tokens back, which may have gone up by then; use "
                "'finish' or 'drop' for single tokens, or unit='answer'"
            )
        self.watch = watch
        self.cost = rung.new_cost()
        self._cache: Any = None
        self._record: RunRecord | None = None
        self._cached = 0
        self._dropped = False

    @property
    def passes(self) -> int:
        """Of its block so far, prompts included."""
        return self.cost.passes + self.cost.prompt_passes

    def missing(self, length: int) -> int:
        """Ids of each sequence that are still to be read, of a text of `length`."""
        return length - self._cached

    def forecast(self, mask: Tensor) -> Spending:
        """The most that reading on costs; the ids that the mask `[B, S]` shows count as caught up on."""
        new = self.missing(mask.shape[1])
        return Spending(loop_passes=self._most_passes(new), catch_up_tokens=int(mask[:, self._cached :].sum()))

    def _loops(self) -> int:
        """Loops that a prompt runs."""
        return self.model.exit_rule(self.config).last_loop if self.config is not None else 1

    def _most_passes(self, new: int) -> int:
        if self.config is None or (new == 1 and self._cached):
            return self._loops()
        return self._loops() * -(-new // PROMPT_CHUNK) + self._waiting()

    def _waiting(self) -> int:
        """Passes that earlier tokens still have to go before a prompt can be read."""
        in_flight = None if self._cache is None or self.config is None else self._cache.in_flight
        return 0 if in_flight is None else int(self._cache.depth - in_flight.loops.min())

    @torch.no_grad()
    def read(self, ids: Tensor, mask: Tensor, ended: Bools, padded: bool) -> Look:
        """Reads on to the end of the ids.

        Args:
            ids: `[B, S]`, left-padded.
            mask: 0 at pads and after an end, `[B, S]`.
            ended: Sequences that have ended, whose ids are pads.
            padded: Whether the mask has zeros.
        """
        began = time.perf_counter()
        look = self._read(ids, mask, ended, padded)
        self.cost.seconds += time.perf_counter() - began
        if self.rung.kv_limit is not None and self._kv_bytes() > self.rung.kv_limit:
            self.drop()
        return look

    def drop(self) -> None:
        """Forgets its K/V; the next reading begins at the beginning."""
        if self._cached:
            self._dropped = True
        self._cache, self._record, self._cached = None, None, 0
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _kv_bytes(self) -> int:
        if self.config is not None:
            return int(self._cache.bytes_in_use)
        return sum(
            tensor.nbytes for layer in self._cache.layers for tensor in (layer.keys, layer.values) if tensor is not None
        )

    def _read(self, ids: Tensor, mask: Tensor, ended: Bools, padded: bool) -> Look:
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        batch, length = ids.shape
        new, shown = self.missing(length), int(mask[:, self._cached :].sum())
        first = self._cache is None
        if first:
            self.cost.refills += self._dropped
            self._dropped = False
            self._cache = self._new_cache(batch)
        waiting = self._waiting()
        before = None if self.config is None else (replace(self._cache.counts), self._rows())
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, self._cached :]
        inputs = {
            "input_ids": ids[:, self._cached :],
            "attention_mask": mask if padded or self.config is None else None,
            "position_ids": positions,
            cache_argument(self.model.forward): self._cache,
            "logits_to_keep": 1,
        }
        if self.config is None:
            known = inspect.signature(self.model.forward).parameters
            fitting = {name: value for name, value in inputs.items() if name in known}
            outputs = self.model(**fitting, use_cache=True)
            self._count_forward(new, shown, first)
            self._cached = length
            unknown: list[Any] = [None] * batch
            return Look(outputs.logits[:, -1], [0] * batch, unknown, unknown)
        self._cache.ended = None if first else ended.copy()
        outputs = self.model(**inputs, exit_config=self.config)
        assert before is not None
        counts, (known_counts, rows) = self._cache.counts, before
        passes, chunks = counts.passes - known_counts.passes, -(-new // PROMPT_CHUNK)
        readings = min(passes, counts.head_rows - known_counts.head_rows)
        self.cost.passes += passes
        self.cost.rows += self._rows() - rows
        if first or new > 1:
            self.cost.prompt_passes += self._loops() * chunks + waiting
            readings += chunks
            self._note_read(shown, first)
        self.cost.beside_bytes += self.rung.beside_bytes(chunks, readings)
        self._cached = length
        return self._look(outputs)

    def _new_cache(self, batch: int) -> Any:
        if self.config is None:
            return DynamicCache(config=self.model.config)
        cache = self.model.new_cache()
        if self.watch:
            model = self.model
            self._record = cache.record = RunRecord(batch, 64, model.num_loops, model.device, model.operations)
        return cache

    def _rows(self) -> int:
        counts = self._cache.counts
        return int(counts.rows + counts.prompt_rows)

    def _count_forward(self, new: int, shown: int, first: bool) -> None:
        self.cost.rows += shown
        if first or new > 1:
            self.cost.prompt_passes += 1
            self._note_read(shown, first)
        else:
            self.cost.passes += 1

    def _note_read(self, shown: int, first: bool) -> None:
        self.cost.read += shown
        self.cost.catch_ups += not first

    def _look(self, outputs: Any) -> Look:
        assert self.config is not None
        depths, met, diverged = (
            to_host(part[:, -1]) for part in (outputs.exit_depths, outputs.exit_met, outputs.exit_diverged)
        )
        mode = self.config.mode
        reasons = [exit_reason(mode, bool(here), bool(off)) for here, off in zip(met, diverged, strict=True)]
        return Look(outputs.logits[:, -1], depths.tolist(), [*reasons], self._fates(len(reasons)))

    def _fates(self, batch: int) -> list[Fate | None]:
        """The mildest of the last two loops that were run by now."""
        if self._record is None:
            return [None] * batch
        fates = to_host(self._record.fates[:, self._cache.length - 1 - self._record.first_position])
        return [self._mildest(row.tolist()) for row in fates]

    def fate_of(self, sequence: int, column: int) -> Fate | None:
        """The mildest of the last two loops of a position that were run by now; None where they were not kept.

        Args:
            sequence: Batch index.
            column: Of the text, pads counted in.
        """
        if self._record is None or not self._record.first_position <= column < self._cached:
            return None
        fates = to_host(self._record.fates[sequence, column - self._record.first_position])
        return self._mildest(fates.tolist())

    def _mildest(self, fates: list[int]) -> Fate | None:
        return mildest([FATES[fate] for fate in fates if fate], min(2, max(1, self.model.num_loops - 2)))
