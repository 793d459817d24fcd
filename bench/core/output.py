"""What a benchmark prints once its rows are in the ledger."""

from collections.abc import Callable, Sequence

import typer

from sigma0.bench.core.ledger import AnyRow


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
