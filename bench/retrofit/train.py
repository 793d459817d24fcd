"""Healing of a cut decoder: the core and its adapter learn from the teacher, the other parts stay as they are.

    loss = 1/r sum_t |s_t - h_t|^2 / |h_t|^2  +  KL(teacher || student read after r loops),    r drawn from 1 to T

s_t is the state after loop t and h_t the teacher's after the layer that it stands for (`Cut.stands_for`); both means
are over tokens, the second over `READ` of them, since the head costs as much as seven layers.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from math import inf
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from sigma0.bench.core.checkpoint import load_run, save_run
from sigma0.bench.retrofit.cut import Cut, retrofitted
from sigma0.bench.retrofit.text import HELD_OUT, digest
from sigma0.models.raven_causal import RavenForCausalLM

STATE = "state.safetensors"
LOG = "log.jsonl"
READ = 256


@dataclass(frozen=True)
class Recipe:
    """Settings of a run.

    Attributes:
        cut: The parts.
        batch: Rows of a step.
        steps: Steps until the rate is down to zero.
        rate: Peak of the learning rate (AdamW).
        warmup: Steps up to it.
        seed: Of the order of rows, of the number of loops and of the places that are read.
        eval_every: Steps between two looks at held-out rows.
    """

    cut: Cut
    batch: int = 8
    steps: int = 2000
    rate: float = 3e-4
    warmup: int = 20
    seed: int = 0
    eval_every: int = 25

    def __post_init__(self) -> None:
        if not 0 < self.rate < inf:
            raise ValueError(f"the rate must be a number above 0, got {self.rate}")

    def at(self, step: int) -> float:
        """The learning rate of a step: up, and down along half a cosine."""
        rise = min(1.0, (step + 1) / self.warmup)
        fall = torch.tensor(torch.pi * step / self.steps).cos().item() / 2 + 0.5
        return self.rate * rise * fall


@dataclass(frozen=True)
class Report:
    """Figures of one step.

    Attributes:
        step: From 0.
        tokens: Seen so far.
        state: Distance of each loop's state from the teacher's, by loop.
        divergence: KL of what was read, nats a token.
        perplexity: Of held-out rows, the teacher's first, then the student's by loop; None between two looks.
    """

    step: int
    tokens: int
    state: list[float]
    divergence: float
    perplexity: list[float] | None


def losses(
    student: RavenForCausalLM, teacher: LlamaForCausalLM, cut: Cut, ids: Tensor, rng: Random
) -> tuple[Tensor, Tensor]:
    """Distances of the states, `[r]`, and the divergence, a scalar, over rows `[B, S]`, -1 where there is no token."""
    real, given = ids >= 0, ids.clamp_min(0)
    loops = rng.choices(range(1, cut.loops + 1), range(1, cut.loops + 1))[0]
    with torch.no_grad():
        output = teacher.model(input_ids=given, output_hidden_states=True, use_cache=False)
        layers = cut.stands_for(teacher.config.num_hidden_layers)[:loops]
        goals = torch.stack([output.hidden_states[layer] for layer in layers])[:, real]  # [r, N, D]
    seen = student.transformer(input_ids=given, use_cache=False, num_loops=loops)
    distance = (seen.loop_states[:, real] - goals).float().square().sum(-1) / goals.float().square().sum(-1)
    places = torch.tensor(rng.sample(range(int(real.sum())), min(READ, int(real.sum()))), device=ids.device)
    wanted = teacher.lm_head(output.last_hidden_state[real][places]).float().log_softmax(-1)
    read = student.lm_head(seen.last_hidden_state[real][places]).float().log_softmax(-1)
    return distance.mean(1), functional.kl_div(read, wanted, reduction="batchmean", log_target=True)


@torch.no_grad()
def perplexities(student: RavenForCausalLM, teacher: LlamaForCausalLM, rows: Tensor, batch: int = 8) -> list[float]:
    """Of rows `[R, S]`: the teacher's, then the student's after each number of loops."""
    total, count = torch.zeros(1 + student.num_loops, dtype=torch.float64), 0
    for ids in torch.split(rows, batch):
        given, targets = ids.clamp_min(0), ids[:, 1:].long()
        readings = [teacher.model(input_ids=given, use_cache=False).last_hidden_state]
        for loops in range(1, student.num_loops + 1):
            readings.append(student.transformer(input_ids=given, use_cache=False, num_loops=loops).last_hidden_state)
        for place, hidden in enumerate(readings):
            logits = teacher.lm_head(hidden[:, :-1][targets >= 0])
            total[place] += functional.cross_entropy(logits.float(), targets[targets >= 0], reduction="sum").item()
        count += int((targets >= 0).sum())
    return [round(value, 4) for value in (total / count).exp().tolist()]


def train(
    teacher: LlamaForCausalLM,
    text: Tensor,
    recipe: Recipe,
    folder: Path,
    minutes: float | None = None,
    on_step: Callable[[Report], None] | None = None,
) -> RavenForCausalLM | None:
    """Trains, or goes on training, in `folder`; after so many minutes it stops with a checkpoint.

    The first `HELD_OUT` rows of the text are not trained on. The others come again in another order when all were seen.

    Returns:
        The student, or None if the time was up first.

    Raises:
        ValueError: If the text is another teacher's or too short, or the run was begun under other settings.
        FloatingPointError: If a loss is not finite.
    """
    if int(text.max()) >= teacher.config.vocab_size:
        raise ValueError(
            f"the text has token {int(text.max())}, the teacher a vocabulary of {teacher.config.vocab_size}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    student = retrofitted(teacher, recipe.cut)
    student.to(text.device)
    teacher.eval().requires_grad_(False)
    student.requires_grad_(False)
    learned = [student.transformer.adapter, student.transformer.core_block]
    weights = [weight.requires_grad_() for part in learned for weight in part.parameters()]
    # Muon's own products would cost more than a step of so few rows does
    optimizers = [torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0)]
    rows = blake2b(text.cpu().numpy().tobytes(), digest_size=8).hexdigest()
    fingerprint = json.dumps({**asdict(recipe), "text": rows, "teacher": digest(teacher)})
    done = load_run(folder / STATE, student, optimizers, fingerprint) if (folder / STATE).exists() else 0
    log = folder / LOG
    lines = log.read_text().splitlines(keepends=True)[:done] if log.exists() else []
    log.write_text("".join(lines))
    tokens = json.loads(lines[-1])["tokens"] if lines else 0
    held_out, rest = text[:HELD_OUT], text[HELD_OUT:]
    rounds = len(rest) // recipe.batch
    if rounds == 0:
        raise ValueError(f"{len(text)} rows: {HELD_OUT} are held out, and a step takes {recipe.batch}")
    end = None if minutes is None else time.monotonic() + 60 * minutes
    # products in bfloat16 on a GPU; weights and optimizer stay in float32
    reduced = torch.autocast(text.device.type, torch.bfloat16, enabled=text.device.type == "cuda")
    student.train()
    for step in range(done, recipe.steps):
        if end is not None and time.monotonic() > end:
            save_run(folder / STATE, student, optimizers, step, fingerprint)
            return None
        order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(recipe.seed + step // rounds))
        start = step % rounds * recipe.batch
        ids = rest[order[start : start + recipe.batch]]
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = recipe.at(step)
        with reduced:
            distance, divergence = losses(student, teacher, recipe.cut, ids, Random(f"{recipe.seed}/{step}"))
        if not (distance.mean() + divergence).isfinite():
            raise FloatingPointError(f"the loss of step {step} is not finite: take a lower rate than {recipe.rate}")
        (distance.mean() + divergence).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        tokens += int((ids >= 0).sum())
        looked = None
        if (step + 1) % recipe.eval_every == 0 or step + 1 == recipe.steps or step == 0:
            with reduced:
                looked = perplexities(student, teacher, held_out)
        report = Report(step, tokens, distance.tolist(), divergence.item(), looked)
        with log.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")
        if on_step is not None:
            on_step(report)
        if (step + 1) % recipe.eval_every == 0 or step + 1 == recipe.steps:
            save_run(folder / STATE, student, optimizers, step + 1, fingerprint)
    student.eval()
    return student
