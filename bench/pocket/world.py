"""The micro-world: any scene of any split from three numbers, always the same."""

import re
from dataclasses import dataclass, replace
from random import Random

from sigma0.bench.pocket.items import DIFFICULTIES, SHORT, Item, Scene, Split, check_split, split_of
from sigma0.bench.pocket.stories import ENTITIES, KINDS, Teller, Told

# How often a difficulty is drawn when none is asked for: the easy ones are learned first and need less.
DIFFICULTY_WEIGHTS = (1, 2, 3, 3, 3, 3)


@dataclass(frozen=True)
class Mix:
    """What is drawn how often."""

    moves: float = 2  # Weight of stories of places
    families: float = 1  # Weight of stories of families
    ages: float = 1  # Weight of stories of ages
    binary: float = 0.25  # Share of questions that are answered by yes or no
    short: float = 0  # Share of stories of a few sentences
    absent: float = 0  # Share of questions about somebody or something that is not told of
    gap: float = 0  # Share of stories of which the end of a chain is not told
    later: float = 0  # Share of scenes that go on after a question, with more of the story or with another one


MIX = Mix()
# No sums, no yes or no.
LOOK_UPS = Mix(moves=2, families=1, ages=0, binary=0)
# What people ask.
PEOPLE = Mix(short=0.4, absent=0.04, gap=0.12, later=0.4)
# Questions about a short story, parts of a story that goes on, and tries for another one.
_FEW, _STAGES, _TRIES = 4, 3, 200


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
    story for any choice of seeds and indices. A story that follows in a later turn falls into it too.

    Its questions are about different subjects, the ones that need most sentences first: an answer given is one more
    fact in the text. In this order no later answer can be found by following an earlier one forwards; read backwards,
    from a thing to what lies in it, it may still shorten the way.
    Scenes of one seed are one endless sequence. The difficulty is a dial from 1 to 6, or `SHORT`; None draws it by
    `DIFFICULTY_WEIGHTS`, up to `hardest`.

    Raises:
        ValueError: On an unknown split.
    """
    wanted = check_split(split)
    rng = Random(f"{wanted}/{seed}/{index}")
    level = rng.choices(DIFFICULTIES[:hardest], DIFFICULTY_WEIGHTS[:hardest])[0] if difficulty is None else difficulty
    if mix.short and rng.random() < mix.short:
        level, questions = SHORT, min(questions, _FEW)
    kinds, weights = list(KINDS), [getattr(mix, kind) for kind in KINDS]
    tell = KINDS[rng.choices(kinds, weights)[0]]
    goes_on = bool(mix.later) and rng.random() < mix.later
    while True:
        tale = tell(rng, level, bool(mix.gap) and rng.random() < mix.gap)
        story = " ".join(tale.sentences)
        items = _ask(rng, tale, story, level, rng.choice((1, 2)) if goes_on else questions, mix)
        for _ in range(_STAGES - 1 if goes_on else 0):
            known = len(tale.sentences)
            if tale.go_on is None or rng.random() < 0.3:
                other = _another(rng, wanted, story, KINDS[rng.choices(kinds, weights)[0]])
                if other is None:
                    break
                tale, known, level = other, 0, SHORT
            else:
                tale.go_on(rng)
            if len(tale.sentences) == known:
                break
            more = " ".join(tale.sentences[known:])
            story = f"{story} {more}"
            first, *others = _ask(rng, tale, story, level, rng.choice((1, 2)), mix)
            items += replace(first, more=more), *others
        if split_of(items[0].story) == wanted:
            return Scene(items[0].story, items[:questions])


def _ask(rng: Random, tale: Told, story: str, level: int, questions: int, mix: Mix) -> tuple[Item, ...]:
    """Some questions about a story, those that need most sentences first."""
    result: dict[str, Item] = {}
    known = " ".join(tale.sentences)
    before = set() if story == known else set(re.findall(r"\w+", story)).difference(re.findall(r"\w+", known))
    tries = 4 * questions
    while len(result) < questions and (tries > 0 or not result):
        tries -= 1
        asked = tale.ask(rng, mix.binary, mix.absent)
        if asked.subject in before:
            # an earlier story may tell of whom this one does not
            continue
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
            derivation=(*(tale.sentences[index] for index in asked.proof), f"So {opening}{asked.answer[1:]}"),
        )
        result.setdefault(item.subject, item)
    return tuple(sorted(result.values(), key=lambda item: -item.hops))


def _another(rng: Random, wanted: Split, story: str, tell: Teller) -> Told | None:
    """A short story of its own split that tells of nobody and nothing that another one does; None where none came."""
    words = set(re.findall(r"\w+", story)) & ENTITIES
    for _ in range(_TRIES):
        tale = tell(rng, SHORT, False)
        text = " ".join(tale.sentences)
        if words.isdisjoint(re.findall(r"\w+", text)) and split_of(text) == wanted:
            return tale
    return None
