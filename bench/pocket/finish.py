"""From a trained backbone to a model folder: the exit gate, fitted on the frozen backbone, its threshold, the files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast

from sigma0.bench.pocket.data import collate, fit, whole_answers
from sigma0.bench.pocket.forms import form_scene
from sigma0.bench.pocket.recipe import Recipe
from sigma0.bench.pocket.tokenizer import PAD
from sigma0.bench.pocket.world import draw
from sigma0.config import ExitConfig
from sigma0.decode.exits import ExitRule, select_exits
from sigma0.models.looped_causal import LoopedForCausalLM
from sigma0.models.ouro import OuroForCausalLM

# Thresholds tried, from eager to patient.
THRESHOLDS = (
    *(0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.985),
    *(0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999, 0.99995, 0.99999, 1.0),
)
MIN_FIDELITY = 0.99
MIN_AGREEMENT = 0.985
# Far behind the scenes the backbone was trained on.
FIT = range(10_000_000, 10_001_500)
CALIBRATION = range(1000)
_RIDGE = 1e-5
# Leaving before the argmax has settled costs an answer, staying costs a loop.
_EARLY_COST = 30.0
_ROWS = 50
_PROMPT_STRIDE = 5

# q; of the answer tokens the mean exit depth, and the share of answers equal to full depth's, token for token; of all
# tokens, those of prompts included, the share whose argmax is full depth's; and whether it was chosen
Tried = list[tuple[float, float, float, float, bool]]


@dataclass(frozen=True)
class Readouts:
    """What the tokens of some scenes look like at every loop."""

    states: torch.Tensor  # Normed states from which the token is read, float32 [T, N, D]
    right: torch.Tensor  # Where the argmax at loop t is the token of the answer, bool [T, N]
    same: torch.Tensor  # Where the argmax at loop t is that of loop T, bool [T, N]
    # The answer, counted from 0, that each token belongs to, or -1 for a token of a prompt, int64 [N]
    answer: torch.Tensor


def finish(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    folder: Path,
    fit_scenes: Iterable[int] = FIT,
    calibration_scenes: Iterable[int] = CALIBRATION,
) -> Tried:
    """Fit the gate on unseen train stories, choose q on calibration stories and write the model folder.

    A model without a gate runs at full depth until it is calibrated (`sigma0 calibrate FOLDER --exit all`).

    Returns:
        The thresholds that were measured; none where there is no gate.
    """
    model.eval().requires_grad_(False)
    tried: Tried = []
    exit_config: dict[str, object] = {"mode": "full"}
    if isinstance(model, OuroForCausalLM):
        fit_gate(model, collect(model, tokenizer, recipe, "train", fit_scenes))
        tried = choose_threshold(model, collect(model, tokenizer, recipe, "calibration", calibration_scenes))
        exit_config = {"mode": "qexit", "q": next(q for q, *_, chosen in tried if chosen)}
    generation = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        exit_config=exit_config,
    )
    # While this flag is set, transformers drops what it does not know when the file is read.
    generation._from_model_config = False
    model.generation_config = generation
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tried


@torch.no_grad()
def collect(
    model: OuroForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, split: str, scenes: Iterable[int]
) -> Readouts:
    """Run scenes of a split as the recipe's last lesson has them, every other one as chat.

    All tokens of answers are kept, and every `_PROMPT_STRIDE`th token of the prompts.
    """
    rows = []
    for number in scenes:
        scene = draw(split, recipe.seed, number)
        scene = form_scene(scene, f"{split}/{recipe.seed}/{number}", recipe.lessons[-1].forms)
        rows.append(fit(tokenizer, scene, number % 2 == 1, recipe.length))
    parts = []
    answers = 0
    for start in range(0, len(rows), _ROWS):
        batch = collate(rows[start : start + _ROWS], tokenizer.convert_tokens_to_ids(PAD))
        states = model.model(input_ids=batch.ids, use_cache=False).loop_states[:, :, :-1]  # [T, B, S - 1, D]
        marks, kept = batch.answer[:, 1:], batch.real[:, 1:].clone()
        kept[:, torch.arange(kept.shape[1]) % _PROMPT_STRIDE != 0] = False
        kept |= marks
        numbers = torch.full_like(batch.ids[:, 1:], -1)
        numbers[marks] = batch.answer_numbers() + answers
        answers = 1 + int(numbers.max())
        tokens = model.lm_head(states[:, kept]).argmax(-1)  # [T, N]
        parts.append((states[:, kept], tokens == batch.ids[:, 1:][kept], tokens == tokens[-1], numbers[kept]))
    return Readouts(*(torch.cat(each, -1 if each[0].dim() < 3 else 1) for each in zip(*parts, strict=True)))


def fit_gate(model: OuroForCausalLM, readouts: Readouts) -> float:
    """Fit the gate alone, by logistic regression, and write it into the model.

    Below the last loop the target is "the argmax is that of loop T from here on", so the gate learns when more loops
    change nothing; agreeing by chance does not count. At loop T, where that always holds, it is "the token is right".
    Where the target is no, the loss weighs `_EARLY_COST` times as much.

    Returns:
        The weighted mean of the binary cross-entropy after the fit, nats.
    """
    settled = readouts.same.int().flip(0).cumprod(0).flip(0).bool()  # [T, N]
    goal = torch.cat([settled[:-1], readouts.right[-1:]]).float()  # [T, N]
    cost = torch.where(goal > 0, 1.0, _EARLY_COST)
    cost = cost / cost.sum()
    weight = torch.zeros(readouts.states.shape[-1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, history_size=20, line_search_fn="strong_wolfe")

    def fit_loss() -> torch.Tensor:
        logits = readouts.states @ weight + bias
        return functional.binary_cross_entropy_with_logits(logits, goal, weight=cost, reduction="sum")

    def closure() -> torch.Tensor:
        solver.zero_grad()
        loss = fit_loss() + _RIDGE * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    solver.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        gate = model.model.early_exit_gate
        gate.weight.copy_(weight[None])
        gate.bias.copy_(bias)
        return fit_loss().item()


@torch.no_grad()
def choose_threshold(model: OuroForCausalLM, readouts: Readouts) -> Tried:
    """Measure `THRESHOLDS` with the runtime's `qexit`; the lowest that reaches both minima, else 1.0, is chosen."""
    gates = model.model.early_exit_gate(readouts.states).squeeze(-1)[:, None]  # [T, 1, N]
    is_answer = readouts.answer >= 0
    # Prompts are kept thinned out: each of their tokens stands for several.
    weight = torch.where(is_answer, 1.0, float(_PROMPT_STRIDE))
    tried: Tried = []
    for q in THRESHOLDS:
        rule = ExitRule(ExitConfig(q=q), len(gates))
        depth = select_exits(rule, gates.new_zeros((*gates.shape, 1)), gates, head=torch.nn.Identity()).depths[0]
        same = readouts.same.gather(0, depth[None] - 1)  # [1, N]
        fidelity = whole_answers(same[:, is_answer], readouts.answer[is_answer]).float().mean().item()
        agreement = ((same[0] * weight).sum() / weight.sum()).item()
        good = q == 1 or (fidelity >= MIN_FIDELITY and agreement >= MIN_AGREEMENT)
        chosen = good and not any(each[-1] for each in tried)
        tried.append((q, depth[is_answer].float().mean().item(), fidelity, agreement, chosen))
    return tried
