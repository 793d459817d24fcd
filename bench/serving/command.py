"""`python -m sigma0.bench serve` and `vllm`: throughput and latency of servers under load, way by way."""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from sigma0.bench.core.ledger import append_rows, check_ledger
from sigma0.bench.core.options import OWN, AsJsonLines, LedgerFile, Rounds
from sigma0.bench.core.output import BenchTable, tell_rows, with_interval
from sigma0.bench.core.rows import Percentiles, ServeRow, VllmRow
from sigma0.bench.serving import measure, servers
from sigma0.bench.serving.measure import WAYS, Ask
from sigma0.commands.console import one_line_errors
from sigma0.commands.options import ModelArgument, Runner
from sigma0.decode.runners import choose_runner
from sigma0.models.load import checkpoint_folder, load

# Requests to each of vLLM's ways at least.
QUESTIONS = 32
# vLLM says how many tokens a chunk has where it is asked to
_VLLM_EXTRA: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_SERVED = ("--dtype", "float32", "--threads", "1")


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

    def requests_under(kind: str, amount: float) -> int:
        return requests * (int(amount) if kind == "closed" else 16)

    with one_line_errors(), ExitStack() as stack:
        loads = [("closed", float(item)) for item in clients.split(",") if item]
        loads += [("open", float(item)) for item in rates.split(",") if item]
        check_ledger(out)
        looped, tokenizer = load(model, dtype="float32")
        ran = choose_runner(runner, looped).name
        prompts, conditions = measure.questions(looped, tokenizer, model, max_tokens)
        configs = measure.our_configs(looped.resolve_exit_config(None), ways.split(","))
        folder = stack.enter_context(servers.endless_copy(model))
        most = str(max(64, *(int(amount) for _, amount in loads)))
        settings = ["--max-running", "16", "--max-waiting", most, "--runner", ran]
        _, url = stack.enter_context(servers.serving_process(str(folder), [*_SERVED, *settings]))
        asks = measure.our_asks(configs, url, folder.name, prompts, max_tokens)
        if compare:
            try:
                theirs = stack.enter_context(servers.transformers_server(folder))
                asks["transformers"] = Ask(theirs, str(folder), prompts, max_tokens, {})
            except ValueError as error:
                typer.echo(f"transformers serve is left out: {error}", err=True)
        # what is compiled at first use is compiled before it is measured
        if ran == "compile":
            for kind, amount in loads:
                for ask in asks.values():
                    measure.run(ask, kind, amount, requests_under(kind, amount))
        else:
            measure.run(asks["full"], "closed", 1, 2)
        result = measure.in_turn(asks, loads, rounds, requests_under, hidden=as_json)
        rows = measure.serve_rows(result, configs, conditions, ran)
        append_rows(out, rows)
    title = "median of the rounds; latencies of the last, ms"
    table = BenchTable.of(SERVE_COLUMNS, rows, title, ("load", "way"))
    tell_rows(rows, as_json, table.show, f"{len(rows)} rows in {out}")


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
    with one_line_errors(), ExitStack() as stack:
        loads = [("closed", float(int(item))) for item in clients.split(",")]
        check_ledger(out)
        looped, tokenizer = load(model, device="cpu", dtype="float32")
        folder = checkpoint_folder(model)
        prompts, conditions = measure.questions(looped, tokenizer, model, max_tokens)
        configs = measure.our_configs(looped.resolve_exit_config(None), ("full", "verify", "finish"))
        settings = ["--max-running", "32", "--max-waiting", "64"]
        _, url = stack.enter_context(servers.serving_process(str(folder), [*_SERVED, *settings]))
        eager = ["--enforce-eager", "--max-model-len", "1024"]
        drafting = [*eager, *servers.draft_arguments(drafts, draft_loops)]
        plain, drafted = (stack.enter_context(servers.vllm_server(python, folder, item)) for item in (eager, drafting))
        asks = {
            "vllm": Ask(plain, folder.name, prompts, max_tokens, _VLLM_EXTRA),
            "vllm-drafts": Ask(drafted, folder.name, prompts, max_tokens, _VLLM_EXTRA, servers.draft_counts),
            **measure.our_asks(configs, url, folder.name, prompts, max_tokens),
        }
        for ask in asks.values():
            measure.run(ask, "closed", 8, QUESTIONS)
        result = measure.in_turn(
            asks, loads, rounds, lambda _, count: max(QUESTIONS, requests * int(count)), hidden=as_json
        )
        rows = measure.vllm_rows(result, conditions, measure.vllm_version(python), drafts, draft_loops)
        append_rows(out, rows)
    title = "medians of the rounds; latencies of the last, ms"
    table = BenchTable.of(VLLM_COLUMNS, rows, title, ("clients", "way"))
    tell_rows(rows, as_json, table.show, f"{len(rows)} rows in {out}")


def _tail(times: Percentiles) -> str:
    return f"{times.p50:.0f} / {times.p99:.0f}"


SERVE_COLUMNS: Mapping[str, Callable[[ServeRow], str]] = {
    "load": lambda row: f"{row.load} {row.amount:g}",
    "way": lambda row: row.way,
    "tokens/s": lambda row: f"{row.tokens_per_second.value:.0f}",
    "of full": lambda row: f"{row.speed_ratio.value:.2f}",
    "rows/s": lambda row: "-" if row.rows_per_second is None else f"{row.rows_per_second:.0f}",
    "passes/s": lambda row: "-" if row.passes_per_second is None else f"{row.passes_per_second:.0f}",
    "first 50/99 %": lambda row: _tail(row.first_token_ms),
    "between 50/99 %": lambda row: f"{row.between_tokens_ms.p50:.1f} / {row.between_tokens_ms.p99:.1f}",
    "failed": lambda row: str(row.failed),
}
VLLM_COLUMNS: Mapping[str, Callable[[VllmRow], str]] = {
    "clients": lambda row: str(row.clients),
    "way": lambda row: row.way,
    "tokens/s": lambda row: f"{row.tokens_per_second.value:.0f}",
    "of vllm": lambda row: with_interval(row.speed_ratio, 2, 1, ""),
    "same text": lambda row: f"{row.same_text:.1%}",
    "a step": lambda row: "-" if row.accepted_length is None else f"{row.accepted_length:.2f}",
    "first 50/99 %": lambda row: _tail(row.first_token_ms),
    "answer 50/99 %": lambda row: _tail(row.answer_ms),
    "failed": lambda row: str(row.failed),
}
