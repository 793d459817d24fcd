"""Questions about stories as prompts with known answers, for whatever reads `sigma0.calibrate.prompts`."""

import json
from collections.abc import Iterator
from itertools import count, islice

from sigma0.bench.pocket.data import chat_messages
from sigma0.bench.pocket.evaluate import HARD
from sigma0.bench.pocket.forms import form_scene
from sigma0.bench.pocket.world import MIX, Mix, draw
from sigma0.calibrate.prompts import Prompt


def micro_world(
    n: int,
    split: str = "test",
    seed: int = 0,
    hard: bool = False,
    mix: Mix = MIX,
    hardest: int = 6,
    difficulty: int | None = None,
    forms: float = 0.0,
) -> Iterator[Prompt]:
    """One question about each of n stories, every other one as chat; of the hard half alone where asked.

    A share of `forms` of them is asked in the forms of outer loops.
    """
    scenes = ((index, draw(split, seed, index, difficulty, 1, hardest, mix)) for index in count())
    items = (form_scene(scene, f"{split}/{seed}/{index}", forms).items[0] for index, scene in scenes)
    asked = (item for item in items if not hard or item.difficulty >= HARD)
    for index, item in enumerate(islice(asked, n)):
        yield Prompt(chat_messages([item])[:1] if index % 2 else item.prompt, item.answer)


def json_line(prompt: Prompt) -> str:
    """A prompt as one line of a JSON Lines file."""
    return json.dumps({"prompt": prompt.content, "answer": prompt.answer}, ensure_ascii=False)
