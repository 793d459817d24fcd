"""Questions about stories as prompts with known answers, for whatever reads `sigma0.calibrate.prompts`; free runs."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice

from transformers import PreTrainedTokenizerFast

from sigma0.api import generate
from sigma0.bench.pocket.data import chat_messages
from sigma0.bench.pocket.evaluate import HARD
from sigma0.bench.pocket.forms import form_scene
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.world import MIX, PEOPLE, Mix, draw
from sigma0.calibrate.prompts import Prompt
from sigma0.config import ExitConfig, Messages
from sigma0.models.looped_causal import LoopedForCausalLM
from sigma0.signals.generation import Generation

_LONGEST = 24


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


@dataclass(frozen=True)
class PeopleAsked:
    """A question as people ask it, with what was said before."""

    prompt: Prompt  # Earlier answers in it are right ones
    item: Item
    turn: int  # Of the chat, from 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """The groups that it is counted in."""
        sentences = self.item.story.count(". ") + 1
        length = "one or two sentences" if sentences <= 2 else "few sentences" if sentences <= 4 else "longer"
        sums = ("sums",) if self.item.family == "age" and self.item.hops > 1 else ()
        said = {"unsaid": ("not told",)}.get(self.item.family, ("yes or no",) if self.item.binary else ())
        turn = {1: "first turn", 2: "second turn"}.get(self.turn, "later turns")
        return ("all", length if self.turn == 1 else "after other questions", turn, *sums, *said)


def people(n: int, split: str = "test", seed: int = 0, mix: Mix = PEOPLE) -> Iterator[PeopleAsked]:
    """One question in each of n chats; every other one that opens its chat as plain text."""
    for index in range(n):
        items = draw(split, seed, index, questions=4, mix=mix).items
        turn = index // 2 % min(3, len(items)) + 1
        content: str | Messages = chat_messages(items[:turn])[:-1]
        if turn == 1 and index % 2:
            content = items[0].prompt
        yield PeopleAsked(Prompt(content, items[turn - 1].answer), items[turn - 1], turn)


def check_people(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    n: int,
    split: str = "test",
    seed: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, dict[str, float]]:
    """Answers written freely at the exits: of each kind `n`, and the shares that are `right`, and have `open` doors.

    Of those with an open door `open_right` are right, or 1 of none.
    """
    counts: dict[str, Counter[str]] = {}
    for place, asked in enumerate(people(n, split, seed)):
        written = generate(model, tokenizer, asked.prompt.content, max_new_tokens=_LONGEST, verdict=True)
        right, opens = written.text.strip() == asked.prompt.answer, written.door == "converge"
        for kind in asked.kinds:
            counts.setdefault(kind, Counter()).update(n=1, right=right, open=opens, both=right and opens)
        advance(place + 1)
    return {
        kind: {
            "n": count["n"],
            "right": count["right"] / count["n"],
            "open": count["open"] / count["n"],
            "open_right": count["both"] / count["open"] if count["open"] else 1.0,
        }
        for kind, count in sorted(counts.items())
    }


def json_line(prompt: Prompt) -> str:
    """A prompt as one line of a JSON Lines file."""
    return json.dumps({"prompt": prompt.content, "answer": prompt.answer}, ensure_ascii=False)


def free_runs(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    n: int,
    split: str,
    seed: int,
    exit_config: ExitConfig | None = None,
    mix: Mix = MIX,
) -> dict[str, float]:
    """Asks one question about each of n stories, every other one as chat, at the exits and at full depth.

    Returns:
        The questions `n`; the shares of answers that are the `same` as full depth's, token for token, and `right` at
        the exits and `right_at_full_depth`; and, over the tokens after each answer's first, `depth_saved` (1 - sum of
        exit depths / (T tokens)), `passes_saved` and `rows_saved`.
    """
    exits: list[Generation] = []
    same = right = right_full = 0
    for prompt in micro_world(n, split, seed, mix=mix):
        early, full = (
            generate(model, tokenizer, prompt.content, max_new_tokens=_LONGEST, exit_config=rule, on_collapse="ignore")
            for rule in (exit_config, ExitConfig(mode="full"))
        )
        exits.append(early)
        same += [token.id for token in early.tokens] == [token.id for token in full.tokens]
        right += early.text.strip() == prompt.answer
        right_full += full.text.strip() == prompt.answer
    full_depth = model.num_loops * sum(len(run.tokens) - 1 for run in exits)
    return {
        "n": n,
        "same": same / n,
        "right": right / n,
        "right_at_full_depth": right_full / n,
        "depth_saved": 1 - sum(token.depth for run in exits for token in run.tokens[1:]) / full_depth,
        "passes_saved": 1 - sum(run.loop_passes for run in exits) / full_depth,
        "rows_saved": 1 - sum(run.loop_rows for run in exits) / full_depth,
    }
