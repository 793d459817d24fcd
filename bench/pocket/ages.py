"""Stories of ages: little sums along a chain of comparisons."""

from random import Random

from sigma0.bench.pocket.asking import Asked, Told, yes_or_no
from sigma0.bench.pocket.words import NAMES

# People in each of the chains a story tells of; the first one's age is told, each next one's against the one before.
LEVELS = {
    1: (1, 1, 1, 1, 1),
    2: (2, 2, 1, 1),
    3: (2, 2, 2, 2),
    4: (3, 3, 2, 2),
    5: (4, 3, 3, 2),
    6: (5, 4, 3, 2),
}
YOUNGEST, OLDEST = 2, 9
_LARGEST_STEP = 3


def tell(rng: Random, difficulty: int) -> Told:
    """Tell one story of the difficulty."""
    lengths = LEVELS[difficulty]
    names = iter(rng.sample(NAMES, sum(lengths)))
    ages: dict[str, int] = {}
    lines: list[list[str]] = []
    facts: list[tuple[str, str]] = []
    for length, first in zip(lengths, rng.sample(range(YOUNGEST, OLDEST + 1), len(lengths)), strict=True):
        line = [next(names)]
        ages[line[0]] = first
        facts.append((line[0], f"{line[0]} is {first} years old."))
        for _ in range(length - 1):
            name, last = next(names), line[-1]
            steps = [
                step for step in range(-_LARGEST_STEP, _LARGEST_STEP + 1) if YOUNGEST <= ages[last] + step <= OLDEST
            ]
            step = rng.choice(steps)
            ages[name] = ages[last] + step
            facts.append((name, _compare(name, last, step)))
            line.append(name)
        lines.append(line)
    rng.shuffle(facts)
    said = {name: index for index, (name, _) in enumerate(facts)}

    def ahead(name: str) -> tuple[str, ...]:
        line = next(line for line in lines if name in line)
        return tuple(reversed(line[: line.index(name)]))

    def proof(name: str) -> tuple[int, ...]:
        return tuple(said[other] for other in (name, *ahead(name)))

    def ask(asker: Random, binary: float) -> Asked:
        name = asker.choice(asker.choice(lines)[-2:])
        if asker.random() >= binary:
            age = str(ages[name])
            return Asked(
                "age", f"How old is {name}?", f"{name} is {age} years old.", age, name, (*ahead(name), age), proof(name)
            )
        # Two chains drawn alike, so that neither of the two is the older one more often.
        while True:
            name, other = (asker.choice(line[-2:]) for line in asker.sample(lines, 2))
            if ages[name] != ages[other]:
                break
        older = ages[name] > ages[other]
        statement, denial = f"{name} is older than {other}.", f"{name} is younger than {other}."
        answer, key = yes_or_no(older, statement, denial)
        return Asked("older", f"Is {name} older than {other}?", answer, key, name, (), (*proof(name), *proof(other)))

    return Told(tuple(sentence for _, sentence in facts), ask)


def _compare(name: str, other: str, step: int) -> str:
    if step == 0:
        return f"{name} is as old as {other}."
    years = "1 year" if abs(step) == 1 else f"{abs(step)} years"
    return f"{name} is {years} {'older' if step > 0 else 'younger'} than {other}."
