"""Tables of a benchmark, written once for the terminal and for Markdown."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass(frozen=True)
class BenchTable:
    """Headings, and rows of cells that are text already."""

    headings: Sequence[str]  # Of the columns
    rows: Sequence[Sequence[str]]  # Cells of each row, as many as there are headings
    title: str | None = None  # What stands over the table in a terminal
    # Headings of the columns that are aligned left; None: the first one. The others, numbers, stand right
    left: Collection[str] | None = None

    def is_left(self, heading: str) -> bool:
        """Whether a column is aligned left."""
        return heading in (self.headings[:1] if self.left is None else self.left)

    def markdown(self) -> str:
        """The table as Markdown, without its title and without a line break at the end."""
        rule = "|".join("---" if self.is_left(heading) else "---:" for heading in self.headings)
        head, *lines = (f"| {' | '.join(cells)} |" for cells in (self.headings, *self.rows))
        return "\n".join([head, f"|{rule}|", *lines])

    def rich(self, no_wrap: Collection[str] = (), compact: bool = False) -> Table:
        """The table for a terminal.

        Args:
            no_wrap: Headings of the columns whose cells are not broken over lines.
            compact: Without a frame, for many columns.
        """
        table = Table(title=self.title, title_justify="left")
        if compact:
            table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
        for heading in self.headings:
            table.add_column(heading, justify="left" if self.is_left(heading) else "right", no_wrap=heading in no_wrap)
        for cells in self.rows:
            table.add_row(*cells)
        return table
