"""The same door where questions or decoding are not those that it was calibrated on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.pocket.world import Mix
from sigma0.bench.verdict.asking import Answers, Asker
from sigma0.calibrate.bootstrap import Estimate, share
from sigma0.calibrate.doors import DoorCheck
from sigma0.calibrate.prompts import Prompt

Kept = Literal["yes", "no", "open"]
# Questions that are drawn otherwise, by name: so many of them, from a seed.
MIXES: dict[str, Callable[[int, int], list[Prompt]]] = {
    "hard half": lambda n, seed: list(micro_world(n, "test", seed, hard=True)),
    "short stories": lambda n, seed: list(micro_world(n, "test", seed, hardest=2)),
    "longest stories": lambda n, seed: list(micro_world(n, "test", seed, difficulty=6)),
    "places alone": lambda n, seed: list(micro_world(n, "test", seed, mix=Mix(families=0, ages=0))),
    "families alone": lambda n, seed: list(micro_world(n, "test", seed, mix=Mix(moves=0, ages=0))),
    "ages alone": lambda n, seed: list(micro_world(n, "test", seed, mix=Mix(moves=0, families=0))),
    "yes or no alone": lambda n, seed: list(micro_world(n, "test", seed, mix=Mix(binary=1))),
}
SAME = "as calibrated"
DROPPED = 'after_exit="drop"'


@dataclass(frozen=True)
class ShiftRow:
    """The door under one shift.

    Attributes:
        shift: What is other than in the calibration.
        door: What the door does.
        strange: Share of the answers that are out of calibration.
    """

    shift: str
    door: DoorCheck
    strange: Estimate

    def kept(self, allowed: float) -> Kept:
        """Whether at most the allowed share of what is let through is wrong: `open` where the interval says neither."""
        if self.door.right_of_opened is None:
            return "yes"
        low, high = self.door.right_of_opened.interval
        return "yes" if low >= 1 - allowed else "no" if high < 1 - allowed else "open"


def shift_rows(asker: Asker, answers: Answers, n: int, seed: int) -> tuple[ShiftRow, ...]:
    """The door on questions as calibrated, and under every shift.

    Args:
        asker: The model.
        answers: Of questions as calibrated, every other one a chat.
        n: Questions of each further shift.
        seed: Of their stories.
    """
    parts = {SAME: answers, "plain texts alone": answers.part(slice(0, None, 2))}
    if len(answers.runs) > 1:
        parts["chats alone"] = answers.part(slice(1, None, 2))
    parts |= {name: asker.answers(draw(n, seed)) for name, draw in MIXES.items()}
    parts[DROPPED] = asker.answers(answers.prompts[:n], replace(asker.config, after_exit="drop"))
    return tuple(ShiftRow(name, part.door, _strange(part)) for name, part in parts.items())


def shift_answers(n: int) -> int:
    """How many questions `shift_rows` asks."""
    return n * (len(MIXES) + 1)


def not_kept(rows: Sequence[ShiftRow], allowed: float) -> list[str]:
    """Names of the shifts under which the stated risk is not kept."""
    return [row.shift for row in rows if row.kept(allowed) == "no"]


def _strange(answers: Answers) -> Estimate:
    return share(int(answers.strange.sum()), len(answers.runs))
