"""The settings of the shipped models, and the untrained model they describe."""

import json
import math
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.data import Batch, Encoded, collate, fit, note_row, word_id
from sigma0.bench.pocket.forms import TOKENS, form_scene
from sigma0.bench.pocket.items import DIFFICULTIES
from sigma0.bench.pocket.stories import ENTITIES
from sigma0.bench.pocket.structured import CODE_TOKENS, QUOTED_TOKENS, json_scene, repair_row, tool_row
from sigma0.bench.pocket.structured import TOKENS as TOOL_TOKENS
from sigma0.bench.pocket.tokenizer import MAX_LENGTH, PAD, build_tokenizer
from sigma0.bench.pocket.world import LOOK_UPS, MIX, PEOPLE, Mix, draw
from sigma0.models.ouro import OuroForCausalLM
from sigma0.models.ouro_config import OuroConfig
from sigma0.models.raven_causal import RavenForCausalLM
from sigma0.models.raven_config import RavenConfig

EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


@dataclass(frozen=True)
class Lesson:
    """A stretch of training on scenes."""

    name: str  # What it is for
    steps: int  # Optimizer steps
    hardest: int  # The highest difficulty drawn
    mix: Mix = MIX  # What is drawn how often
    trails: bool = True  # Whether a loop is asked for what is met on the way (see `train`), not for the answer
    forms: float = 0.0  # Share of questions that are asked in another form than by themselves (see `forms`)
    in_json: float = 0.0  # Share of questions that are answered in JSON (see `structured`)
    tools: float = 0.0  # Share of rows with calls of tools (see `structured`)
    repairs: float = 0.0  # Share of rows of an agent's actions on toy repositories (see `structured`)
    emphasis: float = 1.0  # Weight of an answer's tokens that decide, such as yes and no, beside its others
    rate: float = 1.0  # Of the peak rates


def _lessons(last: int) -> tuple[Lesson, ...]:
    """Look-ups, yes or no, sums, then longer ways, and for `last` steps the answer itself at every loop."""
    return (
        Lesson("one look-up", 120, 1),
        Lesson("yes or no", 560, 1, Mix(moves=1, families=1, ages=0, binary=0.85)),
        Lesson("sums", 700, 2, Mix(moves=1.5, families=1, ages=5, binary=0.2)),
        *(Lesson(f"difficulty {level}", 120, level) for level in DIFFICULTIES[1:]),
        Lesson("the answer at every loop", last, DIFFICULTIES[-1], trails=False),
    )


# Look-ups alone, of up to three sentences: no sums, no yes or no.
_LOOK_UP_LESSONS = (
    Lesson("one look-up", 60, 1, LOOK_UPS),
    Lesson("difficulty 2", 220, 2, LOOK_UPS),
    Lesson("difficulty 3", 120, 3, LOOK_UPS),
    Lesson("random recurrence", 600, 3, LOOK_UPS, trails=False),
)


@dataclass(frozen=True)
class Recurrence:
    """What a Raven needs beside the settings that it shares with one looped layer."""

    mean: float = 8.0  # Mean of the Poisson distribution's rate; the loops of a batch are one more than what it gives
    spread: float = 0.5  # Standard deviation of the logarithm of the rate
    backprop: int = 6  # Loops at the end of a batch that gradients go through
    # Share of the rows that start from drawn states in the last lesson; the others, and all rows of the lessons
    # before it, start from zero
    drawn: float = 0.25
    reads: int = 4  # Loops of a batch with hints that are read, at most; the first and the last are among them
    # What the adapter lets through of state and injection at the start. More of the state: a look-up that asks
    # for what is injected finds the same word at every loop
    adapter: tuple[float, float] = (0.9, 0.3)
    prelude: int = 1  # Layers of the prelude
    core: int = 1  # Layers of the core
    coda: int = 1  # Layers of the coda

    def draw(self, rng: Random, most: int) -> int:
        """Loops of one batch, from 1 to `most`."""
        rate = math.exp(rng.gauss(math.log(self.mean) - self.spread**2 / 2, self.spread))
        # Knuth's method: uniform numbers multiplied until they fall below exp(-rate)
        count, product, floor = 0, rng.random(), math.exp(-rate)
        while product > floor:
            count += 1
            product *= rng.random()
        return min(count + 1, most)

    def read_at(self, rng: Random, loops: int) -> list[int]:
        """The loops, counted from 1, that are read of a batch with hints that runs so many."""
        between = rng.sample(range(2, loops), min(self.reads - 2, max(0, loops - 2)))
        return sorted({1, loops, *between})


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights of a run; the defaults make `pocket-stories`."""

    seed: int = 0  # Seed of the initial weights and of the order of the training scenes
    lessons: tuple[Lesson, ...] = _lessons(2200)  # What is taught after the notes, in turn
    batch: int = 16  # Rows in a batch
    length: int = 224  # Most tokens in a row
    note_steps: int = 500  # Steps at the start that train on warm-up notes only (see `data.note_row`)
    note_batch: int = 24  # Rows in a batch of notes
    note_loops: int = 3  # Loops run on notes: fewer suffice there and cost less
    chat: float = 0.25  # Share of rows in chat form
    width: int = 128  # Hidden size
    intermediate: int = 256  # Size of the MLP's inner layer
    heads: int = 4  # Attention heads (keys and values have as many)
    loops: int = 6  # Loops at full depth, T
    rope_theta: float = 10000.0  # Base of the rotary embedding
    post_gain: float = 0.3  # Initial gain of the two norms after attention and MLP
    init_std: float = 0.02  # Standard deviation of the initial weights, the embedding (1.0) left out
    peak_rate: float = 2e-3  # AdamW's learning rate after the warm-up: embedding, head, norms
    block_rate: float = 6e-3  # Muon's learning rate after the warm-up: the matrices of the block
    last_rate: float = 0.02  # Learning rates of the last step, as a share of the peak
    warmup: int = 100  # Steps of linear warm-up
    decay: float = 0.4  # Share of the steps, at the end, over which the rates fall linearly
    anew: bool = False  # Whether the rates rise and fall in every lesson, not once in all
    weight_decay: float = 0.01  # On the matrices of the block and the head
    answer_weight: float = 20.0  # Weight of an answer token in the loss; any other token weighs 1
    subject_weight: float = 0.3  # Weight of the first loop's hint, beside a loss of mean weight 1
    clip: float = 1.0  # Largest norm of the gradient
    # What makes it a Raven, trained with a random number of loops; None is one Ouro layer with a loss at every
    # loop
    recurrence: Recurrence | None = None
    quoted: bool = False  # Whether a word behind a quotation mark is a token, at the start the same as the word
    # Recipe whose weights the run begins with; what its tokenizer lacks is new. None: all are new
    start: str | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return self.note_steps + sum(lesson.steps for lesson in self.lessons)

    def rate(self, step: int) -> float:
        """Share of the peak rates at a step: linear warm-up, level, linear fall."""
        lesson = self.lesson(step)
        steps, peak = self.steps, 1.0 if lesson is None else lesson.rate
        if self.anew and lesson is not None:
            step -= next(first for first, name in reversed(self.stages()) if name == lesson.name)
            steps = lesson.steps
        fall = max(1, round(steps * self.decay))
        left = (steps - step) / fall
        return peak * min(1.0, (step + 1) / self.warmup, self.last_rate + (1 - self.last_rate) * left)

    def lesson(self, step: int) -> Lesson | None:
        """The lesson a step belongs to, None while there are notes."""
        left = step - self.note_steps
        for lesson in self.lessons:
            if 0 <= left < lesson.steps:
                return lesson
            left -= lesson.steps
        return None

    def stages(self) -> list[tuple[int, str]]:
        """First step and name of what the run does in turn."""
        result = [(0, "notes")]
        start = self.note_steps
        for lesson in self.lessons:
            result.append((start, lesson.name))
            start += lesson.steps
        return result

    def on_trails(self, step: int) -> bool:
        """Whether the loops of a step are asked for what is met on the way."""
        lesson = self.lesson(step)
        return lesson is None or lesson.trails

    def train_loops(self, step: int) -> int:
        """Loops run at a step: as long as a loop has its own target, no more than the longest way takes."""
        lesson = self.lesson(step)
        if lesson is None:
            return min(self.note_loops, self.loops)
        return min(lesson.hardest + 3, self.loops) if lesson.trails else self.loops

    def train_batch(self, tokenizer: PreTrainedTokenizerFast, step: int) -> Batch:
        """Make the batch of a step, notes first, then the scenes of the lessons: resuming needs no reader's state."""
        lesson = self.lesson(step)
        first, size = (step, self.note_batch) if lesson is None else (step - self.note_steps, self.batch)
        rows = []
        for place in range(size):
            number = first * size + place
            if lesson is None:
                rows.append(note_row(tokenizer, self.seed, number))
            else:
                seed, chat = f"{self.seed}/{number}", place < round(size * self.chat)
                rows.append(self.row(tokenizer, lesson, "train", number, chat, seed))
        return collate(rows, tokenizer.convert_tokens_to_ids(PAD))

    def row(
        self, tokenizer: PreTrainedTokenizerFast, lesson: Lesson, split: str, number: int, chat: bool, seed: str
    ) -> Encoded:
        """Make row `number` of a split as a lesson has it; what is drawn beside its scene is drawn from `seed`."""
        scene = draw(split, self.seed, number, hardest=lesson.hardest, mix=lesson.mix)
        kind = Random(f"row/{seed}").random()
        calls = tool_row(tokenizer, scene, seed, self.length) if kind < lesson.tools else None
        if calls is not None:
            return calls
        if lesson.tools <= kind < lesson.tools + lesson.repairs:
            return repair_row(tokenizer, self.seed, number, self.length)
        asked = form_scene(json_scene(scene, seed, lesson.in_json), seed, lesson.forms)
        # so asked, a question may be longer than a row
        return fit(tokenizer, asked, chat, self.length, lesson.trails, otherwise=scene)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The micro-world's; where forms are taught, with their pieces as tokens."""
        tokenizer = build_tokenizer()
        taught = {TOKENS: "forms", TOOL_TOKENS: "tools", CODE_TOKENS: "repairs"}
        taken = [pieces for pieces, name in taught.items() if any(getattr(one, name) for one in self.lessons)]
        for pieces in (*taken, QUOTED_TOKENS) if self.quoted else taken:
            tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
        return tokenizer

    def fingerprint(self, tokenizer: PreTrainedTokenizerFast) -> str:
        """Settings and a digest of the first data of every stage, as one text.

        A run that goes on under another text would be another run. (Code that the data do not show is not in it.)
        """
        batches = [self.train_batch(tokenizer, step) for step, _ in self.stages()]
        data = [[part.tolist() for part in (batch.ids, batch.trails, batch.subjects)] for batch in batches]
        digest = blake2b(json.dumps([tokenizer.get_vocab(), data], sort_keys=True).encode()).hexdigest()
        return json.dumps({**asdict(self), "data": digest[:16]}, sort_keys=True)


_LARGE: dict[str, Any] = {"width": 160, "intermediate": 320, "heads": 5, "loops": 8}
# What people ask: stories from one sentence up that go on, what is not told, JSON, tools, and the forms of outer loops.
_ASKED = Lesson(
    *("what people ask", 3300, 6, PEOPLE), trails=False, forms=0.15, in_json=0.12, tools=0.15, repairs=0.1, emphasis=3.0
)
_PEOPLE: dict[str, Any] = {
    "lessons": (_ASKED,),
    "batch": 16,
    "length": 256,
    "note_steps": 0,
    "chat": 0.6,
    "peak_rate": 1e-3,
    "block_rate": 3e-3,
    "decay": 0.7,
}
_LAST_MIX = replace(PEOPLE, short=0.45, absent=0.05, gap=0.2)
_LAST_ASKED = replace(_ASKED, mix=_LAST_MIX, forms=0.1, repairs=0.08, rate=0.5)
_LAST: dict[str, Any] = {
    **_PEOPLE,
    "lessons": (
        Lesson("values in JSON", 700, 1, PEOPLE, in_json=0.85),
        replace(
            _ASKED, name="all of it", steps=1100, mix=replace(PEOPLE, absent=0.08, gap=0.2), in_json=0.25, rate=0.7
        ),
        # a short story whose end is not told was answered by a guess
        replace(
            _ASKED, name="what is not told", steps=600, mix=replace(PEOPLE, short=0.6, absent=0.08, gap=0.5), rate=0.5
        ),
        replace(_LAST_ASKED, name="all of it again", steps=600, in_json=0.2, tools=0.12),
        # the second number of a sum was a guess, yes and no in JSON too
        replace(
            _ASKED,
            name="sums and calls",
            steps=450,
            mix=replace(_LAST_MIX, ages=4),
            forms=0.05,
            in_json=0.3,
            tools=0.5,
            repairs=0.05,
            rate=0.7,
        ),
        replace(_LAST_ASKED, name="all of it once more", steps=450, in_json=0.25, tools=0.15),
    ),
    "block_rate": 5e-3,
    "decay": 0.4,
    "anew": True,
    "quoted": True,
}
RECIPES: dict[str, Recipe] = {
    "pocket-stories": Recipe(),
    "pocket-people": Recipe(**_PEOPLE, start="pocket-stories"),
    "pocket": Recipe(**_LAST, start="pocket-people"),
    "pocket-large-stories": Recipe(**_LARGE, lessons=_lessons(2600), block_rate=5e-3),
    "pocket-large-people": Recipe(
        **_LARGE,
        **{**_PEOPLE, "lessons": (replace(_ASKED, steps=2600),), "decay": 0.6},
        start="pocket-large-stories",
    ),
    "pocket-large": Recipe(**_LARGE, **_LAST, start="pocket-large-people"),
    "pocket-raven": Recipe(
        lessons=_LOOK_UP_LESSONS,
        batch=12,
        note_steps=300,
        intermediate=144,
        loops=16,
        peak_rate=7e-4,
        block_rate=5e-3,
        warmup=50,
        recurrence=Recurrence(),
    ),
    # taught the forms in which outer loops ask
    "pocket-solver": Recipe(
        lessons=(
            Lesson("forms", 3000, DIFFICULTIES[-1], trails=False, forms=0.85),
            Lesson("decisions", 1200, DIFFICULTIES[-1], trails=False, forms=0.9, emphasis=10.0, rate=0.5),
        ),
        batch=12,
        length=448,
        note_steps=0,
        chat=0.75,
        peak_rate=1e-3,
        block_rate=3e-3,
        decay=0.7,
        anew=True,
        start="pocket-stories",
    ),
}


def build_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, start: Path | None = None
) -> OuroForCausalLM | RavenForCausalLM:
    """Build the untrained model: one Ouro layer, or a Raven; weights from the recipe's seed, or from a model folder.

    The embedding, as it is scaled, starts at standard deviation 1. In Ouro the gains after attention and MLP start
    small: those norms add vectors of unit size to the residual, in which an embedding of the usual size would be lost.
    A Raven's adapter starts near shares of state and injection, so that a loop that has learned nothing keeps what it
    was given.
    """
    shared = {
        # it knows questions of its world, and no words about them
        "sigma0_prompts": "bare",
        "vocab_size": len(tokenizer),
        "intermediate_size": recipe.intermediate,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")},
    }
    model: OuroForCausalLM | RavenForCausalLM
    if recipe.recurrence is None:
        config = OuroConfig(
            hidden_size=recipe.width,
            num_hidden_layers=1,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            total_ut_steps=recipe.loops,
            max_position_embeddings=MAX_LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
            tie_word_embeddings=False,
            **shared,
        )
        model, embedding = OuroForCausalLM(config), 1.0
    else:
        layers = (recipe.recurrence.prelude, recipe.recurrence.core, recipe.recurrence.coda)
        raven = RavenConfig(
            block_layout="sandwich",
            qk_bias=True,
            n_embd=recipe.width,
            n_heads=recipe.heads,
            n_layers=sum(layers),
            n_layers_in_prelude=layers[0],
            n_layers_in_recurrent_block=layers[1],
            n_layers_in_coda=layers[2],
            block_size=MAX_LENGTH,
            mean_recurrence=round(recipe.recurrence.mean),
            mean_backprop_depth=recipe.recurrence.backprop,
            recurrence=recipe.loops,
            rope_base=recipe.rope_theta,
            tie_embeddings=True,
            **shared,
        )
        model, embedding = RavenForCausalLM(raven), 1 / raven.embed_scale
    draw_from = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 2:
                std = embedding if name.endswith(EMBEDDINGS) else recipe.init_std
                weight.normal_(std=std, generator=draw_from)
            else:
                weight.fill_(recipe.post_gain if name.endswith("layernorm_2.weight") else 1.0)
        if isinstance(model, RavenForCausalLM):
            assert recipe.recurrence is not None
            shares = torch.tensor(recipe.recurrence.adapter).repeat_interleave(recipe.width)
            model.transformer.adapter.weight += torch.eye(recipe.width).repeat(1, 2) * shares
        if start is not None:
            # rows of tokens that it lacks stay as they are
            parameters = dict(model.named_parameters())
            for name, weight in load_file(start / "model.safetensors").items():
                if "early_exit_gate" not in name:
                    parameters[name][: len(weight)] = weight
                if weight.dim() == 2 and len(weight) < len(tokenizer) and len(parameters[name]) == len(tokenizer):
                    for new in range(len(weight), len(tokenizer)):
                        piece = tokenizer.convert_ids_to_tokens(new)
                        if piece[0] == '"' and piece[1:] in ENTITIES:
                            parameters[name][new] = weight[word_id(tokenizer, piece[1:])]
    return model
