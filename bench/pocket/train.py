"""Training of the backbone: one CPU thread, a loss at every loop, a checkpoint that a killed run goes on from."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.data import Batch, whole_answers
from sigma0.bench.pocket.forms import DECIDING
from sigma0.bench.pocket.recipe import Recipe, build_model
from sigma0.bench.pocket.recurrence import recurrent_loss
from sigma0.models.looped_causal import LoopedForCausalLM
from sigma0.models.ouro import OuroForCausalLM
from sigma0.models.raven_causal import RavenForCausalLM

STATE = "state.safetensors"
LOG = "log.jsonl"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_MOMENTS = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")


@dataclass(frozen=True)
class Report:
    """Figures of one training step.

    Attributes:
        step: Number of the step, from 0.
        loss: Weighted loss over all loops, nats per token.
        answers: Share of the batch's answers right to the last token (teacher-forced), by the loop it is read at.
    """

    step: int
    loss: float
    answers: dict[int, float]


def loop_loss(
    model: OuroForCausalLM,
    batch: Batch,
    answer_weight: float,
    num_loops: int | None = None,
    trails: bool = False,
    subject_weight: float = 0.3,
    emphasis: float = 1.0,
    deciding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of a batch and which answer tokens each loop gets right.

    Answer tokens count at every loop, with a weight that grows with the loop and sums to 1 over them. The other
    tokens (mostly random story) count at the last loop only, which saves most of the head's work.

    With `trails`, loop t is asked for step t of the way to an answer (its subject, then one look-up a loop) and for the
    answer from its end on. The first loop is also asked, everywhere, whom or what the sentence is about.

    With `deciding`, ids `[K]`, answer tokens among them weigh `emphasis` times as much as the others.

    Returns:
        The loss, a scalar, and right, bool [T, N] over the N answer tokens of the batch in reading order.
    """
    output = model.model(input_ids=batch.ids, use_cache=False, num_loops=num_loops)
    states = output.loop_states[:, :, :-1].flatten(1, 2)  # [T, B(S-1), D]
    targets = batch.ids[:, 1:].flatten()
    answer = batch.answer[:, 1:].flatten()
    other = batch.real[:, 1:].flatten() & ~answer
    loops = states.shape[0]
    logits = model.lm_head(states[:, answer])  # [T, N, V]
    goal = targets[answer].expand(loops, -1)
    steps = torch.arange(loops).clamp(max=batch.trails.shape[1] - 1)
    asked = batch.trails.T[steps] if trails else goal  # [T, N]
    losses = functional.cross_entropy(logits.flatten(0, 1), asked.flatten(), reduction="none").view(loops, -1)
    weights = torch.arange(1, loops + 1) / (loops * (loops + 1) / 2)
    if deciding is not None:
        losses = losses * torch.where(torch.isin(goal[0], deciding), emphasis, 1.0)
    rest = functional.cross_entropy(model.lm_head(states[-1, other]), targets[other], reduction="sum")
    total = answer_weight * (weights[:, None] * losses).sum() + rest
    loss = total / (answer_weight * answer.sum() + other.sum())
    if trails:
        about = batch.subjects[:, :-1].flatten()
        told = about >= 0
        loss = loss + subject_weight * functional.cross_entropy(model.lm_head(states[0, told]), about[told])
    return loss, logits.argmax(-1) == goal


def train(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    minutes: float | None = None,
    save_every: int = 100,
    on_step: Callable[[Report], None] | None = None,
) -> LoopedForCausalLM | None:
    """Train, or go on training, in `folder`.

    Args:
        recipe: The settings; a checkpoint made under other settings is refused.
        tokenizer: The micro-world's tokenizer.
        folder: Where the checkpoint and the log live.
        minutes: Stop (with a checkpoint) after so long; a later call goes on. None runs to the end.
        save_every: Steps between checkpoints.
        on_step: Called with the figures of each step.

    Returns:
        The trained model, or None if the time was up first.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(recipe, tokenizer)
    optimizers = _optimizers(model, recipe)
    fingerprint = recipe.fingerprint(tokenizer)
    start = load_state(folder / STATE, model, optimizers, fingerprint) if (folder / STATE).exists() else 0
    _cut_log(folder / LOG, start)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    # of a text of several tokens the first decides
    deciding = torch.tensor(sorted({tokenizer.encode(text, add_special_tokens=False)[0] for text in DECIDING}))
    model.train()
    for step in range(start, recipe.steps):
        if end is not None and time.monotonic() > end:
            save_state(folder / STATE, model, optimizers, step, fingerprint)
            return None
        report = _step(model, optimizers, recipe.train_batch(tokenizer, step), step, recipe, deciding)
        with (folder / LOG).open("a") as log:
            log.write(json.dumps({"step": step, "loss": report.loss, "answers": report.answers}) + "\n")
        if on_step is not None:
            on_step(report)
        if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
            save_state(folder / STATE, model, optimizers, step + 1, fingerprint)
    model.eval()
    return model


def save_state(
    path: Path, model: LoopedForCausalLM, optimizers: Sequence[torch.optim.Optimizer], step: int, fingerprint: str
) -> None:
    """Write weights and optimizer state as one safetensors file, replaced at once: a kill leaves a whole one."""
    # no other state than parameters, and a tied head is one with its embedding
    tensors = {f"weights.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for moment, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"step": str(step), "settings": fingerprint})
    os.replace(partial, path)


def load_state(
    path: Path, model: LoopedForCausalLM, optimizers: Sequence[torch.optim.Optimizer], fingerprint: str
) -> int:
    """Restore what `save_state` wrote and return the number of steps done.

    Raises:
        ValueError: If the file was made under other settings or by other data, or is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            found = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is no checkpoint of a run: {error}") from error
    if found.get("settings") != fingerprint:
        raise ValueError(f"{path} was made under other settings: {found.get('settings')}; these are {fingerprint}")
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"weights.{name}"])
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            kept = {moment: tensors.get(f"{moment}.{names[parameter]}") for moment in _MOMENTS}
            optimizer.state[parameter] = {moment: value for moment, value in kept.items() if value is not None}
    return int(found["step"])


def read_log(path: Path) -> Iterator[Report]:
    """Read the figures of the steps so far."""
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            answers = {int(loop): share for loop, share in entry["answers"].items()}
            yield Report(entry["step"], entry["loss"], answers)


def _step(
    model: LoopedForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Batch,
    step: int,
    recipe: Recipe,
    deciding: torch.Tensor,
) -> Report:
    for optimizer, peak in zip(optimizers, (recipe.block_rate, recipe.peak_rate), strict=True):
        optimizer.zero_grad(set_to_none=True)
        for group in optimizer.param_groups:
            group["lr"] = peak * recipe.rate(step)
    if isinstance(model, RavenForCausalLM):
        assert recipe.recurrence is not None
        loss, right, read = recurrent_loss(model, batch, recipe, recipe.recurrence, step)
    else:
        assert isinstance(model, OuroForCausalLM)
        loops, trails = recipe.train_loops(step), recipe.on_trails(step)
        lesson = recipe.lesson(step)
        emphasis = 1.0 if lesson is None else lesson.emphasis
        marked = None if emphasis == 1 else deciding
        loss, right = loop_loss(
            model, batch, recipe.answer_weight, loops, trails, recipe.subject_weight, emphasis, marked
        )
        read = list(range(1, loops + 1))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    for optimizer in optimizers:
        optimizer.step()
    shares = whole_answers(right, batch.answer_numbers()).float().mean(1).tolist()
    return Report(step, loss.item(), {loop: round(share, 4) for loop, share in zip(read, shares, strict=True)})


def _optimizers(model: LoopedForCausalLM, recipe: Recipe) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices of the block, AdamW for the rest.

    A look-up needs many directions of these matrices to grow together, which an orthogonalised step lets them do
    (Muon: Jordan et al., 2024). In short trials AdamW alone did not get off the plateau of guesses.
    """
    # The gate gets no gradient here: it is fitted afterwards, on the frozen backbone.
    named = [(name, weight) for name, weight in model.named_parameters() if "early_exit_gate" not in name]
    head = [weight for name, weight in named if name == "lm_head.weight"]
    kept = [weight for name, weight in named if name.endswith(_EMBEDDINGS) or weight.dim() != 2]
    others = {*head, *kept}
    block = [weight for _, weight in named if weight not in others]
    muon = torch.optim.Muon(
        block, lr=recipe.block_rate, weight_decay=recipe.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": head, "weight_decay": recipe.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return muon, torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98))


def _cut_log(path: Path, steps: int) -> None:
    """Keep the lines of the first steps, one line for each: the others will be run again."""
    if path.exists():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:steps]))
