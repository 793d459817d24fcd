"""The harnesses' questions: the micro-world's, of held-out stories, as rows of JSON.

`python -m sigma0.bench.harness.items` writes the files again.
"""

import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from sigma0.bench.pocket.world import MIX, draw

TASKS = Path(__file__).parent / "tasks"
QUESTIONS = 40


def choices() -> Iterator[dict[str, Any]]:
    """Questions that are answered by yes or no."""
    for index in count():
        for item in draw("test", 0, index, questions=1, mix=MIX.__class__(binary=1.0)).items:
            if item.binary:
                yield {"id": f"choice-{index}", "prompt": item.prompt, "yes": item.key == "Yes"}


def answers() -> Iterator[dict[str, Any]]:
    """Questions that are answered by a sentence, and the one word of it that had to be found."""
    for index in count():
        for item in draw("test", 1, index, questions=1, mix=MIX.__class__(binary=0.0)).items:
            yield {"id": f"answer-{index}", "prompt": item.prompt, "answer": item.answer, "key": item.key}


def files() -> dict[str, str]:
    """What each file in `tasks` holds."""
    rows = {"micro_world_choice.jsonl": choices(), "micro_world_answer.jsonl": answers()}
    return {name: "".join(json.dumps(row) + "\n" for row in islice(result, QUESTIONS)) for name, result in rows.items()}


if __name__ == "__main__":
    for name, text in files().items():
        (TASKS / name).write_text(text, encoding="utf-8")
