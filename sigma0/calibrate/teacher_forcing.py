"""Teacher forcing: every token of given texts read at all loops, and where each exit rule would have stopped.

For a predicted token, a_t is the argmax and p_t the distribution that the head reads at loop t, T loops in all:

    same_t           a_t = a_T
    kl_t             KL(p_T || p_t) = sum_v p_T(v) (log p_T(v) - log p_t(v)), in nats
    oracle           the first t with a_t = a_T: the cheapest exit that changes nothing, which may be luck
    settled oracle   the first t from which on every a_s = a_T

All loops are run for all positions, so the K/V of every plane are exact: this is what `after_exit="finish"` decodes.

A grid of settings of one rule is ordered from patient to eager, so that no token's exit depth grows along it. Where two
settings stop a token at the same loop, so does every setting between them: only the other tokens are computed there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sigma0.decode.exits import ExitRule, select_exits
from sigma0.models.hf_generate import DepthGenerationMixin

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
# Tokens run in one forward, pads included, and logits of all loops held at once (in numbers: 64 MiB of float32).
_TOKENS = 2**13
_LOGITS = 2**24
# Of a grid: numbers of loop states held at once (256 MiB of float32).
_STATES = 2**26


@dataclass(frozen=True)
class ForcedText:
    """A text whose tokens are given."""

    ids: tuple[int, ...]  # Prompt and continuation, at least 2 ids
    new: int  # How many ids at the end are the continuation, from 1 to `len(ids) - 1`

    def __post_init__(self) -> None:
        if not 1 <= self.new < len(self.ids):
            raise ValueError(f"{self.new!r} new tokens of a text of {len(self.ids)}: at least one, after a prompt")


@dataclass(frozen=True)
class LoopReadings:
    """The N predicted tokens of some texts, in order; the first token of a text is not predicted."""

    text: Ints  # Number of the text, from 0, `[N]`
    is_new: Bools  # Whether the token belongs to the continuation, `[N]`
    same: Bools  # Whether the argmax at loop t is that of loop T, `[T, N]`
    kl: Floats  # KL(full || loop t) in nats, `[T, N]`
    exits: dict[str, Ints]  # For each rule, the loop at which it stops, `[N]`

    @property
    def oracle(self) -> Ints:
        """First loop whose argmax is that of loop T, `[N]`."""
        first: Ints = self.same.argmax(0) + 1
        return first

    @property
    def settled(self) -> Ints:
        """First loop from which on every argmax is that of loop T, `[N]`."""
        first: Ints = len(self.same) + 1 - np.cumprod(self.same[::-1], axis=0).sum(0)
        return first

    def same_at(self, depths: Ints) -> Bools:
        """Whether the argmax at each token's own loop in `depths` `[N]` is that of loop T."""
        same: Bools = np.take_along_axis(self.same, depths[None] - 1, 0)[0]
        return same

    def kl_at(self, depths: Ints) -> Floats:
        """KL(full || exit) at each token's own loop in `depths` `[N]`."""
        divergence: Floats = np.take_along_axis(self.kl, depths[None] - 1, 0)[0]
        return divergence


def read_forced(
    model: DepthGenerationMixin,
    rules: Mapping[str, ExitRule],
    texts: Sequence[ForcedText],
    on_text: Callable[[int], None] = lambda done: None,
) -> LoopReadings:
    """Reads texts at every loop; each rule decides where it would have stopped.

    Args:
        model: A looped model.
        rules: Exit rules by name.
        texts: At least one.
        on_text: Called with the number of texts done.

    Raises:
        ValueError: If there is no text, or the model computes logits that are not finite.
    """
    if not texts:
        raise ValueError("there is no text to read")
    parts: list[_Part] = []
    done = 0
    for group in groups_of(texts):
        parts += list(_read(model, rules, group))
        done += len(group)
        on_text(done)
    lengths = [len(text.ids) - 1 for text in texts]
    marks = [np.arange(length) >= length - text.new for text, length in zip(texts, lengths, strict=True)]
    return LoopReadings(
        text=np.repeat(np.arange(len(texts)), lengths),
        is_new=np.concatenate(marks),
        same=np.concatenate([part.same for part in parts], axis=1),
        kl=np.concatenate([part.kl for part in parts], axis=1),
        exits={name: np.concatenate([part.exits[name] for part in parts]) for name in rules},
    )


def join_readings(parts: Sequence[LoopReadings]) -> LoopReadings:
    """The readings of texts that were read apart, in their order."""
    counts = [int(part.text.max()) + 1 for part in parts]
    offsets = np.cumsum([0, *counts[:-1]])
    return LoopReadings(
        text=np.concatenate([part.text + offset for part, offset in zip(parts, offsets, strict=True)]),
        is_new=np.concatenate([part.is_new for part in parts]),
        same=np.concatenate([part.same for part in parts], axis=1),
        kl=np.concatenate([part.kl for part in parts], axis=1),
        exits={name: np.concatenate([part.exits[name] for part in parts]) for name in parts[0].exits},
    )


def groups_of(texts: Sequence[ForcedText]) -> Iterator[list[ForcedText]]:
    """Texts in order, as many at once as are read padded to one length: figures depend on it to the last bit."""
    group: list[ForcedText] = []
    for text in texts:
        longest = max(len(member.ids) for member in [*group, text])
        if group and longest * (len(group) + 1) > _TOKENS:
            yield group
            group = []
        group.append(text)
    yield group


@dataclass(frozen=True)
class LoopRun:
    """A run of all loops over N tokens, or over texts `[B, S]` of them."""

    states: Tensor  # `[T, N, D]`
    gates: Tensor | None  # Gate logits `[T, N]`; None where the model has no gate
    readable: Tensor  # What the head reads at every loop, `[T, N, D]`
    start: Tensor  # What loop 1 started from, `[N, D]`

    @classmethod
    def of(cls, model: DepthGenerationMixin, ids: Tensor) -> "LoopRun":
        """Of texts `[B, S]`; pads stand on the right, where no real token sees them."""
        output = model.run_texts(ids)
        return cls(output.loop_states, output.gate_logits, model.readable(output.loop_states), output.start_states)

    def select(self, marks: Tensor) -> "LoopRun":
        """The tokens that are marked, bool `[B, S]`, in order."""
        gates = None if self.gates is None else self.gates[:, marks]
        current = self.readable is self.states
        states = self.states[:, marks]
        return LoopRun(states, gates, states if current else self.readable[:, marks], self.start[marks])

    def part(self, positions: slice | Tensor) -> "LoopRun":
        """Some of the tokens."""
        gates = None if self.gates is None else self.gates[:, positions]
        current = self.readable is self.states
        states = self.states[:, positions]
        return LoopRun(states, gates, states if current else self.readable[:, positions], self.start[positions])

    def exits(self, rule: ExitRule, logits: Iterable[Tensor]) -> Ints:
        """Loop at which each token stops, `[N]`, given the logits of every loop, which are read in order."""
        if rule.fixed_depth is not None:
            return np.full(self.states.shape[1], rule.fixed_depth)
        known = iter(logits)

        def head(_hidden: Tensor) -> Tensor:
            # the rule reads the head once a loop, in order
            return next(known)

        gates = None if self.gates is None else self.gates[:, None]
        result = select_exits(rule, self.states[:, None], gates, head, start=self.start[None])
        depths: Ints = result.depths[0].cpu().numpy()
        return depths


@dataclass(frozen=True)
class _Part:
    same: Bools
    kl: Floats
    exits: dict[str, Ints]


@torch.no_grad()
def _read(model: DepthGenerationMixin, rules: Mapping[str, ExitRule], texts: Sequence[ForcedText]) -> Iterator[_Part]:
    # Pads stand on the right, where no real token sees them.
    ids = pad_sequence([torch.tensor(text.ids) for text in texts], batch_first=True).to(model.device)
    real = pad_sequence([torch.ones(len(text.ids) - 1) for text in texts], batch_first=True).bool().to(model.device)
    run = LoopRun.of(model, ids).select(torch.nn.functional.pad(real, (0, 1)))
    step = max(1, _LOGITS // (len(run.states) * model.config.vocab_size))
    for start in range(0, run.states.shape[1], step):
        yield _read_tokens(model, rules, run.part(slice(start, start + step)))


def _read_tokens(model: DepthGenerationMixin, rules: Mapping[str, ExitRule], run: LoopRun) -> _Part:
    logits = [check_finite(model.head(state), loop) for loop, state in enumerate(run.readable, start=1)]  # T of [n, V]
    top = torch.stack([loop_logits.argmax(-1) for loop_logits in logits])  # [T, n]
    full = torch.log_softmax(logits[-1].float(), -1)
    kl = [divergence(full, torch.log_softmax(loop_logits.float(), -1)) for loop_logits in logits]
    exits = {name: run.exits(rule, logits) for name, rule in rules.items()}
    return _Part((top == top[-1]).cpu().numpy(), torch.stack(kl).cpu().numpy(), exits)


def check_finite(logits: Tensor, loop: int) -> Tensor:
    """The logits of a loop, once it is sure that comparing them means something.

    Raises:
        ValueError: If one of them is NaN or infinite.
    """
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(
            f"the logits of loop {loop} are not finite: the weights are damaged, or {str(logits.dtype)[6:]} is too "
            "narrow for this model"
        )
    return logits


def divergence(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) of log-probabilities `[n, V]`, in nats, `[n]`; what full depth rules out counts nothing."""
    chances = full.exp()
    return torch.where(chances > 0, chances * (full - other), 0.0).sum(-1).clamp_min(0.0)


@dataclass(frozen=True)
class GridReadings:
    """The N new tokens of some texts, in order."""

    text: Ints  # Number of the text, from 0, `[N]`
    same: Bools  # Whether the argmax at loop t is that of loop T, `[T, N]`
    exits: dict[str, Ints]  # For each grid, the loop at which each setting stops, `[settings, N]`

    def same_at(self, depths: Ints) -> Bools:
        """Whether the argmax at each token's own loop in `depths` `[N]` is that of loop T."""
        same: Bools = np.take_along_axis(self.same, depths[None] - 1, 0)[0]
        return same


@torch.no_grad()
def read_grids(
    model: DepthGenerationMixin, grids: Mapping[str, Sequence[ExitRule]], texts: Sequence[ForcedText]
) -> GridReadings:
    """Reads the new tokens of texts at every loop; each setting decides where it would have stopped.

    Args:
        model: A looped model.
        grids: Exit rules by the grid's name, from patient to eager.
        texts: At least one.

    Raises:
        ValueError: If the model computes logits that are not finite.
    """
    same, exits = [], []
    for run in _grid_chunks(model, texts):
        same.append(_same_as_full(model, run.readable))
        exits.append({name: _grid_exits(model, rules, run) for name, rules in grids.items()})
    return GridReadings(
        text=np.repeat(np.arange(len(texts)), [text.new for text in texts]),
        same=np.concatenate(same, axis=1),
        exits={name: np.concatenate([part[name] for part in exits], axis=1) for name in grids},
    )


def _grid_chunks(model: DepthGenerationMixin, texts: Sequence[ForcedText]) -> Iterator[LoopRun]:
    """The positions that new tokens are read from, in order."""
    parts: list[LoopRun] = []
    held = 0
    for group in groups_of(texts):
        # Pads stand on the right, where no real token sees them.
        ids = pad_sequence([torch.tensor(text.ids) for text in group], batch_first=True).to(model.device)
        marks = torch.zeros_like(ids, dtype=torch.bool)
        for row, text in enumerate(group):
            marks[row, len(text.ids) - text.new - 1 : len(text.ids) - 1] = True
        parts.append(LoopRun.of(model, ids).select(marks))
        held += parts[-1].states.numel()
        if held > _STATES:
            yield _joined(parts)
            parts, held = [], 0
    if parts:
        yield _joined(parts)


def _joined(parts: Sequence[LoopRun]) -> LoopRun:
    states = torch.cat([part.states for part in parts], 1)
    gates = [part.gates for part in parts if part.gates is not None]
    current = all(part.readable is part.states for part in parts)
    readable = states if current else torch.cat([part.readable for part in parts], 1)
    return LoopRun(states, torch.cat(gates, 1) if gates else None, readable, torch.cat([part.start for part in parts]))


def _same_as_full(model: DepthGenerationMixin, readable: Tensor) -> Bools:
    step = max(1, _LOGITS // model.config.vocab_size)
    top = [
        torch.cat([check_finite(model.head(part), loop).argmax(-1) for part in state.split(step)])
        for loop, state in enumerate(readable, start=1)
    ]
    same: Bools = (torch.stack(top) == top[-1]).cpu().numpy()
    return same


def _grid_exits(model: DepthGenerationMixin, rules: Sequence[ExitRule], run: LoopRun) -> Ints:
    """Exit depth at each setting, `[settings, n]`."""
    exits = np.zeros((len(rules), run.states.shape[1]), dtype=np.int64)
    step = max(1, _LOGITS // model.config.vocab_size)

    def fill(place: int, tokens: Ints) -> None:
        for part in np.array_split(tokens, -(-len(tokens) // step)):
            some = run.part(torch.from_numpy(part).to(run.states.device))
            exits[place, part] = some.exits(rules[place], map(model.head, some.readable))

    everything = np.arange(run.states.shape[1])
    last = len(rules) - 1
    fill(0, everything)
    if last > 0:
        fill(last, everything)
    spans = [(0, last, everything)]
    while spans:
        low, high, tokens = spans.pop()
        if high - low < 2:
            continue
        differ = exits[low, tokens] != exits[high, tokens]
        exits[low + 1 : high, tokens[~differ]] = exits[low, tokens[~differ]]
        if differ.any():
            middle = (low + high) // 2
            fill(middle, tokens[differ])
            spans += [(low, middle, tokens[differ]), (middle, high, tokens[differ])]
    return exits
