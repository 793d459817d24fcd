"""`python -m sigma0.bench serve`: throughput and latency of the server under load, way by way."""

from typing import Annotated

import typer

from sigma0.bench.core.ledger import OWN, append_row, check_ledger
from sigma0.bench.core.options import AsJsonLines, LedgerFile, Rounds
from sigma0.bench.core.output import tell_rows
from sigma0.bench.serving.load import WAYS
from sigma0.commands.console import one_line_errors
from sigma0.commands.options import ModelArgument, Runner
from sigma0.errors import needs_extra


def serve(
    model: ModelArgument = "pocket-large",
    clients: Annotated[
        str, typer.Option(help="Numbers of clients that ask on and on, separated by commas.")
    ] = "1,4,16,64",
    rates: Annotated[str, typer.Option(help="Requests a second of an open loop, separated by commas.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests for each client, way and round.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens of every answer; none ends by itself.")] = 48,
    rounds: Rounds = 3,
    runner: Runner = "auto",
    ways: Annotated[str, typer.Option(help="Some of these, full first, separated by commas.")] = ",".join(WAYS),
    compare: Annotated[bool, typer.Option(help="Also ask transformers serve, where it starts.")] = True,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Throughput and latency of full depth, never exiting, finish, drop and verify, each through the same server."""
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.serving.measure import Plan, measure_serving, print_serving

        loads = [("closed", float(each)) for each in clients.split(",") if each]
        loads += [("open", float(each)) for each in rates.split(",") if each]
        check_ledger(out)
        plan = Plan(model, tuple(loads), tuple(ways.split(",")), requests, max_tokens, rounds, runner, compare)
        rows = measure_serving(plan, hidden=as_json)
        for row in rows:
            append_row(out, row)
    tell_rows(rows, as_json, lambda: print_serving(rows), f"{len(rows)} rows in {out}")
