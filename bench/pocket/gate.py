"""The exit gate: fitted on the frozen backbone, and the threshold chosen on stories of its own."""

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.data import Batch, collate, fit, whole_answers
from sigma0.bench.pocket.forms import form_scene
from sigma0.bench.pocket.tokenizer import PAD
from sigma0.bench.pocket.world import draw
from sigma0.config import ExitConfig
from sigma0.decode.exits import ExitRule, select_exits
from sigma0.models.ouro import OuroForCausalLM

# Thresholds tried, from eager to patient.
THRESHOLDS = (
    *(0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.985),
    *(0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999, 0.99995, 0.99999),
)
MIN_FIDELITY = 0.99
MIN_AGREEMENT = 0.985
FIT_SCENES = 1500
# Far behind the scenes the backbone was trained on.
FIT_FIRST = 10_000_000
CALIBRATION_SCENES = 1000
_RIDGE = 1e-5
# Leaving before the argmax has settled costs an answer, staying costs a loop.
_EARLY_COST = 30.0
_ROWS = 50
_PROMPT_STRIDE = 5


@dataclass(frozen=True)
class Readouts:
    """What the tokens of some scenes look like at every loop.

    Attributes:
        states: Normed states from which the token is read, float32 [T, N, D].
        right: Where the argmax at loop t is the token of the answer, bool [T, N].
        same: Where the argmax at loop t is that of loop T, bool [T, N].
        answer: The answer, counted from 0, that each token belongs to, or -1 for a token of a prompt, int64 [N].
    """

    states: torch.Tensor
    right: torch.Tensor
    same: torch.Tensor
    answer: torch.Tensor

    def answers(self) -> "Readouts":
        """The tokens of answers alone."""
        keep = self.answer >= 0
        return Readouts(self.states[:, keep], self.right[:, keep], self.same[:, keep], self.answer[keep])


@dataclass(frozen=True)
class Threshold:
    """One exit threshold measured.

    Attributes:
        q: The threshold.
        mean_depth: Mean exit depth of the answer tokens.
        fidelity: Share of answers equal to full depth's, token for token.
        agreement: Share of all tokens, those of prompts included, whose argmax is full depth's.
    """

    q: float
    mean_depth: float
    fidelity: float
    agreement: float


def collect(
    model: OuroForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    split: str,
    seed: int,
    first: int,
    count: int,
    length: int,
    forms: float = 0.0,
) -> Readouts:
    """Run scenes `first` to `first + count - 1` of a split, every other one as chat, `forms` of them in other forms.

    All tokens of answers are kept, and every `_PROMPT_STRIDE`th token of the prompts.
    """
    parts = []
    answers = 0
    pad = tokenizer.convert_tokens_to_ids(PAD)
    for start in range(first, first + count, _ROWS):
        numbers = range(start, min(start + _ROWS, first + count))
        scenes = [form_scene(draw(split, seed, n), f"{split}/{seed}/{n}", forms) for n in numbers]
        rows = [fit(tokenizer, scene, n % 2 == 1, length) for n, scene in zip(numbers, scenes, strict=True)]
        batch = collate(rows, pad)
        part = _read(model, batch, answers)
        answers = 1 + int(part.answer.max())
        parts.append(part)
    return Readouts(
        torch.cat([part.states for part in parts], 1),
        torch.cat([part.right for part in parts], 1),
        torch.cat([part.same for part in parts], 1),
        torch.cat([part.answer for part in parts]),
    )


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

    def fit_loss(logits: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(logits, goal, weight=cost, reduction="sum")

    weight = torch.zeros(readouts.states.shape[-1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        solver.zero_grad()
        loss = fit_loss(readouts.states @ weight + bias) + _RIDGE * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    solver.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        gate = model.model.early_exit_gate
        gate.weight.copy_(weight[None])
        gate.bias.copy_(bias)
        return fit_loss(readouts.states @ weight + bias).item()


def exit_depths(gate_logits: torch.Tensor, q: float) -> torch.Tensor:
    """Loop at which the runtime's `qexit` stops.

    Args:
        gate_logits: Logits of the gate after every loop, [T, N].
        q: The threshold, in (0, 1].

    Returns:
        Depths from 1 to T, int64 [N].
    """
    rule = ExitRule(ExitConfig(q=q), len(gate_logits))
    no_states = gate_logits.new_zeros((*gate_logits.shape, 1))
    return select_exits(rule, no_states[:, None], gate_logits[:, None], head=torch.nn.Identity()).depths[0]


def choose_threshold(model: OuroForCausalLM, readouts: Readouts) -> tuple[Threshold, list[Threshold]]:
    """Measure all of `THRESHOLDS`; choose the lowest that reaches both minima, or 1.0 if none does."""
    with torch.no_grad():
        logits = model.model.early_exit_gate(readouts.states).squeeze(-1)  # [T, N]
    answers = readouts.answers()
    is_answer = readouts.answer >= 0
    # Prompts are kept thinned out: each of their tokens stands for several.
    weight = torch.where(is_answer, 1.0, float(_PROMPT_STRIDE))
    tried = []
    for q in (*THRESHOLDS, 1.0):
        depth = exit_depths(logits, q)
        same = readouts.same.gather(0, depth[None] - 1)  # [1, N]
        fidelity = whole_answers(same[:, is_answer], answers.answer).float().mean().item()
        agreement = ((same[0] * weight).sum() / weight.sum()).item()
        tried.append(Threshold(q, depth[is_answer].float().mean().item(), fidelity, agreement))
    good = (each for each in tried if each.fidelity >= MIN_FIDELITY and each.agreement >= MIN_AGREEMENT)
    return next(good, tried[-1]), tried


@torch.no_grad()
def _read(model: OuroForCausalLM, batch: Batch, answers: int) -> Readouts:
    states = model.model(input_ids=batch.ids, use_cache=False).loop_states[:, :, :-1]  # [T, B, S - 1, D]
    marks, real = batch.answer[:, 1:], batch.real[:, 1:]
    numbers = torch.full_like(batch.ids[:, 1:], -1)
    numbers[marks] = batch.answer_numbers() + answers
    thinned = torch.zeros_like(real)
    thinned[:, ::_PROMPT_STRIDE] = True
    kept = marks | (real & thinned)
    found = states[:, kept]  # [T, N, D]
    tokens = model.lm_head(found).argmax(-1)  # [T, N]
    return Readouts(found, tokens == batch.ids[:, 1:][kept], tokens == tokens[-1], numbers[kept])
