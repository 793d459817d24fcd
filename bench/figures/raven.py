"""What `pocket-raven` shows of its loops, as tables: passes against T, and the radius of the path beside the map's."""

from typing import Any

from sigma0.bench.core.output import BenchTable
from sigma0.bench.fidelity.grid import threshold
from sigma0.bench.figures.results import Results
from sigma0.config import ExitConfig

NAME = "pocket-raven"
RECURRENCES = (4, 8, 16)


def raven_page(results: Results) -> str:
    """Both tables, each behind what was measured."""
    reports = [results.json(f"lossless-{NAME}-{recurrence}") for recurrence in RECURRENCES]
    study = results.json(f"stability-{NAME}")
    asked = {(report["prompts"], report["new_tokens"]) for report in reports}
    ((prompts, new_tokens),) = asked
    return "\n\n".join(
        (
            f"Passes of `verify` over full depth's, in per cent, against T: {prompts} held-out look-ups, {new_tokens} "
            "new tokens each, past the end of the answer, with re-drafts:",
            passes_table(reports),
            f"The radius of a token's path and that of the loop map, at the least sure token of {study['answers']} "
            "answers to held-out look-ups:",
            radius_table(study),
        )
    )


def passes_table(reports: list[dict[str, Any]]) -> str:
    """Passes over full depth's of each rule, a column for each T."""
    rules: dict[str, list[str]] = {}
    for report in reports:
        for cost in report["costs"]:
            config = ExitConfig.parse(cost["exit_config"])
            if not config.redraft:
                continue
            settings = ", ".join(f"{name} = {value}" for name, value in threshold(config).items())
            low, high = cost["passes"]["interval"]
            told = f"{100 * cost['passes']['value']:.1f} ({100 * low:.1f} to {100 * high:.1f})"
            rules.setdefault(f"{config.mode}, {settings}", []).append(told)
    headings = ("rule", *(f"T = {report['total_loops']}" for report in reports))
    return BenchTable(headings, [[rule, *cells] for rule, cells in rules.items()]).markdown()


def radius_table(study: dict[str, Any]) -> str:
    """Quartiles of the two radii, and how they rank with each other."""
    correlation = study["rank_correlation"]
    low, high = correlation["interval"]
    headings = (
        "wrong answers",
        "fit speaks",
        "path's radius",
        "map's radius",
        "path's below the map's",
        "rank correlation",
    )
    quartiles = (" / ".join(f"{each:.2f}" for each in study[name]) for name in ("radius", "jacobian"))
    cells = (
        f"{100 * study['wrong']:.1f} %",
        f"{100 * study['spoke']:.1f} %",
        *quartiles,
        f"{100 * study['below']:.1f} %",
        f"{correlation['value']:.2f} ({low:.2f} to {high:.2f})",
    )
    return BenchTable(headings, [list(cells)]).markdown()
