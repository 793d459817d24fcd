"""The texts that are generated as a whole: a page of `bench/results` for every bench, tables with their conditions."""

# ruff: noqa: E501  (sentences are easier to read where they are not broken up)

from collections.abc import Sequence

from pydantic import TypeAdapter

from sigma0.bench.core.output import BenchTable
from sigma0.bench.effort import table as effort
from sigma0.bench.effort.report import EffortReport
from sigma0.bench.fidelity.pages import CHOSEN_BEFOREHAND, whole_table
from sigma0.bench.figures import tables
from sigma0.bench.figures.results import Results
from sigma0.bench.figures.tables import SHIPPED
from sigma0.bench.humaneval import table as humaneval
from sigma0.bench.kv import table as kv
from sigma0.bench.ladder.routes import HEADINGS, RoutesReport, route_cells
from sigma0.bench.ladder.signs import SignsReport, sign_cells
from sigma0.bench.ladder.tables import ladder_table
from sigma0.bench.outer import table as outer
from sigma0.bench.quantization import table as quantization
from sigma0.bench.serving.table import latest_load, load_table
from sigma0.bench.simulation import table as simulation
from sigma0.bench.speed.table import speed_parts
from sigma0.bench.strategyqa import table as strategyqa
from sigma0.bench.verdict import tables as verdict
from sigma0.bench.verdict.scores import PLAIN
from sigma0.bench.verdict.worlds import WorldRow

_WAYS = (
    "`python -m sigma0.bench speed`, all ways of a run in turn. `huggingface`: transformers' own `generate`; `huggingface-static`: the same with a static cache and a "
    "compiled forward; `self-speculation`: drafts of fixed depth and length; `two-branches`: `verify` with a second proposal in plain torch, `one-branch` the same code "
    "without. [What each is](../NOTES.md#peers), and [the courses](../NOTES.md#courses) that random weights replay. vLLM on a CPU is measured beside our server: "
    "[serve/vllm](../../serve/vllm/README.md), `python -m sigma0.bench vllm`."
)

_OWN_RULE = (
    "No threshold was chosen on what this page measures: a model's own rule is the one that it ships with, "
    "[calibrated](calibrated.md) on prompts of the calibration split."
)


def pages(results: Results) -> dict[str, str]:
    """The pages by their path."""
    rows = results.rows
    titled = {
        "speed": ("Speed", [f"{_WAYS} {_OWN_RULE}", *speed_parts(rows)]),
        "quantization": ("Quantised weights", _quantization(results)),
        "kv": ("K/V in few bits", _kv(results)),
        "humaneval": ("HumanEval", [humaneval.markdown(humaneval.latest_humaneval(rows))]),
        "strategyqa": ("StrategyQA", [strategyqa.whole(run) for run in strategyqa.latest_levels(rows)]),
        "answers": ("Answers by loop", _answers(results)),
        "calibrated": ("Calibrated thresholds", _calibrated(results)),
        "lossless": ("Passes under `verify`", _lossless(results)),
        "verdict": ("Verdicts and doors", _verdict(results)),
        "stability": ("Spectrum of the loops", _stability(results)),
        "ladder": ("Handing up", _ladder(results)),
        "load": ("The server under load", _load(results)),
        "effort": ("Policies of verification effort", _effort(results)),
        "outer": ("Outer loops at equal cost", _outer(results)),
        "proximity": ("Collapse proximity", _proximity(results)),
        "kernels": ("Compiled kernels", _kernels(results)),
    }
    found = {f"fidelity-{name}": whole_table(run) for name, run in tables.fidelity_runs(results).items()}
    found["simulation"] = simulation.whole(simulation.latest_simulation(rows))
    found |= {name: page(title, parts) for name, (title, parts) in titled.items()}
    return {f"bench/results/{name}.md": text for name, text in found.items()}


def _quantization(results: Results) -> list[str]:
    return [
        "`python -m sigma0.bench quantization MODEL`: the block's weights rounded, beside the same model with floats. Where two figures stand, the "
        'second is that of floats. Times are the fastest of interleaved rounds, taken beside other work; "faster" is the median of the rounds\' ratios. '
        + _OWN_RULE,
        *(quantization.whole(run) for run in quantization.latest_quantization(results.rows)),
    ]


def page(title: str, parts: Sequence[str]) -> str:
    """A page of paragraphs and tables."""
    return "\n\n".join([f"# {title}", *parts]) + "\n"


def _answers(results: Results) -> list[str]:
    evaluations = {name: results.json(f"{name}-eval") for name in SHIPPED}
    asked = _joined({f"{each['n']:,}" for each in evaluations.values()})
    return [
        f"Whole answers right, by the loop that they are read at: one question about each of {asked} held-out stories "
        "(`python -m sigma0.bench.pocket eval MODEL`). In the hard half an answer takes up to seven sentences. A guess is "
        "right for at most a quarter of the open questions, and for half of those answered by yes or no (a quarter of all). "
        "Every kind of question stands in [weights.md](../../weights.md). `pocket-raven` is asked look-ups, all that it was "
        "taught: places, holders and families.",
        results.made(*(f"{name}-eval" for name in SHIPPED)),
        tables.answers_table(evaluations),
    ]


def _calibrated(results: Results) -> list[str]:
    runs = {name: results.json(f"calibrate-{name}") for name in SHIPPED}
    rules = [rule for each in runs.values() for rule in each]
    sure = _joined({f"{rule['confidence']:g}" for rule in rules})
    chosen = _joined({f"{rule['prompts']:,}" for rule in rules})
    kept = _joined({f"{rule['check']['prompts']:,}" for rule in rules})
    return [
        "The most eager threshold of each rule at which the promised share of the new tokens is full depth's choice, with "
        f"probability {sure}; chosen on {chosen} prompts, and measured here on {kept} set apart, which had no part in the choice "
        "(`sigma0 calibrate MODEL --exit all`). These thresholds ship with the models. Prompts: "
        + "; ".join(f"{name}, `{results.prompts_of(f'calibrate-{name}')}`" for name in SHIPPED)
        + " (the calibration split; pages of held-out questions are of the test split).",
        results.made(*(f"calibrate-{name}" for name in SHIPPED)),
        tables.calibrated_table(runs),
    ]


def _lossless(results: Results) -> list[str]:
    report = results.json("lossless-pocket-large")
    return [
        f'Passes over full depth\'s under `after_exit="verify"`: {report["model"]}, {report["total_loops"]} loops, '
        f"{report['prompts']} held-out questions, {report['new_tokens']} new tokens each (past the end of the answer), "
        f"{report['dtype']}, checks of the tail included (`python -m sigma0.bench lossless`). `rows` and the columns before "
        f"it are with re-drafts; rows above 100 % are those of rejected followers. {CHOSEN_BEFOREHAND}",
        results.made("lossless-pocket-large"),
        tables.lossless_table(report),
    ]


def _verdict(results: Results) -> list[str]:
    reports, promises = results.verdicts, results.promises
    asked = _joined({f"{report.answers:,}" for report in reports.values()})
    first = next(iter(promises.values()))
    pools = _joined({f"{report.pool:,}" for report in promises.values()})
    fit, test = (f"{part:,}" for part in first.parts)
    drawn = results.json("calibration-worlds")
    worlds = TypeAdapter(list[WorldRow]).validate_python(drawn["worlds"])
    return [
        f"One question about each of {asked} held-out stories (`python -m sigma0.bench verdict MODEL`), under the exit rule, the confidence and the door that "
        "the model ships with: what the door `converge` lets through, by the confidence, and on the same answers by the rule `certificate`, which was not calibrated. Intervals are 95 % intervals. "
        f"{results.made(*(f'verdict-{name}' for name in reports))} The doors were chosen on the questions of "
        + "; ".join(f"`{results.prompts_of(f'doors-{name}')}` ({name})" for name in reports)
        + ", the calibration split.",
        verdict.door_table(reports),
        "## Wrong answers told from right ones",
        f"Scores of doubt on the same answers; `{PLAIN}` is exp(-mean entropy), the best score that needs no fit. Intervals by the bootstrap over answers.",
        verdict.separation_table(reports),
        verdict.more_sentence(reports),
        "## What each feature adds",
        "Every feature that the confidence reads, and the three best of those that it does not: AUROC of the feature alone, and what the confidence's own loses "
        "where the feature is shuffled among the held-out answers (mean and middle 95 % of 20 shuffles). The pictures have all features, beside the log loss that "
        "each saved in the fit.",
        verdict.feature_table(reports),
        *(f"![What each feature adds, {name}](verdict-features-{name}.svg)" for name in reports),
        "## Under shifts",
        "The door by the confidence where the questions, or the decoding, are not those that it was calibrated on. `risk kept`: whether the interval of what is "
        "right of the answers let through lies over what was stated (`yes`), under it (`no`), or around it (`open`). A promise holds for questions like those of the calibration alone.",
        verdict.shift_table(reports),
        verdict.kept_sentence(reports),
        "## Strange prompts",
        "Prompts that are not of the models' world, each as a plain text and as a chat ([strange.jsonl](../verdict/strange.jsonl)): general knowledge, code, stories of "
        "the world with other names, things and places, and held-out stories with their words shuffled. A door that stays shut is what is wanted. Out of calibration is what the verdict gives as its reason (an answer that runs in circles has that instead); the last column is what the confidence would shut out by itself.",
        verdict.strange_table(reports),
        "## How often the promise is kept",
        f"{first.draws} calibrations of {fit} prompts for the fit and {test} for the test, drawn from {pools} answers to other stories (`python -m sigma0.bench promise "
        f"MODEL`); the rest of the answers says the true risk of each door. Stated are a risk of at most {100 * first.allowed:g} % and a confidence of "
        f"{100 * first.confidence:g} %. Intervals of what is let through are the middle 95 % of the calibrations.",
        results.made(*(f"promise-{name}" for name in promises)),
        verdict.promise_table(promises),
        "## Where the true risk is known",
        f"{drawn['sets']:,} sets of judged answers drawn from each of some simulated worlds (`python -m sigma0.bench worlds`), with thresholds ranked and tested by the "
        "library's own functions. `limit` is one less the stated confidence: no more sets may be violated, that is pass a threshold whose true risk is above the one allowed. `oracle`: the chance that the one "
        "threshold most likely to pass, known beforehand, passes the same test. `several starts`: the level shared between three, and passed on down each sequence. `before`: begun at the least p-value of a fit as large as the test. `may be`: the most that a door may let through.",
        verdict.worlds_table(worlds),
        "## What the switches change",
        verdict.switch_table(reports),
    ]


def _stability(results: Results) -> list[str]:
    studies = {name: results.json(f"stability-{name}") for name in SHIPPED}
    asked = _joined({str(study["answers"]) for study in studies.values()})
    return [
        f"The radius along a token's path beside that of the loop map itself, at the least sure token of {asked} answers of "
        "each model (`python -m sigma0.bench stability`), and the area under the ROC curve of each score for a wrong answer. "
        "`pocket-raven` answers look-ups.",
        results.made(*(f"stability-{name}" for name in SHIPPED)),
        tables.stability_table(studies),
    ]


def _ladder(results: Results) -> list[str]:
    run = tables.ladder_run(results)
    reported = next(row for row in run if row.part == "report")
    return [
        f"{reported.named} below {reported.above}: {reported.n} held-out questions ({reported.prompts}), batch "
        f"{reported.batch_size}, greedy, {reported.dtype}, {reported.device}, {reported.threads} thread(s) "
        "(`python -m sigma0.bench ladder`). Cost is passes times bytes of the block over both models, prompts and catch-ups "
        "included, time is wall-clock, both as shares of the larger model alone. Of each curve the cheapest setting that "
        "keeps 95 % of the larger model's accuracy, or else its most accurate one.",
        ladder_table(run),
        *_signs(results),
        *_routes(results),
    ]


def _routes(results: Results) -> list[str]:
    report = results.typed(RoutesReport, "routes-pocket")
    return [
        f"Which score should send a whole answer of {report.small} up to {report.large}: {report.questions:,} questions that both "
        f"answered (`python -m sigma0.bench routes`), of which {100 * report.small_right:.1f} % and {100 * report.large_right:.1f} % "
        f"are right, and {100 * report.either_right:.1f} % of one or the other. The least trusted share goes up, so lines cost the "
        f"same for every score. {results.made('routes-pocket')}",
        BenchTable(HEADINGS, route_cells(report)).markdown(),
    ]


def _signs(results: Results) -> list[str]:
    report = TypeAdapter(SignsReport).validate_python(
        {key: value for key, value in results.json("signs-pocket").items() if key != "hard_half_only"}
    )
    headings = ("sign of a token", "AUROC, 95 % interval", "over entropy, 95 % interval")
    return [
        f"Which sign of a token of {report.small} says that {report.large} would write another: {report.tokens:,} tokens of "
        f"{report.prompts} held-out answers, of which {report.differences:.1%} differ (`python -m sigma0.bench signs`). The last "
        "line is a logistic regression over the logarithms of the others, cross-fitted with whole answers left out. "
        + results.made("signs-pocket"),
        BenchTable(headings, sign_cells(report)).markdown(),
    ]


def _load(results: Results) -> list[str]:
    rows = latest_load(results.rows, "finish")
    first = rows[0]
    return [
        f"{first.named} ({first.parameters / 1e6:.1f} M parameters, {first.total_loops} loops), {first.max_new_tokens} new "
        f"tokens to every answer, {first.dtype}, {first.device}, server and clients on two CPU cores, {first.rounds} "
        "interleaved rounds, medians; latencies are the median and the 99th percentile (`python -m sigma0.bench serve`). "
        f"Clients keep one request each under way, or requests come at random. {_OWN_RULE}",
        load_table(rows),
    ]


def _kv(results: Results) -> list[str]:
    parts: list[str] = []
    for run in kv.latest_kv(results.rows):
        parts += [f"## {run[0].model}, {run[0].dtype}, {run[0].context or 'own'} ids", kv.whole([run]).rstrip()]
    return [
        "`python -m sigma0.bench kv`: the model's own greedy text at full depth, read again with K/V in few bits. `own`: prompts of their own length; `in few bits`: of what new tokens are read over; agreement "
        "and KL at full depth; `depths moved`: tokens that the model's own exit rule reads at another loop; `faster`: time as computed over that in few bits. "
        + _OWN_RULE,
        "![Disagreement and KL over bits](kv.svg)",
        *parts,
    ]


def _effort(results: Results) -> list[str]:
    parts: list[str] = []
    for name in ("pocket", "simulation"):
        report = results.typed(EffortReport, f"effort-{name}")
        settings = ", ".join(
            f"{key} {value}" for key, value in report.settings.items() if isinstance(value, str | int | float)
            and not key.endswith("sha256") and key not in ("device", "threads", "commit", "time")
        )  # fmt: skip
        told = f"Settings: {settings}. {results.made(f'effort-{name}')}"
        parts += [f"## {effort.title(report).capitalize()}", told, effort.table(report).markdown()]
    return [
        "With 95 % intervals, what is measured and what is simulated apart (`python -m sigma0.bench effort`).",
        *parts,
    ]


def _outer(results: Results) -> list[str]:
    parts: list[str] = []
    for run in outer.latest_outer(results.rows):
        first = run[0]
        where = f"{first.n} questions: {first.prompts}; {first.dtype}, {first.device}, {first.threads} thread(s)."
        title = first.model if len(run) > 1 else f"{first.model}: {first.way}"
        shown = [each.markdown() for each in (outer.table(run), outer.levels_table(run)) if each.rows]
        parts += [f"## {title}", where, *shown]
    return [
        "With 95 % intervals; `beats` has the points that a way has right more than another, on the same questions. What the ways and the cost are: "
        "[bench/outer](../outer/README.md).",
        *parts,
    ]


def _proximity(results: Results) -> list[str]:
    report = results.json("proximity")
    areas = [(name, f"{value:.4f}") for name, value in report["roc_area"].items()]
    return [
        "Readings of texts and loops that nothing was fitted on (`python -m sigma0.bench proximity`), cut and read by "
        f"{report['model']}. {results.made('proximity')}",
        tables.proximity_table(report),
        "Area under the ROC curve, loops against texts:",
        BenchTable(("loops", "area"), areas).markdown(),
    ]


def _kernels(results: Results) -> list[str]:
    return [
        "Every configuration compiled ahead of time for sm_80 and sm_90 (`python -m sigma0.kernels`); nothing was run.",
        results.made("kernels-compiled"),
        tables.compiled_table(results.json("kernels-compiled")),
    ]


def _joined(values: set[str]) -> str:
    """The one value, or all of them."""
    return " or ".join(sorted(values))
