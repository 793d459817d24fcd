"""What the stability spectrum of a token's loops says: beside the loop map's own radius, and beside right and wrong."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sigma0.bench.gate.doubt import LONGEST_ANSWER, prompt_text
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.world import MIX, Mix, draw
from sigma0.bench.verdict.abstention import auroc
from sigma0.calibrate.bootstrap import Estimate, bootstrap
from sigma0.config import ExitConfig
from sigma0.decode.ops import FATES, STATISTICS
from sigma0.signals.trajectory import jacobian_radius
from sigma0.signals.verdict import mildest

Floats = npt.NDArray[np.float64]

SPEAKS = 0.5
_PATIENCE = 2
FULL = ExitConfig(mode="full")


@dataclass(frozen=True)
class Answer:
    """One answer written at full depth.

    Attributes:
        wrong: Whether it is wrong.
        path: Statistics behind the last loop of the token that is least sure, by name.
        fate: Of that token.
        jacobian: Radius of the loop map at that token's state before the last loop.
        doubts: Scores of the whole answer, high where it may be wrong.
    """

    wrong: bool
    path: dict[str, float]
    fate: str | None
    jacobian: float
    doubts: dict[str, float]


@dataclass(frozen=True)
class Stability:
    """The study of one model.

    Attributes:
        model: Its name.
        total_loops: T.
        answers: How many questions were asked.
        wrong: Share of wrong answers.
        spoke: Share of the answers whose fit spoke (residual up to 0.5) at the least sure token.
        radius: Quartiles of the trajectory's radius, where the fit spoke.
        jacobian: Quartiles of the loop map's.
        rank_correlation: Spearman's, of the two radii, where the fit spoke.
        below: Share of those tokens at which the trajectory's radius is under the map's.
        fates: Share of each fate of the least sure tokens.
        wrong_by_fate: Share of wrong answers for each fate.
        auroc: How well each score tells wrong from right answers: 0.5 says nothing.
    """

    model: str
    total_loops: int
    answers: int
    wrong: float
    spoke: float
    radius: tuple[float, float, float]
    jacobian: tuple[float, float, float]
    rank_correlation: Estimate | None
    below: float
    fates: dict[str, float]
    wrong_by_fate: dict[str, float]
    auroc: dict[str, Estimate | None]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def read_answers(
    model: Any,
    tokenizer: Any,
    n: int,
    seed: int,
    on_answer: Callable[[int], None] = lambda done: None,
    mix: Mix = MIX,
) -> list[Answer]:
    """Asks one question about each of n held-out stories, every other one as chat."""
    found = []
    for index in range(n):
        item = draw("test", seed, index, questions=1, mix=mix).items[0]
        found.append(_ask(model, tokenizer, item, index % 2 == 1))
        on_answer(index + 1)
    return found


def _ask(model: Any, tokenizer: Any, item: Item, chat: bool) -> Answer:
    ids = tokenizer(prompt_text(tokenizer, item, chat), add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST_ANSWER, do_sample=False, exit_config=FULL,
        output_statistics=True, return_dict_in_generate=True,
    )  # fmt: skip
    text = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True).strip()
    entropy, margin = out.readings[0, :, 0], out.readings[0, :, 1]
    place = int(entropy.argmax())
    # the planes and states of the whole text, for the loop map
    cache = model.new_cache()
    with torch.no_grad():
        forward = model(out.sequences[:, :-1], past_key_values=cache, exit_config=FULL, output_loop_states=True)
    position = ids.shape[1] - 1 + place
    states = forward.loop_states[:, 0, position]  # [T, D]
    last = model.num_loops - 1
    injected = None if forward.injected is None else forward.injected[0, position]
    path = dict(zip(STATISTICS, out.loop_statistics[0, place].nan_to_num(0.0)[last].tolist(), strict=True))
    fates = [FATES[fate] for fate in out.loop_fates[0, place].tolist()]
    spiralling = float(((out.loop_fates[0] == FATES.index("spiral")).sum(-1) > 0).float().mean())
    return Answer(
        wrong=text != item.answer,
        path=path,
        fate=mildest(fates, _PATIENCE),
        jacobian=jacobian_radius(model, states[last - 1], cache, last, position, tolerance=1e-3, injected=injected),
        doubts={
            "entropy": float(entropy.max()),
            "margin": 1 - float(margin.min()),
            "length of the prompt": float(ids.shape[1]),
            "share of tokens with a spiral": spiralling,
        },
    )


def study(name: str, total_loops: int, answers: Sequence[Answer], resamples: int = 500) -> Stability:
    """Sums up.

    Raises:
        ValueError: For fewer than two answers.
    """
    from scipy.stats import spearmanr

    if len(answers) < 2:
        raise ValueError(f"{len(answers)} answers: at least 2")
    wrong = np.array([answer.wrong for answer in answers], dtype=np.float64)
    radius, residual = (np.array([answer.path[key] for answer in answers]) for key in ("radius", "residual"))
    jacobian = np.array([answer.jacobian for answer in answers])
    spoke = np.flatnonzero(residual <= SPEAKS)

    def rank(drawn: Any) -> float | None:
        picked = spoke[drawn]
        moves = len(set(radius[picked])) > 1 and len(set(jacobian[picked])) > 1
        return float(spearmanr(radius[picked], jacobian[picked]).statistic) if moves else None

    scores = {f"path: {key}": np.array([answer.path[key] for answer in answers]) for key in STATISTICS}
    scores["jacobian radius"] = jacobian
    scores |= {key: np.array([answer.doubts[key] for answer in answers]) for key in answers[0].doubts}
    fates = [answer.fate or "unknown" for answer in answers]
    return Stability(
        model=name,
        total_loops=total_loops,
        answers=len(answers),
        wrong=float(wrong.mean()),
        spoke=len(spoke) / len(answers),
        radius=_quartiles(radius[spoke]),
        jacobian=_quartiles(jacobian),
        rank_correlation=bootstrap(rank, len(spoke), resamples) if len(spoke) > 1 else None,
        below=float((radius[spoke] < jacobian[spoke]).mean()) if len(spoke) else 0.0,
        fates={fate: fates.count(fate) / len(fates) for fate in sorted(set(fates))},
        wrong_by_fate={fate: float(wrong[[each == fate for each in fates]].mean()) for fate in sorted(set(fates))},
        auroc={key: _told_apart(values, wrong, resamples) for key, values in scores.items()},
    )


def _told_apart(values: Floats, wrong: Floats, resamples: int) -> Estimate | None:
    return bootstrap(lambda drawn: auroc(values[drawn], wrong[drawn]), len(wrong), resamples)


def _quartiles(values: Any) -> tuple[float, float, float]:
    if not len(values):
        return (0.0, 0.0, 0.0)
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return (low, middle, high)
