"""`python -m sigma0.bench lossless`: the passes of `verify` as a table."""

import json
from typing import Annotated

import typer

from sigma0.bench.core.options import LookUps
from sigma0.bench.core.output import BenchTable, measuring, tell_report
from sigma0.bench.fidelity.grid import threshold
from sigma0.bench.lossless.measure import measure_lossless
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.pocket.world import LOOK_UPS, MIX
from sigma0.calibrate.prompts import encode_prompts
from sigma0.commands.console import progress_bar
from sigma0.commands.options import AsJson, Device, ModelArgument, Recurrence, StatedDtype, Stride, Threads
from sigma0.config import ExitConfig
from sigma0.models.load import load

_RULES = (
    '[{"mode": "qexit", "q": 0.1}, {"mode": "qexit", "q": 0.3}, {"mode": "qexit", "q": 0.6}, '
    '{"mode": "margin", "theta": 0.2}, {"mode": "margin", "theta": 0.6}, {"mode": "margin", "theta": 0.9}]'
)


def lossless(
    model: ModelArgument = "pocket-large",
    rules: Annotated[str, typer.Option(help="Exit rules, as a JSON list.")] = _RULES,
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Prompts: questions about held-out stories.")] = 200,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each, past any end of text.")] = 32,
    device: Device = "auto",
    dtype: StatedDtype = "float32",
    recurrence: Recurrence = None,
    stride: Stride = None,
    look_ups: LookUps = False,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Passes of verify over full depth's, with one draft and with redrafts, and that the text is full depth's."""
    with measuring(threads):
        once = [ExitConfig.parse(rule) for rule in json.loads(rules)]
        configs = [ExitConfig.parse({**rule.to_dict(), "redraft": again}) for rule in once for again in (False, True)]
        looped, tokenizer = load(model, device=device, dtype=dtype, recurrence=recurrence, stride=stride)
        name = model if stride in (None, 1) else f"{model} ({stride} loops a pass)"
        prompts = encode_prompts(looped, tokenizer, list(micro_world(n, mix=LOOK_UPS if look_ups else MIX)), new_tokens)
        with progress_bar("runs", (len(configs) + 1) * n, hidden=as_json) as advance:
            report = measure_lossless(looped, name, prompts, configs, new_tokens, advance)
    if not tell_report(report, None, as_json):
        return
    title = (
        f"{report['model']}: verify over full depth ({report['total_loops']} loops), {report['prompts']} prompts, "
        f"{report['new_tokens']} new tokens each, {report['dtype']}"
    )
    columns = ("rule", "drafts", "passes", "95 %", "no tail", "rows", "stood", "same")
    cells = []
    for config, cost in zip(configs, report["costs"], strict=True):
        settings = ", ".join(f"{name} {value}" for name, value in threshold(config).items())
        cells.append(
            (
                f"{config.mode} {settings}",
                "many" if config.redraft else "one",
                f"{cost['passes']['value']:.3f}",
                "{:.3f}-{:.3f}".format(*cost["passes"]["interval"]),
                f"{cost['passes_without_tail']['value']:.3f}",
                f"{cost['rows']['value']:.2f}",
                f"{100 * cost['accepted']['value']:.1f} %",
                f"{100 * cost['identical']:.0f} %",
            )
        )
    BenchTable(columns, cells, title).show(no_wrap=columns, compact=True)
