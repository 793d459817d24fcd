"""Self-speculation of fixed depth: k tokens are drafted greedily at loop d, then one forward verifies them at loop T.

As a user would write it over the published modules (LayerSkip, arXiv 2404.16710, with loops in place of layers): a
draft runs loops 1 to d and keeps its state there, so that the forward over the k + 1 rows (the last token and its k
drafts) runs loops d + 1 to T alone. Planes 1 to d are then right for every token that is kept, and planes d + 1 to T
are written by the verification, so K/V are those of full depth. After the last accepted draft comes the token of loop
T. A round takes k d + T passes of the block and gives 1 to k + 1 tokens. K/V have one shape for all lengths, so every
step can be compiled once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sigma0.bench.core.replay import Trace
from sigma0.bench.speed.decoders import Decoded, Decoder, now
from sigma0.bench.speed.peer import StockLoopedModel
from sigma0.decode.kv_store import BlockShape

# Drafts that are tried on the fit prompts.
LENGTHS = (1, 2, 3, 5, 8)
_FIT_RUNS, _FIT_TOKENS = 2, 24


@dataclass(frozen=True)
class Drafting:
    """How drafts are made."""

    depth: int  # d, the loop that they are read at; below T
    length: int  # k, drafts of a round

    @classmethod
    def parse(cls, text: str) -> "Drafting":
        """Of "depth,length"."""
        numbers = text.split(",")
        if len(numbers) != 2 or not all(number.strip().isdigit() and int(number) > 0 for number in numbers):
            raise ValueError(f"{text!r} is no depth and length of drafts, such as 2,4")
        return cls(*map(int, numbers))


class _StaticPlanes:
    """K/V `[1, H_kv, N, d]` of each layer and loop, as the layers write them: of rows at columns, int64 `[R]`."""

    def __init__(self, planes: Sequence[tuple[Tensor, ...]], columns: Tensor) -> None:
        self._planes, self._columns = planes, columns

    def update(self, keys: Tensor, values: Tensor, plane: int) -> tuple[Tensor, Tensor]:
        """Writes the rows `[1, H_kv, R, d]`; the whole plane."""
        held_keys, held_values = self._planes[plane]
        held_keys.index_copy_(2, self._columns, keys)
        held_values.index_copy_(2, self._columns, values)
        return held_keys, held_values


class SelfSpeculation(Decoder):
    """Greedy decoding of one sequence `[1, S]`; the first compiled run compiles.

    A course says by its settled loops which drafts stand; without one the model does.

    Attributes:
        drafting: May be set to shorter drafts between runs that are not compiled.
    """

    def __init__(
        self,
        model: Any,
        ids: Tensor,
        new_tokens: int,
        drafting: Drafting,
        trace: Trace | None = None,
        compiled: bool = False,
    ) -> None:
        if len(ids) > 1:
            raise ValueError(f"self-speculation is written for one sequence, not for a batch of {len(ids)}")
        if not 1 <= drafting.depth < model.num_loops:
            raise ValueError(f"drafts at loop {drafting.depth}, but a model of {model.num_loops} loops drafts below")
        if trace is not None and not trace.settled:
            raise ValueError("the course says nothing of settled loops, so not which drafts stand")
        super().__init__(model, ids, new_tokens)
        self._stock = StockLoopedModel(model)
        self._total, self.drafting, self._trace, self._compiled = model.num_loops, drafting, trace, compiled
        self._columns = torch.arange(ids.shape[1] + new_tokens + drafting.length, device=ids.device)
        config, head_dim = model.config, BlockShape.of(model, 1).head_dim
        size = (1, config.num_key_value_heads, len(self._columns), head_dim)
        self._planes = [
            tuple(torch.zeros(size, dtype=model.dtype, device=ids.device) for _ in range(2))
            for _ in range(self._total * config.num_hidden_layers)
        ]

    def read(self) -> None:
        """Reads the prompt but for its last token, from nothing."""
        ids = self.ids[:, :-1]
        self._run(self._stock.inner.embed_tokens(ids), self._columns[: ids.shape[1]], 0, self._total)

    @torch.no_grad()
    def decode(self) -> Decoded:
        """New tokens, timed from the first on; what the last round gives beyond them is in the time and counted."""
        if not self.is_read:
            self.prompt()
        enter, draft, verify = self._enter, self._draft, self._verify
        if self._compiled:
            enter, draft, verify = self._compiled_steps
        depth, length = self.drafting.depth, self.drafting.length
        column, rounds = self.ids.shape[1], 0
        last = self._columns[column - 1 : column]
        written: list[int] = self._verify(self._enter(self.ids[0, -1:], last), last).tolist()
        start = now(self.ids)
        while len(written) < self.new_tokens:
            token = torch.tensor(written[-1:], device=self.ids.device)
            states, drafts = [], []
            for place in range(column, column + length):
                state, token = draft(token, self._columns[place : place + 1])
                states.append(state)
                drafts.append(token)
            # the last draft is verified too, so that a round of right ones gives one more token
            states.append(enter(token, self._columns[column + length : column + length + 1]))
            read = verify(torch.cat(states, 1), self._columns[column : column + length + 1])
            result, proposed = read.tolist(), torch.cat(drafts).tolist()
            right = self._right(proposed, result, len(written) - 1)
            written += [*proposed[:right], result[right]]
            column += right + 1
            rounds += 1
        seconds = now(self.ids) - start
        return Decoded(
            seconds=seconds,
            passes=rounds * (length * depth + self._total),
            rows=rounds * (length + 1) * self._total,
            head_rows=rounds * (2 * length + 1),
            tokens=torch.tensor([written[: self.new_tokens]]),
            kv_in_use=(self.ids.shape[1] + self.new_tokens - 1) * self.position_bytes,
            kv_allocated=len(self._columns) * self.position_bytes,
            runner="compile" if self._compiled else "eager",
            timed=len(written) - 1,
        )

    @cached_property
    def _compiled_steps(self) -> Any:
        steps = (self._enter, self._draft, self._verify)
        return [torch.compile(step, fullgraph=True, dynamic=False) for step in steps]

    def _right(self, drafts: Sequence[int], read: Sequence[int], first: int) -> int:
        """How many drafts stand, of which the first was read from the new token of that number."""
        if self._trace is not None:
            return accepted(self._trace, self.drafting, first)
        return [*(mine == full for mine, full in zip(drafts, read, strict=False)), False].index(False)

    def _enter(self, ids: Tensor, columns: Tensor) -> Tensor:
        """State at loop d, `[1, R, D]`, of ids `[R]`."""
        return self._run(self._stock.inner.embed_tokens(ids[None]), columns, 0, self.drafting.depth)

    def _draft(self, ids: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the ids that follow by it, `[R]`."""
        state = self._enter(ids, columns)
        return state, self._stock.lm_head(state)[0].argmax(-1)

    def _verify(self, states: Tensor, columns: Tensor) -> Tensor:
        """Ids `[R]` that follow at loop T, from states at loop d."""
        return self._stock.lm_head(self._run(states, columns, self.drafting.depth, self._total))[0].argmax(-1)  # type: ignore[no-any-return]

    def _run(self, hidden_states: Tensor, columns: Tensor, first: int, last: int) -> Tensor:
        """Loops after `first` up to `last` of states `[1, R, D]`, each over all columns up to its own."""
        mask = (self._columns[None] <= columns[:, None])[None, None]  # [1, 1, R, N]
        rotary = self._stock.inner.rotary_emb(hidden_states, columns[None])
        planes = _StaticPlanes(self._planes, columns)
        return self._stock.loops(range(first, last), hidden_states, rotary, mask, planes)


def fit_drafting(model: Any, ids: Tensor, new_tokens: int, trace: Trace | None) -> Drafting:
    """The best drafts of a small grid: of the least time a token, decoded eagerly; by a course, the fewest passes."""
    total = model.num_loops
    depths = sorted({depth for depth in (1, 2, total // 4, total // 2) if 1 <= depth < total})
    grid = [Drafting(depth, length) for depth in depths for length in LENGTHS]
    if trace is not None:
        return min(grid, key=lambda drafting: passes_along(trace, drafting))
    decoder = SelfSpeculation(model, ids, min(new_tokens, _FIT_TOKENS), Drafting(1, max(LENGTHS)))
    decoder.decode()
    seconds = {}
    for drafting in grid:
        decoder.drafting = drafting
        runs = [decoder.decode() for _ in range(_FIT_RUNS)]
        seconds[drafting] = min(run.seconds / run.later for run in runs)
    return min(seconds, key=seconds.__getitem__)


def passes_along(trace: Trace, drafting: Drafting) -> float:
    """Passes for a token along a whole course."""
    fed = rounds = 0
    while fed < len(trace.settled):
        fed, rounds = fed + accepted(trace, drafting, fed) + 1, rounds + 1
    return rounds * (drafting.length * drafting.depth + trace.total_loops) / fed


def accepted(trace: Trace, drafting: Drafting, first: int) -> int:
    """How many drafts a course accepts, of which the first is read from the new token of that number."""
    settled = (trace.settled[(first + place) % len(trace.settled)] for place in range(drafting.length))
    return [*(loop <= drafting.depth for loop in settled), False].index(False)
