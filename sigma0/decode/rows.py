"""Tokens between loop 1 and T of all requests: the rows of the next pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.batch import Bools, Ints
from sigma0.decode.transfer import to_device

PASSIVE, LEADER, FOLLOWER = range(3)


@dataclass(frozen=True)
class Rows:
    """Rows, those of one text at one loop side by side in the order of their columns.

    Attributes:
        hidden: State after the last finished loop, `[R, D]`.
        texts: Slot of the request, `[R]`.
        columns: Column in its text, `[R]`.
        loops: Loops finished, `[R]`.
        targets: Loop behind which the row leaves, `[R]`.
        roles: `PASSIVE`: it only writes its planes; `LEADER`: its token is still to be read; `FOLLOWER`: it was read;
            `[R]`.
        slots: Of its trajectory, -1 where nobody asks, `[R]`.
    """

    hidden: Tensor
    texts: Ints
    columns: Ints
    loops: Ints
    targets: Ints
    roles: Ints
    slots: Ints

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, rows: Ints) -> "Rows":
        """The rows with these numbers, in this order."""
        return Rows(
            self.hidden.index_select(0, to_device(rows, self.hidden.device)),
            self.texts[rows],
            self.columns[rows],
            self.loops[rows],
            self.targets[rows],
            self.roles[rows],
            self.slots[rows],
        )

    def without(self, gone: Bools) -> "Rows":
        """The rows that are not gone."""
        return self.select(np.flatnonzero(~gone)) if gone.any() else self

    def with_loops(self, hidden: Tensor) -> "Rows":
        """The same behind one more loop."""
        return replace(self, hidden=hidden, loops=self.loops + 1)


def join(parts: Sequence[Rows]) -> Rows:
    """Several parts, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        torch.cat([part.hidden for part in parts]),
        np.concatenate([part.texts for part in parts]),
        np.concatenate([part.columns for part in parts]),
        np.concatenate([part.loops for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.roles for part in parts]),
        np.concatenate([part.slots for part in parts]),
    )
