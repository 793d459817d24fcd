"""The texts that are generated as a whole: a page of `bench/results` for every bench, tables with their conditions.

Their prose stands in `pages.txt`, a page after each line of `=== NAME`, with names in braces for what is filled in.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sigma0.bench.core.output import BenchTable
from sigma0.bench.effort import measure as effort
from sigma0.bench.effort.measure import EffortReport
from sigma0.bench.fidelity.table import CHOSEN_BEFOREHAND, whole_table
from sigma0.bench.figures import tables
from sigma0.bench.figures.results import Results
from sigma0.bench.figures.tables import SHIPPED, latest_load, load_table
from sigma0.bench.humaneval import table as humaneval
from sigma0.bench.kv import table as kv
from sigma0.bench.ladder.measure import ladder_runs, ladder_table
from sigma0.bench.ladder.signs import HEADINGS, RoutesReport, SignsReport, route_cells, sign_cells
from sigma0.bench.outer import measure as outer
from sigma0.bench.quantization import measure as quantization
from sigma0.bench.simulation import table as simulation
from sigma0.bench.speed.table import speed_parts
from sigma0.bench.strategyqa import table as strategyqa
from sigma0.bench.verdict import tables as verdict
from sigma0.bench.verdict.scores import PLAIN
from sigma0.bench.verdict.worlds import WorldRow

_OWN_RULE = (
    "No threshold was chosen on what this page measures: a model's own rule is the one that it ships with, "
    "[calibrated](calibrated.md) on prompts of the calibration split."
)


@dataclass(frozen=True)
class _Told:
    """What is told of the reports that stand behind its colon in a template."""

    tell: Callable[..., str]

    def __format__(self, names: str) -> str:
        return self.tell(*names.split())


def pages(results: Results) -> dict[str, str]:
    """The pages by their path."""
    result = {f"fidelity-{name}": whole_table(run) for name, run in tables.fidelity_runs(results).items()}
    result["simulation"] = simulation.whole(simulation.latest_simulation(results.rows))
    shared = {"made": _Told(results.made), "prompts": _Told(results.prompts_of), "own_rule": _OWN_RULE}
    values = _values(results)
    for template in Path(__file__).with_name("pages.txt").read_text().split("=== ")[1:]:
        name, _, text = template.partition("\n")
        result[name] = text.format(**shared, **values[name])
    return {f"bench/results/{name}.md": text for name, text in result.items()}


def page(title: str, parts: Sequence[str]) -> str:
    """A page of paragraphs and tables."""
    return "\n\n".join([f"# {title}", *parts]) + "\n"


def _values(results: Results) -> dict[str, dict[str, Any]]:
    """What is filled in, by page and name; `parts` are tables, some with headings and paragraphs."""
    rows, read = results.rows, results.json
    load, kernels = latest_load(rows, "finish"), read("kernels-compiled")
    proximity, lossless = read("proximity"), read("lossless-pocket-large")
    evaluations, studies = ({name: read(kind.format(name)) for name in SHIPPED} for kind in ("{}-eval", "stability-{}"))
    stored = [
        f"## {run[0].model}, {run[0].dtype}, {run[0].context or 'own'} ids\n\n{kv.whole([run]).rstrip()}"
        for run in kv.latest_kv(rows)
    ]
    areas = [(name, f"{value:.4f}") for name, value in proximity["roc_area"].items()]
    return {
        "speed": {"parts": _parts(speed_parts(rows))},
        "quantization": {"parts": _parts(map(quantization.whole, quantization.latest_quantization(rows)))},
        "kv": {"parts": _parts(stored)},
        "humaneval": {"parts": humaneval.markdown(humaneval.latest_humaneval(rows))},
        "strategyqa": {"parts": _parts(map(strategyqa.whole, strategyqa.latest_levels(rows)))},
        "answers": {
            "asked": _joined(item["n"] for item in evaluations.values()),
            "parts": tables.answers_table(evaluations),
        },
        "calibrated": _calibrated(results),
        "lossless": {
            "report": lossless,
            "beforehand": CHOSEN_BEFOREHAND,
            "parts": tables.lossless_table(lossless),
        },
        "verdict": _verdict(results),
        "stability": {
            "asked": _joined(study["answers"] for study in studies.values()),
            "parts": tables.stability_table(studies),
        },
        "ladder": _ladder(results),
        "load": {"row": load[0], "millions": load[0].parameters / 1e6, "parts": load_table(load)},
        "effort": {"parts": _parts(_effort(results))},
        "outer": {"parts": _parts(_outer(results))},
        "proximity": {
            "report": proximity,
            "readings": tables.proximity_table(proximity),
            "parts": BenchTable(("loops", "area"), areas).markdown(),
        },
        "kernels": {"parts": tables.compiled_table(kernels)},
    }


def _calibrated(results: Results) -> dict[str, str]:
    runs = {name: results.json(f"calibrate-{name}") for name in (*SHIPPED, "smol-loop")}
    rules = [rule for item in runs.values() for rule in item]
    return {
        "sure": _joined(rule["confidence"] for rule in rules),
        "chosen": _joined(rule["prompts"] for rule in rules),
        "kept": _joined(rule["check"]["prompts"] for rule in rules),
        "parts": tables.calibrated_table(runs),
    }


def _verdict(results: Results) -> dict[str, Any]:
    reports, promises = results.verdicts, results.promises
    first = next(iter(promises.values()))
    drawn = results.json("calibration-worlds")
    return {
        "asked": _joined(report.answers for report in reports.values()),
        "pools": _joined(report.pool for report in promises.values()),
        "first": first,
        "risk": 100 * first.allowed,
        "sure": 100 * first.confidence,
        "plain": PLAIN,
        "drawn": drawn,
        "door": verdict.door_table(reports),
        "separation": verdict.separation_table(reports),
        "more": verdict.more_sentence(reports),
        "feature": verdict.feature_table(reports),
        "shift": verdict.shift_table(reports),
        "sentence": verdict.kept_sentence(reports),
        "strange": verdict.strange_table(reports),
        "promise": verdict.promise_table(promises),
        "worlds": verdict.worlds_table(TypeAdapter(list[WorldRow]).validate_python(drawn["worlds"])),
        "switch": verdict.switch_table(reports),
    }


def _ladder(results: Results) -> dict[str, Any]:
    run = tables.ladder_run(results)
    english = [run for run in ladder_runs(results.rows).values() if run[0].model == "smol-loop"][-1]
    routes = results.typed(RoutesReport, "routes-pocket")
    signs = TypeAdapter(SignsReport).validate_python(
        {key: value for key, value in results.json("signs-pocket").items() if key != "hard_half_only"}
    )
    headings = ("sign of a token", "AUROC, 95 % interval", "over entropy, 95 % interval")
    return {
        "row": next(row for row in run if row.part == "report"),
        "parts": ladder_table(run),
        "english": english[0],
        "english_parts": ladder_table(english),
        "signs": signs,
        "sign_table": BenchTable(headings, sign_cells(signs)).markdown(),
        "routes": routes,
        "right": [100 * share for share in (routes.small_right, routes.large_right, routes.either_right)],
        "route_table": BenchTable(HEADINGS, route_cells(routes)).markdown(),
    }


def _effort(results: Results) -> list[str]:
    parts: list[str] = []
    for name in ("pocket", "simulation", "repeats"):
        report = results.typed(EffortReport, f"effort-{name}")
        rates = effort.unlike_default(report.settings.get("rates", {}))
        settings = ", ".join(
            f"{key} {value}" for key, value in report.settings.items() if isinstance(value, str | int | float)
            and not key.endswith("sha256") and key not in ("device", "threads", "commit", "time")
        )  # fmt: skip
        output = f"Settings: {settings}{rates and f', {rates}'}. {results.made(f'effort-{name}')}"
        parts += [f"## {effort.title(report).capitalize()}", output, effort.table(report).markdown()]
    return parts


def _outer(results: Results) -> list[str]:
    parts: list[str] = []
    for run in outer.latest_outer(results.rows):
        first = run[0]
        where = f"{first.n} questions: {first.prompts}; {first.dtype}, {first.device}, {first.threads} thread(s)."
        title = first.model if len(run) > 1 else f"{first.model}: {first.way}"
        shown = [item.markdown() for item in (outer.table(run), outer.levels_table(run)) if item.rows]
        parts += [f"## {title}", where, *shown]
    return parts


def _parts(parts: Iterable[str]) -> str:
    return "\n\n".join(parts)


def _joined(values: Iterable[float]) -> str:
    """The one value, or all of them."""
    return " or ".join(sorted({f"{value:,}" for value in values}))
