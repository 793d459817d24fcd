"""Stories of places: people walk about, take things, things lie in other things; who and what is where.

Where a thing is, is found by following it: the coin is in the cup, the cup was taken by Mary, Mary went to the park.
Each step is one sentence, and each kind of question stops at its own kind of word.
"""

from dataclasses import dataclass, field
from random import Random

from sigma0.bench.pocket.asking import Asked, Told, yes_or_no
from sigma0.bench.pocket.words import NAMES, PLACES, THINGS

GO = ("{x} went to the {y}.", "{x} walked to the {y}.")
TAKEN = ("The {x} was taken by {y}.", "The {x} is with {y}.")
INSIDE = ("The {x} is in the {y}.", "The {x} was put into the {y}.")
LEFT = ("The {x} was left in the {y}.",)


@dataclass(frozen=True)
class Level:
    """One setting of the dial: the chains the story opens with, in sentences each, and the events that follow."""

    chains: tuple[int, ...]
    events: int


LEVELS = {
    1: Level((1, 1, 1, 1, 1), 0),
    2: Level((2, 2, 2, 2), 1),
    3: Level((3, 3, 2, 2), 1),
    4: Level((5, 5, 4, 3), 1),
    5: Level((6, 6, 5, 4), 1),
    6: Level((7, 7, 6, 4), 1),
}
_DEEP = 0.7
_HOLDER = 0.2
# With fewer people who hold anything, naming one of them would be right more often than once in four.
_FEWEST_HOLDERS = 4


@dataclass
class _World:
    """Where everything points now, and the sentence that said so."""

    told: list[str] = field(default_factory=list)
    goal: dict[str, str] = field(default_factory=dict)
    said: dict[str, int] = field(default_factory=dict)

    def tell(self, forms: tuple[str, ...], rng: Random, source: str, goal: str) -> None:
        self.goal[source] = goal
        self.said[source] = len(self.told)
        self.told.append(rng.choice(forms).format(x=source, y=goal))

    def path(self, source: str) -> list[str]:
        """All that is met on the way from `source` to its place, the place last."""
        steps = [source]
        while steps[-1] in self.goal:
            steps.append(self.goal[steps[-1]])
        return steps[1:]

    def holders(self) -> set[str]:
        """Everyone who holds something."""
        return {goal for goal in self.goal.values() if goal in NAMES}

    def proof(self, source: str, length: int) -> tuple[int, ...]:
        return tuple(self.said[step] for step in [source, *self.path(source)][:length])


def tell(rng: Random, difficulty: int) -> Told:
    """Tell one story of the difficulty."""
    level = LEVELS[difficulty]
    world = _World()
    facts, starts = _facts(rng, level.chains)
    rng.shuffle(facts)
    for forms, source, goal in facts:
        world.tell(forms, rng, source, goal)
    for _ in range(level.events):
        _event(rng, world)
    return Told(tuple(world.told), lambda asker, binary: _ask(asker, binary, world, starts))


def _facts(rng: Random, lengths: tuple[int, ...]) -> tuple[list[tuple[tuple[str, ...], str, str]], list[list[str]]]:
    """Chains of facts, and the sources of each chain from its person to the thing farthest off."""
    people = rng.sample(NAMES, len(lengths))
    places = rng.sample(PLACES, len(lengths))
    things = iter(rng.sample(THINGS, sum(lengths) - len(lengths)))
    facts: list[tuple[tuple[str, ...], str, str]] = []
    chains = []
    for person, place, length in zip(people, places, lengths, strict=True):
        facts.append((GO, person, place))
        chain = [person]
        while len(chain) < length:
            thing = next(things)
            facts.append((TAKEN if len(chain) == 1 else INSIDE, thing, chain[-1]))
            chain.append(thing)
        chains.append(chain)
    return facts, chains


def _event(rng: Random, world: _World) -> None:
    """Somebody walks on, mostly; or something is left where it is."""
    people = [source for source in world.goal if source in NAMES]
    held = [source for source, goal in world.goal.items() if goal in NAMES]
    if held and rng.random() < 0.2:
        thing = rng.choice(held)
        world.tell(LEFT, rng, thing, world.goal[world.goal[thing]])
    else:
        taken = set(world.goal.values())
        world.tell(GO, rng, rng.choice(people), rng.choice([place for place in PLACES if place not in taken]))


def _ask(rng: Random, binary: float, world: _World, chains: list[list[str]]) -> Asked:
    """Draw a chain first, so that every place is as likely, then mostly one of its two far ends."""
    chain = rng.choice(chains)
    source = rng.choice(chain[-2:] if rng.random() < _DEEP else chain)
    path = world.path(source)
    whole = world.proof(source, len(path))
    name = source if source in NAMES else f"the {source}"
    told = f"{name[0].upper()}{name[1:]} is in the {path[-1]}."
    dice = rng.random()
    holder = next((step for step in path if step in NAMES), None)
    if dice < binary:
        others = [world.path(other[0])[-1] for other in chains if other[0] not in (source, holder)]
        truth = rng.random() < 0.5
        place = path[-1] if truth else rng.choice([other for other in others if other != path[-1]])
        answer, key = yes_or_no(truth, told)
        return Asked("inside", f"Is {name} in the {place}?", answer, key, source, tuple(path), whole)
    if holder is not None and rng.random() < _HOLDER and len(world.holders()) >= _FEWEST_HOLDERS:
        proof = world.proof(source, path.index(holder) + 1)
        return Asked(
            "holder",
            f"Who has {name}?",
            f"The {source} is with {holder}.",
            holder,
            source,
            tuple(path[: len(proof)]),
            proof,
        )
    return Asked("where", f"Where is {name}?", told, path[-1], source, tuple(path), whole)
