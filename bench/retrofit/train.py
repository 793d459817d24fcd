"""Healing of a cut decoder: the core and its adapter learn from the teacher, the other parts stay as they are.

    loss = 1/r sum_t |s_t - h_t|^2 / |h_t|^2  +  KL(teacher || student read after r loops),    r drawn from 1 to T

r is drawn in proportion to its cube: a core that is often read after one loop has little use for the others. s_t is the
state after loop t and h_t the teacher's after the layer that it stands for (`Cut.stands_for`); both means are over
tokens, the second over `READ` of them, since the head costs as much as seven layers.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from sigma0.bench.core.checkpoint import load_run, save_run
from sigma0.bench.retrofit.text import HELD_OUT, digest
from sigma0.models.raven_causal import RavenForCausalLM
from sigma0.models.retrofit import Cut, retrofitted

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
    batch: int = 4
    steps: int = 2000
    rate: float = 5e-4
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


class TeacherStates:
    """What a teacher makes of the rows of a text: its states after some layers, and last what its head reads.

    With a file each row is computed once, by itself: its bits do not depend on the batch, and it costs nothing when it
    comes again. Without, as on a GPU, a batch is computed as a whole each time.
    """

    def __init__(self, teacher: LlamaForCausalLM, text: Tensor, layers: Sequence[int], path: Path | None) -> None:
        """Nothing is computed yet.

        Args:
            teacher: Of hidden size D.
            text: int32 `[R, S]`, -1 behind the end of a row.
            layers: Numbers of layers, K of them.
            path: File for float32 `[R, S, K + 1, D]`; one that is there must be of the same teacher, text and layers.
        """
        self._teacher, self._text, self._layers = teacher, text, layers
        self._kept: tuple[Any, Any] | None = None
        if path is not None:
            shape = (*text.shape, len(layers) + 1, teacher.config.hidden_size)
            mode: Any = "r+" if path.exists() else "w+"
            states = np.memmap(path, np.float32, mode, shape=shape)
            self._kept = states, np.memmap(path.with_suffix(".rows"), np.bool_, mode, shape=shape[:1])

    def __call__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rows `[B, S']`, as long as the longest of them is, and states `[K + 1, B, S', D]`."""
        lengths = (self._text[list(numbers)] >= 0).sum(1)
        rows = self._text[list(numbers), : int(lengths.max())]
        if self._kept is None:
            return rows, self._compute(rows)
        states, is_kept = self._kept
        for number, length in zip(numbers, lengths.tolist(), strict=True):
            if not is_kept[number]:
                states[number, :length] = self._compute(self._text[number : number + 1, :length])[:, 0].transpose(0, 1)
                is_kept[number] = True
        return rows, torch.from_numpy(states[list(numbers), : rows.shape[1]]).permute(2, 0, 1, 3)

    @torch.no_grad()
    def _compute(self, rows: Tensor) -> Tensor:
        output = self._teacher.model(input_ids=rows.clamp_min(0), output_hidden_states=True, use_cache=False)
        return torch.stack([*(output.hidden_states[layer] for layer in self._layers), output.last_hidden_state])


def _loop_states(student: RavenForCausalLM, injected: Tensor, loops: int) -> list[Tensor]:
    """States `[B, S, D]` after each of so many loops, from what the prelude hands over."""
    positions = torch.arange(injected.shape[1], device=injected.device).expand(injected.shape[:2])
    states = [injected]
    for loop in range(loops):
        states.append(student.transformer.run_core(states[-1], injected, positions, loop, None))
    return states[1:]


def losses(student: RavenForCausalLM, rows: Tensor, states: Tensor, rng: Random) -> tuple[Tensor, Tensor]:
    """Distances of the states, `[r]`, and the divergence, a scalar.

    Args:
        student: Its prelude is the teacher's, so it begins with what the teacher has there.
        rows: `[B, S]`, -1 where there is no token.
        states: The teacher's, `[T + 2, B, S, D]`: behind the prelude, after each layer that a loop stands for, and what
            its head reads.
        rng: For the loops and the places.
    """
    real, count = rows >= 0, student.num_loops
    loops = rng.choices(range(1, count + 1), [loop**3 for loop in range(1, count + 1)])[0]
    made = _loop_states(student, states[0], loops)
    goals = states[1 : loops + 1, real]  # [r, N, D]
    distance = (torch.stack(made)[:, real] - goals).float().square().sum(-1) / goals.float().square().sum(-1)
    places = torch.tensor(rng.sample(range(int(real.sum())), min(READ, int(real.sum()))), device=rows.device)
    with torch.no_grad():
        wanted = student.lm_head(states[-1, real][places]).float().log_softmax(-1)
    read = student.lm_head(student.transformer.read_prompt(made[-1], None, None)[real][places]).float().log_softmax(-1)
    return distance.mean(1), functional.kl_div(read, wanted, reduction="batchmean", log_target=True)


def perplexities(student: RavenForCausalLM, states_of: TeacherStates, count: int, batch: int = 8) -> list[float]:
    """Of the first `count` rows: the teacher's, then the student's after each number of loops."""
    total, tokens = torch.zeros(1 + student.num_loops, dtype=torch.float64), 0
    for rows, readings in _readings(student, states_of, count, batch):
        targets = rows[:, 1:].long()
        for place, hidden in enumerate(readings):
            logits = student.lm_head(hidden[:, :-1][targets >= 0])
            total[place] += functional.cross_entropy(logits.float(), targets[targets >= 0], reduction="sum").item()
        tokens += int((targets >= 0).sum())
    return [round(value, 4) for value in (total / tokens).exp().tolist()]


def agreement(student: RavenForCausalLM, states_of: TeacherStates, count: int, batch: int = 8) -> list[float]:
    """In which share of the tokens of the first `count` rows each number of loops says what the teacher says."""
    same, tokens = torch.zeros(student.num_loops, dtype=torch.float64), 0
    for rows, readings in _readings(student, states_of, count, batch):
        first, *others = (student.lm_head(hidden[rows >= 0]).argmax(-1) for hidden in readings)
        same += torch.stack([(other == first).sum() for other in others])
        tokens += len(first)
    return [round(value, 4) for value in (same / tokens).tolist()]


@torch.no_grad()
def _readings(
    student: RavenForCausalLM, states_of: TeacherStates, count: int, batch: int
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Rows `[B, S]`, and what the head reads `[B, S, D]`: of the teacher, then after each number of loops."""
    for numbers in torch.split(torch.arange(count), batch):
        rows, states = states_of(numbers.tolist())
        made = _loop_states(student, states[0], student.num_loops)
        yield rows, [states[-1], *(student.transformer.read_prompt(state, None, None) for state in made)]


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
    layers = [recipe.cut.prelude, *recipe.cut.stands_for(teacher.config.num_hidden_layers)]
    kept = blake2b(f"{fingerprint} {layers}".encode(), digest_size=8).hexdigest()
    states_of = TeacherStates(
        teacher, text, layers, None if text.device.type == "cuda" else folder / f"teacher-{kept}.bin"
    )
    rest = max(0, len(text) - HELD_OUT)
    rounds = rest // recipe.batch
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
        order = torch.randperm(rest, generator=torch.Generator().manual_seed(recipe.seed + step // rounds))
        numbers = order[step % rounds * recipe.batch :][: recipe.batch] + HELD_OUT
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = recipe.at(step)
        with reduced:
            ids, states = states_of(numbers.tolist())
            distance, divergence = losses(student, ids, states, Random(f"{recipe.seed}/{step}"))
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
                looked = perplexities(student, states_of, HELD_OUT)
        report = Report(step, tokens, distance.tolist(), divergence.item(), looked)
        with log.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")
        if on_step is not None:
            on_step(report)
        if (step + 1) % recipe.eval_every == 0 or step + 1 == recipe.steps:
            save_run(folder / STATE, student, optimizers, step + 1, fingerprint)
    student.eval()
    return student
