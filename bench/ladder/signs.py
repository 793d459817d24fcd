"""`python -m sigma0.bench signs`: which sign of a small model's token says that a larger model would write another.

Along the larger model's own text the small one reads every new token at its exit. A token is a difference where the
small one's choice is another. Each sign of doubt is scored by its AUROC for differences, with intervals over prompts,
and beside it stands a logistic regression over the logarithms of all of them, cross-fitted with whole prompts left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import typer

from sigma0.bench.core.options import HardHalf, ReportFile, Stories, StorySeed
from sigma0.bench.core.output import BenchTable, measuring, tell_report, with_interval
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.bootstrap import Estimate, bootstrap
from sigma0.calibrate.prompts import encode_prompts
from sigma0.commands.console import progress_bar
from sigma0.commands.options import AsJson, Threads
from sigma0.models.load import load

Floats = npt.NDArray[np.float64]
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
