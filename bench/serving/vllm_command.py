"""`python -m sigma0.bench vllm`: vLLM with the plugin, with and without drafts, beside our own server."""

import sys
from typing import Annotated

import typer

from sigma0.bench.core.ledger import OWN, append_row, check_ledger
from sigma0.bench.core.options import AsJsonLines, LedgerFile, Rounds
from sigma0.bench.core.output import tell_rows
from sigma0.commands.console import one_line_errors
from sigma0.commands.options import ModelArgument
from sigma0.errors import needs_extra


def vllm(
    model: ModelArgument = "pocket-large",
    python: Annotated[str, typer.Option(help="Interpreter of the environment that has vLLM.")] = sys.executable,
    clients: Annotated[str, typer.Option(help="Numbers of concurrent clients, separated by commas.")] = "1,8,32",
    requests: Annotated[int, typer.Option(min=1, help="Requests for each client, way and round; 32 at least.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens of every answer at most.")] = 48,
    drafts: Annotated[int, typer.Option(min=1, help="Drafts of a step at most.")] = 4,
    draft_loops: Annotated[int, typer.Option(min=1, help="Loops of a draft.")] = 1,
    rounds: Rounds = 3,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """The same requests to vLLM at full depth, to vLLM with our drafts, and to our own server, in turn."""
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.serving.vllm_measure import VllmPlan, measure_vllm, print_vllm

        counts = tuple(int(each) for each in clients.split(","))
        check_ledger(out)
        plan = VllmPlan(model, python, counts, requests, max_tokens, drafts, draft_loops, rounds)
        rows = measure_vllm(plan, hidden=as_json)
        for row in rows:
            append_row(out, row)
    tell_rows(rows, as_json, lambda: print_vllm(rows), f"{len(rows)} rows in {out}")
