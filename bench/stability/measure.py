"""What the stability spectrum of a token's loops says: beside the loop map's own radius, and beside right and wrong."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from sigma0.bench.gate.doubt import LONGEST_ANSWER
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.pocket.world import MIX, Mix
from sigma0.bench.verdict.scores import auroc
from sigma0.calibrate.bootstrap import bootstrap
from sigma0.calibrate.prompts import Prompt
from sigma0.config import ExitConfig
from sigma0.decode.ops import FATES, STATISTICS
from sigma0.models.prompts import encode
from sigma0.signals.trajectory import jacobian_radius
from sigma0.signals.verdict import mildest

SPEAKS = 0.5
_PATIENCE = 2
FULL = ExitConfig(mode="full")


@dataclass(frozen=True)
class Answer:
    """One answer written at full depth."""

    wrong: bool  # Whether it is wrong
    path: dict[str, float]  # Statistics after the last loop of the token that is least sure, by name
    fate: str | None  # Of that token
    jacobian: float  # Radius of the loop map at that token's state before the last loop
    doubts: dict[str, float]  # Scores of the whole answer, high where it may be wrong


def read_answers(
    model: Any,
    tokenizer: Any,
    n: int,
    seed: int,
    on_answer: Callable[[int], None] = lambda done: None,
    mix: Mix = MIX,
) -> list[Answer]:
    """Asks one question about each of n held-out stories, every other one as chat."""
    result = []
    for done, prompt in enumerate(micro_world(n, "test", seed, mix=mix), start=1):
        result.append(_ask(model, tokenizer, prompt))
        on_answer(done)
    return result


def _written(model: Any, tokenizer: Any, prompt: Prompt, statistics: bool = True) -> tuple[Any, int, str]:
    """What `generate` returns of a prompt at full depth, the prompt's length, and the answer."""
    ids = encode(tokenizer, prompt.content)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST_ANSWER, do_sample=False, exit_config=FULL,
        output_statistics=statistics, return_dict_in_generate=True,
    )  # fmt: skip
    return out, ids.shape[1], tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True).strip()


def compare_break(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What the inner break changes at full depth, in plain JSON values.

    Returns:
        Without and with it the share of `right` answers, and of a token the `depth` at which it is read, and `passes`
        and `rows` in them; the share of answers that are the `same`, and of tokens that were `broken` off.
    """
    sums: list[dict[str, float]] = [dict.fromkeys(("right", "depth", "passes", "rows"), 0.0) for _ in range(2)]
    texts: list[tuple[str, str]] = []
    reasons: list[str] = []
    for prompt in prompts:
        written = []
        for switch, counted in zip("01", sums, strict=True):
            with patch.dict(os.environ, SIGMA0_INNER_BREAK=switch):
                out, _, text = _written(model, tokenizer, prompt, statistics=False)
            written.append(text)
            counted["right"] += (text == prompt.answer) / len(prompts)
            counted["depth"] += float(out.exit_depths[0].float().mean()) / len(prompts)
            counted["passes"] += out.loop_passes / out.exit_depths.shape[1] / len(prompts)
            counted["rows"] += out.loop_rows / out.exit_depths.shape[1] / len(prompts)
        reasons += out.exit_reasons[0]
        texts.append((written[0], written[1]))
    return {
        **{name: [counted[name] for counted in sums] for name in sums[0]},
        "same": sum(plain == broken for plain, broken in texts) / len(texts),
        "broken": reasons.count("divergence") / len(reasons),
    }


def _ask(model: Any, tokenizer: Any, prompt: Prompt) -> Answer:
    out, length, text = _written(model, tokenizer, prompt)
    entropy, margin = out.readings[0, :, 0], out.readings[0, :, 1]
    place = int(entropy.argmax())
    # the planes and states of the whole text, for the loop map
    cache = model.new_cache()
    with torch.no_grad():
        forward = model(out.sequences[:, :-1], past_key_values=cache, exit_config=FULL, output_loop_states=True)
    position = length - 1 + place
    states = forward.loop_states[:, 0, position]  # [T, D]
    last = model.num_loops - 1
    injected = None if forward.injected is None else forward.injected[0, position]
    path = dict(zip(STATISTICS, out.loop_statistics[0, place].nan_to_num(0.0)[last].tolist(), strict=True))
    fates = [FATES[fate] for fate in out.loop_fates[0, place].tolist()]
    spiralling = float(((out.loop_fates[0] == FATES.index("spiral")).sum(-1) > 0).float().mean())
    return Answer(
        wrong=text != prompt.answer,
        path=path,
        fate=mildest(fates, _PATIENCE),
        jacobian=jacobian_radius(model, states[last - 1], cache, last, position, tolerance=1e-3, injected=injected),
        doubts={
            "entropy": float(entropy.max()),
            "margin": 1 - float(margin.min()),
            "length of the prompt": float(length),
            "share of tokens with a spiral": spiralling,
        },
    )


def study(name: str, total_loops: int, answers: Sequence[Answer], resamples: int = 500) -> dict[str, Any]:
    """Sums up, in plain JSON values.

    Returns:
        Of the answers the share that is `wrong`, and of those whose fit `spoke` (residual up to 0.5) at the least sure
        token; quartiles of the trajectory's `radius`, where it spoke, and of the loop map's, `jacobian`; Spearman's
        `rank_correlation` of the two, and the share of tokens at which the first is `below` the second; the share of
        each fate of the least sure tokens, and of wrong answers for each; and the `auroc` of each score: how well it
        tells wrong from right answers, where 0.5 says nothing.
    """
    from scipy.stats import spearmanr

    if len(answers) < 2:
        raise ValueError(f"{len(answers)} answers: at least 2")
    wrong = np.array([answer.wrong for answer in answers], dtype=np.float64)
    radius, residual = (np.array([answer.path[key] for answer in answers]) for key in ("radius", "residual"))
    jacobian = np.array([answer.jacobian for answer in answers])
    spoke = np.flatnonzero(residual <= SPEAKS)

    def estimate(statistic: Callable[..., float | None], units: int) -> dict[str, Any] | None:
        result = bootstrap(statistic, units, resamples)
        return None if result is None else asdict(result)

    def rank(drawn: Any) -> float | None:
        picked = spoke[drawn]
        moves = len(set(radius[picked])) > 1 and len(set(jacobian[picked])) > 1
        return float(spearmanr(radius[picked], jacobian[picked]).statistic) if moves else None

    scores = {f"path: {key}": np.array([answer.path[key] for answer in answers]) for key in STATISTICS}
    scores["jacobian radius"] = jacobian
    scores |= {key: np.array([answer.doubts[key] for answer in answers]) for key in answers[0].doubts}
    fates = [answer.fate or "unknown" for answer in answers]
    return {
        "model": name,
        "total_loops": total_loops,
        "answers": len(answers),
        "wrong": float(wrong.mean()),
        "spoke": len(spoke) / len(answers),
        "radius": _quartiles(radius[spoke]),
        "jacobian": _quartiles(jacobian),
        "rank_correlation": estimate(rank, len(spoke)) if len(spoke) > 1 else None,
        "below": float((radius[spoke] < jacobian[spoke]).mean()) if len(spoke) else 0.0,
        "fates": {fate: fates.count(fate) / len(fates) for fate in sorted(set(fates))},
        "wrong_by_fate": {fate: float(wrong[[item == fate for item in fates]].mean()) for fate in sorted(set(fates))},
        "auroc": {
            key: estimate(lambda drawn, values=values: auroc(values[drawn], wrong[drawn]), len(wrong))
            for key, values in scores.items()
        },
    }


def _quartiles(values: Any) -> list[float]:
    return [float(item) for item in np.quantile(values, [0.25, 0.5, 0.75])] if len(values) else [0.0] * 3
