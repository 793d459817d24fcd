"""The bookkeeping of a step on a CPU in few calls: which lanes run, how a loop ends, what stops, and what is fed back.

The reference is `sigma0.decode.step`, which every other device runs and every compiled program: a hundred operations
over a few numbers each, of which a call costs more than the work. With the layers of the block (`row_block.py`) it is
two calls a step, with the output head between them. All memory is handed over once, and again where it was replaced, so
that a call takes a pointer, and what it returns lies in memory that the next pass writes again.

The tables are the caller's, whose columns and values `cpu/constants.h` repeats.
"""

import ctypes
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigma0.kernels.native import constants, function, structure
from sigma0.kernels.row_attention import ELEMENTS
from sigma0.kernels.row_block import Block
from sigma0.kernels.row_dot import MOST_ROWS

# A letter for each argument, and for the result, as `native.function` has them.
_CALLS = {
    "start_rows": ("p", "n"),
    "end_rows": ("ppnp", ""),
    "loop_rows": ("p", "f"),
    "lead_rows": ("ppnn", ""),
    "commit_rows": ("pppppn", "n"),
    "commit_greedy": ("ppnnfn", "n"),
    "step_rows": ("pnn", "n"),
    "live_lanes": ("pnn", "n"),
    "count_rows": ("pnnppppp", "n"),
}
# They run the layers; all others are too short to let go of Python's lock.
_LONG = ("loop_rows", "step_rows")


class EndWeights(NamedTuple):
    """Weights of a model's parts whose functions in C++ may take their place; None where they may not."""

    norm: Tensor | None = None  # Of the norm after a loop, float32 `[D]`
    epsilon: float = 0.0  # Of that norm
    gate: Tensor | None = None  # Of the exit gate, float32 `[1, D]`
    bias: Tensor | None = None  # Of the exit gate, float32 `[1]`
    embedding: Tensor | None = None  # Of the ids, float32 `[V, D]`
    head: Tensor | None = None  # Of the output head, float32 `[V, D]`


class LaneTables(NamedTuple):
    """Memory of the lanes of S sequences, T each."""

    table: Tensor  # Table of lanes, int64 `[S T + 1, 6]`
    hidden: Tensor  # State of each token, `[S T + 1, W]`
    gate: Tensor  # What `qexit` keeps of each, float32 `[S T + 1, 2]`
    counts: Tensor | None  # Zeroed where a token enters, int32 `[S T + 1, n]`; None for none
    # States after every loop by sequence and cache position, position c at c mod window, `[S window + 1, T, D]`;
    # None where they are not kept
    paths: Tensor | None
    settings: Tensor  # Of every sequence, int64 `[S, n]`
    thresholds: Tensor  # Of every sequence, float32 `[S, 3]`
    eos: Tensor  # Ids that end a sequence, int64 `[S, E]`
    # Loops at which tokens stop, of the token at each cache position after a prompt, in a ring, int64 `[S, n]`;
    # None where rules say it
    given: Tensor | None = None
    # What rules over differences keep of each, `[S T + 1, K, W]`; None for no such rule
    differences: Tensor | None = None
    gram: Tensor | None = None  # Likewise, float32 `[S T + 1, 10]`


class LiveRows(NamedTuple):
    """The live lanes of a pass by their stages, from before the loop."""

    lines: Tensor  # Their lines of the table, int64 `[R, 6]`
    lanes: Tensor  # Lane of each, int64 `[R]`; likewise
    sequences: Tensor  # its sequence,
    cache_positions: Tensor  # its cache position,
    positions: Tensor  # its position,
    planes: Tensor  # the plane that the next loop writes, and
    loops: Tensor  # loops that are finished with it
    previous: Tensor  # State of each, `[R, W]`
    states: Tensor  # Where its state after the loop is written if it is normed here, `[R, W]`


class StepResult(NamedTuple):
    """What a step emits and feeds."""

    lines: Any  # Array of int64 `[K, 9]`
    kept: Any  # Which of the rows that were read they are about, array of int64 `[K]`
    # Lane, id and position of each token that enters and is not embedded yet, int64 `[3, N]`; None for none
    fed: Tensor | None


class CpuStepState:
    """What the passes over some lanes keep between calls.

    Args:
        tables: The lanes.
        depth: T.

    Attributes:
        norms: Whether the norm after a loop is known here.
        has_block: Whether `loop` can run the layers.
        has_head: Whether `step` can run.
        gates: Whether the exit gate is.
        decoding: Rows of the pass that wait for their reading; they come first.
    """

    def __init__(self, tables: LaneTables, depth: int) -> None:
        self._calls, known = _calls(), constants()
        self._widths = tuple(int(known[name]) for name in ("TABLE_WIDTH", "SETTINGS_WIDTH", "THRESHOLDS"))
        lanes, width = tables.table.shape[0] - 1, tables.hidden.shape[1]
        self._fields = fields = self._calls.StepState(lanes=lanes, depth=depth, width=width)
        self._pointer = ctypes.byref(fields)
        with torch.inference_mode(False):
            numbers: dict[str, tuple[int, ...]] = {
                "lines": (lanes, self._widths[0]),
                "columns": (int(known["COLUMNS"]), lanes),
                "emitted": (lanes, int(known["LINE_WIDTH"])),
            }
            numbers |= {
                "fed": (3, lanes),
                "codes": (lanes,),
                "decided": (lanes,),
                "which": (lanes,),
                "token_ids": (lanes,),
                "kept": (lanes,),
            }
            self._own = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in numbers.items()}
            self._own |= {name: torch.zeros(lanes, dtype=torch.bool) for name in ("met", "stands")}
            self._own |= {name: tables.hidden.new_zeros((lanes, width)) for name in ("previous", "states")}
        for name, tensor in self._own.items():
            setattr(fields, name, tensor.data_ptr())
        self._lines, self._kept = self._own["emitted"].numpy(), self._own["kept"].numpy()
        self._rows: dict[int, LiveRows] = {}
        self._parts: dict[tuple[str, int], Tensor] = {}
        self._tables: LaneTables | None = None
        self._block: Block | None = None
        self._held: list[Tensor | None] = []
        self._logits = torch.empty(0)
        self.norms = self.gates = self.has_block = self.has_head = False
        self.decoding = 0

    def take_tables(self, tables: LaneTables, window: int) -> None:
        """Takes the lanes, some of whose memory may be another one than before.

        Args:
            tables: The lanes.
            window: Cache positions of which paths are kept.

        Raises:
            ValueError: For memory of another kind than the functions take.
        """
        fields, (table_width, settings_width, thresholds) = self._fields, self._widths
        rows, depth, width = fields.lanes + 1, fields.depth, fields.width
        sequences, state = fields.lanes // depth, tables.hidden.dtype
        whole, real = torch.int64, torch.float32
        expected = {
            "table": (whole, (rows, table_width)),
            "hidden": (self._own["previous"].dtype, (rows, width)),
            "gate": (real, (rows, 2)),
            "counts": (torch.int32, (rows, None)),
            "paths": (state, (sequences * window + 1, depth, None)),
            "settings": (whole, (sequences, settings_width)),
            "thresholds": (real, (sequences, thresholds)),
            "eos": (whole, (sequences, None)),
            "given": (whole, (sequences, None)),
            "differences": (state, (rows, int(constants()["KEPT"]), width)),
            "gram": (real, (rows, int(constants()["GRAM_SIZE"]))),
        }
        for name, (dtype, shape) in expected.items():
            _check(name, getattr(tables, name), dtype, shape)
            setattr(fields, name, _address(getattr(tables, name)))
        if window < 1 or (tables.paths is not None and tables.paths.shape[2] > width):
            raise ValueError("paths are kept of states, at one cache position at least")
        if tables.differences is not None and (tables.gram is None or tables.counts is None):
            raise ValueError("rules over differences keep their products and counts too")
        size = tables.hidden.element_size()
        fields.element, fields.noise = ELEMENTS[state], 4 * torch.finfo(state).eps
        fields.bytes, fields.window, fields.eos_count = width * size, window, tables.eos.shape[1]
        fields.path_bytes = 0 if tables.paths is None else tables.paths.shape[2] * size
        fields.counts_width = 0 if tables.counts is None else tables.counts.shape[1]
        fields.given_count = 0 if tables.given is None else tables.given.shape[1]
        # held, so that no other tensor can come to lie where one of them lay
        self._tables = tables

    def take_weights(self, weights: EndWeights, gates: bool) -> None:
        """Takes the weights of a model; those that the functions cannot take are left out.

        Args:
            weights: Of norm, gate, embedding and head.
            gates: Whether some sequence stops by its gate: states are normed elsewhere then where that is not known.
        """
        fields, width = self._fields, self._fields.width
        shapes = ((width,), (1, width), (1,), (None, width), (None, width))
        given = (weights.norm, weights.gate, weights.bias, weights.embedding, weights.head)
        dtype = self._own["previous"].dtype
        fitting = [
            part.detach() if part is not None and dtype in MOST_ROWS and _fits(part, dtype, shape) else None
            for part, shape in zip(given, shapes, strict=True)
        ]
        if dtype is not torch.float32:
            # the gate alone is known in fewer bits
            fitting = [None, *(None if part is None else part.float() for part in fitting[1:3]), None, None]
        self._held = fitting
        norm, gate, bias, embedding, head = fitting
        self.gates = gate is not None and bias is not None
        norm = None if gates and not self.gates else norm
        fields.norm, fields.epsilon = _address(norm), weights.epsilon
        fields.gate_weight, fields.gate_bias, fields.embedding = _address(gate), _address(bias), _address(embedding)
        fields.embeddings = 0 if embedding is None else embedding.shape[0]
        fields.head, fields.vocabulary = _address(head), 0 if head is None else head.shape[0]
        self.norms = norm is not None

    def take_program(
        self,
        verify: bool,
        prompts: bool,
        gates: bool,
        leads: bool,
        whole: bool,
        drops: bool,
        block: Block | None,
        growth: float = 0.0,
        spiral: float = 0.0,
    ) -> None:
        """Takes what the passes to come compute.

        Args:
            verify: Whether some sequence checks drafts.
            prompts: Whether the last token of some prompt runs in a lane.
            gates: Whether some sequence stops by its gate.
            leads: Whether some sequence stops by `margin`: then rows stop after `lead`, else at the end of the loop.
            whole: Whether the head then reads all rows, since drafts are checked at every loop too.
            drops: Whether K/V of tokens that run no further are copied to deeper planes, where there is a block.
            block: The layers, where `loop` is to run them.
            growth: Of the fate, where there are differences.
            spiral: Likewise, radians.

        Raises:
            ValueError: If the norm after a block is not known.
        """
        fields = self._fields
        if block is not None and not self.norms:
            raise ValueError("what ends a loop is not known here")
        fields.verify, fields.prompts, fields.asks_gate = verify, prompts, gates
        fields.leads, fields.whole, fields.drops = leads, whole, drops
        fields.growth, fields.spiral = growth, spiral
        fields.block, fields.most_rows = (None, 0) if block is None else (block.address, MOST_ROWS[torch.float32])
        self._block, self.has_block = block, block is not None
        self.has_head = self.has_block and self._held[-1] is not None
        if self.has_head and self._logits.shape[-1] != fields.vocabulary:
            with torch.inference_mode(False):
                self._logits = torch.empty(min(fields.lanes, fields.most_rows), fields.vocabulary)
            fields.logits = self._logits.data_ptr()

    def start(self) -> int:
        """Takes the live lanes; how many there are."""
        count: int = self._calls.start_rows(self._pointer)
        self.decoding = self._fields.decoding
        return count

    def rows(self, count: int) -> LiveRows:
        """The rows of the pass, of which there are so many."""
        rows = self._rows.get(count)
        if rows is None:
            with torch.inference_mode(False):
                current = self._own
                lane, sequence, at, position, plane, loops = current["columns"][:, :count]
                columns = lane, sequence, at, position, plane, loops
                rows = LiveRows(
                    current["lines"][:count], *columns, current["previous"][:count], current["states"][:count]
                )
            self._rows[count] = rows
        return rows

    def loop(self) -> bool:
        """Takes the live lanes and runs a loop of them, with the layers of the block that were taken.

        Returns:
            False where the lanes are taken and no more: of too many rows, or where a position is not in the tables.
        """
        ran: bool = self._calls.loop_rows(self._pointer)
        self.decoding = self._fields.decoding
        return ran

    def step(self, broken: int) -> StepResult | None:
        """As `loop`, and then a step to its end, with the likeliest ids; None where the lanes are taken and no more.

        Args:
            broken: What stands in the place of an id where the largest logit is not finite.
        """
        said = self._calls.step_rows(self._pointer, torch.get_num_threads(), broken)
        self.decoding = self._fields.decoding
        return None if said == -3 else self._settled(said)

    def logits(self, rows: Any) -> Tensor:
        """Logits `[K, V]` that the last `step` read, of rows that `kept` tells."""
        fields = self._fields
        if fields.leads and (fields.whole or not fields.verify):
            rows = self._own["which"].numpy()[rows]
        return self._logits.index_select(0, torch.from_numpy(rows))

    def end(self, raw: Tensor, gate_logits: Tensor | None = None) -> Tensor:
        """Puts states after a loop into their lanes, normed where the norm is known.

        Args:
            raw: `[R, W]`.
            gate_logits: Of decoding rows, float32 `[L]`, where the gate is asked and not known.

        Returns:
            The states, `[R, W]`.
        """
        rows = self.rows(self._fields.count)
        if raw.shape != rows.previous.shape or raw.dtype is not rows.previous.dtype:
            raise ValueError(f"a loop leaves {raw.dtype} {list(raw.shape)} of {list(rows.previous.shape)}")
        _check("gate_logits", gate_logits, torch.float32, (self.decoding,))
        if self._fields.asks_gate and not self.gates and gate_logits is None:
            raise ValueError("the gate is asked, and its weights are not known here: give its logits")
        raw = raw.contiguous()
        self._calls.end_rows(self._pointer, raw.data_ptr(), raw.stride(0) * raw.element_size(), _address(gate_logits))
        return rows.states if self.norms else raw

    def lead(self, logits: Tensor) -> None:
        """Rows stop by `margin`, or by what was seen of the gate.

        Args:
            logits: float32, of decoding rows at least, `[>= L, V]`.
        """
        logits = self._readable(logits, self.decoding)
        self._calls.lead_rows(self._pointer, logits.data_ptr(), logits.shape[1], logits.stride(0))

    @property
    def count(self) -> int:
        """Rows of the pass."""
        count: int = self._fields.count
        return count

    @property
    def read_rows(self) -> int:
        """How many of them are to be read."""
        reads: int = self._fields.reads
        return reads

    @property
    def codes(self) -> Tensor:
        """Why decoding rows have stopped, int64 `[L]`, 0 where a row goes on."""
        return self._part("codes", self.decoding)

    @property
    def reads(self) -> Tensor:
        """Which rows are to be read, int64 `[K]`."""
        return self._part("which", self._fields.reads)

    def commit_greedy(self, logits: Tensor, of_all: bool, broken: int) -> StepResult:
        """Takes the likeliest ids of the rows that were to be read, and settles them.

        Args:
            logits: float32, of these rows `[K, V]`, or of all that there are.
            of_all: Which of the two.
            broken: What stands in the place of an id where the largest logit is not finite.
        """
        fields, count = self._fields, self._fields.reads
        rows = fields.count if fields.verify else self.decoding
        logits = self._readable(logits, rows if of_all else count)
        memory = logits.data_ptr(), logits.shape[1], logits.stride(0)
        return self._settled(self._calls.commit_greedy(self._pointer, *memory, of_all, broken))

    def commit(self, row_ids: Tensor, token_ids: Tensor, stands: Tensor, ends: Tensor | None) -> StepResult:
        """Which drafts stand, what is fed back, and what is emitted.

        Args:
            row_ids: Rows that were read, int64 `[K]`.
            token_ids: What holds for each now, int64 `[K]`.
            stands: Whether a draft stands, bool `[K]`; read where some sequence checks drafts.
            ends: Whether the sequence ends with it, bool `[K]`; None as the settings say.
        """
        # bound to names, since the compiled function sees their memory only
        parts = [None if part is None else part.contiguous() for part in (row_ids, token_ids, stands, ends)]
        if not self._fields.verify and stands.dtype is not torch.bool:
            parts[2] = None
        kinds = (torch.int64, torch.int64, torch.bool, torch.bool)
        count = row_ids.shape[0]
        if count > self._fields.lanes:
            raise ValueError(f"{count} rows of {self._fields.lanes} lanes are settled")
        for part, dtype in zip(parts, kinds, strict=True):
            _check("what was chosen", part, dtype, (count,))
        return self._settled(self._calls.commit_rows(self._pointer, *map(_address, parts), count))

    def _settled(self, said: int) -> StepResult:
        if said < 0:
            raise IndexError("no such row was run" if said == -1 else "an id has no embedding")
        entering, fed = self._fields.entering, None
        if entering and not self._fields.embedding:
            fed = self._own["fed"][:, :entering]
        return StepResult(self._lines[:said].copy(), self._kept[:said], fed)

    def _readable(self, logits: Tensor, count: int) -> Tensor:
        if logits.dtype is not torch.float32 or logits.shape[0] < count or logits.device.type != "cpu":
            raise ValueError(f"{count} rows of float32 logits are wanted, not {logits.dtype} {list(logits.shape)}")
        return logits if logits.stride(1) == 1 else logits.contiguous()

    def _part(self, name: str, count: int) -> Tensor:
        part = self._parts.get((name, count))
        if part is None:
            with torch.inference_mode(False):
                part = self._parts[name, count] = self._own[name][:count]
        return part


class RowCount:
    """Counts the rows of new tokens in the passes over some lanes.

    Args:
        table: Table of lanes, int64 `[S T + 1, 6]`.
        depth: T.
        prompts: Cache position from which on tokens of each sequence are new, int64 `[S]`.
        passes: Passes with a row of a new token, int64 `[S]`; counted up.
        rows: Such rows, int64 `[S]`; counted up.

    """

    def __init__(self, table: Tensor, depth: int, prompts: Tensor, passes: Tensor, rows: Tensor) -> None:
        sequences = (table.shape[0] - 1) // depth
        _check("table", table, torch.int64, (sequences * depth + 1, int(constants()["TABLE_WIDTH"])))
        for item in (prompts, passes, rows):
            _check("a count of rows", item, torch.int64, (sequences,))
        with torch.inference_mode(False):
            self._left = torch.zeros((sequences * depth, 2), dtype=torch.int64)
        self._longest = ctypes.c_int64()
        # kept, since the functions see their memory only
        self._held = table, prompts, passes, rows
        calls = _calls()
        memory = (item.data_ptr() for item in (prompts, passes, rows, self._left))
        self._live = partial(calls.live_lanes, table.data_ptr(), sequences * depth, depth)
        self._count = partial(
            calls.count_rows, table.data_ptr(), sequences, depth, *memory, ctypes.addressof(self._longest)
        )

    def live(self) -> int:
        """How many lanes are live."""
        live: int = self._live()
        return live

    def count(self) -> list[list[int]]:
        """Counts the coming pass; sequence and cache position of each token for which it is the last one."""
        count: int = self._count()
        left: list[list[int]] = self._left[:count].tolist() if count else []
        return left

    @property
    def longest(self) -> int:
        """One more than the largest cache position in the pass that was counted last."""
        return self._longest.value


@lru_cache
def _calls() -> SimpleNamespace:
    """The functions, and the memory that they read."""
    calls = {name: function(name, *types, keeps_lock=name not in _LONG) for name, types in _CALLS.items()}
    return SimpleNamespace(StepState=structure("step"), **calls)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Refuses memory that a function would take for something else; None in a shape is any number."""
    if tensor is None:
        return
    if not _fits(tensor, dtype, shape):
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, not {dtype} {shape}, whole"
        )


def _fits(tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> bool:
    """Whether the memory of a tensor is of this kind; None in a shape is any number."""
    if tensor.dtype is not dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return len(tensor.shape) == len(shape) and all(
        wanted is None or current == wanted for current, wanted in zip(tensor.shape, shape, strict=True)
    )
