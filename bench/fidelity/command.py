"""`python -m sigma0.bench fidelity`: measure, append, go on where a run was cut off."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from pydantic import TypeAdapter, ValidationError

from sigma0.bench.core.conditions import describe
from sigma0.bench.core.ledger import append_row, read_rows, repair
from sigma0.bench.core.options import OWN, AsJsonLines, LedgerFile, WorkerCount
from sigma0.bench.core.output import measuring, tell_rows
from sigma0.bench.core.rows import FidelityRow
from sigma0.bench.core.workers import keeping_pool
from sigma0.bench.fidelity.grid import MODES, plan
from sigma0.bench.fidelity.runs import do_item
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.prompts import Prompt, encode_prompts, read_prompts
from sigma0.commands.console import progress_bar
from sigma0.commands.options import (
    KV,
    Device,
    ModelArgument,
    Quantization,
    Recurrence,
    StatedDtype,
    Stride,
    check_known,
)
from sigma0.config import AfterExit, ExitConfig
from sigma0.errors import one_line
from sigma0.models.load import load

TASK = "pocket"
_GRID = TypeAdapter(dict[str, tuple[float, ...]])


def fidelity(
    model: ModelArgument = "pocket",
    prompts: Annotated[
        str, typer.Option(help=f"{TASK} (questions about held-out stories), or a file: JSON lines or paragraphs.")
    ] = TASK,
    n: Annotated[int, typer.Option("-n", "--n", min=2, help="Prompts at most, the first ones.")] = 60,
    modes: Annotated[str, typer.Option(help="Some of these, separated by commas.")] = ",".join(MODES),
    after: Annotated[
        str, typer.Option(help="After the exit: some of finish, drop, verify, separated by commas.")
    ] = "finish,drop",
    grid: Annotated[str, typer.Option(help='Other thresholds, as JSON: {"qexit": [0.5, 0.9]}.')] = "{}",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each prompt at most.")] = 32,
    out: LedgerFile = OWN,
    device: Device = "auto",
    dtype: StatedDtype = "float32",
    quantization: Quantization = None,
    recurrence: Recurrence = None,
    stride: Stride = None,
    kv: KV = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, of each worker.")] = 1,
    workers: WorkerCount = 1,
    as_json: AsJsonLines = False,
) -> None:
    """Compute saved against fidelity, for every exit rule and threshold and the baselines beside them.

    Rows are appended as they are measured. A run that was cut off goes on where it stopped, once it is started again
    under the same conditions: weights, prompts, commit, versions, device. With several workers so does each prompt of a
    setting, and the rows are those of one worker but for their times, which are taken in this process. With --kv full
    depth reads K/V in few bits too; what those cost is told by `kv`.
    """
    with measuring(threads):
        from sigma0.bench.fidelity.measure import open_bench
        from sigma0.bench.fidelity.table import print_rows

        chosen, source = _prompts(prompts, n)
        options: dict[str, Any] = {"quantization": quantization, "recurrence": recurrence, "stride": stride, "kv": kv}
        options["dtype"] = dtype
        looped, tokenizer = load(model, device=device, **options)
        settings = plan(modes.split(","), _after(after), looped.num_loops, _grid(grid), looped.exit_thresholds)
        ids = encode_prompts(looped, tokenizer, chosen, max_new_tokens)
        answers = [prompt.answer for prompt in chosen]
        conditions = describe(looped, model, source, ids, answers, max_new_tokens)
        if repair(out):
            typer.echo(f"cut off the half-written last line of {out}", err=True)
        read_rows(out)  # A damaged ledger is told before anything is measured.
        loaded = {
            "name": str(Path(model).resolve()) if Path(model).is_dir() else model,
            # what was kept of other weights is not taken for theirs
            "sha256": conditions.model_sha256,
            "threads": threads,
            "options": {**options, "device": looped.device.type},
        }
        bar = progress_bar("settings", len(settings) + 1, hidden=as_json)
        with bar as advance, _spread(workers, loaded, out, conditions.run) as spread:
            bench = open_bench(looped, tokenizer, conditions, ids, answers, settings, spread)
            advance(1)
            done = {row.key for row in read_rows(out) if row.run == conditions.run}
            for number, setting in enumerate(settings, start=2):
                if setting.key not in done:
                    append_row(out, bench.measure(setting))
                advance(number)
            append_row(out, bench.sample(looped.resolve_exit_config(None)))
        wanted = {setting.key for setting in settings}
        known = [row for row in read_rows(out) if row.run == conditions.run and row.key in wanted]
        rows = [row for row in known if isinstance(row, FidelityRow)]
    tell_rows(
        rows, as_json, lambda: print_rows(rows), f"{len(rows)} rows in {out}; python -m sigma0.bench report draws them"
    )


@contextmanager
def _spread(
    workers: int, loaded: dict[str, Any], out: Path, run: str
) -> Iterator[Callable[[list[Any]], list[Any]] | None]:
    """Has workers do items, and a file beside the ledger keep results until the run is whole; None for one worker."""
    if workers == 1:
        yield None
        return
    gpus = int(loaded["options"]["device"] == "cuda")
    path = out.with_name(f".{out.stem}-{run}.work.jsonl")
    with keeping_pool(path, "items", workers, loaded["threads"], gpus) as (pool, kept):
        yield lambda items: pool.spread(do_item, [{**item, "loaded": loaded} for item in items], kept)


def _prompts(source: str, n: int) -> tuple[list[Prompt], str]:
    if source == TASK:
        return list(micro_world(n)), f"{TASK}, test split, seed 0"
    result = list(islice(read_prompts(Path(source)), n))
    if len(result) < 2:
        raise ValueError(f"{source!r} holds one prompt: intervals over prompts take at least 2")
    return result, Path(source).name


def _after(text: str) -> list[AfterExit]:
    known = get_args(AfterExit)
    for name in text.split(","):
        check_known("setting of after_exit", name, known)
        # Told here, before anything is measured, if it cannot be had.
        ExitConfig(after_exit=cast(AfterExit, name))
    return [cast(AfterExit, name) for name in dict.fromkeys(text.split(","))]


def _grid(text: str) -> dict[str, tuple[float, ...]]:
    try:
        return _GRID.validate_json(text)
    except ValidationError as error:
        raise ValueError(f"--grid {text!r}: {one_line(error)}") from error
