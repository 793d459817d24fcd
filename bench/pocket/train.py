"""Training of the backbone: one CPU thread, a loss at every loop, a checkpoint that a killed run goes on from.

Then the model folder: the exit gate, fitted on the frozen backbone, its threshold, the files.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast

from sigma0.bench.core.checkpoint import load_run, save_run
from sigma0.bench.core.output import drawing
from sigma0.bench.pocket.data import Batch, collate, whole_answers
from sigma0.bench.pocket.forms import DECIDING, DECIDING_VALUES
from sigma0.bench.pocket.recipe import EMBEDDINGS, Recipe, build_model
from sigma0.bench.pocket.tokenizer import PAD
from sigma0.commands.console import depth_style
from sigma0.config import ExitConfig
from sigma0.decode.exits import ExitRule, select_exits
from sigma0.models.looped_causal import LoopedForCausalLM
from sigma0.models.ouro import OuroForCausalLM
from sigma0.models.raven_causal import RavenForCausalLM
from sigma0.models.start_states import start_states

STATE = "state.safetensors"
LOG = "log.jsonl"
_POINTS = 120


@dataclass(frozen=True)
class Report:
    """Figures of one training step."""

    step: int  # Number of the step, from 0
    loss: float  # Weighted loss over all loops, nats per token
    # Share of the batch's answers right to the last token (teacher-forced), by the loop it is read at
    answers: dict[int, float]


def loop_loss(
    model: LoopedForCausalLM, batch: Batch, recipe: Recipe, step: int, deciding: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Loss of the batch of a step, and which answer tokens are right where it was read.

    An Ouro is read at every loop. A Raven is trained as Huginn's authors do it (arXiv 2502.05171, section 3.3): the
    number of loops of a batch is drawn, gradients go through the last of them only, and the loss is read after the
    last one. On trails it runs few loops, all of them with gradients, and is read at some, since each costs a coda.

    Answer tokens count at every loop that is read, with a weight that grows with the loop and sums to 1 over them. The
    other tokens (mostly random story) count at the last loop only, which saves most of the head's work.

    On trails, loop t is asked for step t of the way to an answer (its subject, then one look-up a loop) and for the
    answer from its end on. The first loop is also asked, everywhere, whom or what the sentence is about.

    Where the lesson has an emphasis, answer tokens among `deciding`, ids `[K]`, weigh so many times as much as others.

    Returns:
        The loss, a scalar; right, bool [L, N] over the N answer tokens of the batch in reading order; and the L loops,
        counted from 1, that were read.
    """
    lesson, trails, loops = recipe.lesson(step), recipe.on_trails(step), recipe.train_loops(step)
    if isinstance(model, RavenForCausalLM):
        assert recipe.recurrence is not None
        rng = Random(f"recurrence/{recipe.seed}/{step}")
        if not trails:
            loops = recipe.recurrence.draw(rng, recipe.loops)
        read = recipe.recurrence.read_at(rng, loops) if trails else [loops]
        output = model.transformer(
            input_ids=batch.ids,
            use_cache=False,
            num_loops=loops,
            loops_without_grad=0 if trails else max(0, loops - recipe.recurrence.backprop),
            initial_state=None if trails else _drawn_states(model, batch, recipe, step),
        )
        before = [model.transformer.read_prompt(output.loop_states[loop - 1], None, None) for loop in read[:-1]]
        loop_states = torch.stack([*before, output.last_hidden_state])
    else:
        read = list(range(1, loops + 1))
        loop_states = model.base_model(input_ids=batch.ids, use_cache=False, num_loops=loops).loop_states
    states = loop_states[:, :, :-1].flatten(1, 2)  # [L, B(S-1), D]
    targets = batch.ids[:, 1:].flatten()
    answer = batch.answer[:, 1:].flatten()
    other = batch.real[:, 1:].flatten() & ~answer
    logits = model.lm_head(states[:, answer])  # [L, N, V]
    goal = targets[answer].expand(len(read), -1)
    places = (torch.tensor(read) - 1).clamp(max=batch.trails.shape[1] - 1)
    asked = batch.trails.T[places] if trails else goal  # [L, N]
    losses = functional.cross_entropy(logits.flatten(0, 1), asked.flatten(), reduction="none").view(len(read), -1)
    if deciding is not None and lesson is not None and lesson.emphasis != 1:
        losses = losses * torch.where(torch.isin(goal[0], deciding), lesson.emphasis, 1.0)
    weights = torch.tensor(read) / sum(read)
    rest = functional.cross_entropy(model.lm_head(states[-1, other]), targets[other], reduction="sum")
    total = recipe.answer_weight * (weights[:, None] * losses).sum() + rest
    loss = total / (recipe.answer_weight * answer.sum() + other.sum())
    if trails:
        about = batch.subjects[:, :-1].flatten()
        reported = about >= 0
        hint = functional.cross_entropy(model.lm_head(states[0, reported]), about[reported])
        loss = loss + recipe.subject_weight * hint
    return loss, logits.argmax(-1) == goal, read


def _drawn_states(model: RavenForCausalLM, batch: Batch, recipe: Recipe, step: int) -> torch.Tensor | None:
    """Start states `[B, S, D]`: drawn at their published size for a share of the rows, zero for the others."""
    assert recipe.recurrence is not None
    rows, length = batch.ids.shape
    count = round(rows * recipe.recurrence.drawn)
    if count == 0:
        return None
    states = torch.zeros(rows, length, recipe.width)
    places = torch.arange(count * length).view(count, length)
    # the last rows: the first ones of a batch are in chat form
    states[rows - count :] = start_states(places, model.config.state_std, (recipe.seed << 32) + step, states)
    return states


def train(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    minutes: float | None = None,
    save_every: int = 100,
    on_step: Callable[[Report], None] | None = None,
    start: Path | None = None,
) -> LoopedForCausalLM | None:
    """Train, or go on training, in `folder`, a new run from the weights of a model folder `start` where it is given.

    A checkpoint made under other settings is refused. After so many minutes it stops with a checkpoint, from which a
    later call goes on; None runs to the end.

    Returns:
        The trained model, or None if the time was up first.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(recipe, tokenizer, start)
    optimizers = _optimizers(model, recipe)
    fingerprint = recipe.fingerprint(tokenizer)
    done = load_run(folder / STATE, model, optimizers, fingerprint) if (folder / STATE).exists() else 0
    if (folder / LOG).exists():
        # the steps after the checkpoint are run again
        (folder / LOG).write_text("".join((folder / LOG).read_text().splitlines(keepends=True)[:done]))
    end = None if minutes is None else time.monotonic() + 60 * minutes
    # of a text of several tokens the first decides
    texts = (*DECIDING, *DECIDING_VALUES) if recipe.quoted else DECIDING
    deciding = torch.tensor(sorted({tokenizer.encode(text, add_special_tokens=False)[0] for text in texts}))
    model.train()
    for step in range(done, recipe.steps):
        if end is not None and time.monotonic() > end:
            save_run(folder / STATE, model, optimizers, step, fingerprint)
            return None
        for optimizer, peak in zip(optimizers, (recipe.block_rate, recipe.peak_rate), strict=True):
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = peak * recipe.rate(step)
        batch = recipe.train_batch(tokenizer, step)
        loss, right, read = loop_loss(model, batch, recipe, step, deciding)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
        shares = whole_answers(right, batch.answer_numbers()).float().mean(1).tolist()
        answers = {loop: round(share, 4) for loop, share in zip(read, shares, strict=True)}
        report = Report(step, loss.item(), answers)
        with (folder / LOG).open("a") as log:
            log.write(json.dumps(asdict(report)) + "\n")
        if on_step is not None:
            on_step(report)
        if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
            save_run(folder / STATE, model, optimizers, step + 1, fingerprint)
    model.eval()
    return model


def read_log(path: Path) -> Iterator[Report]:
    """Read the figures of the steps so far."""
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            answers = {int(loop): share for loop, share in entry["answers"].items()}
            yield Report(entry["step"], entry["loss"], answers)


def _optimizers(model: LoopedForCausalLM, recipe: Recipe) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices of the block, AdamW for the rest.

    A look-up needs many directions of these matrices to grow together, which an orthogonalised step lets them do
    (Muon: Jordan et al., 2024). In short trials AdamW alone did not get off the plateau of guesses.
    """
    # The gate gets no gradient here: it is fitted afterwards, on the frozen backbone.
    named = [(name, weight) for name, weight in model.named_parameters() if "early_exit_gate" not in name]
    head = [weight for name, weight in named if name == "lm_head.weight"]
    kept = [weight for name, weight in named if name.endswith(EMBEDDINGS) or weight.dim() != 2]
    others = {*head, *kept}
    block = [weight for _, weight in named if weight not in others]
    muon = torch.optim.Muon(
        block, lr=recipe.block_rate, weight_decay=recipe.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": head, "weight_decay": recipe.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return muon, torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98))


def draw_curve(reports: Sequence[Report], recipe: Recipe, path: Path) -> None:
    """Draw the share of a training batch's answers that are right, by loop, averaged over spans of steps.

    Raises:
        ValueError: If there is nothing to draw, or the run is not of this recipe.
    """
    if not reports:
        raise ValueError(f"no step was logged, so there is nothing to draw into {path}")
    most = max(loop for report in reports for loop in report.answers)
    if most > recipe.loops or reports[-1].step >= recipe.steps:
        raise ValueError(
            f"the log has {most} loops and step {reports[-1].step}, the recipe {recipe.loops} loops and {recipe.steps} "
            "steps: name the recipe of the run"
        )
    span = max(1, len(reports) // _POINTS)
    with drawing([path], (8, 4.5), dpi=150) as figure:
        axes = figure.subplots()
        for loop in range(1, recipe.loops + 1):
            steps, shares = [], []
            for start in range(0, len(reports), span):
                part = [report for report in reports[start : start + span] if loop in report.answers]
                if part:
                    steps.append(part[-1].step)
                    shares.append(100 * sum(report.answers[loop] for report in part) / len(part))
            axes.plot(steps, shares, color=depth_style(loop, recipe.loops), label=f"loop {loop}")
        # where no step is spent on notes, the lesson that begins there stands in their place
        for step, name in dict(recipe.stages()).items():
            axes.axvline(step, color="0.7", linewidth=0.8)
            axes.annotate(name, (step, 101), fontsize=7, rotation=90, ha="center", annotation_clip=False)
        axes.set(xlabel="step", ylabel="answers right, % (training batches)", ylim=(0, 100))
        figure.legend(fontsize=8, loc="outside right center")


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
    last = recipe.lessons[-1]
    rows = []
    for number in scenes:
        rows.append(recipe.row(tokenizer, last, split, number, number % 2 == 1, f"{split}/{recipe.seed}/{number}"))
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
    return Readouts(*(torch.cat(element, -1 if element[0].dim() < 3 else 1) for element in zip(*parts, strict=True)))


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
        chosen = good and not any(element[-1] for element in tried)
        tried.append((q, depth[is_answer].float().mean().item(), fidelity, agreement, chosen))
    return tried
