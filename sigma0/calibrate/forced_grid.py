"""New tokens of given texts read at all loops, and where each setting of whole grids of exit settings would stop.

A grid is ordered from patient to eager, so that no token's exit depth grows along it. Where two settings stop a token
at the same loop, so does every setting between them: only the other tokens are looked at there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sigma0.calibrate.teacher_forcing import ForcedText, check_finite, groups_of
from sigma0.decode.exits import ExitRule, select_exits

# Numbers of loop states, and of logits of one loop, held at once (in numbers: 256 and 64 MiB of float32).
_STATES = 2**26
_LOGITS = 2**24


@dataclass(frozen=True)
class GridReadings:
    """The N new tokens of some texts, in order.

    Attributes:
        text: Number of the text, from 0, `[N]`.
        same: Whether the argmax at loop t is that of loop T, `[T, N]`.
        exits: For each grid, the loop at which each setting stops, `[settings, N]`.
    """

    text: NDArray[np.int64]
    same: NDArray[np.bool_]
    exits: dict[str, NDArray[np.int64]]

    def same_at(self, depths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the argmax at each token's own loop in `depths` `[N]` is that of loop T."""
        same: NDArray[np.bool_] = np.take_along_axis(self.same, depths[None] - 1, 0)[0]
        return same


@torch.no_grad()
def read_grids(model: Any, grids: Mapping[str, Sequence[ExitRule]], texts: Sequence[ForcedText]) -> GridReadings:
    """Reads the new tokens of texts at every loop; each setting decides where it would have stopped.

    Args:
        model: A looped model.
        grids: Exit rules by the grid's name, from patient to eager.
        texts: At least one.

    Raises:
        ValueError: If the model computes logits that are not finite.
    """
    same, exits = [], []
    for states, gates in _chunks(model, texts):
        same.append(_same(model, states))
        exits.append({name: _exits(model, rules, states, gates) for name, rules in grids.items()})
    return GridReadings(
        text=np.repeat(np.arange(len(texts)), [text.new for text in texts]),
        same=np.concatenate(same, axis=1),
        exits={name: np.concatenate([part[name] for part in exits], axis=1) for name in grids},
    )


def _chunks(model: Any, texts: Sequence[ForcedText]) -> Iterator[tuple[Tensor, Tensor]]:
    """Loop states `[T, n, D]` and gate logits `[T, n]` of the positions that new tokens are read from, in order."""
    parts: list[tuple[Tensor, Tensor]] = []
    held = 0
    for group in groups_of(texts):
        # Pads stand on the right, where no real token sees them.
        ids = pad_sequence([torch.tensor(text.ids) for text in group], batch_first=True).to(model.device)
        marks = torch.zeros_like(ids, dtype=torch.bool)
        for row, text in enumerate(group):
            marks[row, len(text.ids) - text.new - 1 : len(text.ids) - 1] = True
        output = model.model(input_ids=ids, use_cache=False)
        parts.append((output.loop_states[:, marks], output.gate_logits[:, marks]))
        held += parts[-1][0].numel()
        if held > _STATES:
            yield _joined(parts)
            parts, held = [], 0
    if parts:
        yield _joined(parts)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    states, gates = zip(*parts, strict=True)
    return torch.cat(states, 1), torch.cat(gates, 1)


def _same(model: Any, states: Tensor) -> NDArray[np.bool_]:
    step = max(1, _LOGITS // model.config.vocab_size)
    top = [
        torch.cat([check_finite(model.head(part), loop).argmax(-1) for part in state.split(step)])
        for loop, state in enumerate(states, start=1)
    ]
    same: NDArray[np.bool_] = (torch.stack(top) == top[-1]).cpu().numpy()
    return same


def _exits(model: Any, rules: Sequence[ExitRule], states: Tensor, gates: Tensor) -> NDArray[np.int64]:
    """Exit depth at each setting, `[settings, n]`."""
    found = np.zeros((len(rules), states.shape[1]), dtype=np.int64)
    step = max(1, _LOGITS // model.config.vocab_size)

    def look(place: int, tokens: NDArray[np.int64]) -> None:
        for part in np.array_split(tokens, -(-len(tokens) // step)):
            index = torch.from_numpy(part).to(states.device)
            some, of_gate = states.index_select(1, index), gates.index_select(1, index)
            depths = select_exits(rules[place], some[:, None], of_gate[:, None], model.head).depths[0]
            found[place, part] = depths.cpu().numpy()

    everything = np.arange(states.shape[1])
    last = len(rules) - 1
    look(0, everything)
    if last > 0:
        look(last, everything)
    spans = [(0, last, everything)]
    while spans:
        low, high, tokens = spans.pop()
        if high - low < 2:
            continue
        parted = found[low, tokens] != found[high, tokens]
        found[low + 1 : high, tokens[~parted]] = found[low, tokens[~parted]]
        if parted.any():
            middle = (low + high) // 2
            look(middle, tokens[parted])
            spans += [(low, middle, tokens[parted]), (middle, high, tokens[parted])]
    return found
