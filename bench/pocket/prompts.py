"""Questions about stories as prompts with known answers, for whatever reads `sigma0.calibrate.prompts`; exact answers.

Read greedily from loop k, an answer is right under teacher forcing exactly if free generation at depth k gives it:
the tokens before the first wrong one are the same in both, and loop k reads no deeper loop of any token. So one
forward pass measures what the model would write. A coda reads what earlier tokens' codas left, so there loop k is read
as a model of k loops reads it, everywhere; at the exits, that is an approximation (`free_runs` has the figure).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from sigma0.api import generate
from sigma0.bench.pocket.data import Batch, chat_messages, collate, encode, whole_answers
from sigma0.bench.pocket.forms import form_scene, in_form
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.structured import json_scene
from sigma0.bench.pocket.tokenizer import PAD
from sigma0.bench.pocket.world import MIX, PEOPLE, Mix, draw
from sigma0.calibrate.bootstrap import share
from sigma0.calibrate.prompts import Prompt
from sigma0.checkpoints.about import Form
from sigma0.config import ExitConfig, Messages
from sigma0.decode.exits import ExitRule, select_exits
from sigma0.models.looped_causal import LoopedForCausalLM
from sigma0.models.raven_causal import RavenForCausalLM
from sigma0.signals.generation import Generation

# The hard half of the dial starts here.
HARD = 4
_ROWS = 50


@dataclass(frozen=True)
class Outcome:
    """One question asked."""

    item: Item  # The question
    chat: bool  # Whether it was asked as a chat turn, not as plain text
    right: tuple[bool, ...]  # Whether the whole answer, eos included, is right when read at loop 1, ..., T
    exit_right: bool  # Whether it is right when each token is read where the exit rule stops
    exit_depth: float  # Mean loop at which the rule stops over the answer's tokens


def evaluate(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rule: ExitRule,
    n: int,
    split: str = "test",
    seed: int = 0,
    mix: Mix = MIX,
    form: Form = "answer",
) -> list[Outcome]:
    """Ask one question about each of n stories, so that the outcomes are independent; every other one as chat.

    In another form than `answer` it is drawn as it is in training: which step, which proposal, what is known already.
    """
    pad = tokenizer.convert_tokens_to_ids(PAD)
    asked = []
    for number in range(n):
        item = draw(split, seed, number, questions=1, mix=mix).items[0]
        asked.append((in_form(item, form, Random(f"{form}/{seed}/{number}")), number % 2 == 1))
    outcomes: list[Outcome] = []
    for start in range(0, n, _ROWS):
        part = asked[start : start + _ROWS]
        outcomes += _outcomes(model, collate([encode(tokenizer, [item], chat) for item, chat in part], pad), part, rule)
    return outcomes


def summarize(outcomes: Sequence[Outcome]) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures of outcomes by family, hops, difficulty, half and form, and of all together.

    A guess is worth at most a quarter on an open question and a half on one answered by yes or no, so these two are
    also counted apart.

    Returns:
        For each group of each kind plain JSON values: its questions `n`; the shares that are right at each of the
        `loops`, and at the `exit`, with exact 95 % intervals; and the mean `exit_depth`.
    """
    keys: dict[str, Callable[[Outcome], str]] = {
        "family": lambda o: o.item.family,
        "hops": lambda o: str(o.item.hops),
        "difficulty": lambda o: str(o.item.difficulty),
        "open, difficulty": lambda o: "" if o.item.binary else str(o.item.difficulty),
        "yes or no, difficulty": lambda o: str(o.item.difficulty) if o.item.binary else "",
        "half": lambda o: "hard" if o.item.difficulty >= HARD else "easy",
        "open, half": lambda o: "" if o.item.binary else "hard" if o.item.difficulty >= HARD else "easy",
        "form": lambda o: "chat" if o.chat else "plain",
        "all": lambda o: "all",
    }
    groups = {}
    for name, key in keys.items():
        values = sorted({key(outcome) for outcome in outcomes} - {""})
        groups[name] = {value: _figures([o for o in outcomes if key(o) == value]) for value in values}
    return groups


def _figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    n = len(outcomes)
    loops = [share(sum(column), n) for column in zip(*(outcome.right for outcome in outcomes), strict=True)]
    exits = share(sum(outcome.exit_right for outcome in outcomes), n)
    return {
        "n": n,
        "loops": [loop.value for loop in loops],
        "intervals": [loop.interval for loop in loops],
        "exit": exits.value,
        "exit_interval": exits.interval,
        "exit_depth": sum(outcome.exit_depth for outcome in outcomes) / n,
    }


@torch.no_grad()
def _outcomes(
    model: LoopedForCausalLM, batch: Batch, asked: Sequence[tuple[Item, bool]], rule: ExitRule
) -> Iterable[Outcome]:
    output = model.base_model(input_ids=batch.ids, use_cache=False)
    marks = batch.answer[:, 1:]
    states = output.loop_states[:, :, :-1][:, marks]  # [T, N, D]
    # as a model of so many loops has them
    read = output.loop_states
    if isinstance(model, RavenForCausalLM):
        read = torch.stack([model.transformer.read_prompt(entry, None, None) for entry in read])
    logits = model.lm_head(read[:, :, :-1][:, marks])  # [T, N, V]
    right = logits.argmax(-1) == batch.ids[:, 1:][marks]
    gates = None if output.gate_logits is None else output.gate_logits[:, None, :, :-1][:, :, marks]
    by_turn = iter(logits)
    depths = select_exits(rule, states[:, None], gates, lambda hidden: next(by_turn)).depths[0]  # [N]
    numbers = batch.answer_numbers()
    by_loop = whole_answers(right, numbers).T.tolist()
    at_exit = whole_answers(right.gather(0, depths[None] - 1), numbers)[0].tolist()
    total = torch.zeros(len(asked)).index_add_(0, numbers, depths.float())
    mean_depths = (total / numbers.bincount()).tolist()
    for (item, chat), loops, done, depth in zip(asked, by_loop, at_exit, mean_depths, strict=True):
        yield Outcome(item, chat, tuple(loops), done, depth)


_LONGEST, _IN_JSON = 24, 0.2


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
        said = ("JSON",) if self.item.answer.startswith("{") else said
        turn = {1: "first turn", 2: "second turn"}.get(self.turn, "later turns")
        return ("all", length if self.turn == 1 else "after other questions", turn, *sums, *said)


def people(n: int, split: str = "test", seed: int = 0, mix: Mix = PEOPLE) -> Iterator[PeopleAsked]:
    """One question in each of n other chats, some in JSON; every other first one is plain text."""
    seen: set[str] = set()
    for index in count():
        if len(seen) == n:
            return
        scene = draw(split, seed, index, questions=4, mix=mix)
        turn = index // 2 % min(3, len(scene.items)) + 1
        in_json = json_scene(scene, f"{split}/{seed}/{index}", _IN_JSON)
        # without a schema only the keys say what is asked for
        items = [plain if item.given else item for plain, item in zip(scene.items, in_json.items, strict=True)]
        as_text = turn == 1 and index % 2 == 1
        content: str | Messages = items[0].prompt if as_text else chat_messages(items[:turn])[:-1]
        asked = PeopleAsked(Prompt(content, items[turn - 1].answer), items[turn - 1], turn)
        if (text := json.dumps(content)) not in seen:
            seen.add(text)
            yield asked


def check_people(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    n: int,
    split: str = "test",
    seed: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, dict[str, Any]]:
    """Answers written freely: of each kind `n`, and the shares that are right at each of the `loops`, and at the exits.

    At the exits they are `right`, and have `open` doors; of those with an open door `open_right` are right, or 1 of
    none.
    """
    counts: dict[str, Counter[str | int]] = {}
    loops = range(1, model.num_loops + 1)
    for place, asked in enumerate(people(n, split, seed)):
        written = generate(model, tokenizer, asked.prompt.content, max_new_tokens=_LONGEST, verdict=True)
        right, opens = written.text.strip() == asked.prompt.answer, written.door == "converge"
        read: dict[str | int, int] = {"n": 1, "right": right, "open": opens, "both": right and opens}
        for loop in loops:
            at_loop = generate(
                *(model, tokenizer, asked.prompt.content),
                max_new_tokens=_LONGEST,
                exit_config=ExitConfig(mode="fixed", depth=loop),
            )
            read[loop] = at_loop.text.strip() == asked.prompt.answer
        for kind in asked.kinds:
            counts.setdefault(kind, Counter()).update(read)
        advance(place + 1)
    return {
        kind: {
            "n": count["n"],
            "loops": [count[loop] / count["n"] for loop in loops],
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
