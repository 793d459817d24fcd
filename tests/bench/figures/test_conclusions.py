"""What the texts conclude is in the rows, and the pages of results show them."""

import json
import re
from pathlib import Path

from pydantic import TypeAdapter

from sigma0.bench.core.ledger import FidelityRow, StrategyQARow, read_rows
from sigma0.bench.core.provenance import read_report
from sigma0.bench.effort.report import EffortReport
from sigma0.bench.effort.simulation import Rates
from sigma0.bench.effort.table import table as effort_table
from sigma0.bench.fidelity.pages import latest_runs, whole_table
from sigma0.bench.figures.results import VERDICTS, Results
from sigma0.bench.figures.tables import MODELS, SHIPPED, ladder_run
from sigma0.bench.ladder.tables import ladder_runs
from sigma0.bench.serving.table import latest_load, load_table, never_rows, never_sentence
from sigma0.bench.speed.table import latest_speed_runs, speed_table
from sigma0.bench.strategyqa.registry import ONCE
from sigma0.bench.strategyqa.table import whole as levels_table
from sigma0.bench.verdict.measure import VerdictReport
from sigma0.bench.verdict.tables import door_table, separation_table, shift_table, strange_table, switch_table
from sigma0.reason.trail import Call, Decision, Heading, Outcome, read_lines

ROOT = Path(__file__).parents[3]


def read(name):
    return (ROOT / name).read_text()


def report_of(name):
    return read_report(ROOT / "bench" / "results" / f"{name}.json")[1]


def test_the_speed_tables_are_those_of_the_ledger():
    runs = latest_speed_runs(read_rows(ROOT / "bench" / "results" / "leaderboard.jsonl"))
    page = (ROOT / "bench" / "results" / "speed.md").read_text()
    sides = [[run for run in runs if run[0].device.startswith("cuda") == on_gpu] for on_gpu in (True, False)]
    assert page.startswith("# Speed\n\n") and page.index("## On a GPU") < page.index("## On a CPU")
    for side, part in zip(sides, page.split("\n## On a ")[1:], strict=True):
        tables, _, roofline = part.partition("\n### Roofline\n")
        assert tables.endswith("\n".join(f"{speed_table(run)}\n" for run in side))
        assert bool(roofline) == any(row.copy_bandwidth is not None for run in side for row in run)
    large = [run for run in runs if run[0].model == "random ouro-2.6b"][-1][0]
    tokens = large.context + large.max_new_tokens - 1
    assert large.kv_bytes_in_use == tokens * 48 * 4 * 2 * 16 * 128 * 2
    assert f"{large.kv_bytes_in_use / 1e6:.1f} MB of K/V for {tokens} tokens" in (ROOT / "weights.md").read_text()


def test_what_verify_costs_is_quoted_right():
    report = report_of("lossless-pocket-large")
    page = read("bench/results/lossless.md")
    section = read("sigma0/decode/README.md").split("## verify")[1].split("\n## ")[0]
    assert f"`{report['model']}`, {report['prompts']} held-out questions, {report['new_tokens']} new tokens" in section
    costs = {}
    for cost in report["costs"]:
        config = cost["exit_config"]
        name, value = ("q", config["q"]) if config["mode"] == "qexit" else ("theta", config["theta"])
        costs.setdefault(f"| {config['mode']} ({name} {value:g}) |", {})[config["redraft"]] = cost
    for label, drafts in costs.items():
        many = drafts[True]
        quoted = [
            drafts[False]["passes"]["value"],
            many["passes"]["value"],
            many["passes"]["interval"],
            many["passes_without_tail"]["value"],
            many["rows"]["value"],
            min(drafts[False]["identical"], many["identical"]),
        ]
        low, high = quoted[2]
        quoted[2] = f"{100 * low:.1f} % to {100 * high:.1f} %"
        cells = [each if isinstance(each, str) else f"{100 * each:.1f} %" for each in quoted]
        assert f"{label} {' | '.join(cells)} |" in page
    fastest = min(report["costs"], key=lambda cost: cost["passes"]["value"])["simulated"]
    two = [f"{100 * fastest[name] / fastest['full']:.1f} %" for name in ("with_fallback", "with_redraft")]
    assert f"{two[0]} in place of {two[1]}" in " ".join(section.split())


def test_what_the_verdict_tells_is_quoted_right():
    """Switches, doors and scores of doubt, the study of stability, and the grounding of facts."""
    ROOT / "bench" / "results"
    page, studies = read("bench/results/verdict.md"), read("bench/results/stability.md")
    reports = {name: TypeAdapter(VerdictReport).validate_python(report_of(f"verdict-{name}")) for name in VERDICTS}
    for table in (switch_table, door_table, separation_table, shift_table, strange_table):
        assert table(reports) in page
    words = " ".join(read("sigma0/signals/README.md").split())
    for name in MODELS:
        study = report_of(f"stability-{name}")
        scores = {score: f"{found['value']:.2f}" for score, found in study["auroc"].items()}
        told = [scores[score] for score in ("path: radius", "jacobian radius", "entropy", "margin")]
        correlation = f"{study['rank_correlation']['value']:.2f}"
        assert f"| {name} | {correlation} | {' | '.join(told)} |" in studies
        doors = report_of(f"doors-{name}")
        stored = json.loads((ROOT / "sigma0" / "checkpoints" / name / "generation_config.json").read_text())
        assert stored["door_policy"] == doors["chosen"] and stored["fate_config"] == doors["fates"]
    facts = {each["kind"]: each for each in report_of("grounding")["detections"]}
    for kind in ("number", "entity"):
        found = facts[kind]
        assert f"{100 * found['recall']:.1f} % of {found['falsified']:,}" in words
    assert f"at a precision of {100 * facts['both']['precision']:.2f} %" in words


def test_what_is_concluded_of_ladders_is_in_the_rows():
    """Of the run under the shipped rule, on the questions that no setting was chosen on."""
    rows = [row for row in ladder_run(Results(ROOT)) if row.part == "report"]
    (large,) = (row for row in rows if row.family == "large only")
    kept = [row for row in rows if row.accuracy.value >= 0.95 * large.accuracy.value]
    assert 0.6 < min(row.cost.value for row in kept if row.family == "entropy") < 0.68, "two thirds"
    assert min(row.cost.value for row in kept if row.family == "whole questions by lot") > 0.85, "nine tenths"
    assert all(row.cost.value > 1 for row in rows if row.family == "random" and row.policy["rate"] >= 0.3)
    warm = [row for row in rows if row.warm_start]
    assert max(row.accuracy.value for row in warm) < large.accuracy.value - 0.1


def test_what_is_said_of_another_tokenizer_is_in_the_ledger():
    rows = read_rows(ROOT / "bench" / "results" / "leaderboard.jsonl")
    (run,) = [run for run in ladder_runs(rows).values() if run[0].above.startswith("SmolLM2")]
    by_family = {row.family: row for row in run}
    small, verdict, warm = (by_family[name] for name in ("small only", "verdict", "verdict, warm start"))
    words = " ".join(read("sigma0/ladder/README.md").split())
    assert f"on the first {small.n} prompts of HumanEval, {small.max_new_tokens} new tokens" in words
    shares = [f"{100 * each.value:.1f} %" for each in (verdict.cost, verdict.seconds, small.cost, small.seconds)]
    assert (
        f"hands up {verdict.accuracy.value * verdict.n:.0f} of {verdict.n}, at {shares[0]} of SmolLM2's cost" in words
    )
    assert f"and {shares[1]} of its time; `pocket` alone costs {shares[2]} and {shares[3]}." in words
    assert f"writes its own in {warm.accuracy.value * warm.n:.0f} of {warm.n}." in words


def test_what_policies_of_effort_do_is_quoted_right():
    """The measured table here, the simulated one in the bench's own page, and neither in the other's place."""
    reports = {
        name: TypeAdapter(EffortReport).validate_python(report_of(f"effort-{name}"))
        for name in ("pocket", "simulation")
    }
    assert {name: report.kind for name, report in reports.items()} == {
        "pocket": "measurement",
        "simulation": "simulation",
    }
    section = read("sigma0/reason/README.md").split("## Measured")[1]
    page = read("bench/results/effort.md")
    measured, simulated = reports["pocket"], reports["simulation"]
    tables = page.split("## Simulated")
    assert effort_table(measured).markdown() in tables[0] and effort_table(simulated).markdown() in tables[1]
    assert effort_table(simulated).markdown() not in tables[0]
    assert f"in {100 * measured.first_right.value:.1f} %" in " ".join(section.split())
    by_policy = {each.policy: each for each in measured.policies}
    flat, rising = by_policy.pop("flat high"), by_policy.values()
    assert all(each.accepted_wrong.value == 0 for each in (flat, *rising))
    assert all(each.accepted_right.value <= flat.accepted_right.value for each in rising)
    ratios = {each.policy: each.cost.value / flat.cost.value for each in rising}
    assert 0.78 < ratios.pop("success_based") < 0.85, "a fifth less"
    assert all(0.9 < ratio < 1.15 for ratio in ratios.values()), "about as much in all"
    for each in rising:
        assert each.cost.value / each.verifications.value < flat.cost.value / flat.verifications.value
        assert each.accepted_right.value < each.right.value
    rates = TypeAdapter(Rates).validate_python(simulated.settings["rates"])
    assert rates == Rates(), "the page tells the default odds"
    by_policy = {each.policy: each for each in simulated.policies}
    flat, rising = by_policy.pop("flat high"), by_policy.values()
    assert all(each.accepted_wrong.value <= flat.accepted_wrong.value / 5 for each in rising)
    asked = [each.verifications.value / flat.verifications.value for each in rising]
    costs = [each.cost.value / flat.cost.value for each in rising]
    assert (round(min(asked), 1), round(max(asked), 1)) == (1.6, 2.1)
    assert (round(min(costs), 2), round(max(costs), 2)) == (1.04, 1.27)


def test_the_load_table_is_that_of_the_ledger():
    rows = read_rows(ROOT / "bench" / "results" / "leaderboard.jsonl")
    run, never = latest_load(rows, "finish"), never_rows(rows)
    section = read("serve/README.md").split("## Under load")[1].split("\n## ")[0]
    assert load_table(run) in read("bench/results/load.md") and f"{run[0].rounds} interleaved rounds" in section
    assert {row.max_new_tokens for row in run} == {48} and sum(row.failed for row in run) == 0
    assert never_sentence(never) in " ".join(section.split())
    assert [row.amount for row in never] == [1, 4, 16] and all(row.speed_ratio.value > 0.97 for row in never)
    at_1, at_16 = (
        {row.way: row.speed_ratio.value for row in run if row.load == "closed" and row.amount == clients}
        for clients in (1, 16)
    )
    assert at_1["finish"] > 1.5 and at_1["finish"] > at_16["finish"] and at_16["drop"] > 1.1


def test_what_levels_of_control_did_is_quoted_right():
    found = [
        row for row in read_rows(ROOT / "bench" / "results" / "leaderboard.jsonl") if isinstance(row, StrategyQARow)
    ]
    rows, distilled = ([row for row in found if (row.against == "L0") == is_run] for is_run in (True, False))
    runs = {n: {row.level: row for row in rows if row.n == n} for n in (100, 229)}
    assert tuple(runs[100]) == ONCE and set(ONCE) - set(runs[229]) == {"L3", "L3-simple"}
    direct = runs[229]["L0"].accuracy
    figure = f"{100 * direct.value:.1f} % ({100 * direct.low:.1f} to {100 * direct.high:.1f})"
    section = read("bench/README.md").split("## In other people's harnesses")[1]
    assert f"is right on {figure} asked directly" in " ".join(section.split())
    for row in rows:
        assert (row.model, row.max_new_tokens, row.dtype) == ("SmolLM2-135M-Instruct", 64, "float32")
        assert row.level == "L0" or row.difference <= 0 or row.p_holm > 0.9, "a level is better than L0"
    whole = (ROOT / "bench" / "results" / "strategyqa.md").read_text()
    assert all(levels_table(list(run.values())) in whole for run in runs.values())
    page = " ".join(read("bench/strategyqa/README.md").split())
    before, after = (f"{100 * row.accuracy.value:.1f} % ({100 * row.accuracy.low:.1f} to" for row in distilled)
    assert after in page.split("Measured with SmolLM2 (`--from")[1] and before in page
    assert f"{sum(distilled[1].misses.values())} and {sum(distilled[0].misses.values())} of 229 are misses" in page


def test_the_fidelity_pages_are_those_of_the_ledger():
    rows = read_rows(ROOT / "bench" / "results" / "leaderboard.jsonl")
    runs = latest_runs(rows)
    assert set(runs) == set(SHIPPED)
    for name, run in runs.items():
        table = whole_table([row for row in run if isinstance(row, FidelityRow)])
        assert (ROOT / "bench" / "results" / f"fidelity-{name}.md").read_text() == table


def test_the_committed_trails_say_what_the_text_says_of_them():
    trails = {
        name: read_lines(ROOT / "bench" / "results" / f"solve-{name}.jsonl")
        for name in ("progressive", "lemma", "agent")
    }
    for name, lines in trails.items():
        assert isinstance(lines[0], Heading) and isinstance(lines[-1], Outcome)
        assert (lines[0].strategy, lines[0].models) == (name, ("SmolLM2-135M-Instruct",))
    # 3 pens of 4 sheep, 5 of them sold
    accepted = trails["progressive"][-1]
    assert accepted.solved and not re.search(r"\b7\b", accepted.answer)
    efforts = {line.effort for line in trails["progressive"] if isinstance(line, Call) and "label" in line.purpose}
    assert efforts == {"low", "medium", "high"}
    decided = {name: {line.what for line in lines if isinstance(line, Decision)} for name, lines in trails.items()}
    assert not trails["lemma"][-1].solved and {"plan refused", "fallback", "gave up"} <= decided["lemma"]
    assert not trails["agent"][-1].solved and {"refused", "unsolved"} <= decided["agent"]
    assert not decided["agent"] & {"list", "read", "edit", "run_tests", "start_over", "finish"}
