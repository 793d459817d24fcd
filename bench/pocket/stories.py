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
ENTITIES = frozenset((*NAMES, *THINGS, *PLACES, *CITIES))
YOUNGEST, OLDEST = 2, 9
_LARGEST_STEP = 3

GO = ("{x} went to the {y}.", "{x} walked to the {y}.")
TAKEN = ("The {x} was taken by {y}.", "The {x} is with {y}.")
INSIDE = ("The {x} is in the {y}.", "The {x} was put into the {y}.")
LEFT = ("The {x} was left in the {y}.",)
ORIGIN = ("The family of {x} comes from {y}.", "{x} comes from {y}.")
CHILD = ("{x} is a child of {y}.", "The parent of {x} is {y}.")

UNSAID = "The text does not say."

# For each difficulty the chains that a story tells of, in sentences each; of ages in people, the first one's age is
# told and each next one's against the one before. A story of few sentences (difficulty `SHORT`) draws its chains.
CHAINS = ((1, 1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 2, 2), (5, 5, 4, 3), (6, 6, 5, 4), (7, 7, 6, 4))
AGE_CHAINS = ((1, 1, 1, 1, 1), (2, 2, 1, 1), (2, 2, 2, 2), (3, 3, 2, 2), (4, 3, 3, 2), (5, 4, 3, 2))
SHORT_CHAINS = ((1,), (1, 1), (2,), (2, 1), (1, 1, 1), (3,))
_DEEP = 0.7
_HOLDER = 0.2
_LEFT = 0.2
# With fewer people who hold anything, naming one of them would be right more often than once in four.
_FEWEST_HOLDERS = 4


@dataclass(frozen=True)
class Question:
    """A question about a story, see `Item`; `proof` holds the indices of the sentences that the answer rests on."""

    family: str
    question: str
    answer: str
    key: str
    subject: str
    trail: tuple[str, ...]
    proof: tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """A story as it is told."""

    sentences: Sequence[str]  # So far
    # Makes a random question: ask(rng, share of yes or no, share about somebody or something that is not told of)
    ask: Callable[[Random, float, float], Question]
    go_on: Callable[[Random], None] | None = None  # Tells one sentence more, after which other answers may be right


def moves(rng: Random, difficulty: int, gap: bool = False) -> Told:
    """People walk about, take things, things lie in other things: who and what is where."""
    lengths = _lengths(rng, difficulty, CHAINS)
    people, places = rng.sample(NAMES, len(lengths)), rng.sample(PLACES, len(lengths))
    things = iter(rng.sample(THINGS, sum(lengths) - len(lengths)))
    # from a person to the thing farthest off
    chains = [[person, *islice(things, length - 1)] for person, length in zip(people, lengths, strict=True)]
    lost = _lost(rng, chains) if gap else None
    facts = []
    for chain, place in zip(chains, places, strict=True):
        for goal, source in pairwise(chain if chain is lost else [place, *chain]):
            facts.append((GO if goal == place else TAKEN if goal == chain[0] else INSIDE, source, goal))
    rng.shuffle(facts)
    sentences: list[str] = []
    goals: dict[str, str] = {}
    said: dict[str, int] = {}

    def say(forms: tuple[str, ...], source: str, goal: str) -> None:
        goals[source], said[source] = goal, len(sentences)
        sentences.append(rng.choice(forms).format(x=source, y=goal))

    def go_on(rng: Random) -> None:
        """Somebody walks on, mostly; or something is left where it is."""
        held = [source for source, goal in goals.items() if goal in NAMES and goal in goals]
        walkers = [source for source in goals if source in NAMES]
        if held and (not walkers or rng.random() < _LEFT):
            thing = rng.choice(held)
            say(LEFT, thing, goals[goals[thing]])
        elif walkers:
            say(GO, rng.choice(walkers), rng.choice([place for place in PLACES if place not in goals.values()]))

    for fact in facts:
        say(*fact)
    if difficulty > 1:
        go_on(rng)

    def path(source: str) -> list[str]:
        steps = [source]
        while steps[-1] in goals:
            steps.append(goals[steps[-1]])
        return steps[1:]

    def ask(asker: Random, binary: float, absent: float = 0.0) -> Question:
        # a chain first, so that every place is as likely, then mostly one of its two far ends
        chain = asker.choice(chains)
        source = asker.choice(chain[-2:] if asker.random() < _DEEP else chain)
        if absent and asker.random() < absent:
            source = asker.choice([word for word in (*NAMES, *THINGS) if not any(word in chain for chain in chains)])
        way = path(source)
        proof = tuple(said[step] for step in (source, *way) if step in said)
        name = source if source in NAMES else f"the {source}"
        where = next((step for step in way if step in PLACES), None)
        output = UNSAID if where is None else f"{name[0].upper()}{name[1:]} is in the {where}."
        dice = asker.random()
        holder = next((step for step in way if step in NAMES), None)
        if dice < binary:
            ends = [path(other[0])[-1] for other in chains if other[0] not in (source, holder) and other[0] in goals]
            others = [other for other in ends if other != where] or [place for place in PLACES if place != where]
            truth = asker.random() < 0.5
            place = where if truth and where is not None else asker.choice(others)
            question = f"Is {name} in the {place}?"
            if where is None:
                return _unsaid(question, source, proof)
            answer, key = yes_or_no(truth, output)
            return Question("inside", question, answer, key, source, tuple(way), proof)
        holders = {goal for goal in goals.values() if goal in NAMES}
        many = len(holders) >= _FEWEST_HOLDERS or len(chains) < _FEWEST_HOLDERS
        if holder is not None and asker.random() < _HOLDER and many:
            count = way.index(holder) + 1
            answer, trail = f"The {source} is with {holder}.", tuple(way[:count])
            return Question("holder", f"Who has {name}?", answer, holder, source, trail, proof[:count])
        if where is None:
            asks = f"Who has {name}?" if holder is None and source in THINGS and asker.random() < _HOLDER else ""
            return _unsaid(asks or f"Where is {name}?", source, proof)
        return Question("where", f"Where is {name}?", output, where, source, tuple(way), proof)

    return Told(sentences, ask, go_on)


def families(rng: Random, difficulty: int, gap: bool = False) -> Told:
    """Who is whose child, and which city a family comes from."""
    lengths = _lengths(rng, difficulty, CHAINS)
    cities = rng.sample(CITIES, len(lengths))
    names = iter(rng.sample(NAMES, sum(lengths)))
    lines = [list(islice(names, length)) for length in lengths]
    lost = _lost(rng, lines) if gap else None
    facts = [(line[0], city) for line, city in zip(lines, cities, strict=True) if line is not lost]
    facts += [(child, parent) for line in lines for parent, child in pairwise(line)]
    rng.shuffle(facts)
    said = {source: index for index, (source, _) in enumerate(facts)}
    sentences = [rng.choice(ORIGIN if goal in CITIES else CHILD).format(x=source, y=goal) for source, goal in facts]

    def ask(asker: Random, binary: float, absent: float = 0.0) -> Question:
        number = asker.randrange(len(lines))
        line, city = lines[number], cities[number]
        place = asker.randrange(max(0, len(line) - 2) if asker.random() < _DEEP else 0, len(line))
        child, unknown = line[place], line is lost
        strangers = [name for name in NAMES if not any(name in line for line in lines)] if absent else []
        if strangers and asker.random() < absent:
            child, line, place, unknown = asker.choice(strangers), [], 0, True
        proof = tuple(said[name] for name in reversed(line[: place + 1]) if name in said)
        trail = (*reversed(line[:place]), city)
        output = f"The family of {child} comes from {city}."
        if asker.random() >= binary:
            question = f"Where does the family of {child} come from?"
            if unknown:
                return _unsaid(question, child, proof)
            return Question("origin", question, output, city, child, trail, proof)
        truth = asker.random() < 0.5
        others = [other for other in (cities if len(cities) > 1 else CITIES) if other != city]
        asked = city if truth else asker.choice(others)
        question = f"Does the family of {child} come from {asked}?"
        if unknown:
            return _unsaid(question, child, proof)
        answer, key = yes_or_no(truth, output)
        return Question("descent", question, answer, key, child, trail, proof)

    return Told(sentences, ask)


def ages(rng: Random, difficulty: int, gap: bool = False) -> Told:
    """Little sums along a chain of comparisons."""
    lengths = _lengths(rng, difficulty, AGE_CHAINS)
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
    lost = _lost(rng, lines) if gap else None
    if lost is not None:
        facts = [(name, fact) for name, fact in facts if name != lost[0]]
    rng.shuffle(facts)
    said = {name: index for index, (name, _) in enumerate(facts)}
    known = [line for line in lines if line is not lost]

    def back(name: str) -> list[str]:
        """The person and those before, up to the one whose age is told."""
        line = next(line for line in lines if name in line)
        return [name for name in line[line.index(name) :: -1] if name in said]

    def ask(asker: Random, binary: float, absent: float = 0.0) -> Question:
        name = asker.choice(asker.choice(lines)[-2:])
        if absent and asker.random() < absent:
            name = asker.choice([name for name in NAMES if name not in years])
            other = asker.choice(list(years))
            question = f"Is {name} older than {other}?" if asker.random() < binary else f"How old is {name}?"
            return _unsaid(question, name, ())
        if asker.random() >= binary or len(known) < 2:
            question, way = f"How old is {name}?", back(name)
            proof = tuple(said[step] for step in way)
            if lost is not None and name in lost:
                return _unsaid(question, name, proof)
            age = str(years[name])
            return Question("age", question, f"{name} is {age} years old.", age, name, (*way[1:], age), proof)
        # Two chains drawn alike, so that neither of the two is the older one more often.
        while True:
            name, other = (asker.choice(line[-2:]) for line in asker.sample(known, 2))
            if years[name] != years[other]:
                break
        statement, denial = f"{name} is older than {other}.", f"{name} is younger than {other}."
        answer, key = yes_or_no(years[name] > years[other], statement, denial)
        proof = tuple(said[step] for step in (*back(name), *back(other)))
        return Question("older", f"Is {name} older than {other}?", answer, key, name, (), proof)

    return Told([sentence for _, sentence in facts], ask)


def _lengths(rng: Random, difficulty: int, dial: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The chains of a story."""
    return dial[difficulty - 1] if difficulty else rng.choice(SHORT_CHAINS)


def _lost(rng: Random, chains: Sequence[list[str]]) -> list[str] | None:
    """A chain whose end is not told, though others lead to it; None where there is none of two sentences."""
    longer = [chain for chain in chains if len(chain) > 1]
    return rng.choice(longer) if longer else None


def _unsaid(question: str, subject: str, proof: tuple[int, ...]) -> Question:
    return Question("unsaid", question, UNSAID, "not", subject, (), proof)


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


# One teller for each kind of story: tell(rng, difficulty, whether the end of a chain is left untold). A new kind is one
# more entry, and one more weight in `Mix`.
Teller = Callable[[Random, int, bool], Told]
KINDS: dict[str, Teller] = {"moves": moves, "families": families, "ages": ages}
