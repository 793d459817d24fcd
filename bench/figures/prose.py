"""The figures that stand in sentences, each with the row or constant that it comes from."""

# ruff: noqa: E501  (sentences are easier to find in their text where they are not broken up)

import re
from typing import Literal

from sigma0.bench.core.ledger import SpeedRow
from sigma0.bench.fidelity.table import label
from sigma0.bench.figures.check import computed as c
from sigma0.bench.figures.forms import only, value
from sigma0.bench.figures.forms import percent as p
from sigma0.bench.figures.prose_benches import (
    accel_sentences,
    distillation_sentences,
    effort_sentence,
    humaneval_sentences,
    outer_sentences,
    policy_sentences,
    task_sentences,
    vllm_sentences,
)
from sigma0.bench.figures.prose_fleets import fleet_sentences, simulation_sentences
from sigma0.bench.figures.results import Results
from sigma0.bench.figures.tables import MODELS, fidelity_runs, ladder_run
from sigma0.bench.ladder.tables import ladder_runs
from sigma0.bench.serving.table import latest_load, never_rows, never_sentence
from sigma0.bench.speed.table import latest_speed_runs
from sigma0.bench.verdict.scores import CONFIDENCE, PLAIN
from sigma0.bench.verdict.strange import ALL
from sigma0.bench.verdict.worlds import WorldRow
from sigma0.calibrate.agreement import prompts_needed
from sigma0.serve.size_command import shape_of
from sigma0.serve.sizing import parameters, token_bytes, weight_bytes

_LARGEST = "random ouro-2.6b"
_SCORES = (CONFIDENCE, PLAIN)
# Share of the sets of a world in which a door should be found.
_FOUND = 0.8


def sentences(results: Results) -> dict[str, list[str]]:
    """Pieces of sentences of each text, with computed figures."""
    return {
        "README.md": _front(results),
        "weights.md": [*_weights(results), _holder(results)],
        "kernels/README.md": [*_areas(results), _times(results)],
        "serve/README.md": [*_gains(results), *_serving(results), *fleet_sentences(results)],
        "serve/vllm/README.md": vllm_sentences(results),
        "sigma0/calibrate/README.md": [*_promises(results), *_worlds(results)],
        "sigma0/decode/README.md": _lossless(results),
        "sigma0/ladder/README.md": _ladder(results),
        "sigma0/reason/README.md": [effort_sentence(results)],
        "sigma0/signals/README.md": [*_collapse(results), *_doors(results), *_grounding(results)],
        "bench/README.md": task_sentences(results),
        "bench/effort/README.md": policy_sentences(results),
        "bench/outer/README.md": outer_sentences(results),
        "bench/fidelity/README.md": accel_sentences(results),
        "bench/humaneval/README.md": humaneval_sentences(results),
        "bench/simulation/README.md": simulation_sentences(results),
        "bench/strategyqa/README.md": distillation_sentences(results),
    }


def _front(results: Results) -> list[str]:
    rows = [row for row in fidelity_runs(results)["pocket-large"] if row.after_exit == "finish"]
    (own,) = [row for row in rows if row.mode == "margin" and row.promise is not None]
    (full,), (fixed,) = ([row for row in rows if label(row) == name] for name in ("full", "fixed (depth 2)"))
    assert own.promise is not None and own.threads == 1
    same, agreed, saved = own.exact_match, own.promise.agreement, own.passes_saved
    size = f"`pocket-large` ({c(own.parameters / 1e6, '.1f')} M parameters, {c(own.total_loops)} loops; {c(own.n)} held-out"
    large_ratio = _large_speed(results)["finish"].speed_ratio
    lossless = results.json("lossless-pocket-large")
    assert min(cost["identical"] for cost in lossless["costs"]) == 1, "all answers are full depth's"
    fewest = min(cost["passes"]["value"] for cost in lossless["costs"])
    return [
        f"{size} questions, {own.dtype}, one CPU thread) runs {p(value(saved))} % fewer passes of its block, "
        f"{p(value(own.rows_saved))} % less arithmetic, and still writes full depth's text in {p(same.value)} % "
        f"({p(same.low)} to {p(same.high)}) of the answers.",
        f"save fewer passes, {p(value(fixed.passes_saved))} %, and get {p(value(fixed.accuracy))} % of the answers right in place "
        f"of {p(value(full.accuracy))} %.",
        _token(results),
        f"where reading weights takes the time, they come {c(value(large_ratio), '.2f')} times as fast",
        f'("{p(agreed)} % of the tokens as at full depth")',
        f"at most {c(own.max_new_tokens)} new tokens, thresholds promised {p(agreed)} % beforehand",
        f"full depth's text in all of {c(lossless['prompts'])} answers, in {p(fewest)} % of its passes",
        _large(results),
        _on_gpu(results),
        _clients(results, "The server writes", "for", "client", "for"),
    ]


# transformers' own decoding as a user would make it fast
_STATIC: Literal["huggingface-static"] = "huggingface-static"


def _token(results: Results) -> str:
    """What a token of the shipped model takes at the shortest context that was timed, by the last such run."""
    runs = [
        {row.way: row for row in run}
        for run in latest_speed_runs(results.rows)
        if run[0].model == "pocket-large" and {row.way for row in run} >= {"full", "finish", "huggingface", _STATIC}
    ]
    own = [run for run in runs if (run["full"].runner, run["full"].dtype) == ("eager", "float32")]
    ways = min(reversed(own), key=lambda run: run["full"].context)
    finish, full, static, eager = (
        c(ways[way].milliseconds_per_token.value, ".2f") for way in ("finish", "full", _STATIC, "huggingface")
    )
    return (
        f"A token takes {finish} ms, at full depth {full}, in transformers' own loop {static} (compiled, with a "
        f"static cache; {eager} without)"
    )


def _on_gpu(results: Results) -> str:
    """What the last runs in Ouro-1.4B's shape wrote on a GPU at batch 1 and the shortest context."""
    runs = [
        run for run in latest_speed_runs(results.rows) if run[0].device.startswith("cuda") and run[0].batch_size == 1
    ]
    shown = {(row.way, row.runner): row for run in runs for row in run if row.model == "random ouro-1.4b"}
    ours, full = [shown[way, "cudagraph"] for way in ("full", "finish", "verify")], shown["full", "cudagraph"]
    assert len({(row.device, row.commit, row.context, row.max_new_tokens, row.dtype) for row in ours}) == 1
    speeds = " / ".join(c(row.tokens_per_second.value, ".1f") for row in ours)
    device = full.device.removeprefix("cuda (").removesuffix(")")
    return (
        f"On an {device}, random weights in the shape of Ouro-1.4B ({full.dtype}, batch {c(full.batch_size)}, "
        f"context {c(full.context)}, {c(full.max_new_tokens)} new tokens) write {speeds} tokens/s at full depth / `finish` / `verify`"
    )


def _large_speed(results: Results) -> dict[str, SpeedRow]:
    """The last run in the largest shape, by way."""
    run = [run for run in latest_speed_runs(results.rows) if run[0].model == _LARGEST and len(run) > 2][-1]
    return {row.way: row for row in run}


def _large(results: Results) -> str:
    ways = _large_speed(results)
    finish, ratio = ways["finish"], ways["finish"].speed_ratio
    assert ratio is not None and (finish.dtype, finish.threads) == ("bfloat16", 2)
    assert finish.max_new_tokens >= 64 and "+" not in (finish.commit or "+")
    took = {way: c(row.milliseconds_per_token.value, ",.0f") for way, row in ways.items()}
    stock = min(
        (way for way in ways if way.startswith("huggingface")), key=lambda w: ways[w].milliseconds_per_token.value
    )
    return (
        f"tokens that exit at {c(finish.passes_per_token, '.2f')} of {c(finish.total_loops)} loops by a stated course: `finish` "
        f"takes {took['finish']} ms a token, full depth {took['full']}, {c(ratio.value, '.2f')} times ({c(ratio.low, '.2f')} to "
        f"{c(ratio.high, '.2f')}) as long; transformers' own loop {took[stock]} ms"
    )


def _promises(results: Results) -> list[str]:
    rule = results.json("calibrate-pocket")[0]
    agreed, promised = rule["agreement"], rule["confidence"]
    # of one rule alone; what stands in the report is for all of them at once
    least, half = prompts_needed(agreed, promised)
    return [
        f"at which at least {c(100 * agreed, 'g')} % of the new tokens",
        f"with probability {c(promised)} over the choice of prompts, the mean share",
        f"is at most {c(100 - 100 * agreed, 'g')} %, for all rules at once",
        f"It takes {c(least)} prompts without a single error for one rule, or about {c(round(half, -2), ',')} at half",
        f"On the {c(rule['check']['prompts'])} prompts set apart, which had no part",
    ]


def _limit(row: WorldRow) -> float:
    return round(1 - row.confidence, 6)


def _worlds(results: Results) -> list[str]:
    """Of calibrations in simulated worlds: the promise, and the power beside the oracle's."""
    rows = {row.world: row for row in results.worlds}
    broken = {limit: [row.found.violated for row in rows.values() if _limit(row) == limit] for limit in (0.05, 0.2)}
    assert all(each.interval[0] <= limit for limit, shares in broken.items() for each in shares), "the promise is kept"
    worst = {limit: max(each.value for each in shares) for limit, shares in broken.items()}
    possible = [row for row in rows.values() if row.allowed]
    often = [sum(found >= _FOUND for found in each) for each in (
        [row.found.chose.value for row in possible],
        [row.before.chose.value for row in possible],
        [row.oracle for row in possible],
    )]  # fmt: skip
    return [
        f"in {c(results.json('calibration-worlds')['sets'], ',')} sets drawn from each of {c(len(rows))} simulated worlds",
        f"at most {p(worst[0.05])} % where {c(5)} % may be, {p(worst[0.2])} % where {c(20)} %",
        f"In {c(len(possible))} worlds something can be promised. A door was found in {c(100 * _FOUND, 'g')} % of the sets or more in {c(often[0])} of them (before in "
        f"{c(often[1])}, by an oracle that knows the best threshold beforehand in {c(often[2])}).",
        *(
            f"`{row.world}`: {p(row.found.chose.value)} % where the oracle found one in {p(row.oracle)} % (before: {p(row.before.chose.value)} %)"
            for row in possible
            if row.found.chose.value < _FOUND
        ),
    ]


def _lossless(results: Results) -> list[str]:
    report = results.json("lossless-pocket-large")
    fastest = min(report["costs"], key=lambda cost: cost["passes"]["value"])
    (alone,) = (cost for cost in report["costs"] if cost["exit_config"] == {**fastest["exit_config"], "redraft": False})
    assert fastest["exit_config"]["mode"] == "margin"
    traced = [
        p(fastest["simulated"][name] / fastest["simulated"]["full"]) for name in ("with_fallback", "with_redraft")
    ]
    return [
        f"On `{report['model']}`, {c(report['prompts'])} held-out questions, {c(report['new_tokens'])} new tokens each",
        f"takes {p(fastest['passes']['value'])} % of full depth's passes and {p(fastest['rows']['value'])} % of its rows; with "
        f"`redraft=False` {p(alone['passes']['value'])} %",
        f"counted from traces, {traced[0]} % in place of {traced[1]} % for the fastest",
    ]


def _times(results: Results) -> str:
    times = {(row["kernel"], row["size"]): row["microseconds"] / 1000 for row in results.json("kernels-cpu")["timings"]}
    boundary, logits = times["loop_boundary", "4 rows of 2048"], times["collapse", "4 rows of 49152"]
    return (
        f"takes {c(boundary, '.1f')} ms for {c(4)} rows of {c(2048, ',')} numbers, and reading {c(4)} tokens' "
        f"{c(49152, ',')} logits {c(logits, '.1f')} ms"
    )


def _doors(results: Results) -> list[str]:
    reports = results.verdicts
    doors = [reports[name].shifts[0].door for name in MODELS]
    shares = [
        [p(each.value) for each in (door.opened_of_right, door.right_of_opened, door.right) if each] for door in doors
    ]
    known = [[reports[name].separations[score].auroc for score in _SCORES] for name in MODELS]
    areas = [[c(each.value, ".3f") for each in row if each] for row in known]
    strange = [row for row in reports["pocket"].strange if row.kind == ALL]
    promise = {row.score: row for row in results.promises["pocket"].rows}
    kept, others = promise[CONFIDENCE], promise[PLAIN]
    return [
        f"On {only({reports[name].answers for name in MODELS})} held-out questions each the door of `pocket` opens for "
        f"{shares[0][0]} % of the right answers, and {shares[0][1]} % of what it lets through is right, of all answers "
        f"{shares[0][2]} %; on `pocket-large` {shares[1][0]} %, {shares[1][1]} % and {shares[1][2]} %.",
        f"ranks better than mean entropy (AUROC {areas[0][0]} against {areas[0][1]} on `pocket`, "
        f"{areas[1][0]} against {areas[1][1]} on `pocket-large`)",
        f"Of {c(sum(row.prompts for row in strange))} prompts that are not of its world",
        f"{p(sum(row.shut.value for row in strange) / len(strange))} % leave the door of `pocket` shut",
        f"In {c(results.promises['pocket'].draws)} simulated calibrations of `pocket` {p(kept.kept.value)} % of the doors kept the stated risk, and let "
        f"{p(kept.opened.value)} % of all answers through, on mean entropy alone {p(others.opened.value)} %",
    ]


def _grounding(results: Results) -> list[str]:
    facts = {row["kind"]: row for row in results.json("grounding")["detections"]}
    studied = {results.json(f"stability-{name}")["answers"] for name in MODELS}
    return [
        f"at the least sure token of {only(studied)} answers of each model",
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
        f"Of {only({found['answers'] for found in report['models'].values()})} ordinary answers none was cut",
        f"any of {c(stories)} stories of their world; of stretches of {c(256)} tokens, {kinds['prose']} of prose, "
        f"{kinds['code']} of code and {kinds['lists']} of lists",
        f"it ended {kinds['exact loops']} exact ones, {kinds['changed loops']} with a fault in each period and "
        f"{kinds['drifted loops']} that drift",
    ]


def _ladder(results: Results) -> list[str]:
    reported = next(row for row in ladder_run(results) if row.part == "report")
    (other,) = [run for run in ladder_runs(results.rows).values() if run[0].above.startswith("SmolLM2")]
    by_family = {row.family: row for row in other if row.part == "report"}
    small, verdict, warm = (by_family[name] for name in ("small only", "verdict", "verdict, warm start"))
    shares = [p(each.value) for each in (verdict.cost, verdict.seconds, small.cost, small.seconds)]
    return [
        f"{c(reported.n)} held-out questions of the micro-world's hard half, `pocket` below",
        f"on the first {c(small.n)} prompts of HumanEval, {c(small.max_new_tokens)} new tokens",
        f"hands up {c(verdict.accuracy.value * verdict.n, '.0f')} of {c(verdict.n)}, at {shares[0]} % of SmolLM2's cost "
        f"and {shares[1]} % of its time; `pocket` alone costs {shares[2]} % and {shares[3]} %.",
        f"writes its own in {c(warm.accuracy.value * warm.n, '.0f')} of {c(warm.n)}.",
        *_ups(results),
    ]


def _ups(results: Results) -> list[str]:
    """By which score tokens and answers go up."""
    signs = {name: c(sign["auroc"]["value"], ".3f") for name, sign in results.json("signs-pocket")["signs"].items()}
    report = results.json("routes-pocket")
    route = next(route for route in report["routes"] if route["share"] == 0.2)
    right, over = route["right"], route["over_entropy"]
    low, high = (c(100 * each, ".2f") for each in over["interval"])
    return [
        f"(AUROC {signs['entropy']}; all of them together, fitted, {signs['all, fitted']})",
        f"Of {c(report['questions'], ',')} questions that both models answered {p(right[CONFIDENCE])} % are right if the least "
        f"trusted {c(20)} % go up by it, by mean entropy {p(right[PLAIN])} %: {c(100 * over['value'], '.2f')} points more "
        f"({low} to {high}). The larger model alone gets {p(report['large_right'])} %.",
    ]


def _holder(results: Results) -> str:
    holder = results.json("pocket-eval")["groups"]["family"]["holder"]
    return f"`pocket` is right in {p(holder['loops'][-1])} % at full depth and in {p(holder['exit'])} % at its exits"


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
    return [_clients(results, "it wrote", "with", "client", "with")]


def _clients(results: Results, begin: str, first: str, unit: str, word: str) -> str:
    """What `finish` gains by the number of clients."""
    load = [row for row in latest_load(results.rows, "finish") if row.load == "closed" and row.way == "finish"]
    gains = {row.amount: row.speed_ratio for row in load}
    told = [c(value(gains[amount]), ".2f") for amount in (1, 16, 64)]
    return (
        f"{begin} {told[0]} times full depth's tokens {first} {c(1)} {unit}, {told[1]} times {word} {c(16)}, and {told[2]} "
        f"times {word} {c(64)}"
    )


def _areas(results: Results) -> list[str]:
    areas = results.json("proximity")["roc_area"]
    kinds = ("exact", "changed", "drifted")
    whole = ", ".join(f"{kind} {c(areas[kind], '.4f')}" for kind in kinds)
    prose = ", ".join(c(areas[f"{kind} against prose"], ".4f") for kind in kinds)
    return [
        f"{whole}, babble {c(areas['babble'], '.2f')}; against prose alone {prose} and "
        f"{c(areas['babble against prose'], '.2f')}."
    ]


def _weights(results: Results) -> list[str]:
    speed = next(iter(_large_speed(results).values()))
    told = []
    for name, unit, digits in (("pocket", 1e6, 2), ("pocket-large", 1e6, 2)):
        shape = shape_of(name)
        told.append(
            f"| `{name}` (ships inside the package) | {c(parameters(shape) / unit, f'.{digits}f')} M | "
            f"{c(shape.layers)} x {c(shape.loops)} | Apache-2.0 | {c(weight_bytes(shape, 2) / 1e6, '.1f')} MB (ships in "
            f"float32, {c(weight_bytes(shape, 4) / 1e6, '.1f')} MB) | {c(token_bytes(shape, 2) / 1024, '.0f')} KiB |"
        )
    for size in ("1.4B", "2.6B"):
        shape = shape_of(f"ouro-{size.lower()}")
        told.append(
            f"`ByteDance/Ouro-{size}-Thinking` | {c(parameters(shape) / 1e9, '.1f')} B | {c(shape.layers)} x "
            f"{c(shape.loops)} | Apache-2.0 | {c(weight_bytes(shape, 2) / 1e9, '.1f')} GB | "
            f"{c(token_bytes(shape, 2) / 1024, '.0f')} KiB |"
        )
    nanbeige = shape_of("nanbeige4.2-3b")
    told.append(
        f"`Nanbeige/Nanbeige4.2-3B` | {c(parameters(nanbeige) / 1e9, '.1f')} B | {c(nanbeige.layers)} x "
        f"{c(nanbeige.loops)} | Apache-2.0 | {c(weight_bytes(nanbeige, 2) / 1e9, '.1f')} GB, partly assumed (below) | "
        f"{c(token_bytes(nanbeige, 2) / 1024, '.0f')} KiB |"
    )
    huginn = shape_of("huginn-0125")
    told.append(
        f"`tomg-group-umd/huginn-0125` | {c(parameters(huginn) / 1e9, '.1f')} B | {c(huginn.prelude)} + "
        f"{c(huginn.layers)} x {c(huginn.loops)} + {c(huginn.coda)} | Apache-2.0 | "
        f"{c(weight_bytes(huginn, 2) / 1e9, '.1f')} GB | {c(token_bytes(huginn, 2) / 1024, '.0f')} KiB |"
    )
    told.append(
        f"{c(4096, ',')} tokens of Ouro-1.4B take {c(4096 * token_bytes(shape_of('ouro-1.4b'), 2) / 2**30, '.0f')} GiB"
    )
    used = speed.kv_bytes_in_use
    assert used is not None
    told.append(f"{c(used / 1e6, '.1f')} MB of K/V for {c(speed.context + speed.max_new_tokens - 1)} tokens")
    return told
