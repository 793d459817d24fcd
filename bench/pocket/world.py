"""The micro-world: any scene of any split from three numbers, always the same."""

from dataclasses import dataclass
from random import Random

from sigma0.bench.pocket.items import DIFFICULTIES, Item, Scene, check_split, split_of
from sigma0.bench.pocket.stories import KINDS

# How often a difficulty is drawn when none is asked for: the easy ones are learned first and need less.
DIFFICULTY_WEIGHTS = (1, 2, 3, 3, 3, 3)


@dataclass(frozen=True)
class Mix:
    """What is drawn how often."""

    moves: float = 2  # Weight of stories of places
    families: float = 1  # Weight of stories of families
    ages: float = 1  # Weight of stories of ages
    binary: float = 0.25  # Share of questions that are answered by yes or no


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

    Its questions are about different subjects, the ones that need most sentences first: an answer given is one more
    fact in the text. In this order no later answer can be found by following an earlier one forwards; read backwards,
    from a thing to what lies in it, it may still shorten the way.
    Scenes of one seed are one endless sequence. The difficulty is a dial from 1 to 6; None draws it by
    `DIFFICULTY_WEIGHTS`, up to `hardest`.

    Raises:
        ValueError: On an unknown split.
    """
    wanted = check_split(split)
    rng = Random(f"{wanted}/{seed}/{index}")
    level = difficulty or rng.choices(DIFFICULTIES[:hardest], DIFFICULTY_WEIGHTS[:hardest])[0]
    tell = KINDS[rng.choices(list(KINDS), [getattr(mix, kind) for kind in KINDS])[0]]
    while True:
        sentences, ask = tell(rng, level)
        story = " ".join(sentences)
        result: dict[str, Item] = {}
        for _ in range(4 * questions):
            if len(result) == questions:
                break
            asked = ask(rng, mix.binary)
            opening = asked.answer[0].lower() if asked.answer.startswith(("The ", "Yes", "No,")) else asked.answer[0]
            item = Item(
                story=story,
                question=asked.question,
                answer=asked.answer,
                key=asked.key,
                subject=asked.subject,
                trail=asked.trail,
                family=asked.family,
                hops=len(asked.proof),
                difficulty=level,
                derivation=(*(sentences[index] for index in asked.proof), f"So {opening}{asked.answer[1:]}"),
            )
            result.setdefault(item.subject, item)
        if split_of(story) == wanted:
            return Scene(story, tuple(sorted(result.values(), key=lambda item: -item.hops)))
