"""`python -m sigma0.bench outer`: outer loops on held-out questions, beside votes that cost the same."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from math import ceil
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from sigma0.bench.core.conditions import describe
from sigma0.bench.core.ledger import OWN, OuterRow, append_row, check_ledger
from sigma0.bench.core.options import AsJsonLines, FormsModel, HardStories, LedgerFile, ShownExamples
from sigma0.bench.core.output import tell_rows
from sigma0.bench.outer.measure import Asked, Result, examples, hard_questions, run, run_vote, to_row, where_from
from sigma0.bench.outer.table import levels_table, table
from sigma0.bench.outer.ways import (
    MAX_TOKENS,
    Learned,
    Way,
    lemmas,
    plain,
    planned,
    reasoned,
    routed,
    sampled,
    verified,
    walked,
)
from sigma0.bench.pocket.items import Item
from sigma0.checkpoints.about import read_about
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import Threads
from sigma0.models.load import load_causal
from sigma0.models.prompts import encode
from sigma0.reason.chat import ChatModel, LocalChat
from sigma0.reason.progressive.policies import ProgressiveConfig, Stage
from sigma0.reason.shown_forms import ShownForms

FLAT_LOW = ProgressiveConfig("flat low", (Stage("low", 2),))
RISING = ProgressiveConfig("low to high", (Stage("low", 1), Stage("medium", 1), Stage("high", 1)))
FLAT_HIGH = ProgressiveConfig("flat high", (Stage("high", 2),))
BY_RULE = "yes or no by rule"
PLAIN, PLAIN_HIGH = "plain answer", "plain answer, high effort"


def loops() -> dict[str, Way]:
    """The outer loops by name, made anew: one of them learns."""
    return {
        "plan, unchecked": planned,
        "check, once": reasoned,
        "effort: flat low": verified(FLAT_LOW),
        "effort: low to high": verified(RISING),
        "effort: flat high": verified(FLAT_HIGH),
        "lemma graph": lemmas(),
        "walk": walked,
        "walk where the verdict doubts": routed(walked),
        "walk where plain answers were wrong": Learned(walked),
    }


def outer(
    model: FormsModel = "pocket-solver",
    larger: Annotated[str, typer.Option(help="A larger one, asked alone.")] = "pocket-large",
    n: HardStories = 500,
    seed: Annotated[int, typer.Option(help="Of the stories and the samples.")] = 0,
    shown: ShownExamples = 3,
    ways: Annotated[str, typer.Option(help="Some of the loops, separated by semicolons; all by default.")] = "",
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    most_votes: Annotated[int, typer.Option(min=1, help="Answers of a vote at most.")] = 32,
    threads: Threads = 1,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Each outer loop on held-out hard questions, beside the plain answer, votes of equal cost and a larger model."""
    torch.set_num_threads(threads)
    started = datetime.now(timezone.utc).isoformat()
    with one_line_errors():
        check_ledger(out)
        items = hard_questions(n, seed)
        where = where_from(seed)
        chosen = choose(ways)
        small, block = open_asked(model, items, where, shown, dtype=dtype)
        large, _ = open_asked(larger, items, where, shown, block)
        if model != larger and small.conditions.model == large.conditions.model:
            raise ValueError(f"{model!r} and {larger!r} have one name, so that their rows could not be told apart")
        total = n * (len(chosen) + 3 + 2 * most_votes)
        with progress_bar("questions", total, as_json) as advance:
            measured = _Measured(items, seed, started, most_votes, out, advance)
            _measure(measured, chosen, small, large)
    told = measured.rows
    tables = [each.rich() for each in (table(told), levels_table(told)) if each.rows]
    tell_rows(told, as_json, lambda: Console().print(*tables), f"{len(told)} rows in {out}")


def choose(names: str) -> dict[str, Way]:
    """Some of the loops.

    Args:
        names: Parted by semicolons, since some hold commas; empty for all.

    Raises:
        ValueError: For a name that there is not.
    """
    known = loops()
    wanted = [name.strip() for name in names.split(";") if name.strip()] or list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no such loop: {unknown[0]!r}; there are {'; '.join(known)}")
    return {name: known[name] for name in wanted}


def open_asked(
    name: str,
    items: Sequence[Item],
    where: str,
    shown: int | None,
    first_block: int | None = None,
    dtype: str = "float32",
) -> tuple[Asked, int]:
    """A model, and the numbers of its block; one that was not taught the forms is shown them, but where it is None.

    Of a folder its rows have the name alone: where it lies on this machine tells nobody anything.
    """
    model, tokenizer = load_causal(name, device="cpu", dtype=dtype)
    short = Path(name).absolute().name if Path(name).is_dir() else name
    block = sum(weight.numel() for layer in model.base_model.layers for weight in layer.parameters())
    ids = [tuple(encode(tokenizer, [{"role": "user", "content": item.prompt}])[0].tolist()) for item in items]
    chat: ChatModel = LocalChat(model, tokenizer, short)
    about = read_about(model.name_or_path)
    if about is None and shown is not None:
        chat, where = ShownForms(chat, examples(shown)), f"{where}; {shown} examples of each form, held to its grammar"
    conditions = describe(model, name, where, ids, [item.answer for item in items], MAX_TOKENS)
    return Asked(chat, conditions.model_copy(update={"model": short}), block / (first_block or block)), block


class _Measured:
    """The rows of a run, in the ledger as they come: a run that breaks off leaves those that it has.

    Args:
        items: All questions.
        seed: Of the run.
        time: When it began.
        most_votes: Answers of a vote at most.
        out: The ledger.
        advance: Told how many questions were asked.
    """

    def __init__(
        self, items: Sequence[Item], seed: int, time: str, most_votes: int, out: Path, advance: Callable[[int], None]
    ) -> None:
        self.rows: list[OuterRow] = []
        self._items, self._seed, self._time, self._out, self._advance = items, seed, time, out, advance
        self._most_votes = most_votes
        self._results: dict[str, list[Result]] = {}
        self._drawn: dict[str, list[list[Result]]] = {}
        self._asked = 0

    def run(self, name: str, way: Way, asked: Asked) -> float:
        """Asks every question in a way; what one cost."""
        self._results[name] = run(way, asked.chat, self._items, self._seed, self._count)
        return asked.cost(self._results[name])

    def keep(self, name: str, asked: Asked, beside: Sequence[str] = ()) -> None:
        """Adds the row of a way that was run, with how it stands to others."""
        others = {other: self._results[other] for other in beside}
        self.rows.append(to_row(name, asked, self._results[name], others, self._seed, self._time))
        append_row(self._out, self.rows[-1])

    def vote(self, asked: Asked, one: float, cost: float) -> str:
        """Runs the smallest vote that costs no less than `cost`, where one answer costs `one`; its name."""
        wanted = max(1, ceil(cost / one))
        votes = min(self._most_votes, wanted)
        drawn = self._drawn.setdefault(asked.conditions.model, [])
        while len(drawn) < votes:
            drawn.append(run(sampled(len(drawn)), asked.chat, self._items, self._seed, self._count))
        name = f"vote of {votes}{', which costs less' if wanted > votes else ''}"
        if asked.conditions.model != self.rows[0].model:
            name = f"{asked.conditions.model}: {name}"
        for each, by_rule in ((name, False), (f"{name}, {BY_RULE}", True)):
            if each not in self._results:
                self._results[each] = run_vote(self._items, drawn[:votes], by_rule)
                self.keep(each, asked, (PLAIN,))
        return name

    def _count(self) -> None:
        self._asked += 1
        self._advance(self._asked)


def _measure(measured: _Measured, chosen: Mapping[str, Way], small: Asked, large: Asked) -> None:
    """All ways: each loop beside the plain answer and the vote that costs as much, and the larger model alone."""
    one = measured.run(PLAIN, plain(), small)
    measured.keep(PLAIN, small)
    measured.run(PLAIN_HIGH, plain("high"), small)
    measured.keep(PLAIN_HIGH, small, (PLAIN,))
    dearest = 0.0
    for name, way in chosen.items():
        cost = measured.run(name, way, small)
        vote = measured.vote(small, one, cost)
        measured.keep(name, small, (PLAIN, vote, f"{vote}, {BY_RULE}"))
        dearest = max(dearest, cost)
    alone = f"{large.conditions.model}: {PLAIN}"
    cost = measured.run(alone, plain(), large)
    measured.keep(alone, large, (PLAIN,))
    measured.vote(large, cost, dearest)
