"""Exact-answer accuracy on held-out stories, by family, hops, difficulty and loop readout.

Read greedily from loop k, an answer is right under teacher forcing exactly if free generation at depth k gives it:
the tokens before the first wrong one are the same in both, and loop k reads no deeper loop of any token. So one
forward pass measures what the model would write. A coda reads what earlier tokens' codas left, so there loop k is read
as a model of k loops reads it, everywhere; at the exits, that is an approximation (`prompts.free_runs` has the figure).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
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
from sigma0.models.raven_causal import RavenForCausalLM

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
