"""The bookkeeping of a step on a CPU in few calls: which lanes run, which of them stop, and what is fed back.

These are parts 1, 6, 7 and 8 of a step and the end of part 3. The reference is `sigma0.decode.step`, which every other
device runs and every compiled program: a hundred operations over a few numbers each, of which a call costs more than
the work. For three rows the calls here take 2 us each.

The tables are the caller's: it names their columns, and the values in them, once.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.kernels.cpp_library import load
from sigma0.kernels.exit_state import DIVERGED, LAST_LOOP, MET

_COLUMNS = 6
_LINE = 9
_POINTER, _NUMBER, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool


@dataclass(frozen=True)
class LiveRows:
    """The live lanes, by their stages; int64 and contiguous.

    Attributes:
        lines: Their lines of the table, `[R, 6]`.
        columns: Lane, sequence, cache position, position, plane that the next loop writes, and loops that are finished
            with it, `[6, R]`.
    """

    lines: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Settled:
    """What a step emits and feeds.

    Attributes:
        lines: int64 `[K, 9]`.
        kept: Which of the rows that were read they are about, int64 `[K]`.
        lanes: Lane of each token that enters, int64 `[N]`.
        token_ids: `[N]`.
        positions: Position of each, `[N]`.
    """

    lines: Tensor
    kept: Tensor
    lanes: Tensor
    token_ids: Tensor
    positions: Tensor


class LaneRows:
    """The calls.

    Args:
        names: Columns and widths of the tables, and values in them, as the source in C++ names them.
    """

    def __init__(self, names: Mapping[str, int]) -> None:
        codes = {"MET": MET, "LAST_LOOP": LAST_LOOP, "DIVERGED": DIVERGED, "COLUMNS": _COLUMNS}
        definitions = {**names, **codes}

        def function(name: str, arguments: str, returns: type[ctypes.c_int64] | None = None) -> Callable[..., int]:
            kinds = {"p": _POINTER, "n": _NUMBER, "f": _FLAG}
            return load("lane_rows.cpp", name, [kinds[kind] for kind in arguments], definitions, returns)

        self._live = function("live_rows", "pnnnpp")
        self._keep = function("keep_rows", "pnnpnnpn")
        self._stop = function("stop_rows", "ppnnnppppffppp", ctypes.c_int64)
        self._settle = function("settle_rows", "ppnpnnppppnppnfnppppp")

    def live(self, table: Tensor, depth: int, count: int) -> LiveRows:
        """The live lanes.

        Args:
            table: Table of lanes, int64 `[S T + 1, 6]`, contiguous.
            depth: T.
            count: How many live lanes there are.
        """
        lines, columns = table.new_empty((count, table.shape[1])), table.new_empty((_COLUMNS, count))
        self._live(table.data_ptr(), table.shape[0] - 1, depth, count, lines.data_ptr(), columns.data_ptr())
        return LiveRows(lines, columns)

    def keep(self, rows: LiveRows, states: Tensor, paths: Tensor, window: int) -> None:
        """Keeps what a loop has left of tokens.

        Args:
            rows: The live lanes, from before the loop.
            states: `[R, D]`.
            paths: By sequence and cache position, position c at c mod window, `[S window + 1, T, D]`; changed.
            window: Cache positions that are kept.
        """
        size, count = states.element_size(), rows.lines.shape[0]
        assert states.stride(1) == 1 and states.dtype == paths.dtype
        self._keep(
            rows.columns.data_ptr(), count, paths.shape[1], states.data_ptr(), states.stride(0) * size,
            states.shape[1] * size, paths.data_ptr(), window,
        )  # fmt: skip

    def stop(
        self,
        rows: LiveRows,
        decoding: int,
        depth: int,
        settings: Tensor,
        met: Tensor | None,
        decisions: Tensor | None,
        given: Tensor | None,
        verify: bool,
        prompts: bool,
        table: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Why rows stop; their lanes are a loop further after it.

        Args:
            rows: The live lanes, from before the loop.
            decoding: L, those that decode.
            depth: T.
            settings: Of every sequence, int64, contiguous.
            met: Whether a rule holds, from its first loop on, bool `[L]`; None for none.
            decisions: `MET` or `DIVERGED` of rules over differences, int64 `[L]`; None for none.
            given: Whether an exit that was given has come, bool `[L]`; None for none.
            verify: Whether some sequence checks drafts.
            prompts: Whether the last token of some prompt is among the rows.
            table: Table of lanes; changed.

        Returns:
            Codes int64 `[L]`, 0 where a row goes on, and which rows are to be read, int64 `[K]`.
        """
        count = rows.lines.shape[0]
        codes, which = table.new_empty(decoding), table.new_empty(count)
        reads = self._stop(
            rows.lines.data_ptr(),
            rows.columns.data_ptr(),
            count,
            decoding,
            depth,
            settings.data_ptr(),
            None if met is None else met.data_ptr(),
            None if decisions is None else decisions.data_ptr(),
            None if given is None else given.data_ptr(),
            verify,
            prompts,
            table.data_ptr(),
            codes.data_ptr(),
            which.data_ptr(),
        )
        return codes, which if reads == count else which[:reads]

    def settle(
        self,
        rows: LiveRows,
        codes: Tensor,
        depth: int,
        which: Tensor,
        token_ids: Tensor,
        stands: Tensor,
        ends: Tensor | None,
        settings: Tensor,
        eos: Tensor,
        verify: bool,
        table: Tensor,
    ) -> Settled:
        """Which drafts stand, what is fed back, and what is emitted.

        Args:
            rows: The live lanes, from before the loop.
            codes: Of those that decode, int64 `[L]`.
            depth: T.
            which: Rows that were read, int64 `[K]`.
            token_ids: What holds for each now, int64 `[K]`.
            stands: Whether a draft stands, bool `[K]`; read under `verify`.
            ends: Whether the sequence ends with it, bool `[K]`; None as the settings say.
            settings: As `stop` has it.
            eos: Ids that end a sequence, int64 `[S, E]`.
            verify: As `stop` has it.
            table: Table of lanes; changed.
        """
        count = which.shape[0]
        numbers = table.new_empty(count * (_LINE + 4) + 2)
        lines, kept, fed, counts = torch.split(numbers, [count * _LINE, count, count * 3, 2])
        # bound to names, since the compiled function sees their memory only
        which, token_ids, stands = which.contiguous(), token_ids.contiguous(), stands.contiguous()
        ends = None if ends is None else ends.contiguous()
        self._settle(
            rows.lines.data_ptr(),
            rows.columns.data_ptr(),
            rows.lines.shape[0],
            codes.data_ptr(),
            codes.shape[0],
            depth,
            which.data_ptr(),
            token_ids.data_ptr(),
            stands.data_ptr(),
            None if ends is None else ends.data_ptr(),
            count,
            settings.data_ptr(),
            eos.data_ptr(),
            eos.shape[1],
            verify,
            table.shape[0] - 1,
            table.data_ptr(),
            lines.data_ptr(),
            kept.data_ptr(),
            fed.data_ptr(),
            counts.data_ptr(),
        )
        said, entering = counts.tolist()
        lanes, ids, positions = fed.view(3, count)[:, :entering].unbind(0)
        return Settled(lines.view(count, _LINE)[:said], kept[:said], lanes, ids, positions)
