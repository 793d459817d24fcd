"""`python -m sigma0.bench routes`: which score should send a whole answer up to a larger model.

The least trusted share of the small model's answers is replaced by the larger model's. Scores are compared at equal
shares, which cost the same: the small model answers every question, and the larger one that share of them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from sigma0.bench.core.options import ReportFile, StorySeed
from sigma0.bench.core.output import BenchTable, measuring, tell_report, with_interval
from sigma0.calibrate.bootstrap import Estimate, bootstrap
from sigma0.calibrate.risk import Answered
from sigma0.commands.options import AsJson, Threads
from sigma0.models.load import load
from sigma0.signals.confidence import ConfidenceModel
from sigma0.signals.evidence import FEATURES
from sigma0.signals.verdict import DoorPolicy

Floats = npt.NDArray[np.float64]
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
SCORES = ("confidence", "mean entropy", "minimum margin")


@dataclass(frozen=True)
class Route:
    """Share of right answers by score where one share of them goes up, and what confidence has over mean entropy."""

    share: float
    right: dict[str, float]
    over_entropy: Estimate


@dataclass(frozen=True)
class RoutesReport:
    """What was found, as shares of the questions that both models have answered; `either_right` bounds any route."""

    small: str
    large: str
    questions: int
    small_right: float
    large_right: float
    either_right: float
    routes: tuple[Route, ...]


def doubts_of(answers: Sequence[Answered], model: ConfidenceModel) -> dict[str, Floats]:
    """Scores of doubt of each answer, `[n]`, high where it may be wrong; an unknown confidence is no trust at all."""
    known = [answer.verdict(DoorPolicy(), model).confidence for answer in answers]
    evidence = np.stack([answer.evidence for answer in answers])
    return {
        "confidence": np.array([1.0 if item is None else 1 - item for item in known]),
        "mean entropy": evidence[:, FEATURES.index("mean_entropy")],
        "minimum margin": evidence[:, FEATURES.index("most_doubt")],
    }


def routed(doubt: Floats, small: Floats, large: Floats, share: float) -> float:
    """Accuracy where the most doubted share of the small model's answers is the larger one's instead; all `[n]`."""
    up = np.argsort(-doubt, kind="stable")[: round(share * len(doubt))]
    return float((small.sum() - small[up].sum() + large[up].sum()) / len(small))


def measure_routes(
    names: tuple[str, str], doubts: dict[str, Floats], small: Floats, large: Floats, resamples: int = 400
) -> RoutesReport:
    """The figures of every share: of doubts by name, and 1 where a model is right, each `[n]`."""

    def over(drawn: npt.NDArray[np.int64], share: float) -> float:
        by = [routed(doubts[name][drawn], small[drawn], large[drawn], share) for name in SCORES[:2]]
        return by[0] - by[1]

    routes = []
    for share in SHARES:
        result = bootstrap(partial(over, share=share), len(small), resamples)
        assert result is not None
        routes.append(Route(share, {name: routed(doubts[name], small, large, share) for name in SCORES}, result))
    means = (float(small.mean()), float(large.mean()), float(np.maximum(small, large).mean()))
    return RoutesReport(*names, len(small), *means, tuple(routes))


def routes(
    small: Annotated[str, typer.Argument(help="The lower model, with a calibrated confidence.")] = "pocket",
    large: Annotated[str, typer.Argument(help="The larger one.")] = "pocket-large",
    pools: Annotated[
        Path | None, typer.Option(help="Folder of pool-MODEL.jsonl: answers, written where they are missing.")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", min=10, help="Stories of the calibration split.")] = 10000,
    seed: StorySeed = 1,
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Which score should send a whole answer up to a larger model, on many questions that both have answered."""
    with measuring(threads):
        from sigma0.bench.verdict.promise import open_pool

        result: list[dict[tuple[int, ...], Answered]] = []
        for name in (small, large):
            model, tokenizer = load(name, dtype="float32")
            file = None if pools is None else pools / f"pool-{Path(name).name}.jsonl"
            result.append({item.prompt_ids: item for item in open_pool(model, tokenizer, file, n, seed, as_json)})
        confidence = load(small, dtype="float32")[0].confidence_model
        if confidence is None:
            raise ValueError(f"{small!r} has no calibrated confidence: sigma0 calibrate --objective risk fits one")
        both = [ids for ids in result[1] if ids in result[0]]
        right = [np.array([float(answers[ids].right) for ids in both]) for answers in result]
        doubts = doubts_of([result[0][ids] for ids in both], confidence)
        report = measure_routes((Path(small).name, Path(large).name), doubts, right[0], right[1])
    if tell_report(asdict(report), out, as_json):
        alone = f"{report.small_right:.1%} right, {report.large_right:.1%} of the larger alone"
        BenchTable(HEADINGS, route_cells(report), f"{report.questions} questions: {alone}").show()


HEADINGS = ("answers that go up", *(f"right by {name}" for name in SCORES), "confidence over entropy, points, 95 %")


def route_cells(report: RoutesReport) -> list[list[str]]:
    """A line for each share."""
    return [
        [
            f"{route.share:.0%}",
            *(f"{100 * route.right[name]:.1f} %" for name in SCORES),
            with_interval(route.over_entropy, 2, unit="", sign="+"),
        ]
        for route in report.routes
    ]
