"""What a simulated engine has in flight: rows between their first loop and T, and the tokens that are read of them.

As `sigma0.decode.batch` has it under `finish`: every row runs a loop in each pass. A token is told at its exit
depth, and its row goes on to loop T.
"""

from typing import NamedTuple

from sigma0.bench.simulation.request import Request


class _Rows(NamedTuple):
    """Rows of a request that leave together.

    Attributes:
        request: Whose.
        number: How many.
        stop: One past the last position.
        in_lane: Whether it is a token that decodes; else a chunk of the prompt.
        is_exact: Whether the positions are exact in every plane with that.
    """

    request: Request
    number: int
    stop: int
    in_lane: bool
    is_exact: bool


class Flight:
    """Rows in flight, by the passes after which they leave.

    Args:
        loops: T.
        page: Columns of a block.

    Attributes:
        rows: How many.
        chunks: Of prompts, among them.
        passes: So far.
    """

    def __init__(self, loops: int, page: int) -> None:
        self._loops, self._page = loops, page
        self.rows = self.chunks = self.passes = 0
        # by the number of a pass modulo T + 1: a row that enters in one leaves with the one T - 1 later
        self._due: list[list[Request]] = [[] for _ in range(loops + 1)]
        self._leaving: list[list[_Rows]] = [[] for _ in range(loops + 1)]

    @property
    def due(self) -> list[Request]:
        """Requests of which the coming pass tells a token."""
        return self._due[self.passes % len(self._due)]

    def land(self) -> tuple[list[Request], dict[int, int]]:
        """Ends a pass.

        Returns:
            Requests of which it told a token, and leading positions that are exact in every plane now, by key.
        """
        place = self.passes % len(self._due)
        self.passes += 1
        due, gone = self._due[place], self._leaving[place]
        complete: dict[int, int] = {}
        if due:
            self._due[place] = []
        if gone:
            self._leaving[place] = []
        for rows in gone:
            self.rows -= rows.number
            self.chunks -= not rows.in_lane
            # only whole blocks are registered, and no position is left out
            if rows.is_exact and not (rows.in_lane and rows.stop % self._page):
                key = rows.request.sequence.key
                complete[key] = max(complete.get(key, 0), rows.stop)
        return due, complete

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Positions of a prompt before loop 1, or those of a preempted request that are recomputed."""
        saved = request.saved
        if saved is None:
            whole = stop
            if stop == request.prompt:
                # the last position of a prompt is the first that decodes
                whole -= 1
                self.enter_token(request, whole, 0)
        else:
            whole = min(stop, min(saved))
            for position in range(max(start, whole), stop):
                # of those in flight as many loops as they had run
                if saved[position]:
                    self._start(_Rows(request, 1, position + 1, False, False), saved[position])
        if whole > start:
            self._start(_Rows(request, whole - start, whole, False, True), self._loops)

    def enter_token(self, request: Request, position: int, ran: int) -> None:
        """A token that decodes, has run so many loops and runs the next one in the coming pass."""
        self._start(_Rows(request, 1, position + 1, True, True), self._loops - ran)
        if position == request.prompt - 1 + request.told:
            depth = request.depths[request.told]
            self._due[(self.passes + depth - ran - 1) % len(self._due)].append(request)

    def _start(self, rows: _Rows, passes: int) -> None:
        self._leaving[(self.passes + passes - 1) % len(self._leaving)].append(rows)
        self.rows += rows.number
        self.chunks += not rows.in_lane

    def has(self, request: Request) -> bool:
        """Whether it has rows in flight."""
        return any(rows.request is request for leaving in self._leaving for rows in leaving)

    def drop(self, request: Request) -> dict[int, int]:
        """Takes the rows of a request away; the loops that those of its tokens had run, by position."""
        ran: dict[int, int] = {}
        for ahead in range(len(self._due)):
            place = (self.passes + ahead) % len(self._due)
            leaving = self._leaving[place]
            mine = [rows for rows in leaving if rows.request is request]
            if mine:
                self._leaving[place] = [rows for rows in leaving if rows.request is not request]
            for rows in mine:
                self.rows -= rows.number
                self.chunks -= not rows.in_lane
                if rows.in_lane:
                    ran[rows.stop - 1] = self._loops - 1 - ahead
            if request in self._due[place]:
                self._due[place].remove(request)
        return ran
