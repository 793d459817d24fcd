"""Runs ways over the same questions, and compares them: right answers, wrong ones accepted, and what it took."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any

from sigma0.bench.outer.ways import Way
from sigma0.bench.pocket.evaluate import HARD
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.world import draw
from sigma0.bench.strategyqa.statistics import mcnemar
from sigma0.calibrate.bootstrap import Estimate, ratio, share
from sigma0.reason.desk import Desk
from sigma0.reason.messages import ChatModel, Usage
from sigma0.reason.trail import Trail


@dataclass(frozen=True)
class Result:
    """One way on one question.

    Attributes:
        answer: That stood at the end.
        right: Whether it is the known one.
        accepted: Whether the way stood behind it.
        usage: Of its desk.
    """

    answer: str
    right: bool
    accepted: bool
    usage: Usage


@dataclass(frozen=True)
class Summary:
    """One way over all questions.

    Attributes:
        way: Its name.
        model: Who was asked.
        n: Questions.
        right: Share of right answers.
        accepted_wrong: Share of all questions on which it stood behind a wrong answer.
        accepted: Share on which it stood behind its answer.
        passes: Passes of the looped block a question, those over prompts included: T for each of them.
        cost: Those passes times the weights of a block, in passes of the first model.
        tokens: Written, a question.
        seconds: A question.
        calls: Questions to the model, a question.
    """

    way: str
    model: str
    n: int
    right: Estimate
    accepted_wrong: Estimate
    accepted: Estimate
    passes: Estimate
    cost: float
    tokens: float
    seconds: float
    calls: float


@dataclass(frozen=True)
class Difference:
    """Two ways on the same questions.

    Attributes:
        first: A way.
        second: Another.
        points: Share that the first has right less that of the second.
        p: Of McNemar's exact test.
    """

    first: str
    second: str
    points: Estimate
    p: float


def hard_questions(n: int, seed: int, split: str = "test") -> list[Item]:
    """One question about each held-out story of the hard half."""
    items = (draw(split, seed, index, questions=1).items[0] for index in count())
    return list(islice((item for item in items if item.difficulty >= HARD), n))


def run(way: Way, model: ChatModel, items: Sequence[Item], seed: int, advance: Callable[[], None]) -> list[Result]:
    """A way on each question, each with a desk of its own."""
    results = []
    for place, item in enumerate(items):
        desk = Desk(Trail(), seed=seed + place)
        answered = way(model, desk, item.prompt)
        results.append(Result(answered.answer, answered.answer == item.answer, answered.accepted, desk.usage))
        advance()
    return results


def summarise(way: str, model: str, results: Sequence[Result], loops: int, weight: float) -> Summary:
    """Sums up a way.

    Args:
        way: Its name.
        model: Who was asked.
        results: At least one.
        loops: T of the model: passes over each prompt.
        weight: Of a pass, in passes of the first model.
    """
    n = len(results)
    passes = [float(one.usage.loop_passes + loops * one.usage.calls) for one in results]
    mean = ratio(passes, [1.0] * n)
    assert mean is not None
    return Summary(
        way=way,
        model=model,
        n=n,
        right=share(sum(one.right for one in results), n),
        accepted_wrong=share(sum(one.accepted and not one.right for one in results), n),
        accepted=share(sum(one.accepted for one in results), n),
        passes=mean,
        cost=mean.value * weight,
        tokens=sum(one.usage.completion_tokens for one in results) / n,
        seconds=sum(one.usage.seconds for one in results) / n,
        calls=sum(one.usage.calls for one in results) / n,
    )


def difference(names: tuple[str, str], first: Sequence[Result], second: Sequence[Result]) -> Difference:
    """Two ways on the same questions; the interval is Student's t over their paired differences."""
    paired = [float(one.right) - float(other.right) for one, other in zip(first, second, strict=True)]
    points = ratio(paired, [1.0] * len(paired))
    assert points is not None
    test = mcnemar([one.right for one in first], [other.right for other in second])
    return Difference(*names, points, test.p)


def report(summaries: Sequence[Summary], differences: Sequence[Difference], settings: Mapping[str, Any]) -> Any:
    """Plain JSON values."""
    return {
        "settings": dict(settings),
        "ways": [asdict(summary) for summary in summaries],
        "differences": [asdict(one) for one in differences],
    }
