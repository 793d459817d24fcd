"""A model with rounded weights beside the same model with its own: what it writes, and the time of a token; tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from sigma0.bench.core.conditions import Conditions, Figure, utc_now
from sigma0.bench.core.ledger import runs_of
from sigma0.bench.core.output import BenchTable, percent, with_interval
from sigma0.bench.core.rows import AnyRow, QuantizationRow
from sigma0.bench.fidelity.grid import threshold
from sigma0.bench.fidelity.table import label
from sigma0.bench.speed.decoders import Ours, PromptedCache, median_figure, turns
from sigma0.calibrate.bootstrap import clustered_share, ratio
from sigma0.calibrate.teacher_forcing import check_finite, divergence
from sigma0.config import ExitConfig
from sigma0.models.quantization import weight_bytes

Models = Mapping[str | None, Any]


# Of each prompt the new tokens, and the loops at which they were read.
Written = list[tuple[tuple[int, ...], tuple[int, ...]]]


def time_models(
    models: Models, config: ExitConfig, ids: Tensor, new_tokens: int, rounds: int, advance: Callable[[], None]
) -> dict[str | None, list[float]]:
    """Seconds of each round by model, the tokens after the first, whatever they say; the models take turns."""
    decoders = {name: Ours(PromptedCache(model, ids, new_tokens), config, None) for name, model in models.items()}
    result: dict[str | None, list[float]] = {name: [] for name in models}
    for number, name in turns(list(models), rounds):
        decoded = decoders[name].decode()
        # the first round compiles too
        if number:
            result[name].append(decoded.seconds)
        advance()
    return result


def write(model: Any, prompts: Sequence[tuple[int, ...]], config: ExitConfig, max_new_tokens: int) -> Written:
    """Continues prompts greedily."""
    if not prompts:
        return []
    # it needs the extra `bench`, which times of random weights do without
    from sigma0.bench.fidelity.runs import run_free

    runs = [run_free(model, prompt, config, max_new_tokens) for prompt in prompts]
    return [(run.ids, run.depths) for run in runs]


@torch.no_grad()
def read_exits(model: Any, prompt: tuple[int, ...], new: tuple[int, ...], config: ExitConfig) -> Tensor:
    """Log-probabilities `[new, V]` of a given continuation, each read at the loop that the model's own exit picks."""
    ids = torch.tensor([[*prompt, *new]], device=model.device)
    read = model(ids, use_cache=False, exit_config=config, logits_to_keep=len(new) + 1)
    return torch.log_softmax(check_finite(read.logits[0, :-1], model.num_loops).float(), -1)


def fidelity(
    floats: Any,
    rounded: Any,
    prompts: Sequence[tuple[int, ...]],
    texts: Written,
    config: ExitConfig,
    max_new_tokens: int,
) -> dict[str, Any]:
    """How closely a model with rounded weights follows, under one rule, the one with floats that wrote the texts."""
    same, kl, sizes = [], [], [len(new) for new, _ in texts]
    for prompt, (new, _) in zip(prompts, texts, strict=True):
        reference, result = (read_exits(model, prompt, new, config) for model in (floats, rounded))
        same.append(int((reference.argmax(-1) == result.argmax(-1)).sum()))
        kl.append(float(divergence(reference, result).sum()))
    current = write(rounded, prompts, config, max_new_tokens)
    equal = [mine == theirs for (mine, _), (theirs, _) in zip(current, texts, strict=True)]
    return {
        "agreement": Figure.of(clustered_share(same, sizes)),
        "kl": Figure.of(ratio(np.array(kl), np.array(sizes))),
        "exact_match": Figure.of(clustered_share(equal, np.ones(len(equal)))),
        "mean_depth": _mean_depth(current),
        "mean_depth_of_floats": _mean_depth(texts),
    }


def _mean_depth(written: Written) -> Figure | None:
    depths = np.array([sum(item[1:]) for _, item in written])
    return Figure.of(ratio(depths, np.array([len(item) - 1 for _, item in written])))


def measure(
    models: Models,
    conditions: Callable[[Any], Conditions],
    configs: Sequence[ExitConfig],
    ids: Tensor,
    new_tokens: int,
    rounds: int,
    prompts: Sequence[tuple[int, ...]] = (),
    advance: Callable[[], None] = lambda: None,
) -> list[QuantizationRow]:
    """One row for each exit rule and quantisation.

    All models, by the name of their quantisation (None: with floats), are timed in turn after a prompt `[1, S]`; each
    run is told to `advance`. Fidelity is on `prompts`: none for random weights, whose text means nothing.
    """
    floats = models[None]
    rows = []
    for config in configs:
        seconds = time_models(models, config, ids, new_tokens, rounds, advance)
        output = {name: conditions(model) for name, model in models.items()}
        texts = write(floats, prompts, config, output[None].max_new_tokens)
        for name, model in models.items():
            if name is None:
                continue
            followed = fidelity(floats, model, prompts, texts, config, output[name].max_new_tokens) if prompts else {}
            rows.append(
                QuantizationRow.model_validate(
                    {
                        **output[name].model_dump(),
                        "time": utc_now("seconds"),
                        "mode": config.mode,
                        "settings": threshold(config),
                        "runner": floats.runner,
                        "dtype_of_floats": str(floats.dtype).removeprefix("torch."),
                        "block_bytes": _block_bytes(model),
                        "block_bytes_of_floats": _block_bytes(floats),
                        "model_bytes": weight_bytes(model),
                        "model_bytes_of_floats": weight_bytes(floats),
                        "context": ids.shape[1],
                        "timed_tokens": new_tokens,
                        "rounds": rounds,
                        **_times(seconds[name], seconds[None], new_tokens - 1),
                        **followed,
                    }
                )
            )
    return rows


def _block_bytes(model: Any) -> int:
    """Bytes of all layers, and of the adapter where there is one."""
    parts = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList)]
    adapter = getattr(model.base_model, "adapter", None)
    return sum(weight_bytes(part) for part in [*parts, *([] if adapter is None else [adapter])])


def _times(ours: Sequence[float], floats: Sequence[float], tokens: int) -> dict[str, Any]:
    return {
        "milliseconds_per_token": 1000 * min(ours) / tokens,
        "milliseconds_per_token_of_floats": 1000 * min(floats) / tokens,
        "speed_ratio": median_figure(np.array(floats) / np.array(ours)),
    }


COLUMNS: Mapping[str, Callable[[QuantizationRow], str]] = {
    "rule": label,
    "weights": lambda row: str(row.quantization),
    "block MB": lambda row: f"{row.block_bytes / 1e6:.2f} / {row.block_bytes_of_floats / 1e6:.2f}",
    "model MB": lambda row: f"{row.model_bytes / 1e6:.2f} / {row.model_bytes_of_floats / 1e6:.2f}",
    "ms/token": lambda row: f"{row.milliseconds_per_token:.3g} / {row.milliseconds_per_token_of_floats:.3g}",
    "faster": lambda row: with_interval(row.speed_ratio, 2, 1, ""),
    "agreement": lambda row: percent(row.agreement),
    "KL": lambda row: "-" if row.kl is None else f"{row.kl.value:.4f}",
    "same text": lambda row: percent(row.exact_match),
    "depth": lambda row: (
        f"{row.mean_depth.value:.2f} / {row.mean_depth_of_floats.value:.2f}"
        if row.mean_depth and row.mean_depth_of_floats
        else "-"
    ),
}
# of a page, which has room for intervals
WIDE: Mapping[str, Callable[[QuantizationRow], str]] = {
    **COLUMNS,
    "agreement": lambda row: with_interval(row.agreement),
    "same text": lambda row: with_interval(row.exact_match),
}
LEFT = ("rule", "weights")


def conditions_text(row: QuantizationRow) -> str:
    """What the rows of a run were measured with, in a sentence or two."""
    asked = (
        "random weights, of which bytes and time alone mean something"
        if row.agreement is None
        else f"{row.n} prompts ({row.prompts}), at most {row.max_new_tokens} new tokens"
    )
    return (
        f"{row.named}, {row.parameters / 1e6:,.1f} M parameters, {row.total_loops} loops: {asked}; timed: "
        f"{row.runner}, context {row.context}, {row.timed_tokens} new tokens, {row.rounds} interleaved rounds, batch "
        f"{row.batch_size}, {row.dtype} beside floats of {row.dtype_of_floats}, {row.device}, {row.threads} thread(s), "
        f"{row.code}."
    )


def whole(rows: Sequence[QuantizationRow]) -> str:
    """A run with its conditions, as Markdown."""
    return f"{conditions_text(rows[0])}\n\n{BenchTable.of(WIDE, rows, left=LEFT).markdown()}"


def print_rows(rows: Sequence[QuantizationRow]) -> None:
    """The rows of a run in the terminal."""
    BenchTable.of(COLUMNS, rows, conditions_text(rows[0]), LEFT).show(no_wrap=COLUMNS, compact=True)
    Console().print("second figures: with floats; faster: their time over that of quantised weights")


def latest_quantization(rows: Sequence[AnyRow]) -> list[list[QuantizationRow]]:
    """The latest row of each rule and quantisation, by model, runner and dtype of the floats."""
    runs = runs_of(rows, QuantizationRow, lambda row: (row.model, row.runner, row.dtype_of_floats))
    return [
        list({(row.mode, row.quantization): row for row in sorted(run, key=lambda row: row.time)}.values())
        for _, run in sorted(runs.items())
    ]
