"""Exact-answer accuracy on held-out stories, by family, hops, difficulty and loop readout.

Read greedily from loop k, an answer is right under teacher forcing exactly if free generation at depth k gives it:
the tokens before the first wrong one are the same in both, and loop k reads no deeper loop of any token. So one
forward pass measures what the model would write. A coda reads what earlier tokens' codas left, so there loop k is read
as a model of k loops reads it, everywhere; at the exits, that is an approximation, and `free.py` has the figure.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.data import Batch, collate, encode, whole_answers
from sigma0.bench.pocket.forms import in_form
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.tokenizer import PAD
from sigma0.bench.pocket.world import MIX, Mix, draw
from sigma0.calibrate.bootstrap import share
from sigma0.checkpoints.about import Form
from sigma0.decode.exits import ExitRule, select_exits
from sigma0.models.looped_causal import LoopedForCausalLM
from sigma0.models.outputs import LoopedModelOutput
from sigma0.models.raven_causal import RavenForCausalLM

# The hard half of the dial starts here.
HARD = 4
_ROWS = 50


@dataclass(frozen=True)
class Outcome:
    """One question asked.

    Attributes:
        item: The question.
        chat: Whether it was asked as a chat turn, not as plain text.
        right: Whether the whole answer, eos included, is right when read at loop 1, ..., T.
        exit_right: Whether it is right when each token is read where the exit rule stops.
        exit_depth: Mean loop at which the rule stops over the answer's tokens.
    """

    item: Item
    chat: bool
    right: tuple[bool, ...]
    exit_right: bool
    exit_depth: float


@dataclass(frozen=True)
class Group:
    """Accuracy of a group of questions with exact 95 % intervals; `loops` holds loop 1, ..., T."""

    n: int
    loops: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...]
    exit: float
    exit_interval: tuple[float, float]
    exit_depth: float


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
    outcomes: list[Outcome] = []
    for start in range(0, n, _ROWS):
        numbers = range(start, min(start + _ROWS, n))
        asked = [(_draw(split, seed, k, mix, form), k % 2 == 1) for k in numbers]
        batch = collate([encode(tokenizer, [item], chat) for item, chat in asked], pad)
        outcomes += _outcomes(model, batch, asked, rule)
    return outcomes


def _draw(split: str, seed: int, number: int, mix: Mix, form: Form) -> Item:
    item = draw(split, seed, number, questions=1, mix=mix).items[0]
    return in_form(item, form, Random(f"{form}/{seed}/{number}"))


def summarize(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Group]]:
    """Group outcomes by family, hops, difficulty, half and form, and all together.

    A guess is worth at most a quarter on an open question and a half on one answered by yes or no, so these two are
    also counted apart.
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
        groups[name] = {value: _group([o for o in outcomes if key(o) == value]) for value in values}
    return groups


def to_json(groups: Mapping[str, Mapping[str, Group]], **about: object) -> str:
    """The figures as JSON, with what they are about beside them."""
    figures = {name: {value: asdict(group) for value, group in part.items()} for name, part in groups.items()}
    return json.dumps({**about, "groups": figures}, indent=1)


def as_table(groups: Mapping[str, Mapping[str, Group]], title: str) -> Table:
    """The figures as a table: percent right by loop, the interval at full depth, and what the exit rule does."""
    loops = len(groups["all"]["all"].loops)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    columns = (str(loop) for loop in range(1, loops + 1))
    for column in ("read at loop", "n", *columns, "95 %", "exits", "depth"):
        table.add_column(column, justify="left" if column == "read at loop" else "right", no_wrap=True)
    for name, part in groups.items():
        for value, group in part.items():
            low, high = group.intervals[-1]
            shares = [*(f"{100 * share:.0f}" for share in group.loops[:-1]), f"{100 * group.loops[-1]:.1f}"]
            interval = f"{100 * low:.1f}-{100 * high:.1f}"
            table.add_row(
                group_label(name, value),
                str(group.n),
                *shares,
                interval,
                f"{100 * group.exit:.1f}",
                f"{group.exit_depth:.2f}",
            )
        table.add_section()
    return table


def group_label(name: str, value: str) -> str:
    """What a table calls a group."""
    if name in ("all", "family", "form"):
        return value
    return name.replace("half", f"{value} half") if name.endswith("half") else f"{name} {value}"


def _group(outcomes: Sequence[Outcome]) -> Group:
    n = len(outcomes)
    by_loop = [sum(column) for column in zip(*(outcome.right for outcome in outcomes), strict=True)]
    exits = sum(outcome.exit_right for outcome in outcomes)
    return Group(
        n=n,
        loops=tuple(right / n for right in by_loop),
        intervals=tuple(share(right, n).interval for right in by_loop),
        exit=exits / n,
        exit_interval=share(exits, n).interval,
        exit_depth=sum(outcome.exit_depth for outcome in outcomes) / n,
    )


@torch.no_grad()
def _outcomes(
    model: LoopedForCausalLM, batch: Batch, asked: Sequence[tuple[Item, bool]], rule: ExitRule
) -> Iterable[Outcome]:
    output = model.base_model(input_ids=batch.ids, use_cache=False)
    marks = batch.answer[:, 1:]
    states = output.loop_states[:, :, :-1][:, marks]  # [T, N, D]
    logits = _loop_logits(model, output, marks)  # [T, N, V]
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


def _loop_logits(model: LoopedForCausalLM, output: LoopedModelOutput, marks: torch.Tensor) -> torch.Tensor:
    """Logits `[T, N, V]` of the marked positions, as a model of so many loops has them.

    Args:
        model: The model.
        output: Of all loops.
        marks: bool `[B, S - 1]`.
    """
    assert output.loop_states is not None
    states = list(output.loop_states)
    if isinstance(model, RavenForCausalLM):
        states = [model.transformer.read_prompt(each, None, None) for each in states]
    logits: torch.Tensor = model.lm_head(torch.stack([each[:, :-1][marks] for each in states]))
    return logits
