"""The figures that stand in sentences, each with the row or constant that it comes from."""

# ruff: noqa: E501  (sentences are easier to find in their text where they are not broken up)

import re
from collections.abc import Sequence

from sigma0.bench.core.ledger import FidelityRow, Figure, HumanEvalRow, SimulationRow, StrategyQARow
from sigma0.bench.effort.simulation import Rates
from sigma0.bench.fidelity.pages import latest_runs
from sigma0.bench.figures.check import computed as c
from sigma0.bench.figures.results import Results
from sigma0.bench.figures.tables import ladder_run
from sigma0.bench.ladder.tables import ladder_runs
from sigma0.bench.serving.table import latest_load, never_rows, never_sentence
from sigma0.bench.simulation.inputs import read_inputs
from sigma0.bench.simulation.table import apart_cells, latest_simulation
from sigma0.bench.simulation.traffic import LONG, SHORT
from sigma0.bench.speed.table import latest_speed_runs
from sigma0.bench.strategyqa.table import latest_levels
from sigma0.calibrate.agreement import prompts_needed
from sigma0.calibrate.bootstrap import share
from sigma0.serve.size_command import shape_of
from sigma0.serve.sizing import parameters, token_bytes, weight_bytes

_LARGEST, _RATES = "random ouro-2.6b", ("47,821", "86,118", "133,939")


def sentences(results: Results) -> dict[str, list[str]]:
    """Pieces of sentences of each text, with computed figures."""
    return {
        "README.md": [
            *_promises(results),
            *_costs(results),
            *_collapse(results),
            *_ladder(results),
            *_tasks(results),
            *_serving(results),
            *_front_simulation(results),
        ],
        "weights.md": _weights(results),
        "kernels/README.md": _areas(results),
        "serve/README.md": _gains(results),
        "bench/effort/README.md": _policies(results),
        "bench/fidelity/README.md": _accel(results),
        "bench/humaneval/README.md": _solved(results),
        "bench/simulation/README.md": _simulation(results),
        "bench/strategyqa/README.md": _distilled(results),
    }


def p(value: float, digits: int = 1) -> str:
    """A share in per cent."""
    return c(100 * value, f".{digits}f")


def _promises(results: Results) -> list[str]:
    rule, lossless = results.json("calibrate-pocket")[0], results.json("lossless-pocket-large")
    agreed = rule["agreement"]
    promised = rule["confidence"]
    # of one rule alone; what stands in the report is for all of them at once
    least, half = prompts_needed(agreed, promised)
    fastest = min(lossless["costs"], key=lambda cost: cost["passes"]["value"])["simulated"]
    traced = [p(fastest[name] / fastest["full"]) for name in ("with_fallback", "with_redraft")]
    return [
        f"at which at least {c(100 * agreed, 'g')} % of the new tokens",
        f"with probability {c(promised)} over the choice of prompts, the mean share",
        f"is at most {c(100 - 100 * agreed, 'g')} %, for all rules at once",
        f"It takes {c(least)} prompts without a single error for one rule, or about {c(round(half, -2), ',')} at half",
        f"on the {c(rule['check']['prompts'])} prompts set apart, which had no part",
        f"`{lossless['model']}`, {c(lossless['prompts'])} held-out questions, {c(lossless['new_tokens'])} new tokens each",
        f"counted from traces, {traced[0]} % in place of {traced[1]} % for the fastest",
    ]


def _costs(results: Results) -> list[str]:
    times = {
        (each["kernel"], each["size"]): each["microseconds"] / 1000 for each in results.json("kernels-cpu")["timings"]
    }
    boundary, logits = times["loop_boundary", "4 rows of 2048"], times["collapse", "4 rows of 49152"]
    facts = {each["kind"]: each for each in results.json("grounding")["detections"]}
    answers = {report.answers for report in results.verdicts.values()}
    studied = {results.json(f"stability-{name}")["answers"] for name in ("pocket", "pocket-large")}
    return [
        f"takes {c(boundary, '.1f')} ms for {c(4)} rows of {c(2048, ',')} numbers, and reading {c(4)} tokens' "
        f"{c(49152, ',')} logits {c(logits, '.1f')} ms",
        f"one about each of {_only(answers)} stories",
        f"at the least sure token of {_only(studied)} answers each",
        f"number altered it finds {p(facts['number']['recall'])} % of {c(facts['number']['falsified'], ',')}, with a name "
        f"swapped {p(facts['entity']['recall'])} % of {c(facts['entity']['falsified'], ',')}, beside",
        f"at a precision of {p(facts['both']['precision'], 2)} %",
    ]


def _collapse(results: Results) -> list[str]:
    report = results.json("collapse")
    small, large = (
        next(row["ratio"] for row in found["costs"] if row["way"] == "both") for found in report["models"].values()
    )
    more = [[p(value - 1) for value in (each["value"], *each["interval"])] for each in (small, large)]
    kinds = {row["kind"]: f"{c(row['ended'])} of {c(row['texts'])}" for row in report["texts"]}
    stories = next(row["texts"] for row in report["texts"] if row["kind"] == "stories")
    return [
        f"{more[0][0]} % ({c(95)} % interval {more[0][1]} % to {more[0][2]} %) more CPU time a token on `pocket` and "
        f"{more[1][0]} % ({more[1][1]} % to {more[1][2]} %) on `pocket-large`",
        f"at least {c(report['tau'])} behind {c(report['running'])} tokens running",
        f"Of {_only({found['answers'] for found in report['models'].values()})} ordinary answers none was cut",
        f"any of {c(stories)} stories of their world; of stretches of {c(256)} tokens, {kinds['prose']} of prose, "
        f"{kinds['code']} of code and {kinds['lists']} of lists",
        f"it ended {kinds['exact loops']} exact ones, {kinds['changed loops']} with a fault in each period and "
        f"{kinds['drifted loops']} that drift",
    ]


def _only(values: set[int]) -> str:
    (value,) = values
    return c(value, ",")


def _ladder(results: Results) -> list[str]:
    reported = next(row for row in ladder_run(results) if row.part == "report")
    (other,) = [run for run in ladder_runs(results.rows).values() if run[0].above.startswith("SmolLM2")]
    by_family = {row.family: row for row in other if row.part == "report"}
    small, verdict, warm = (by_family[name] for name in ("small only", "verdict", "verdict, warm start"))
    shares = [p(each.value) for each in (verdict.cost, verdict.seconds, small.cost, small.seconds)]
    return [
        f"On {c(reported.n)} held-out questions of the micro-world's hard half, one at a time",
        f"on the first {c(small.n)} prompts of HumanEval, {c(small.max_new_tokens)} new tokens",
        f"hands up {c(verdict.accuracy.value * verdict.n, '.0f')} of {c(verdict.n)}, at {shares[0]} % of SmolLM2's cost "
        f"and {shares[1]} % of its time; `pocket` alone costs {shares[2]} % and {shares[3]} %.",
        f"writes its own in {c(warm.accuracy.value * warm.n, '.0f')} of {c(warm.n)}.",
    ]


def _tasks(results: Results) -> list[str]:
    effort = results.effort("pocket")
    first = effort.first_right
    assert first is not None
    asked = {results.json(f"{name}-eval")["n"] for name in ("pocket", "pocket-large")}
    solved = {row.n for row in results.rows if isinstance(row, HumanEvalRow)}
    direct = _direct(results)
    holder = results.json("pocket-eval")["groups"]["family"]["holder"]
    return [
        f"{c(effort.policies[0].runs)} held-out questions of the hard half, temperature "
        f"{c(str(effort.settings['temperature']))}; first answers were right in {p(first.value)} %",
        f"none of HumanEval's first {_only(solved)} problems",
        f"On StrategyQA's {c(direct.n)} dev items SmolLM2 is right on {p(direct.accuracy.value)} % "
        f"({p(direct.accuracy.low)} to {p(direct.accuracy.high)}) asked directly",
        f"one question about each of {_only(asked)} held-out stories",
        f"`pocket` is right in {p(holder['loops'][-1])} % at full depth and in {p(holder['exit'])} % at its exits",
    ]


def _direct(results: Results) -> StrategyQARow:
    runs = latest_levels(results.rows)
    return next(row for row in max(runs, key=lambda run: run[0].n) if row.level == "L0")


def _serving(results: Results) -> list[str]:
    load, soak = latest_load(results.rows, "finish"), results.json("soak-pocket")
    first = load[0]
    size = f"{first.parameters / 1e6:.1f}"
    return [
        f"`{first.model}` ({c(size)} M parameters, {c(first.total_loops)} loops), {c(first.max_new_tokens)} new tokens to "
        f"every answer, server and clients on two CPU cores, {c(first.rounds)} interleaved rounds",
        re.sub(r"\d+(?:\.\d+)?", lambda match: c(match[0]), never_sentence(never_rows(results.rows))),
        f"at {c(max(row.amount for row in load if row.load == 'closed'), '.0f')} clients the server is full",
        f"mixed load from {c(soak['clients'])} clients",
    ]


def _gains(results: Results) -> list[str]:
    load = [row for row in latest_load(results.rows, "finish") if row.load == "closed" and row.way == "finish"]
    gains = {row.amount: row.speed_ratio for row in load}
    told = [c(_value(gains[amount]), ".2f") for amount in (1, 16, 64)]
    return [
        f"it wrote {told[0]} times full depth's tokens with {c(1)} client, {told[1]} times with {c(16)}, and {told[2]} "
        f"times with {c(64)} (the load table"
    ]


def _value(figure: Figure | None) -> float:
    assert figure is not None
    return figure.value


def _fleets(results: Results) -> dict[tuple[int, str, str], SimulationRow]:
    rows = latest_simulation(results.rows)
    return {(row.replicas, f"{row.fleet_rate:,.0f}", row.routing): row for row in rows}


def _apart(results: Results) -> dict[tuple[str, str, str], Sequence[str]]:
    return {(cell[0], cell[1], cell[2]): cell[4:] for cell in apart_cells(latest_simulation(results.rows))}


def _gain(cell: str) -> list[str]:
    """A ratio with its interval as a gain in per cent: least and greatest change places."""
    value, low, high = map(float, re.findall(r"\d+\.\d+", cell))
    return [c(100 * (1 - each), ".0f") for each in (value, high, low)]


def _loss(cell: str) -> list[str]:
    value, low, high = map(float, re.findall(r"\d+\.\d+", cell))
    return [c(100 * (each - 1), ".0f") for each in (value, low, high)]


def _front_simulation(results: Results) -> list[str]:
    found, apart = _fleets(results), _apart(results)
    least, fleet = (found[10240, "86,118", name] for name in ("least-loaded", "fleet"))
    gains = [_gain(apart["16", rate, "fleet-depth-aware"][1])[0] for rate in ("134.6", "209.3")]
    return [
        f"on up to {c(fleet.replicas, ',')} replicas, in groups of {c(fleet.group)}, at {c(fleet.fleet_rate, ',.0f')} "
        "requests a second",
        f"percentile of {c(fleet.latency_ms.p95, ',.0f')} ms where the least loaded replica gives "
        f"{c(least.latency_ms.p95, ',.0f')}.",
        f"gain in groups of {c(16)} only ({gains[0]} and {gains[1]} % at two rates)",
    ]


def _simulation(results: Results) -> list[str]:
    found, apart = _fleets(results), _apart(results)
    random, least, affine, fleet = (
        found[10240, "86,118", name] for name in ("random", "least-loaded", "session-affine", "fleet")
    )
    later, last = found[10240, "133,939", "fleet"], found[10240, "191,386", "fleet"]
    inputs, _ = read_inputs(results.root / "bench" / "results" / "simulation-inputs.json")
    busy, calm = sorted(inputs.checks, key=lambda check: -check.rate)
    pairs = [
        " / ".join(c(each, ".0f") for each in seen)
        for check in (busy, calm)
        for seen in (check.measured, check.simulated)
    ]
    misses = [1 - mine / theirs for check in inputs.checks
              for mine, theirs in zip(check.simulated, check.measured, strict=True)]  # fmt: skip
    settled = [apart["10,240", rate, "fleet-depth-aware"] for rate in _RATES]
    beside = [apart["10,240", rate, "depth-aware"] for rate in _RATES[:2]]
    small = [apart["16", rate, "fleet-depth-aware"] for rate in ("134.6", "209.3")]
    marked = [re.sub(r"\d+\.\d+", lambda match: c(match[0]), each[0]) for each in settled]
    short = ", ".join(c(each[1].split()[0]) for each in settled)
    losses, gains = [_loss(each[0]) for each in (*beside, *small)], [_gain(each[1]) for each in (*beside, *small)]
    paces = [min(inputs.pass_times.paces), max(inputs.pass_times.paces)]
    return [
        f"On one replica, at {c(busy.rate, '.1f')} requests a second, the engine took {pairs[0]} ms (p50 / p95 / p99) and "
        f"the simulation of the same arrivals {pairs[1]}; at {c(calm.rate, '.1f')}, {pairs[2]} and {pairs[3]}: between "
        f"{p(min(misses), 0)} and {p(max(misses), 0)} % too little",
        f"took {c(paces[0], '.2f')} to {c(paces[1], '.2f')} times the mean",
        f"At {c(fleet.fleet_rate, ',.0f')} requests a second on {c(fleet.replicas, ',')} replicas the 95th percentile of an "
        f"answer is {c(random.latency_ms.p95, ',.0f')} ms where any replica is drawn, {c(least.latency_ms.p95, ',.0f')} "
        f"where the least loaded one is taken, {c(affine.latency_ms.p95, ',.0f')} where a chat has a replica drawn for "
        f"it, and {c(fleet.latency_ms.p95, ',.0f')} under `fleet`, which finds {p(fleet.cached, 0)} % of the prompts'",
        f"At {c(later.fleet_rate, ',.0f')} `fleet` still answers within {c(later.latency_ms.p95, ',.0f')} ms",
        f"has a p95 of {marked[0]}, {marked[1]} and {marked[2]} times `fleet`'s",
        f"could be told from noise ({short}).",
        f"short answers gain {gains[0][0]} to {gains[1][0]} % at the two lower rates, and all together lose "
        f"{losses[0][0]} % ({losses[0][1]} to {losses[0][2]}) and {losses[1][0]} % ({losses[1][1]} to {losses[1][2]}).",
        f"In a group of {c(16)}, which is halved, short answers gain {gains[2][0]} % ({gains[2][1]} to {gains[2][2]}) and "
        f"{gains[3][0]} % ({gains[3][1]} to {gains[3][2]})",
        f"at {c('134.6')} and {c('209.3')} requests a second, and all together lose {losses[2][0]} % "
        f"({losses[2][1]} to {losses[2][2]}) and {losses[3][0]} % ({losses[3][1]} to {losses[3][2]}).",
        f"({c(fleet.by_kind_ms[SHORT].p50, '.0f')} against {c(fleet.by_kind_ms[LONG].p50, '.0f')} ms under `fleet` at "
        f"{c(fleet.fleet_rate, ',.0f')})",
        f"From {c(later.fleet_rate, ',.0f')} to {c(last.fleet_rate, ',.0f')} requests a second the median answer of `fleet` "
        f"goes from {c(later.latency_ms.p50, ',.0f')} ms to {c(last.latency_ms.p50, ',.0f')}",
    ]


def _areas(results: Results) -> list[str]:
    areas = results.json("proximity")["roc_area"]
    kinds = ("exact", "changed", "drifted")
    whole = ", ".join(f"{kind} {c(areas[kind], '.4f')}" for kind in kinds)
    prose = ", ".join(c(areas[f"{kind} against prose"], ".4f") for kind in kinds)
    return [
        f"{whole}, babble {c(areas['babble'], '.2f')}; against prose alone {prose} and "
        f"{c(areas['babble against prose'], '.2f')}."
    ]


def _policies(results: Results) -> list[str]:
    simulated, odds = results.effort("simulation"), Rates()
    passed, failed, cut = (
        [p(each[level], 0) for level in ("low", "medium", "high")]
        for each in (odds.false_pass, odds.false_fail, odds.cut_off)
    )
    costly = [c(each, "g") for each in (*odds.tokens.values(), odds.generation)]
    rising = {each.policy: each for each in simulated.policies}
    flat = rising.pop("flat high")
    asked = [each.verifications.value / flat.verifications.value - 1 for each in rising.values()]
    costs = [each.cost.value / flat.cost.value - 1 for each in rising.values()]
    return [
        f"{c(flat.runs, ',')} runs of each policy with the default odds: {p(odds.first_right, 0)} % of first solutions are "
        f"right, {p(odds.repaired, 0)} % of corrections mend, {p(odds.spoiled, 0)} % of needless ones spoil",
        f"lets a wrong solution pass in {passed[0]}, {passed[1]} and {passed[2]} %, fails a right one in {failed[0]}, "
        f"{failed[1]} and {failed[2]} %, is cut off in {cut[0]}, {cut[1]} and {cut[2]} %, and costs {costly[0]}, "
        f"{costly[1]} and {costly[2]}, a solution {costly[3]};",
        f"and asks for {c(round(100 * min(asked), -1), '.0f')} to {c(round(100 * max(asked), -1), '.0f')} % more "
        f"verifications, at a cost that is {p(min(costs), 0)} to {p(max(costs), 0)} % higher",
    ]


def _accel(results: Results) -> list[str]:
    runs = latest_runs(results.rows)
    rows = [row for run in runs.values() for row in run if isinstance(row, FidelityRow) and row.after_exit == "finish"]

    def saved(model: str, mode: str) -> str:
        (row,) = (row for row in rows if (row.model, row.mode) == (model, mode) and row.promise is not None)
        assert row.passes_saved is not None
        return p(row.passes_saved.value)

    ours, older = ([saved(model, mode) for model in ("pocket", "pocket-large")] for mode in ("accel", "accel-steps"))
    return [
        f"at thresholds of one promise ours saves {ours[0]} % and {ours[1]} % of the passes, the older form {older[0]} % "
        f"and {older[1]} %",
    ]


def _solved(results: Results) -> list[str]:
    rows = [row for row in results.rows if isinstance(row, HumanEvalRow)]
    n = max(row.n for row in rows)
    return [
        f"{c(0)} of {c(n)} is {c(0)} to {p(share(0, n).interval[1])} %",
        f"The first {c(n)} problems, greedy, at most {_only({row.max_new_tokens for row in rows})} new tokens",
    ]


def _distilled(results: Results) -> list[str]:
    found = [row for row in results.rows if isinstance(row, StrategyQARow) and row.against != "L0"]
    before, after = ([p(each) for each in (row.accuracy.value, row.accuracy.low, row.accuracy.high)] for row in found)
    misses = [c(sum(row.misses.values())) for row in reversed(found)]
    return [
        f"{after[0]} % ({after[1]} to {after[2]}) right on the items of dev, {before[0]} % ({before[1]} to {before[2]}) "
        f"without (p {c(found[1].p_value or 0.0, '.2f')}). {misses[0]} and {misses[1]} of {c(found[0].n)} are misses of form"
    ]


def _weights(results: Results) -> list[str]:
    speed = next(run[0] for run in latest_speed_runs(results.rows) if run[0].model == _LARGEST and len(run) > 2)
    told = []
    for name, unit, digits in (("pocket", 1e6, 2), ("pocket-large", 1e6, 2)):
        shape = shape_of(name)
        told.append(
            f"| `{name}` (ships inside the package) | {c(parameters(shape) / unit, f'.{digits}f')} M | "
            f"{c(shape.layers)} x {c(shape.loops)} | Apache-2.0 | {c(weight_bytes(shape, 2) / 1e6, '.1f')} MB (ships in "
            f"float32, {c(weight_bytes(shape, 4) / 1e6, '.1f')} MB) | {c(token_bytes(shape, 2) / 1024, '.0f')} KiB |"
        )
    for label in ("1.4B", "2.6B"):
        shape = shape_of(f"ouro-{label.lower()}")
        told.append(
            f"`ByteDance/Ouro-{label}-Thinking` | {c(parameters(shape) / 1e9, '.1f')} B | {c(shape.layers)} x "
            f"{c(shape.loops)} | Apache-2.0 | {c(weight_bytes(shape, 2) / 1e9, '.1f')} GB | "
            f"{c(token_bytes(shape, 2) / 1024, '.0f')} KiB |"
        )
    told.append(
        f"{c(4096, ',')} tokens of Ouro-1.4B take {c(4096 * token_bytes(shape_of('ouro-1.4b'), 2) / 2**30, '.0f')} GiB"
    )
    used = speed.kv_bytes_in_use
    assert used is not None
    told.append(f"{c(used / 1e6, '.1f')} MB of K/V for {c(speed.context + speed.max_new_tokens - 1)} tokens")
    return told
