"""What a benchmark prints and draws: rows that are in the ledger or one report, tables, pictures."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sigma0.bench.core.ledger import AnyRow
from sigma0.errors import needs_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def tell_rows(rows: Sequence[AnyRow], as_json: bool, table: Callable[[], None], closing: str) -> None:
    """JSON lines, or a table and a line under it.

    Args:
        rows: What was measured.
        as_json: Print the rows as JSON lines instead of a table.
        table: Prints the table.
        closing: The line under it: where the rows are.
    """
    if as_json:
        for row in rows:
            typer.echo(row.model_dump_json())
        return
    table()
    typer.echo(closing)


def tell_report(report: Mapping[str, Any], out: Path | None, as_json: bool) -> bool:
    """Writes a report to a file, and prints it where JSON is asked for.

    Args:
        report: Plain JSON values.
        out: The file; None for none.
        as_json: Whether it is printed.

    Returns:
        Whether tables are still to be printed in its place.
    """
    text = json.dumps(report, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    return not as_json


@contextmanager
def drawing(paths: Sequence[Path], size: tuple[float, float], font: int = 10, dpi: int = 110) -> "Iterator[Figure]":
    """A figure to draw on, which is written at the end: the same bytes for the same values.

    Args:
        paths: Files, .png or .svg.
        size: Width and height in inches.
        font: Size of the text in points.
        dpi: Dots an inch.
    """
    with needs_extra("bench"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context({"font.size": font, "svg.hashsalt": "sigma0"}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        for path in paths:
            figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
