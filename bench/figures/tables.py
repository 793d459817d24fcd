"""The generated tables of every text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sigma0.bench.core.digests import stale_mark
from sigma0.bench.core.ledger import FidelityRow, LadderRow
from sigma0.bench.core.tables import BenchTable
from sigma0.bench.fidelity.pages import latest_runs
from sigma0.bench.fidelity.table import label as rule_label
from sigma0.bench.fidelity.table import percent, with_interval
from sigma0.bench.figures.printed import printed
from sigma0.bench.figures.raven import raven_page
from sigma0.bench.figures.results import Results
from sigma0.bench.ladder.tables import ladder_runs
from sigma0.bench.pocket.card import forms_table, model_card
from sigma0.bench.simulation.inputs import Inputs, read_inputs
from sigma0.bench.simulation.table import checks_table

# The shipped models that have a gate: what was measured of all of them stands in the tables.
MODELS = ("pocket", "pocket-large")
# with the one that has no gate
SHIPPED = (*MODELS, "pocket-raven")
# of the front page, with `after_exit`: rules at their calibrated thresholds, and baselines by their labels
FRONT = (
    ("full", "finish"),
    ("margin", "finish"),
    ("margin", "drop"),
    ("qexit", "finish"),
    ("fixed (depth 2)", "finish"),
    ("oracle", "finish"),
)
NAMES = {
    "coded_attention_join": "joining its parts",
}
READ = {
    "lee_background.cor": "news (gensim's Lee corpus, second half)",
    "train.json": "facts (StrategyQA)",
    "HumanEval.jsonl.gz": "code (HumanEval, second half)",
    "zones": "list of time zones, second half",
    "questions-words.txt": "list of word pairs (gensim)",
    "exact loops": "exact loops, periods 1 to 64",
    "babble loops": "babble of 2 to 16 ids",
    "changed loops": "one id changed in each period, 8 to 64",
    "drifted loops": "an id lost or gained in each period, 8 to 64",
}


def marked(table: str, mark: str) -> str:
    """A table, and under it that it is stale where it is."""
    return f"{table}\n\n{mark.strip()}" if mark else table


def blocks(results: Results) -> dict[str, dict[str, str]]:
    """The generated blocks by text and name, without line breaks at their ends."""
    cards = {
        f"card {name}": marked(
            model_card(results.json(f"{name}-eval"), results.json(f"{name}-gate")),
            results.stale(f"{name}-eval", f"{name}-gate"),
        )
        for name in MODELS
    }
    raven = "pocket-raven-eval"
    cards["card pocket-raven"] = marked(model_card(results.json(raven)), results.stale(raven))
    cards["loops pocket-raven"] = marked(raven_page(results), results.stale("lossless-pocket-raven-16", raven))
    forms = "pocket-solver-forms"
    cards["card pocket-solver"] = marked(forms_table(results.json(forms)).markdown(), results.stale(forms))
    front = fidelity_runs(results)["pocket-large"]
    return {
        "README.md": {"front": marked(front_table(front), stale_mark({front[0].model: front[0].model_sha256}))},
        "weights.md": cards,
        "bench/simulation/README.md": {"checks": checks_table(simulation_inputs(results).checks).markdown()},
        "serve/README.md": {f"size {name}": size_page(name) for name in ("ouro-1.4b", "ouro-2.6b")},
    }


def simulation_inputs(results: Results) -> Inputs:
    """What the simulation of fleets is fed with."""
    return read_inputs(results.root / "bench" / "results" / "simulation-inputs.json")[0]


def fidelity_runs(results: Results) -> dict[str, list[FidelityRow]]:
    """The latest fidelity rows of each model."""
    runs = latest_runs(results.rows)
    return {name: [row for row in run if isinstance(row, FidelityRow)] for name, run in runs.items()}


def ladder_run(results: Results) -> list[LadderRow]:
    """The last long run of a ladder by tokens with pocket's stored setting."""
    path = results.root / "sigma0" / "checkpoints" / "pocket" / "generation_config.json"
    asked = json.loads(path.read_text())["exit_config"]
    for run in sorted(ladder_runs(results.rows).values(), key=lambda run: run[0].time, reverse=True):
        config = run[0].exit_config
        if run[0].n >= 100 and run[0].unit == "token" and {**config, **asked} == config:
            return run
    raise ValueError(f"the ledger holds no ladder of 100 questions with {asked}: python -m sigma0.bench ladder")


def front_table(rows: Sequence[FidelityRow]) -> str:
    """Rules and baselines of one run, each with what it saves and what it costs."""
    headings = ("rule", "after", "same text as full depth", "right", "passes_saved", "rows_saved")
    lines = []
    for name, after in FRONT:
        row = [
            row
            for row in rows
            if row.after_exit == after and (rule_label(row) == name or (row.mode == name and row.promise is not None))
        ][-1]
        shares = [percent(figure) for figure in (row.accuracy, row.passes_saved, row.rows_saved)]
        lines.append([rule_label(row), after, with_interval(row.exact_match), *shares])
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def calibrated_table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Each rule at its calibrated threshold, on prompts set apart; of each model the rule that saves most first."""
    headings = ("model", "rule", "promised", "new tokens with full depth's choice", "same text", "passes_saved")
    lines = []
    for name, rules in runs.items():
        for rule in sorted(rules, key=lambda rule: -rule["check"]["passes_saved"]["value"]):
            settings = ", ".join(
                f"{key} {value:.4g}"
                for key, value in rule["chosen"].items()
                if key in ("q", "theta", "eps", "patience") and value is not None
            )
            check = rule["check"]
            low, high = check["agreement"]["interval"]
            kept = f"{_percent(check['agreement']['value'])} ({100 * low:.1f} to {100 * high:.1f})"
            shares = [_percent(check[key]["value"]) for key in ("same", "passes_saved")]
            promised = f"{100 * rule['agreement']:g} %"
            lines.append([name, f"{rule['mode']} ({settings})", promised, kept, *shares])
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def lossless_table(report: Mapping[str, Any]) -> str:
    """Passes of `verify` over full depth's, with one draft and with redrafts."""
    costs: dict[str, dict[bool, Any]] = {}
    for cost in report["costs"]:
        config = cost["exit_config"]
        name = "q" if config["mode"] == "qexit" else "theta"
        costs.setdefault(f"{config['mode']} ({name} {config[name]:g})", {})[config["redraft"]] = cost
    lines = []
    for label, drafts in costs.items():
        one, many = drafts[False], drafts[True]
        low, high = many["passes"]["interval"]
        same = min(one["identical"], many["identical"])
        shares = [_percent(one["passes"]["value"]), _percent(many["passes"]["value"])]
        shares += [f"{_percent(low)} to {_percent(high)}", _percent(many["passes_without_tail"]["value"])]
        lines.append([label, *shares, _percent(many["rows"]["value"]), _percent(same)])
    headings = ("rule", "one draft", "redrafts", "95 % interval", "without the tail", "rows", "same text")
    return BenchTable(headings, lines).markdown()


def stability_table(studies: Mapping[str, Any]) -> str:
    """The radius along a token's path beside that of the loop map, and what tells wrong answers."""
    headings = ("model", "rank correlation of the radii", "path's radius", "map's radius", "entropy", "margin")
    scores = ("path: radius", "jacobian radius", "entropy", "margin")
    lines = [
        [name, *(f"{each['value']:.2f}" for each in (told["rank_correlation"], *(told["auroc"][s] for s in scores)))]
        for name, told in studies.items()
    ]
    return BenchTable(headings, lines).markdown()


def answers_table(evaluations: Mapping[str, Any]) -> str:
    """Whole answers right, by the loop they are read at."""
    headings = ("model", "questions", "n", "loop 1", "loop T/2", "full depth", "95 % interval", "at its exits")
    rows = {
        "difficulty 1": ("difficulty", "1"),
        "difficulty 2": ("difficulty", "2"),
        "hard half (4 to 6)": ("half", "hard"),
        "of these open": ("open, half", "hard"),
        "all": ("all", "all"),
    }
    lines = []
    for name, evaluation in evaluations.items():
        for label, (part, key) in rows.items():
            group = evaluation["groups"][part][key]
            loops = len(group["loops"])
            low, high = group["intervals"][-1]
            shares = [_percent(group["loops"][place]) for place in (0, loops // 2 - 1, -1)]
            interval = f"{_percent(low)} to {_percent(high)}"
            lines.append(
                [f"{name}, {loops} loops", label, f"{group['n']:,}", *shares, interval, _percent(group["exit"])]
            )
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def proximity_table(report: Mapping[str, Any]) -> str:
    """Readings of what was not fitted on."""
    lines = [
        [READ[row["name"]], f"{row['readings']:,}"]
        + [f"{value:.2f}" for value in (row["quantiles"][2], row["quantiles"][4], row["lowest"], row["highest"])]
        + [f"{row['alarms']:.1%}"]
        for row in report["figures"]
        if not row["fitted"]
    ]
    return BenchTable(("read", "readings", "median", "99 %", "lowest", "highest", "0.5 or more"), lines).markdown()


def compiled_table(variants: Sequence[Mapping[str, Any]]) -> str:
    """What the compiled kernels use, over all configurations for sm_80 and sm_90."""
    lines = []
    for kernel in dict.fromkeys(each["kernel"] for each in variants):
        mine = {name: [each for each in variants if (each["kernel"], each["target"]) == (kernel, name)]
                for name in ("sm_80", "sm_90")}  # fmt: skip
        both = [each for rows in mine.values() for each in rows]
        registers = ", ".join(_span([each["registers"] for each in rows]) for rows in mine.values())
        widths = [each["load_width"] for each in both if each["load_width"] is not None]
        shared = max(each["shared_bytes"] for each in both)
        spilled = max(each["spill_bytes"] or 0 for each in both)
        most = [f"{len(mine['sm_80'])}", registers, f"{spilled}", f"{shared:,}", f"{_span(widths)} bytes"]
        lines.append([NAMES.get(kernel, f"`{kernel}`"), *most])
    headings = ("kernel", "configurations", "registers (sm_80, sm_90)", "spilled", "shared bytes, most", "loads")
    return BenchTable(headings, lines).markdown()


def size_page(name: str) -> str:
    """What `sigma0 size` prints of a shape."""
    return printed(f"sigma0 size {name} --context 4096,32768 --memory 24GB,48GB,80GB").strip()


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _span(values: Sequence[int]) -> str:
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else f"{values[0]}"
