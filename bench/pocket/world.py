"""The micro-world: any scene of any split from three numbers, always the same."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from sigma0.bench.pocket import ages, families, moves
from sigma0.bench.pocket.asking import Told, scene
from sigma0.bench.pocket.items import DIFFICULTIES, Scene, check_split, split_of

# One teller for each kind of story: tell(rng, difficulty). A new kind is one more entry, and one more weight in `Mix`.
KINDS: dict[str, Callable[[Random, int], Told]] = {"moves": moves.tell, "families": families.tell, "ages": ages.tell}
# How often a difficulty is drawn when none is asked for: the easy ones are learned first and need less.
DIFFICULTY_WEIGHTS = (1, 2, 3, 3, 3, 3)


@dataclass(frozen=True)
class Mix:
    """What is drawn how often.

    Attributes:
        moves: Weight of stories of places.
        families: Weight of stories of families.
        ages: Weight of stories of ages.
        binary: Share of questions that are answered by yes or no.
    """

    moves: float = 2
    families: float = 1
    ages: float = 1
    binary: float = 0.25

    def __post_init__(self) -> None:
        if min(self.moves, self.families, self.ages) < 0 or self.moves + self.families + self.ages <= 0:
            raise ValueError(f"weights {self.moves!r}, {self.families!r}, {self.ages!r} leave nothing to draw")
        if not 0 <= self.binary <= 1:
            raise ValueError(f"binary {self.binary!r} is not a share between 0 and 1")


MIX = Mix()
# No sums, no yes or no.
LOOK_UPS = Mix(moves=2, families=1, ages=0, binary=0)


def draw(
    split: str,
    seed: int,
    index: int,
    difficulty: int | None = None,
    questions: int = 8,
    hardest: int = 6,
    mix: Mix = MIX,
) -> Scene:
    """Draw scene number `index` of a split.

    Candidates are drawn until one's own text falls into the split (`items.split_of`), so the splits share no
    story for any choice of seeds and indices.

    Args:
        split: "train", "calibration" or "test".
        seed: Selects one endless sequence of scenes.
        index: Position in that sequence, from 0.
        difficulty: Dial from 1 to 6; None draws it by `DIFFICULTY_WEIGHTS`.
        questions: The most questions to ask about the story.
        hardest: The highest difficulty that may be drawn when none is asked for.
        mix: What is drawn how often.

    Raises:
        ValueError: On an unknown split or difficulty, a negative index or fewer than one question.
    """
    wanted = check_split(split)
    for asked in (difficulty, hardest):
        if asked is not None and asked not in DIFFICULTIES:
            raise ValueError(f"difficulty {asked!r} is not one of {DIFFICULTIES}")
    if index < 0:
        raise ValueError(f"index {index!r} is negative")
    if questions < 1:
        raise ValueError(f"questions {questions!r} is below 1")
    rng = Random(f"{wanted}/{seed}/{index}")
    level = difficulty or rng.choices(DIFFICULTIES[:hardest], DIFFICULTY_WEIGHTS[:hardest])[0]
    tell = KINDS[rng.choices(list(KINDS), [getattr(mix, kind) for kind in KINDS])[0]]
    while True:
        drawn = scene(rng, tell(rng, level), level, questions, mix.binary)
        if split_of(drawn.story) == wanted:
            return drawn
