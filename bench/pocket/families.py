"""Stories of families: who is whose child, and which city a family comes from."""

from itertools import pairwise
from random import Random

from sigma0.bench.pocket.asking import Asked, Told, yes_or_no
from sigma0.bench.pocket.words import CITIES, NAMES

ORIGIN = ("The family of {x} comes from {y}.", "{x} comes from {y}.")
CHILD = ("{x} is a child of {y}.", "The parent of {x} is {y}.")
# Generations in each of the families a story tells of.
LEVELS = {
    1: (1, 1, 1, 1, 1),
    2: (2, 2, 2, 2),
    3: (3, 3, 2, 2),
    4: (5, 5, 4, 3),
    5: (6, 6, 5, 4),
    6: (7, 7, 6, 4),
}
_DEEP = 0.7


def tell(rng: Random, difficulty: int) -> Told:
    """Tell one story of the difficulty."""
    lengths = LEVELS[difficulty]
    cities = rng.sample(CITIES, len(lengths))
    names = iter(rng.sample(NAMES, sum(lengths)))
    lines = [[next(names) for _ in range(length)] for length in lengths]
    facts = [(line[0], city) for line, city in zip(lines, cities, strict=True)]
    facts += [(child, parent) for line in lines for parent, child in pairwise(line)]
    rng.shuffle(facts)
    said = {source: index for index, (source, _) in enumerate(facts)}
    sentences = tuple(
        rng.choice(ORIGIN if goal in CITIES else CHILD).format(x=source, y=goal) for source, goal in facts
    )

    def ask(asker: Random, binary: float) -> Asked:
        number = asker.randrange(len(lines))
        line, city = lines[number], cities[number]
        place = asker.randrange(max(0, len(line) - 2), len(line)) if asker.random() < _DEEP else None
        place = asker.randrange(len(line)) if place is None else place
        child = line[place]
        proof = tuple(said[name] for name in reversed(line[: place + 1]))
        trail = (*reversed(line[:place]), city)
        told = f"The family of {child} comes from {city}."
        if asker.random() >= binary:
            return Asked("origin", f"Where does the family of {child} come from?", told, city, child, trail, proof)
        truth = asker.random() < 0.5
        asked = city if truth else asker.choice([other for other in cities if other != city])
        answer, key = yes_or_no(truth, told)
        return Asked("descent", f"Does the family of {child} come from {asked}?", answer, key, child, trail, proof)

    return Told(sentences, ask)
