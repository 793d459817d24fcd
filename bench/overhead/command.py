"""`python -m sigma0.bench overhead`: time the host, print and append."""

from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from sigma0.bench.core.conditions import Digests, Figure, describe, utc_now
from sigma0.bench.core.ledger import append_rows
from sigma0.bench.core.options import OWN, AsJsonLines, LedgerFile, Rounds
from sigma0.bench.core.output import BenchTable, measuring, step_bar, tell_rows
from sigma0.bench.core.rows import OverheadRow
from sigma0.bench.overhead.measure import RUNNERS, WAYS, Bench, Case, Sample, cases
from sigma0.checkpoints import resolve_model
from sigma0.commands.console import compiling
from sigma0.commands.options import Threads
from sigma0.models.load import load_tokenizer


def overhead(
    ways: Annotated[str, typer.Option(help="Some of these, separated by commas.")] = ",".join(WAYS),
    runners: Annotated[str, typer.Option(help="Some of these, separated by commas.")] = ",".join(RUNNERS),
    rows: Annotated[str, typer.Option(help="Rows of a pass, separated by commas.")] = "1,8,64,256",
    loops: Annotated[int, typer.Option(min=1, help="T of the empty model.")] = 8,
    passes: Annotated[int, typer.Option(min=8, help="Passes of a round, about.")] = 64,
    rounds: Rounds = 7,
    threads: Threads = 1,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Host time and dispatched operations of a pass whose block is empty: library, engine, transformers' generate."""
    with measuring(threads, "serve"):
        counts = tuple(int(part) for part in rows.split(","))
        for name, known, given in (("way", WAYS, ways), ("runner", RUNNERS, runners)):
            unknown = sorted(set(given.split(",")) - set(known))
            if unknown:
                raise ValueError(f"no such {name}: {', '.join(unknown)}; there are {', '.join(known)}")
        plan = list(cases(ways.split(","), runners.split(","), counts, loops, passes))
        bench = Bench(load_tokenizer(resolve_model("pocket")), loops, positions=4 * passes + 64)
        if not as_json:
            bench.looped.progress = compiling
        samples: dict[Case, list[Sample]] = {case: [] for case in plan}
        operations: dict[Case, float] = {}
        with step_bar("rounds", len(plan) * (rounds + 1), hidden=as_json) as advance:
            for case in plan:
                # compiles and warms up, then counts
                bench.run(case)
                sample = bench.run(case, counted=True)
                operations[case] = sample.operations / sample.passes
                advance()
            for _ in range(rounds):
                for case in plan:
                    samples[case].append(bench.run(case))
                    advance()
        ended = utc_now()
        result = [_row(bench, ended, case, current, operations[case]) for case, current in samples.items()]
        append_rows(out, result)
    table = BenchTable.of(COLUMNS, result, left=_LEFT)
    tell_rows(result, as_json, lambda: table.show(compact=True), f"{len(result)} rows in {out}")


def _row(bench: Bench, time: str, case: Case, current: list[Sample], operations: float) -> OverheadRow:
    model = bench.plain if case.way == "transformers" else bench.looped
    digests = Digests(weights_sha256="empty", settings_sha256="empty")
    conditions = describe(model, "empty", "one word", [(0,)], [None], case.passes, case.sequences, digests)
    per_pass = [sample.seconds / sample.passes * 1e6 for sample in current]
    rows = current[0].rows / current[0].passes
    return OverheadRow.model_validate(
        {
            **conditions.model_dump(),
            **{name: value for name, value in case._asdict().items() if name != "passes"},
            "time": time,
            "rounds": len(current),
            "rows_per_pass": rows,
            "microseconds_per_pass": Figure.spread(per_pass),
            "microseconds_per_row": Figure.spread([value / rows for value in per_pass]),
            "operations_per_pass": operations,
        }
    )


COLUMNS: Mapping[str, Callable[[OverheadRow], str]] = {
    "way": lambda row: row.way,
    "runner": lambda row: row.runner or "",
    "telemetry": lambda row: "on" if row.telemetry else "off",
    "sequences": lambda row: f"{row.sequences} x {row.lanes}",
    "rows": lambda row: f"{row.rows_per_pass:.1f}",
    "us/pass": lambda row: f"{row.microseconds_per_pass.value:.0f}",
    "us/row": lambda row: f"{row.microseconds_per_row.value:.1f}",
    "operations": lambda row: f"{row.operations_per_pass:.0f}",
}
_LEFT = ("way", "runner", "telemetry", "sequences")
