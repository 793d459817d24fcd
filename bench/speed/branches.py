"""Pipelined self-speculation with a second branch (arXiv 2609.17184), decoded live over the plain layers.

A token that stops at its exit e proposes its argmax a_e, which is fed at once while the token runs on. At the first
deeper loop whose argmax is not a_e, a second branch opens with that argmax, beside the first. At loop T one of them
is right and the other is dropped with all that was fed after it; where neither is, full depth's token is fed. So text
is full depth's, and `sigma0.bench.lossless.measure` counts the same passes from argmax traces. All tokens under way, of
all branches, are rows of one pass, each at its own loop; two tokens of one position are told apart by the slot in which
their K/V lie, and a row sees the slots of the tokens that it follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sigma0.bench.speed.decoders import Decoded, Decoder, now
from sigma0.config import ExitConfig
from sigma0.decode.kv_store import BlockShape
from sigma0.decode.ops import Operations

RULES = ("full", "fixed", "qexit", "margin")


@dataclass(eq=False)
class _Node:
    """A token under way."""

    token: int
    place: int  # how many new tokens were fed before it
    slot: int  # where its K/V lie
    seen: Tensor  # slots that it sees, its own among them, bool `[N]`
    loops: int = 0  # how many it has run
    exit: int = 0  # loop at which it proposed; 0 before
    proposed: int = -1  # its argmax there
    mass: float = 0.0  # probability that it has left by the gate, under `qexit`
    survival: float = 1.0  # the rest
    branches: list["_Node"] = field(default_factory=list)  # tokens that were fed after it


class _TreeRows:
    """The rows of a pass, as the layers of a block see them: `sigma0.decode.attention.PassRows`."""

    def __init__(
        self,
        planes: Sequence[tuple[Tensor, ...]],  # keys and values of each layer, `[T, H_kv, N, d]`
        positions: Tensor,  # of the rows, int64 `[R]`
        loops: list[int],  # that each has run, ascending, so that those of one loop are neighbours
        slots: Tensor,  # where their K/V lie, int64 `[R]`
        seen: Tensor,  # slots that each sees, bool `[R, N]`
        ops: Operations,  # of the pass, of which attention is not taken
    ) -> None:
        self.longest = seen.shape[1]
        self.ops = replace(ops, attend_rows=None, depth_attention=None, run_block=None, project_rows=None)
        self._planes, self._positions, self._slots, self._seen = planes, positions, slots, seen
        starts = [row for row in range(len(loops)) if not row or loops[row] != loops[row - 1]]
        self._groups = [
            (loops[start], slice(start, end)) for start, end in zip(starts, [*starts[1:], len(loops)], strict=True)
        ]

    def positions(self, device: torch.device) -> Tensor:
        """Positions, int64 `[R]`."""
        return self._positions

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Writes the rows' K/V and attends; as `PassRows.attend`."""
        held_keys, held_values = self._planes[layer]
        output = torch.empty_like(query)
        for loop, rows in self._groups:
            own_keys, own_values = held_keys[loop], held_values[loop]  # [H_kv, N, d]
            own_keys.index_copy_(1, self._slots[rows], keys[rows].transpose(0, 1))
            own_values.index_copy_(1, self._slots[rows], values[rows].transpose(0, 1))
            attended = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                own_keys[None],
                own_values[None],
                self._seen[rows][None, None],
                scale=scaling,
                enable_gqa=query.shape[1] != keys.shape[1],
            )  # [1, H, r, d]
            output[rows] = attended[0].transpose(0, 1)
        return output


def most_nodes(total_loops: int) -> int:
    """Tokens that can be under way: a first branch lags by a loop at least, a second one by two."""
    before, here = 1, 2
    for _ in range(total_loops):
        before, here = here, 1 + here + before
    return here


class Branches(Decoder):
    """Greedy decoding of one sequence `[1, S]` by that rule; without second branches, `verify` without redrafts."""

    def __init__(self, model: Any, ids: Tensor, new_tokens: int, config: ExitConfig, second: bool) -> None:
        if len(ids) > 1:
            raise ValueError(f"branches are written for one sequence, not for a batch of {len(ids)}")
        if config.mode not in RULES or model.stages != (0, 0):
            raise ValueError(f"branches are written for Ouro under {', '.join(RULES)}, not under {config.mode}")
        super().__init__(model, ids, new_tokens)
        self._second, self._rule = second, model.exit_rule(replace(config, after_exit="finish"))
        shape = BlockShape.of(model, 1)
        self._slots = ids.shape[1] + new_tokens + most_nodes(shape.planes)
        size = (shape.planes, shape.kv_heads, self._slots, shape.head_dim)
        self._planes = [
            tuple(torch.zeros(size, dtype=model.dtype, device=ids.device) for _ in range(2))
            for _ in range(shape.layers)
        ]

    def read(self) -> None:
        """Reads the prompt but for its last token, from nothing."""
        length = self.ids.shape[1] - 1
        slots = torch.arange(length, device=self.ids.device)
        seen = torch.arange(self._slots, device=self.ids.device)[None] <= slots[:, None]
        hidden = self.model.enter(self.ids[0, :-1], slots)
        for loop in range(self.model.num_loops):
            hidden = self._pass(hidden, slots, [loop] * length, slots, seen)

    @torch.no_grad()
    def decode(self) -> Decoded:
        """New tokens, timed from the first on."""
        if not self.is_read:
            self.prompt()
        length = self.ids.shape[1]
        self._free = list(range(self._slots - 1, length - 1, -1))
        seen = torch.arange(self._slots, device=self.ids.device) < length
        first = _Run(self, _Node(int(self.ids[0, -1]), -1, length - 1, seen), last=-1).to_the_end()
        start = now(self.ids)
        run = _Run(self, self._fed(first.written[0], first.tip), last=self.new_tokens - 2).to_the_end()
        seconds = now(self.ids) - start
        return Decoded(
            seconds=seconds,
            passes=run.passes,
            rows=run.rows,
            head_rows=run.rows,
            tail_passes=run.tail_passes,
            tokens=torch.tensor([first.written + run.written]),
            kv_in_use=(length + self.new_tokens - 1) * self.position_bytes,
            kv_allocated=self._slots * self.position_bytes,
        )

    def _fed(self, token: int, after: _Node) -> _Node:
        slot = self._free.pop()
        seen = after.seen.clone()
        seen[slot] = True
        return _Node(token, after.place + 1, slot, seen)

    def _pass(self, hidden: Tensor, positions: Tensor, loops: list[int], slots: Tensor, seen: Tensor) -> Tensor:
        """States `[R, D]` after a loop of each row."""
        rows = _TreeRows(self._planes, positions, loops, slots, seen, self.model.operations)
        states: Tensor = self.model.norm(self.model.loop(hidden, rows))
        return states


class _Run:
    """A tree of tokens under way from its first one to its last, counted as `Decoded` says.

    Attributes:
        written: Full depth's token after each token that was right.
        tip: The last of these.
    """

    def __init__(self, owner: Branches, root: _Node, last: int) -> None:
        self._owner, self._model, self._last = owner, owner.model, last
        self._nodes = [root]  # a token stands behind those that it follows
        self._states: dict[_Node, Tensor] = {}
        self.tip = root
        self.written: list[int] = []
        self.passes = self.rows = self.tail_passes = 0

    def to_the_end(self) -> "_Run":
        """Passes until the last token was read at loop T."""
        while self._nodes:
            self._step()
        return self

    def _step(self) -> None:
        nodes = sorted(self._nodes, key=lambda node: node.loops)  # those of one loop are neighbours
        device, start = self._owner.ids.device, self._owner.ids.shape[1]
        entering = torch.tensor([node.token for node in nodes if not node.loops], device=device, dtype=torch.int64)
        positions = torch.tensor([start + node.place for node in nodes], device=device)
        fresh = self._model.enter(entering, positions[: len(entering)])
        hidden = torch.cat([fresh, *(self._states[node][None] for node in nodes[len(entering) :])])
        slots = torch.tensor([node.slot for node in nodes], device=device)
        seen = torch.stack([node.seen for node in nodes])
        states = self._owner._pass(hidden, positions, [node.loops for node in nodes], slots, seen)
        self.passes += 1
        self.rows += len(nodes)
        self.tail_passes = self.tail_passes + 1 if all(node.exit for node in nodes) else 0
        logits = self._model.read(states)
        argmax = logits.argmax(-1).tolist()
        met = self._met(nodes, states, logits)
        self._states = dict(zip(nodes, states, strict=True))
        judged = dict(zip(nodes, zip(argmax, met, strict=True), strict=True))
        for node in list(self._nodes):
            if node in self._states:  # else it was dropped in this pass
                self._judge(node, *judged[node])

    def _met(self, nodes: list[_Node], states: Tensor, logits: Tensor) -> list[bool]:
        """Whether the rule lets each token stop at the loop that it has just run."""
        rule = self._owner._rule
        loops = [node.loops + 1 for node in nodes]
        if rule.fixed_depth is not None:
            return [loop >= rule.fixed_depth for loop in loops]
        if rule.config.mode == "margin":
            met: list[bool] = self._model.operations.margin_met(logits, rule.threshold).tolist()
        else:
            for node, hazard in zip(nodes, torch.sigmoid(self._model.gate(states).float()).tolist(), strict=True):
                node.mass += hazard * node.survival
                node.survival *= 1 - hazard
            met = [node.mass >= rule.threshold and rule.threshold < 1 for node in nodes]
        return [here and loop >= rule.min_loops for here, loop in zip(met, loops, strict=True)]

    def _judge(self, node: _Node, argmax: int, met: bool) -> None:
        """What follows from the argmax of a token at its next loop."""
        node.loops += 1
        is_last = node.loops == self._model.num_loops
        if not node.exit and (met or is_last):
            node.exit, node.proposed = node.loops, argmax
            self._feed(argmax, node)
        elif node.exit and argmax != node.proposed and len(node.branches) == 1 and self._owner._second:
            self._feed(argmax, node)
        if is_last:
            self._settle(node, argmax)

    def _feed(self, token: int, after: _Node) -> None:
        if after.place < self._last:
            node = self._owner._fed(token, after)
            after.branches.append(node)
            self._nodes.append(node)

    def _settle(self, node: _Node, token: int) -> None:
        """The token of loop T is known: the branch that starts with it stays."""
        self.written.append(token)
        self.tip = node
        self._nodes.remove(node)
        del self._states[node]
        for branch in node.branches:
            if branch.token != token:
                self._drop(branch)
        if all(branch.token != token for branch in node.branches):
            self._feed(token, node)

    def _drop(self, node: _Node) -> None:
        for branch in node.branches:
            self._drop(branch)
        self._nodes.remove(node)
        self._states.pop(node, None)
        self._owner._free.append(node.slot)
