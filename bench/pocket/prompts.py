"""Questions about stories as prompts with known answers, for whatever reads `sigma0.prompts`."""

import json
from collections.abc import Iterator

from sigma0.bench.pocket.data import chat_messages
from sigma0.bench.pocket.world import draw
from sigma0.prompts import Prompt


def micro_world(n: int, split: str = "test", seed: int = 0) -> Iterator[Prompt]:
    """One question about each of n stories, every other one as chat."""
    for index in range(n):
        item = draw(split, seed, index, questions=1).items[0]
        yield Prompt(chat_messages([item])[:1] if index % 2 else item.prompt, item.answer)


def json_line(prompt: Prompt) -> str:
    """A prompt as one line of a JSON Lines file."""
    return json.dumps({"prompt": prompt.content, "answer": prompt.answer}, ensure_ascii=False)
