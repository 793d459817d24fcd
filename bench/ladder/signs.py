"""`python -m sigma0.bench signs` and `routes`: which tokens a larger model would write otherwise, which answers go up.

Along the larger model's own text the small one reads every new token at its exit. A token is a difference where the
small one's choice is another. Each sign of doubt is scored by its AUROC for differences, with intervals over prompts,
and beside it stands a logistic regression over the logarithms of all of them, cross-fitted with whole prompts left out.

Of whole answers the least trusted share of the small model's is replaced by the larger model's. Scores are compared at
equal shares, which cost the same: the small model answers every question, and the larger one that share of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer

from sigma0.bench.core.options import HardHalf, ReportFile, Stories, StorySeed
from sigma0.bench.core.output import BenchTable, measuring, tell_report, with_interval
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.bootstrap import Estimate, bootstrap
from sigma0.calibrate.prompts import encode_prompts
from sigma0.calibrate.risk import Answered
from sigma0.commands.console import progress_bar
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


SIGNS = ("entropy", "1 - margin", "1 - top-1", "depth", "all, fitted")
_FOLDS = 5


@dataclass(frozen=True)
class Sign:
    """Chance that a difference is doubted more than an agreement, and that less what entropy has."""

    auroc: Estimate
    over_entropy: Estimate


@dataclass(frozen=True)
class SignsReport:
    """What was found; `differences` is the share of the new tokens at which the small model's choice is another."""

    small: str
    large: str
    prompts: int
    tokens: int
    differences: float
    signs: dict[str, Sign]


@torch.no_grad()
def read_signs(
    small: Any, large: Any, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, on_prompt: Callable[[int], None]
) -> tuple[Floats, npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """The four signs of every token `[n, 4]`, whether it is a difference `[n]`, and its prompt `[n]`."""
    signs, differs, prompt_of = [], [], []
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        text = large.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )  # [1, P + N]
        read = small(text[:, :-1])
        logits = read.logits[0, len(prompt) - 1 :].double()  # [N, V]
        chances, depths = logits.softmax(-1), read.exit_depths[0, len(prompt) - 1 :] / small.num_loops
        best = chances.topk(2, dim=-1).values
        entropy = torch.special.entr(chances).sum(-1)
        signs.append(torch.stack([entropy, 1 - (best[:, 0] - best[:, 1]), 1 - best[:, 0], depths], dim=-1).numpy())
        differs.append((logits.argmax(-1) != text[0, len(prompt) :]).numpy())
        prompt_of.append(np.full(len(differs[-1]), number))
        on_prompt(number + 1)
    return np.concatenate(signs), np.concatenate(differs), np.concatenate(prompt_of)


def score(
    signs: Floats, differs: npt.NDArray[np.bool_], prompt_of: npt.NDArray[np.int64], resamples: int = 400
) -> dict[str, Sign]:
    """The figures of each sign and of all of them together."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import GroupKFold, cross_val_predict

    if differs.all() or not differs.any():
        raise ValueError("all tokens agree with the larger model, or none does: no sign can be scored")
    fit = cross_val_predict(
        LogisticRegression(max_iter=1000), np.log(signs + 1e-4), differs, groups=prompt_of,
        cv=GroupKFold(_FOLDS), method="predict_proba",
    )  # fmt: skip
    columns = dict(zip(SIGNS, [*signs.T, fit[:, 1]], strict=True))
    count = int(prompt_of.max()) + 1
    rows = [np.flatnonzero(prompt_of == number) for number in range(count)]

    def estimate(name: str, less: str | None) -> Estimate:
        def statistic(drawn: npt.NDArray[np.int64]) -> float | None:
            here = np.concatenate([rows[number] for number in drawn])
            if differs[here].all() or not differs[here].any():
                return None
            areas = [float(roc_auc_score(differs[here], columns[item][here])) for item in (name, less) if item]
            return areas[0] - sum(areas[1:])

        result = bootstrap(statistic, count, resamples)
        assert result is not None
        return result

    return {name: Sign(estimate(name, None), estimate(name, SIGNS[0])) for name in SIGNS}


def signs(
    small: str = typer.Argument("pocket", help="The lower model."),
    large: str = typer.Argument("pocket-large", help="The larger one, with the same tokenizer."),
    n: Stories = 700,
    hard: HardHalf = False,
    seed: StorySeed = 0,
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Which sign of a small model's token says that a larger model would write another."""
    with measuring(threads):
        below, tokenizer = load(small, dtype="float32")
        above, _ = load(large, dtype="float32")
        ids = encode_prompts(below, tokenizer, list(micro_world(n, "test", seed, hard)), 24)
        with progress_bar("prompts", n, hidden=as_json) as advance:
            read, differs, prompt_of = read_signs(below, above, ids, 24, advance)
        names = Path(small).name, Path(large).name
        report = SignsReport(*names, n, len(differs), float(differs.mean()), score(read, differs, prompt_of))
    if tell_report({"hard_half_only": hard, **asdict(report)}, out, as_json):
        title = f"{report.differences:.1%} of {report.tokens} tokens differ from {report.large}'s"
        BenchTable(("sign", "AUROC, 95 %", "over entropy, 95 %"), sign_cells(report), title).show()


def sign_cells(report: SignsReport) -> list[tuple[str, str, str]]:
    """A line for each sign."""
    shown = partial(with_interval, digits=3, times=1, unit="")
    return [
        (name, shown(sign.auroc), "-" if name == SIGNS[0] else shown(sign.over_entropy, sign="+"))
        for name, sign in report.signs.items()
    ]
