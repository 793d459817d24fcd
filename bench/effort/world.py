"""Progressive verification by real models: questions of the micro-world, whose answers are known.

The shipped models know nothing but their world, so that each step is a question of that world. A solution is the
answer to "Where is the coin?". A verification asks "Is the coin in the kitchen?" about the place that it names, and
passes if the whole answer is "Yes, the coin is in the kitchen.": a sentence of another form passes nothing. A
correction asks the first question anew, with a new seed: these models cannot read a bug report.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice

from sigma0.bench.pocket.evaluate import HARD
from sigma0.bench.pocket.items import Item
from sigma0.bench.pocket.world import draw
from sigma0.reason.chat import ChatModel
from sigma0.reason.desk import Desk
from sigma0.reason.messages import Usage
from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.policies import ProgressiveConfig
from sigma0.reason.progressive.verify_loop import Turn, Verification, VerifyLoop
from sigma0.reason.trail import Trail

MAX_TOKENS = 24
_WHERE = re.compile(r"(?P<name>(?:The )?\w+) is in the (?P<place>\w+)\.")


@dataclass(frozen=True)
class Checked:
    """How one run on one question ended.

    Attributes:
        accepted: Whether the policy accepted an answer.
        right: Whether the answer that stood at the end is the known one.
        first_right: Whether the first answer was.
        verifications: Of the run.
        usage: Of the run.
    """

    accepted: bool
    right: bool
    first_right: bool
    verifications: int
    usage: Usage


class WhereIs:
    """One question after a place, see this file's heading.

    Args:
        item: The question, of the family `where`.

    Raises:
        ValueError: For another family.
    """

    def __init__(self, item: Item) -> None:
        if item.family != "where":
            raise ValueError(f"a question of the family {item.family!r} has no place to verify")
        self.item = item
        self.first: str | None = None

    def solve(self, turn: Turn) -> str:
        """See `ProgressiveTask`."""
        answer = self._ask(turn, self.item.question)
        self.first = self.first or answer
        return answer

    def verify(self, turn: Turn, solution: str) -> Verification:
        """See `ProgressiveTask`."""
        named = _WHERE.fullmatch(solution)
        if named is None:
            return Verification(False, "no place is named", f"{solution!r} names no place")
        name, place = named["name"], named["place"]
        said = self._ask(turn, f"Is {name[0].lower() + name[1:] if ' ' in name else name} in the {place}?")
        if said == f"Yes, {solution[0].lower() + solution[1:] if ' ' in name else solution}":
            return Verification(True, None, said)
        return Verification(False, said, said)

    def correct(self, turn: Turn, solution: str, report: str) -> str:
        """See `ProgressiveTask`."""
        return self._ask(turn, self.item.question)

    def _ask(self, turn: Turn, question: str) -> str:
        return turn.text([{"role": "user", "content": f"{self.item.story} {question}"}]).text.strip()


def questions(n: int, seed: int) -> Iterator[Item]:
    """Questions after places, one about each held-out story of the hard half."""
    items = (draw("test", seed, index, questions=1).items[0] for index in count())
    return islice((item for item in items if item.difficulty >= HARD and item.family == "where"), n)


def check(
    config: ProgressiveConfig,
    item: Item,
    solver: ChatModel,
    verifier: ChatModel,
    temperature: float,
    seed: int,
    advance: Callable[[], None],
) -> Checked:
    """One run on one question."""
    task = WhereIs(item)
    loop = VerifyLoop(
        task,
        Desk(Trail(), seed=seed),
        solver,
        verifier,
        manager=ProgressiveReasoningManager(config),
        problem=item.prompt,
        temperature=temperature,
        max_tokens=MAX_TOKENS,
    )
    report = loop.run()
    advance()
    return Checked(
        accepted=report.solved,
        right=report.solution == item.answer,
        first_right=task.first == item.answer,
        verifications=report.status["iteration"],
        usage=report.usage,
    )
