"""`python -m sigma0.bench outer`: outer loops on held-out questions, beside votes that cost the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import ceil
from typing import Annotated

import torch
import typer
from rich.console import Console

from sigma0.bench.core.conditions import device_name, git_commit, weights_sha256
from sigma0.bench.core.options import ReportFile
from sigma0.bench.core.output import tell_report
from sigma0.bench.outer.measure import Difference, Result, Summary, difference, hard_questions, report, run, summarise
from sigma0.bench.outer.table import differences_table, ways_table
from sigma0.bench.outer.ways import Way, lemmas, plain, planned, reasoned, verified, voted, walked
from sigma0.bench.pocket.items import Item
from sigma0.commands.console import one_line_errors, progress_bar, quiet_transformers
from sigma0.commands.options import AsJson, Threads
from sigma0.models.load import load
from sigma0.reason.chat import LocalChat
from sigma0.reason.progressive.policies import HYBRID_DEFAULT, ProgressiveConfig, Stage

FLAT_LOW = ProgressiveConfig("flat low", (Stage("low", 2),))
RISING = ProgressiveConfig("low to high", (Stage("low", 1), Stage("medium", 1), Stage("high", 1)))
FLAT_HIGH = ProgressiveConfig("flat high", (Stage("high", 2),))
LOOPS: dict[str, Way] = {
    "plan, unchecked": planned,
    "check, once": reasoned,
    "effort: flat low": verified(FLAT_LOW),
    "effort: low to high": verified(RISING),
    "effort: flat high": verified(FLAT_HIGH),
    "effort: hybrid_default": verified(HYBRID_DEFAULT),
    "lemma graph": lemmas(),
    "walk": walked,
}
PLAIN = "plain answer"
# A vote of more answers than that says no more.
MOST_VOTES = 64


@dataclass(frozen=True)
class _Asked:
    """A model that ways ask.

    Attributes:
        chat: It.
        loops: Its T.
        weight: Bytes of its block over those of the first model's.
    """

    chat: LocalChat
    loops: int
    weight: float


def outer(
    model: Annotated[
        str, typer.Argument(help="A model that knows the forms: shipped name or folder.")
    ] = "pocket-solver",
    larger: Annotated[str, typer.Option(help="A larger one, asked alone.")] = "pocket-large",
    n: Annotated[
        int, typer.Option("-n", "--n", min=2, help="Held-out stories of the hard half, one question each.")
    ] = 500,
    seed: Annotated[int, typer.Option(help="Of the stories and the samples.")] = 0,
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Each outer loop on held-out hard questions, beside the plain answer, votes of equal cost and a larger model."""
    quiet_transformers()
    torch.set_num_threads(threads)
    started = datetime.now(timezone.utc).isoformat()
    with one_line_errors():
        small = _open(model, None)
        large = _open(larger, small)
        items = hard_questions(n, seed)
        summaries, differences = _measure(small, large, items, seed, as_json)
    settings = {
        "model": model,
        "model_sha256": weights_sha256(model),
        "larger": larger,
        "larger_sha256": weights_sha256(larger),
        "questions": f"{n}, one about each story, micro-world, test split, hard half, seed {seed}",
        "device": device_name(small.chat.model.device),
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "commit": git_commit(),
        "time": started,
    }
    if not tell_report(report(summaries, differences, settings), out, as_json):
        return
    console = Console()
    console.print(ways_table(summaries).rich(no_wrap=("way",)))
    console.print(differences_table(differences).rich(no_wrap=("first", "second")))
    console.print(", ".join(f"{name} {value}" for name, value in settings.items()))


def _open(name: str, first: _Asked | None) -> _Asked:
    model, tokenizer = load(name, dtype="float32")
    block = sum(weight.numel() for layer in model.model.layers for weight in layer.parameters())
    chat = LocalChat(model, tokenizer, name)
    return _Asked(chat, model.num_loops, 1.0 if first is None else block / _block(first))


def _block(asked: _Asked) -> int:
    return sum(weight.numel() for layer in asked.chat.model.model.layers for weight in layer.parameters())


def _measure(
    small: _Asked, large: _Asked, items: Sequence[Item], seed: int, hidden: bool
) -> tuple[list[Summary], list[Difference]]:
    """All ways, and how each stands to the plain answer and to the vote that costs as much."""
    summaries: list[Summary] = []
    found: dict[str, Sequence[Result]] = {}
    total = len(items) * (2 * len(LOOPS) + 4)
    with progress_bar("questions", total, hidden) as advance:
        done = iter(range(1, total + 1))

        def add(name: str, way: Way, asked: _Asked) -> Summary:
            if name in found:
                return next(summary for summary in summaries if summary.way == name)
            found[name] = run(way, asked.chat, items, seed, lambda: advance(next(done)))
            summaries.append(summarise(name, asked.chat.name, found[name], asked.loops, asked.weight))
            return summaries[-1]

        one = add(PLAIN, plain(), small)
        add(f"{PLAIN}, high effort", plain("high"), small)
        beside = {name: _matched(add, small, one.cost, add(name, way, small).cost) for name, way in LOOPS.items()}
        alone = add(f"{large.chat.name}, plain answer", plain(), large)
        _matched(add, large, alone.cost, max(summary.cost for summary in summaries if summary.way in LOOPS))
    pairs = [pair for name, vote in beside.items() for pair in ((name, PLAIN), (name, vote))]
    return summaries, [difference((first, second), found[first], found[second]) for first, second in pairs]


def _matched(add: Callable[[str, Way, _Asked], Summary], asked: _Asked, one: float, cost: float) -> str:
    """Runs the smallest vote that costs no less than `cost`, where one answer costs `one`; its name."""
    votes = min(MOST_VOTES, max(1, ceil(cost / one)))
    name = f"vote of {votes}" if asked.weight == 1 else f"{asked.chat.name}, vote of {votes}"
    add(name, voted(votes), asked)
    return name
