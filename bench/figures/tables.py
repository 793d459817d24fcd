"""The generated tables of every text."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sigma0.bench.core.conditions import stale_mark
from sigma0.bench.core.output import BenchTable, percent, with_interval
from sigma0.bench.core.rows import AnyRow, FidelityRow, LadderRow, ServeRow, VllmRow
from sigma0.bench.fidelity.grid import threshold
from sigma0.bench.fidelity.table import label as rule_label
from sigma0.bench.fidelity.table import latest_runs
from sigma0.bench.figures.results import Results
from sigma0.bench.ladder.measure import ladder_runs
from sigma0.bench.pocket.card import estimate_text, forms_table, model_card, people_table
from sigma0.bench.simulation.inputs import read_inputs
from sigma0.bench.simulation.table import checks_table
from sigma0.bench.speed.table import latest_speed_runs
from sigma0.config import ExitConfig


def latest_load(rows: Sequence[AnyRow], way: str) -> list[ServeRow]:
    """The rows of the last load run that measured a way."""
    result = [row for row in rows if isinstance(row, ServeRow)]
    times = [row.time for row in result if row.way == way]
    return [row for row in result if row.time == times[-1]]


def never_rows(rows: Sequence[AnyRow]) -> list[ServeRow]:
    """`never` beside `full` alone, as runs that ask for just these two have it; by load."""
    result = [row for row in rows if isinstance(row, ServeRow)]
    others = {row.time for row in result if row.way not in ("full", "never")}
    alone = {(row.load, row.amount): row for row in result if row.way == "never" and row.time not in others}
    return [alone[load] for load in sorted(alone)]


LOAD_COLUMNS: Mapping[str, Callable[[ServeRow], str]] = {
    "load": lambda row: f"{row.amount:g} {'clients' if row.load == 'closed' else 'requests/s'}",
    "way": lambda row: row.way,
    "tokens/s": lambda row: f"{row.tokens_per_second.value:,.0f}",
    "of `full`, least to greatest": lambda row: with_interval(row.speed_ratio, 2, 1, ""),
    "rows/s": lambda row: "-" if row.rows_per_second is None else f"{row.rows_per_second:,.0f}",
    "passes/s": lambda row: "-" if row.passes_per_second is None else f"{row.passes_per_second:,.0f}",
    "first token, ms": lambda row: f"{row.first_token_ms.p50:,.0f} / {row.first_token_ms.p99:,.0f}",
    "between, ms": lambda row: f"{row.between_tokens_ms.p50:,.0f} / {row.between_tokens_ms.p99:,.0f}",
}


def load_table(rows: Sequence[ServeRow]) -> str:
    """Every way of one run under every load."""
    return BenchTable.of(LOAD_COLUMNS, rows, left=("load", "way")).markdown()


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


def mark_of(rows: Sequence[AnyRow]) -> str:
    """What marks a table of rows as stale."""
    return stale_mark({row.model: row.model_sha256 for row in rows})


def blocks(results: Results) -> dict[str, dict[str, str]]:
    """The generated blocks by text and name, without line breaks at their ends."""
    cards = {
        f"card {name}": marked(
            model_card(results.json(f"{name}-eval"), results.json(f"{name}-gate")),
            results.stale(f"{name}-eval", f"{name}-gate"),
        )
        for name in MODELS
    }
    for name in MODELS:
        asked = f"people-{name}"
        cards[f"people {name}"] = marked(people_table(results.json(asked)["groups"]).markdown(), results.stale(asked))
    raven = "pocket-raven-eval"
    cards["card pocket-raven"] = marked(model_card(results.json(raven)), results.stale(raven))
    cards["loops pocket-raven"] = marked(raven_page(results), results.stale("lossless-pocket-raven-16", raven))
    forms = "pocket-solver-forms"
    cards["card pocket-solver"] = marked(forms_table(results.json(forms)).markdown(), results.stale(forms))
    english = ("smol-loop-eval", "smol-loop-tasks", "smol-loop-speed")
    cards["card smol-loop"] = marked(retrofit_table(results), results.stale(*english))
    front = fidelity_runs(results)["pocket-large"]
    inputs, _ = read_inputs(results.root / "bench" / "results" / "simulation-inputs.json")
    never, drafts = never_rows(results.rows), [row for row in results.rows if isinstance(row, VllmRow)]
    ended = [[text["kind"], f"{text['ended']}", f"{text['texts']}"] for text in results.json("collapse")["texts"]]
    return {
        "README.md": {"headline": marked(headline_table(results), mark_of(front))},
        "weights.md": cards,
        "bench/fidelity/README.md": {"front": marked(front_table(front), mark_of(front))},
        "bench/gpu/README.md": {"pass": pass_table(results), "dependent launch": launch_table(results)},
        "bench/simulation/README.md": {"checks": checks_table(inputs.checks).markdown()},
        "kernels/README.md": {"areas": areas_table(results.json("proximity")["roc_area"])},
        "serve/README.md": {"never": marked(never_table(never), mark_of(never))},
        "serve/vllm/README.md": {"drafts": marked(vllm_table(drafts), mark_of(drafts[-1:]))},
        "sigma0/signals/README.md": {
            "collapse": marked(_table("text | ended | of", ended), results.stale("collapse")),
            "grounding": grounding_table(results.json("grounding")["detections"]),
        },
    }


def headline_table(results: Results) -> str:
    """What a user would pick, what sigma0 does, and where: on a GPU, in time, in fidelity."""
    runs = [{row.way: row for row in run} for run in latest_speed_runs(results.rows) if run[0].batch_size == 1]
    gpu = [run for run in runs if "full" in run and (run["full"].runner, run["full"].context) == ("cudagraph", 512)][-1]
    asked = ("eager", "pocket-large", "float32")
    cpu = min(
        (
            run
            for run in reversed(runs)
            if {"full", "finish", "huggingface-static"} <= set(run)
            and (run["full"].runner, run["full"].model, run["full"].dtype) == asked
        ),
        key=lambda run: run["full"].context,
    )
    rows = fidelity_runs(results)["pocket-large"]
    (rule,) = (r for r in rows if (r.mode, r.after_exit) == ("margin", "finish") and r.promise is not None)
    (two,) = (r for r in rows if rule_label(r) == "fixed (depth 2)" and r.after_exit == "finish")
    speeds = [f"{gpu[way].tokens_per_second.value:.0f}" for way in ("full", "finish", "verify")]
    times = [f"{cpu[way].milliseconds_per_token.value:.2f} ms" for way in ("huggingface-static", "full", "finish")]
    place = gpu["full"].device.removeprefix("cuda (").removesuffix(")")
    lines = [
        [
            f"full depth: {speeds[0]} tokens/s",
            f"`finish` {speeds[1]}, `verify` {speeds[2]} tokens/s",
            f"{place}, random weights in Ouro-1.4B's shape, bfloat16, batch 1, scripted exits",
        ],
        [
            f"transformers, compiled, static cache: {times[0]} a token",
            f"full depth {times[1]}, `finish` {times[2]}",
            "`pocket-large`, float32, one CPU thread",
        ],
        [
            f"two loops a token: full depth's text in {with_interval(two.exact_match)}, "
            f"{percent(two.passes_saved)} of passes saved",
            f"`margin`, calibrated: {with_interval(rule.exact_match)}, {percent(rule.passes_saved)} saved",
            f"`pocket-large`, {rule.n} held-out questions",
        ],
    ]
    english = results.json("smol-loop-eval")
    loops = ", ".join(f"{perplexity:.1f}" for perplexity in english["perplexity"])
    lines.append(
        [
            f"SmolLM2-135M-Instruct, no loops: perplexity {english['teacher']:.1f}",
            f"`smol-loop`, its middle layers looped: {loops} by loop",
            f"English: {english['tokens']:,} held-out tokens of SmolLM2's own",
        ]
    )
    return _table("what a user would pick | sigma0 | conditions", lines, left=3)


def _table(headings: str, lines: Sequence[Sequence[str]], left: int = 1) -> str:
    return BenchTable.under(headings, lines, left).markdown()


def pass_table(results: Results) -> str:
    """Kernels of a pass at full depth, from a profile, each with the time that a copy of its bytes would take."""
    lines = [
        [f"`{kernel['name']}`", f"{kernel['launches']:.0f}", f"{kernel['each']:.2f}", f"{kernel['a_pass']:.0f}"]
        for kernel in results.gpu["profile"]["ways"]["full"]["kernels"]
        if kernel["name"].startswith("_")
    ]
    return _table("kernel | launches a pass | each, us | a pass, us", lines)


def launch_table(results: Results) -> str:
    """Time of a pass by when a kernel lets the next one begin."""
    ways = results.gpu["dependent_launch"]["ways"]
    lines = [[way["when"], f"{way['full']:,}", f"{way['finish']:,}", way["text"]] for way in ways]
    return _table("the next may begin | full, us a pass | finish, us a pass | text", lines)


def areas_table(areas: Mapping[str, float]) -> str:
    """How well a proximity tells loops from texts."""
    kinds = [name for name in areas if f"{name} against prose" in areas]
    lines = [[kind, f"{areas[kind]:.4f}", f"{areas[f'{kind} against prose']:.4f}"] for kind in kinds]
    return _table("loops | AUROC against all texts | against prose", lines)


def never_table(rows: Sequence[ServeRow]) -> str:
    """What an exit rule that is never met costs."""
    return _table(
        "clients | of full depth's speed | rounds",
        [[f"{row.amount:g}", with_interval(row.speed_ratio, 2, 1, ""), f"{row.rounds}"] for row in rows],
    )


def vllm_table(rows: Sequence[VllmRow]) -> str:
    """Tokens a second over vLLM's own, of the last run."""
    last = max(row.time for row in rows)
    lines = [
        [row.way, f"{row.clients}", with_interval(row.speed_ratio, 2, 1, "")]
        for row in rows
        if row.time == last and row.way != "vllm"
    ]
    return _table("way | clients | tokens/s over vLLM's, least to greatest", lines)


def grounding_table(detections: Sequence[Mapping[str, Any]]) -> str:
    """Altered facts that are found."""
    lines = [
        [d["kind"], f"{d['falsified']:,}", *(f"{100 * d[k]:.2f} %" for k in ("recall", "precision"))]
        for d in detections
    ]
    return _table("altered | facts | found | precision", lines)


def fidelity_runs(results: Results) -> dict[str, list[FidelityRow]]:
    """The latest fidelity rows of each model."""
    runs = latest_runs(results.rows)
    return {name: [row for row in run if isinstance(row, FidelityRow)] for name, run in runs.items()}


def retrofit_table(results: Results) -> str:
    """A teacher and its retrofit by the loop that is read: text foretold, time, and tasks of BIG-bench."""
    log = (results.root / "bench" / "retrofit" / "smol-loop.jsonl").read_text().splitlines()
    report, trained = results.json("smol-loop-eval"), json.loads(log[-1])["perplexity"]
    times = {way: f"{item['ms_per_token']['value']:.1f}" for way, item in results.json("smol-loop-speed").items()}
    right: dict[str, list[str]] = {}
    for row in results.json("smol-loop-tasks"):
        right.setdefault(row["way"], []).append(f"{row['right']} of {row['n']}")
    first = report["teacher"]
    lines = [["teacher", f"{trained[0]:.2f}", f"{first:.2f}", "", "", times["teacher"], *right["teacher"]]]
    pairs = zip(trained[1:], report["perplexity"], report["agreement"], strict=True)
    for loop, (before, perplexity, same) in enumerate(pairs, start=1):
        cells = [f"{before:.2f}", f"{perplexity:.2f}", f"{perplexity / first:.2f}", _percent(same)]
        lines.append([f"loop {loop}", *cells, times[f"loop {loop}"], *right[f"loop {loop}"]])
    for way in ("margin, finish", "margin, verify"):
        lines.append([way, *[""] * 4, times[way], *[""] * len(right["teacher"])])
    tasks = " | ".join(dict.fromkeys(row["task"].replace("_", " ") for row in results.json("smol-loop-tasks")))
    headings = "read | perplexity as trained | as it ships, in int8 | over the teacher's | the teacher's own token"
    return _table(f"{headings} | ms a token | {tasks}", lines)


def ladder_run(results: Results) -> list[LadderRow]:
    """The last long run of a ladder by tokens with pocket's stored setting."""
    path = results.root / "sigma0" / "checkpoints" / "pocket" / "generation_config.json"
    asked = {name: value for name, value in json.loads(path.read_text())["exit_config"].items() if value is not None}
    for run in sorted(ladder_runs(results.rows).values(), key=lambda run: run[0].time, reverse=True):
        config = run[0].exit_config
        if run[0].n >= 100 and run[0].unit == "token" and {**config, **asked} == config:
            return run
    raise ValueError(f"the ledger holds no ladder of 100 questions with {asked}: python -m sigma0.bench ladder")


def front_table(rows: Sequence[FidelityRow]) -> str:
    """Rules and baselines of one run, each with what it saves and what it costs."""
    headings = "rule | after | same text as full depth | right | passes_saved | rows_saved"
    lines = []
    for name, after in FRONT:
        row = [
            row
            for row in rows
            if row.after_exit == after and (rule_label(row) == name or (row.mode == name and row.promise is not None))
        ][-1]
        shares = [percent(figure) for figure in (row.accuracy, row.passes_saved, row.rows_saved)]
        lines.append([rule_label(row), after, with_interval(row.exact_match), *shares])
    return _table(headings, lines, left=2)


def calibrated_table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Each rule at its calibrated threshold, on prompts set apart; of each model the rule that saves most first."""
    headings = "model | rule | promised | new tokens with full depth's choice | same text | passes_saved"
    lines = []
    for name, rules in runs.items():
        for rule in sorted(rules, key=lambda rule: -rule["check"]["passes_saved"]["value"]):
            settings = ", ".join(
                f"{key} {value:.4g}"
                for key, value in rule["chosen"].items()
                if key in ("q", "theta", "eps", "patience") and value is not None
            )
            check = rule["check"]
            kept = estimate_text(check["agreement"], 1, 100, "{} % ({} to {})")
            shares = [_percent(check[key]["value"]) for key in ("same", "passes_saved")]
            promised = f"{100 * rule['agreement']:g} %"
            lines.append([name, f"{rule['mode']} ({settings})", promised, kept, *shares])
    return _table(headings, lines, left=2)


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
    headings = "rule | one draft | redrafts | 95 % interval | without the tail | rows | same text"
    return _table(headings, lines)


def stability_table(studies: Mapping[str, Any]) -> str:
    """The radius along a token's path beside that of the loop map, and what tells wrong answers."""
    headings = "model | rank correlation of the radii | path's radius | map's radius | entropy | margin"
    scores = ("path: radius", "jacobian radius", "entropy", "margin")
    lines = [
        [
            name,
            *(f"{item['value']:.2f}" for item in (output["rank_correlation"], *(output["auroc"][s] for s in scores))),
        ]
        for name, output in studies.items()
    ]
    return _table(headings, lines)


def answers_table(evaluations: Mapping[str, Any]) -> str:
    """Whole answers right, by the loop they are read at."""
    headings = "model | questions | n | loop 1 | loop T/2 | full depth | 95 % interval | at its exits"
    rows = (
        ("difficulty 1", "difficulty", "1"),
        ("difficulty 2", "difficulty", "2"),
        ("hard half (4 to 6)", "half", "hard"),
        ("of these open", "open, half", "hard"),
        ("all", "all", "all"),
    )
    lines = []
    for name, evaluation in evaluations.items():
        for label, part, key in rows:
            group = evaluation["groups"][part][key]
            loops = len(group["loops"])
            low, high = group["intervals"][-1]
            shares = [_percent(group["loops"][place]) for place in (0, loops // 2 - 1, -1)]
            interval = f"{_percent(low)} to {_percent(high)}"
            lines.append(
                [f"{name}, {loops} loops", label, f"{group['n']:,}", *shares, interval, _percent(group["exit"])]
            )
    return _table(headings, lines, left=2)


def proximity_table(report: Mapping[str, Any]) -> str:
    """Readings of what was not fitted on."""
    lines = [
        [READ[row["name"]], f"{row['readings']:,}"]
        + [f"{value:.2f}" for value in (row["quantiles"][2], row["quantiles"][4], row["lowest"], row["highest"])]
        + [f"{row['alarms']:.1%}"]
        for row in report["figures"]
        if not row["fitted"]
    ]
    return _table("read | readings | median | 99 % | lowest | highest | 0.5 or more", lines)


def compiled_table(variants: Sequence[Mapping[str, Any]]) -> str:
    """What the compiled kernels use, over all configurations for sm_80 and sm_90."""
    lines = []
    for kernel in dict.fromkeys(item["kernel"] for item in variants):
        mine = {name: [item for item in variants if (item["kernel"], item["target"]) == (kernel, name)]
                for name in ("sm_80", "sm_90")}  # fmt: skip
        both = [item for rows in mine.values() for item in rows]
        registers = ", ".join(_span([item["registers"] for item in rows]) for rows in mine.values())
        widths = [item["load_width"] for item in both if item["load_width"] is not None]
        shared = max(item["shared_bytes"] for item in both)
        spilled = max(item["spill_bytes"] or 0 for item in both)
        most = [f"{len(mine['sm_80'])}", registers, f"{spilled}", f"{shared:,}", f"{_span(widths)} bytes"]
        lines.append(["joining its parts" if kernel == "coded_attention_join" else f"`{kernel}`", *most])
    headings = "kernel | configurations | registers (sm_80, sm_90) | spilled | shared bytes, most | loads"
    return _table(headings, lines)


def raven_page(results: Results) -> str:
    """What `pocket-raven` shows of its loops: passes against T, and the radius of the path beside the map's."""
    reports = [results.json(f"lossless-pocket-raven-{recurrence}") for recurrence in (4, 8, 16)]
    ((prompts, new_tokens),) = {(report["prompts"], report["new_tokens"]) for report in reports}
    study = results.json("stability-pocket-raven")
    return "\n\n".join(
        (
            f"Passes of `verify` over full depth's, in per cent, against T: {prompts} held-out look-ups, {new_tokens} "
            "new tokens each, past the end of the answer, with re-drafts:",
            _passes_table(reports),
            f"The radius of a token's path and that of the loop map, at the least sure token of {study['answers']} "
            "answers to held-out look-ups:",
            _radius_table(study),
        )
    )


def _passes_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Passes over full depth's of each rule, a column for each T."""
    rules: dict[str, list[str]] = {}
    for cost in (cost for report in reports for cost in report["costs"] if cost["exit_config"]["redraft"]):
        config = ExitConfig.parse(cost["exit_config"])
        settings = ", ".join(f"{name} = {value}" for name, value in threshold(config).items())
        rules.setdefault(f"{config.mode}, {settings}", []).append(estimate_text(cost["passes"], 1, 100))
    headings = " | ".join(("rule", *(f"T = {report['total_loops']}" for report in reports)))
    return _table(headings, [[rule, *cells] for rule, cells in rules.items()])


def _radius_table(study: Mapping[str, Any]) -> str:
    """Quartiles of the two radii, and how they rank with each other."""
    headings = "wrong answers | fit speaks | path's radius | map's radius | path's below the map's | rank correlation"
    radii = (" / ".join(f"{item:.2f}" for item in study[name]) for name in ("radius", "jacobian"))
    shares = [_percent(study[name]) for name in ("wrong", "spoke", "below")]
    return _table(headings, [[*shares[:2], *radii, shares[2], estimate_text(study["rank_correlation"], 2)]])


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _span(values: Sequence[int]) -> str:
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else f"{values[0]}"
