"""What a benchmark prints and draws: rows that are in the ledger or one report, tables, pictures."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table

from sigma0.bench.core.conditions import Figure
from sigma0.bench.core.rows import AnyRow
from sigma0.calibrate.bootstrap import Estimate
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.errors import needs_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

T = TypeVar("T")


@contextmanager
def measuring(threads: int | None = None, extra: str = "bench") -> Iterator[None]:
    """Runs a benchmark on so many CPU threads; bad input, and a library that is not there, end it with one line."""
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors(), needs_extra(extra):
        yield


@contextmanager
def step_bar(what: str, total: int, hidden: bool = False) -> Iterator[Callable[[], None]]:
    """A progress bar that counts by itself: it yields what is called after each step."""
    with progress_bar(what, total, hidden) as advance:
        done = count(1)
        yield lambda: advance(next(done))


def percent(figure: Figure | Estimate | None, digits: int = 1) -> str:
    """A share without its interval, - where there is none."""
    return "-" if figure is None else f"{100 * figure.value:.{digits}f} %"


def with_interval(
    figure: Figure | Estimate | None, digits: int = 1, times: float = 100, unit: str = " %", sign: str = ""
) -> str:
    """A figure and its interval, by default a share in per cent; the sign is `+` for a difference."""
    if figure is None:
        return "-"
    ends = (figure.low, figure.high) if isinstance(figure, Figure) else figure.interval
    value, low, high = (f"{times * item:{sign}.{digits}f}" for item in (figure.value, *ends))
    return f"{value}{unit} ({low} to {high})"


@dataclass(frozen=True)
class BenchTable:
    """Headings, and rows of cells that are text already."""

    headings: Sequence[str]  # Of the columns
    rows: Sequence[Sequence[str]]  # Cells of each row, as many as there are headings
    title: str | None = None  # What stands over the table in a terminal
    # Headings of the columns that are aligned left; None: the first one. The others, numbers, stand right
    left: Collection[str] | None = None

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Callable[[T], str]],
        rows: Iterable[T],
        title: str | None = None,
        left: Collection[str] | None = None,
    ) -> "BenchTable":
        """A line for each of some objects, out of what makes the cell of each column."""
        return cls(tuple(columns), [[cell(row) for cell in columns.values()] for row in rows], title, left)

    @classmethod
    def under(cls, headings: str, lines: Iterable[Sequence[str]], left: int = 1) -> "BenchTable":
        """Lines under headings that are separated by bars, as in Markdown; so many columns stand left."""
        names = headings.split(" | ")
        return cls(names, list(lines), left=names[:left])

    def is_left(self, heading: str) -> bool:
        """Whether a column is aligned left."""
        return heading in (self.headings[:1] if self.left is None else self.left)

    def markdown(self) -> str:
        """The table as Markdown, without its title and without a line break at the end."""
        rule = "|".join("---" if self.is_left(heading) else "---:" for heading in self.headings)
        head, *lines = (f"| {' | '.join(cells)} |" for cells in (self.headings, *self.rows))
        return "\n".join([head, f"|{rule}|", *lines])

    def rich(self, no_wrap: Collection[str] = (), compact: bool = False) -> Table:
        """The table for a terminal; columns `no_wrap` are not broken over lines, and compact is without a frame."""
        table = Table(title=self.title, title_justify="left")
        if compact:
            table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
        for column in zip(self.headings, *self.rows, strict=True):
            heading, longest = column[0], max(map(len, " ".join(column).split()), default=0)
            justify: JustifyMethod = "left" if self.is_left(heading) else "right"
            table.add_column(heading, justify=justify, no_wrap=heading in no_wrap, min_width=longest)
        for cells in self.rows:
            table.add_row(*cells)
        return table

    def show(self, no_wrap: Collection[str] = (), compact: bool = False, caption: str | None = None) -> None:
        """Prints the table as `rich` makes it, wider than a terminal or a pipe's 80 columns if a word would be cut."""
        console, table = Console(), self.rich(no_wrap, compact)
        table.caption = caption
        console.width = max(
            console.width, Measurement.get(console, console.options.update(width=10_000), table).minimum
        )
        console.print(table)


def tell_rows(rows: Sequence[AnyRow], as_json: bool, table: Callable[[], None], closing: str) -> None:
    """Prints rows as JSON lines, or their table and under it where they are."""
    if as_json:
        for row in rows:
            typer.echo(row.model_dump_json())
        return
    table()
    typer.echo(closing)


def tell_report(report: Mapping[str, Any], out: Path | None, as_json: bool) -> bool:
    """Writes a report of plain JSON to a file, and prints it if asked to; whether tables are still to be printed."""
    text = json.dumps(report, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    return not as_json


@contextmanager
def drawing(paths: Sequence[Path], size: tuple[float, float], font: int = 10, dpi: int = 110) -> "Iterator[Picture]":
    """A figure to draw on, which is written at the end as .png or .svg: the same bytes for the same values."""
    with needs_extra("bench"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context({"font.size": font, "svg.hashsalt": "sigma0"}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        for path in paths:
            figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
