"""When a text that runs in circles is ended: false stops on ordinary texts, loops ended, and what looking costs."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sigma0.api import generate
from sigma0.bench.pocket.world import draw
from sigma0.calibrate.bootstrap import bootstrap
from sigma0.calibrate.prompts import Prompt
from sigma0.decode.ops import operations
from sigma0.decode.repetition import CollapseStop, TextStats
from sigma0.decode.transfer import Ints

# Of a stored text, read as a text of its own.
STRETCH = 256
TAUS, RUNNINGS = (0.7, 0.8, 0.9, 0.95), (1, 4, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Series:
    """Proximities of one text, of its ids alone."""

    kind: str  # What it is
    onset: int  # Ids once it must be noticed; 0 of an ordinary text
    values: tuple[float, ...]  # After each id, `[N]`


def series(kind: str, ids: Iterable[int], onset: int = 0) -> Series:
    """The proximities of one text."""
    stats, current = TextStats(operations("auto", torch.device("cpu"))), [int(token_id) for token_id in ids]
    return Series(kind, onset, tuple(stats.take([stats.text()] * len(current), current)[-1]))


def stretches(kind: str, ids: Ints) -> Iterator[Series]:
    """A stored text, a stretch at a time."""
    for start in range(0, len(ids) - STRETCH + 1, STRETCH):
        yield series(kind, ids[start : start + STRETCH].tolist())


def stories(tokenizer: Any, n: int, seed: int) -> Iterator[Series]:
    """Held-out stories of the models' own world, with their questions and answers: as repetitive as texts there are."""
    for index in range(n):
        items = draw("test", seed, index, questions=5).items
        output = items[0].prompt + "".join(f" {item.answer} {item.question}" for item in items[1:])
        yield series("stories", tokenizer(output)["input_ids"])


def ended_at(entry: Series, tau: float, running: int, every: int) -> int | None:
    """Ids after which a text is ended; None where it is not."""
    high = np.array(entry.values) >= tau
    runs = np.convolve(high, np.ones(running, dtype=np.int64))[: len(high)] == running
    ends = [number + 1 for number in np.flatnonzero(runs).tolist() if (number + 1) % every == 0]
    return ends[0] if ends else None


def rows(texts: Sequence[Series], tau: float, running: int) -> list[dict[str, Any]]:
    """What a setting of `CollapseStop` ends, by kind.

    Returns:
        Beside kind and setting the number of texts, of those `ended`, and how `late`: the median of the ids from the
        onset to the end; None of ordinary texts.
    """
    result = []
    for kind in dict.fromkeys(entry.kind for entry in texts):
        current = [entry for entry in texts if entry.kind == kind]
        ends = [ended_at(entry, tau, running, CollapseStop().every) for entry in current]
        late = [end - entry.onset for entry, end in zip(current, ends, strict=True) if end is not None and entry.onset]
        result.append(
            {
                "kind": kind,
                "tau": tau,
                "running": running,
                "texts": len(current),
                "ended": sum(end is not None for end in ends),
                "late": float(np.median(late)) if late else None,
            }
        )
    return result


def grid(texts: Sequence[Series]) -> list[dict[str, Any]]:
    """Every setting that was tried."""
    return [row for tau in TAUS for running in RUNNINGS for row in rows(texts, tau, running)]


def answers_cut(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int, on_answer: Callable[[], None]
) -> int:
    """How many ordinary answers the shipped setting changes."""
    cut = 0
    for prompt in prompts:
        written = generate(model, tokenizer, prompt.content, max_new_tokens=new_tokens, do_sample=False)
        cut += written.stop_reason == "collapse"
        on_answer()
    return cut


WAYS: dict[str, dict[str, Any]] = {
    "off": {"verdict": False, "on_collapse": "ignore"},
    "collapse": {"verdict": False, "on_collapse": "stop"},
    "verdict": {"verdict": True, "on_collapse": "ignore"},
    "both": {"verdict": True, "on_collapse": "stop"},
}


def costs(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], new_tokens: int, rounds: int, on_round: Callable[[], None]
) -> list[dict[str, Any]]:
    """CPU time a token, every way in turn on the same prompt, in an order that changes from round to round.

    A text goes on past its end, so that all are of one length; the prompts are ordinary ones, on which nothing is cut.
    `on_round` is called after each round of all ways.

    Returns:
        For each way the median `ms` of a token, and its `ratio` over `off` of the same round: the median of the rounds.
    """
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    names = list(WAYS)
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": []}
    for number in range(-1, rounds):
        prompt = prompts[number % len(prompts)].content
        for place in range(len(names)):
            way = names[(place + number) % len(names)]
            began = time.process_time()
            written = generate(model, tokenizer, prompt, **settings, **WAYS[way])
            spent = time.process_time() - began
            # the first round warms up
            if number >= 0:
                times[way].append(1000 * spent / len(written.tokens))
        on_round()
    result = []
    for way, entry in times.items():
        ratios = np.array(entry) / np.array(times["off"])
        ratio = bootstrap(lambda drawn: float(np.median(ratios[drawn])), rounds)  # noqa: B023
        result.append({"way": way, "ms": float(np.median(entry)), "ratio": None if ratio is None else asdict(ratio)})
    return result
