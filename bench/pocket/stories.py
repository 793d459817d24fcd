"""The kinds of story: sentences, and questions with the sentences that prove their answers.

Every answer is found by following pointers. The coin is in the cup, the cup was taken by Mary, Mary went to the park:
each step is one sentence, and each kind of question stops at its own kind of word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from random import Random

# Nearly every word is a single token.
NAMES = (
    *("Mary", "John", "Anna", "Peter", "Emma", "David", "Lucy", "Tom", "Sara", "Paul", "Nora", "Ben"),
    *("Clara", "Max", "Ella", "Hugo", "Rosa", "Felix", "Ida", "Leo", "Vera", "Oscar", "Julia", "Simon"),
)
PLACES = (
    *("kitchen", "garden", "office", "bedroom", "hallway", "cellar"),
    *("attic", "library", "garage", "park", "barn", "market"),
)
THINGS = (
    *("apple", "book", "ball", "key", "lamp", "coin", "hat", "cup", "map", "pen", "rope", "box"),
    *("bag", "basket", "chest", "jar", "ring", "bottle", "drum", "kite", "bucket", "crate", "shell", "clock"),
)
CITIES = ("Rome", "Paris", "London", "Madrid", "Vienna", "Oslo", "Cairo", "Lima", "Tokyo", "Delhi")
YOUNGEST, OLDEST = 2, 9
_LARGEST_STEP = 3

GO = ("{x} went to the {y}.", "{x} walked to the {y}.")
TAKEN = ("The {x} was taken by {y}.", "The {x} is with {y}.")
INSIDE = ("The {x} is in the {y}.", "The {x} was put into the {y}.")
LEFT = ("The {x} was left in the {y}.",)
ORIGIN = ("The family of {x} comes from {y}.", "{x} comes from {y}.")
CHILD = ("{x} is a child of {y}.", "The parent of {x} is {y}.")

# For each difficulty the chains that a story tells of, in sentences each; of ages in people, the first one's age is
# told and each next one's against the one before.
CHAINS = ((1, 1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 2, 2), (5, 5, 4, 3), (6, 6, 5, 4), (7, 7, 6, 4))
AGE_CHAINS = ((1, 1, 1, 1, 1), (2, 2, 1, 1), (2, 2, 2, 2), (3, 3, 2, 2), (4, 3, 3, 2), (5, 4, 3, 2))
_DEEP = 0.7
_HOLDER = 0.2
_LEFT = 0.2
# With fewer people who hold anything, naming one of them would be right more often than once in four.
_FEWEST_HOLDERS = 4


@dataclass(frozen=True)
class Asked:
    """A question about a story, see `Item`; `proof` holds the indices of the sentences that the answer rests on."""

    family: str
    question: str
    answer: str
    key: str
    subject: str
    trail: tuple[str, ...]
    proof: tuple[int, ...]


# A story as sentences, and a maker of random questions about it: ask(rng, share of yes or no).
Told = tuple[Sequence[str], Callable[[Random, float], Asked]]


def moves(rng: Random, difficulty: int) -> Told:
    """People walk about, take things, things lie in other things: who and what is where."""
    lengths = CHAINS[difficulty - 1]
    people, places = rng.sample(NAMES, len(lengths)), rng.sample(PLACES, len(lengths))
    things = iter(rng.sample(THINGS, sum(lengths) - len(lengths)))
    # from a person to the thing farthest off
    chains = [[person, *islice(things, length - 1)] for person, length in zip(people, lengths, strict=True)]
    facts = []
    for chain, place in zip(chains, places, strict=True):
        for goal, source in pairwise([place, *chain]):
            facts.append((GO if goal == place else TAKEN if goal == chain[0] else INSIDE, source, goal))
    rng.shuffle(facts)
    sentences: list[str] = []
    goals: dict[str, str] = {}
    said: dict[str, int] = {}

    def say(forms: tuple[str, ...], source: str, goal: str) -> None:
        goals[source], said[source] = goal, len(sentences)
        sentences.append(rng.choice(forms).format(x=source, y=goal))

    for fact in facts:
        say(*fact)
    if difficulty > 1:
        # somebody walks on, mostly; or something is left where it is
        held = [source for source, goal in goals.items() if goal in NAMES]
        if held and rng.random() < _LEFT:
            thing = rng.choice(held)
            say(LEFT, thing, goals[goals[thing]])
        else:
            person = rng.choice([source for source in goals if source in NAMES])
            say(GO, person, rng.choice([place for place in PLACES if place not in goals.values()]))

    def path(source: str) -> list[str]:
        steps = [source]
        while steps[-1] in goals:
            steps.append(goals[steps[-1]])
        return steps[1:]

    def ask(asker: Random, binary: float) -> Asked:
        # a chain first, so that every place is as likely, then mostly one of its two far ends
        chain = asker.choice(chains)
        source = asker.choice(chain[-2:] if asker.random() < _DEEP else chain)
        way = path(source)
        proof = tuple(said[step] for step in (source, *way[:-1]))
        name = source if source in NAMES else f"the {source}"
        output = f"{name[0].upper()}{name[1:]} is in the {way[-1]}."
        dice = asker.random()
        holder = next((step for step in way if step in NAMES), None)
        if dice < binary:
            others = [path(other[0])[-1] for other in chains if other[0] not in (source, holder)]
            truth = asker.random() < 0.5
            place = way[-1] if truth else asker.choice([other for other in others if other != way[-1]])
            answer, key = yes_or_no(truth, output)
            return Asked("inside", f"Is {name} in the {place}?", answer, key, source, tuple(way), proof)
        holders = {goal for goal in goals.values() if goal in NAMES}
        if holder is not None and asker.random() < _HOLDER and len(holders) >= _FEWEST_HOLDERS:
            count = way.index(holder) + 1
            answer, trail = f"The {source} is with {holder}.", tuple(way[:count])
            return Asked("holder", f"Who has {name}?", answer, holder, source, trail, proof[:count])
        return Asked("where", f"Where is {name}?", output, way[-1], source, tuple(way), proof)

    return sentences, ask


def families(rng: Random, difficulty: int) -> Told:
    """Who is whose child, and which city a family comes from."""
    lengths = CHAINS[difficulty - 1]
    cities = rng.sample(CITIES, len(lengths))
    names = iter(rng.sample(NAMES, sum(lengths)))
    lines = [list(islice(names, length)) for length in lengths]
    facts = [(line[0], city) for line, city in zip(lines, cities, strict=True)]
    facts += [(child, parent) for line in lines for parent, child in pairwise(line)]
    rng.shuffle(facts)
    said = {source: index for index, (source, _) in enumerate(facts)}
    sentences = [rng.choice(ORIGIN if goal in CITIES else CHILD).format(x=source, y=goal) for source, goal in facts]

    def ask(asker: Random, binary: float) -> Asked:
        number = asker.randrange(len(lines))
        line, city = lines[number], cities[number]
        place = asker.randrange(max(0, len(line) - 2) if asker.random() < _DEEP else 0, len(line))
        child = line[place]
        proof = tuple(said[name] for name in reversed(line[: place + 1]))
        trail = (*reversed(line[:place]), city)
        output = f"The family of {child} comes from {city}."
        if asker.random() >= binary:
            return Asked("origin", f"Where does the family of {child} come from?", output, city, child, trail, proof)
        truth = asker.random() < 0.5
        asked = city if truth else asker.choice([other for other in cities if other != city])
        answer, key = yes_or_no(truth, output)
        return Asked("descent", f"Does the family of {child} come from {asked}?", answer, key, child, trail, proof)

    return sentences, ask


def ages(rng: Random, difficulty: int) -> Told:
    """Little sums along a chain of comparisons."""
    lengths = AGE_CHAINS[difficulty - 1]
    names = iter(rng.sample(NAMES, sum(lengths)))
    years: dict[str, int] = {}
    lines = []
    facts = []
    for length, first in zip(lengths, rng.sample(range(YOUNGEST, OLDEST + 1), len(lengths)), strict=True):
        line = list(islice(names, length))
        lines.append(line)
        years[line[0]] = first
        facts.append((line[0], f"{line[0]} is {first} years old."))
        for other, name in pairwise(line):
            nearby = range(years[other] - _LARGEST_STEP, years[other] + _LARGEST_STEP + 1)
            years[name] = rng.choice([age for age in nearby if YOUNGEST <= age <= OLDEST])
            facts.append((name, _compare(name, other, years[name] - years[other])))
    rng.shuffle(facts)
    said = {name: index for index, (name, _) in enumerate(facts)}

    def back(name: str) -> list[str]:
        """The person and those before, up to the one whose age is told."""
        line = next(line for line in lines if name in line)
        return line[line.index(name) :: -1]

    def ask(asker: Random, binary: float) -> Asked:
        name = asker.choice(asker.choice(lines)[-2:])
        if asker.random() >= binary:
            age, way = str(years[name]), back(name)
            trail, proof = (*way[1:], age), tuple(said[step] for step in way)
            return Asked("age", f"How old is {name}?", f"{name} is {age} years old.", age, name, trail, proof)
        # Two chains drawn alike, so that neither of the two is the older one more often.
        while True:
            name, other = (asker.choice(line[-2:]) for line in asker.sample(lines, 2))
            if years[name] != years[other]:
                break
        statement, denial = f"{name} is older than {other}.", f"{name} is younger than {other}."
        answer, key = yes_or_no(years[name] > years[other], statement, denial)
        proof = tuple(said[step] for step in (*back(name), *back(other)))
        return Asked("older", f"Is {name} older than {other}?", answer, key, name, (), proof)

    return [sentence for _, sentence in facts], ask


def yes_or_no(truth: bool, statement: str, denial: str | None = None) -> tuple[str, str]:
    """An answer that opens with yes or no and goes on with a full statement, and its key.

    Without a denial the statement holds also where the answer is no.
    """
    key = "Yes" if truth else "No"
    text = statement if truth or denial is None else denial
    return f"{key}, {text[0].lower() + text[1:] if text.startswith('The ') else text}", key


def _compare(name: str, other: str, step: int) -> str:
    if step == 0:
        return f"{name} is as old as {other}."
    years = "1 year" if abs(step) == 1 else f"{abs(step)} years"
    return f"{name} is {years} {'older' if step > 0 else 'younger'} than {other}."


# One teller for each kind of story: tell(rng, difficulty). A new kind is one more entry, and one more weight in `Mix`.
KINDS: dict[str, Callable[[Random, int], Told]] = {"moves": moves, "families": families, "ages": ages}
