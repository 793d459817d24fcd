"""Scenes of people who walk about and carry things: who is where, who has what, where things are."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from sigma0.bench.pocket.items import Item, Scene

NAMES = ("Mary", "John", "Anna", "Peter", "Emma", "David", "Lucy", "Tom", "Sara", "Paul", "Nora", "Ben")
PLACES = (
    "kitchen",
    "garden",
    "office",
    "bedroom",
    "hallway",
    "cellar",
    "attic",
    "library",
    "garage",
    "park",
    "barn",
    "market",
)
THINGS = ("apple", "book", "ball", "key", "lamp", "coin", "hat", "cup", "map", "pen", "rope", "box")

_GO = ("went to", "walked to")
_TAKE = ("took", "picked up")
_DROP = ("dropped", "put down")
# A walk mostly leads to an empty place. Were places often shared, naming the place read last would be a good guess.
_EMPTY_PLACE = 0.75
_REST = 3


@dataclass(frozen=True)
class Level:
    """What one setting of the difficulty dial means: `extra` events follow the opening ones."""

    people: int
    things: int
    extra: int
    families: tuple[str, ...]


# "Who has the cup?" is not asked: it looks a fact up against the order in which it was told, which no trial learned.
LEVELS = {
    1: Level(5, 0, 0, ("where",)),
    2: Level(5, 5, 0, ("where", "carries")),
    3: Level(5, 5, 2, ("where", "carries", "object")),
    4: Level(5, 5, 4, ("where", "carries", "object", "before", "together")),
    5: Level(6, 5, 5, ("where", "carries", "object", "before", "together", "origin")),
    6: Level(6, 6, 7, ("where", "carries", "object", "before", "together", "origin")),
}


@dataclass(frozen=True)
class Stay:
    """A thing's stay at one place: the place and the sentences (by index) that prove it."""

    place: str
    proof: frozenset[int]


@dataclass
class _World:
    """The state after the sentences told so far. Every fact keeps the index of the sentence that told it."""

    rng: Random
    people: list[str]
    told: list[str] = field(default_factory=list)
    walks: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # person -> (sentence, place), in order
    holder: dict[str, str | None] = field(default_factory=dict)  # thing -> person, or None once put down
    touch: dict[str, int] = field(default_factory=dict)  # thing -> the sentence that last changed its holder
    stays: dict[str, list[Stay]] = field(default_factory=dict)  # thing -> places in order, no two equal in a row

    def place(self, person: str) -> str:
        return self.walks[person][-1][1]

    def held(self, person: str) -> list[str]:
        return [thing for thing, holder in self.holder.items() if holder == person]

    def last_named(self, but: str) -> str:
        """The person named last in the story, `but` left out."""
        words = (word.rstrip(".") for sentence in reversed(self.told) for word in reversed(sentence.split()))
        return next(word for word in words if word in self.people and word != but)

    def tell(self, sentence: str) -> int:
        self.told.append(sentence)
        return len(self.told) - 1

    def walk(self, person: str) -> None:
        here = self.walks[person][-1][1] if person in self.walks else ""
        taken = {steps[-1][1] for steps in self.walks.values()}
        places = [place for place in PLACES if place != here]
        if self.rng.random() < _EMPTY_PLACE:
            places = [place for place in places if place not in taken]
        goal = self.rng.choice(places)
        index = self.tell(f"{person} {self.rng.choice(_GO)} the {goal}.")
        self.walks.setdefault(person, []).append((index, goal))
        for thing in self.held(person):
            self.stays[thing].append(Stay(goal, frozenset({self.touch[thing], index})))

    def take(self, person: str, thing: str) -> None:
        index = self.tell(f"{person} {self.rng.choice(_TAKE)} the {thing}.")
        self._pass_to(thing, person, index)
        if thing not in self.stays:
            self.stays[thing] = [Stay(self.place(person), frozenset({index, self.walks[person][-1][0]}))]

    def give(self, thing: str, giver: str, taker: str) -> None:
        self._pass_to(thing, taker, self.tell(f"{giver} gave the {thing} to {taker}."))

    def drop(self, person: str, thing: str) -> None:
        index = self.tell(f"{person} {self.rng.choice(_DROP)} the {thing}.")
        self._pass_to(thing, None, index)
        # Nobody carries it from here on, so the proof of where it lies is fixed now.
        self.stays[thing][-1] = Stay(self.place(person), frozenset({index, self.walks[person][-1][0]}))

    def _pass_to(self, thing: str, person: str | None, index: int) -> None:
        self.holder[thing] = person
        self.touch[thing] = index


def build(rng: Random, difficulty: int, questions: int) -> Scene:
    """Tell one story and ask up to `questions` different things about it.

    A family is drawn first, then a question of that family, so common families do not crowd out rare ones.

    Args:
        rng: Source of every choice.
        difficulty: Dial from 1 to 6, see `LEVELS`.
        questions: The most items to return; small stories may have fewer.
    """
    level = LEVELS[difficulty]
    world = _tell(rng, level)
    story = " ".join(world.told)
    pools = [pool for pool in (_ASK[family](world) for family in level.families) if pool]
    items: list[Item] = []
    while pools and len(items) < questions:
        pool = rng.choice(pools)
        asked = pool.pop(rng.randrange(len(pool)))
        if not pool:
            pools.remove(pool)
        items.append(_item(world, story, asked, difficulty))
    return Scene(story, tuple(items))


def _tell(rng: Random, level: Level) -> _World:
    world = _World(rng, rng.sample(NAMES, level.people))
    waiting = list(world.people)
    things = rng.sample(THINGS, level.things)
    # One first thing for each person before anyone gets a second: holders are spread, so a guess is worth little.
    first_takers = rng.sample(world.people, level.people) + rng.choices(world.people, k=level.things)
    takes = list(zip(first_takers, things, strict=False))
    while waiting or takes:
        ready = [pair for pair in takes if pair[0] in world.walks]
        if waiting and (not ready or rng.random() < 0.6):
            world.walk(waiting.pop())
        else:
            pair = rng.choice(ready)
            takes.remove(pair)
            world.take(*pair)
    for _ in range(level.extra):
        _extra(world)
    return world


def _extra(world: _World) -> None:
    rng = world.rng
    # A thing that just changed hands rests a while, or two people who meet would pass it to and fro.
    rested = {t: person for t, person in world.holder.items() if len(world.told) - world.touch[t] > _REST}
    held = [(thing, person) for thing, person in rested.items() if person is not None]
    lying = [thing for thing, person in rested.items() if person is None]
    gifts = [
        (thing, giver, taker)
        for thing, giver in held
        for taker in world.people
        if taker != giver and world.place(taker) == world.place(giver)
    ]
    finds = [(p, thing) for thing in lying for p in world.people if world.place(p) == world.stays[thing][-1].place]
    dice = rng.random()
    if gifts and dice < 0.4:
        world.give(*rng.choice(gifts))
    elif finds and dice < 0.5:
        world.take(*rng.choice(finds))
    elif held and dice < 0.55:
        thing, person = rng.choice(held)
        world.drop(person, thing)
    else:
        world.walk(rng.choice(world.people))


@dataclass(frozen=True)
class _Asked:
    family: str
    question: str
    answer: str
    key: str
    proof: frozenset[int]


def _item(world: _World, story: str, asked: _Asked, difficulty: int) -> Item:
    steps = tuple(world.told[index] for index in sorted(asked.proof))
    conclusion = asked.answer[0].lower() + asked.answer[1:] if asked.answer.startswith("The ") else asked.answer
    return Item(
        story=story,
        question=asked.question,
        answer=asked.answer,
        key=asked.key,
        family=asked.family,
        hops=len(asked.proof),
        difficulty=difficulty,
        derivation=(*steps, f"So {conclusion}"),
    )


def _where(world: _World) -> list[_Asked]:
    return [
        _Asked("where", f"Where is {p}?", f"{p} is in the {steps[-1][1]}.", steps[-1][1], frozenset({steps[-1][0]}))
        for p, steps in world.walks.items()
    ]


def _before(world: _World) -> list[_Asked]:
    asked = []
    for person, steps in world.walks.items():
        if len(steps) > 1:
            (first, old), (last, new) = steps[-2:]
            question = f"Where was {person} before the {new}?"
            asked.append(_Asked("before", question, f"{person} was in the {old}.", old, frozenset({first, last})))
    return asked


def _together(world: _World) -> list[_Asked]:
    asked = []
    for person, steps in world.walks.items():
        others = [other for other in world.people if other != person and world.place(other) == steps[-1][1]]
        # Who has just joined somebody is often named last; such pairs are left out, or that guess would pay.
        if len(others) == 1 and others[0] != world.last_named(person):
            proof = frozenset({steps[-1][0], world.walks[others[0]][-1][0]})
            asked.append(
                _Asked("together", f"Who is with {person}?", f"{others[0]} is with {person}.", others[0], proof)
            )
    return asked


def _carries(world: _World) -> list[_Asked]:
    asked = []
    for person in world.people:
        held = world.held(person)
        if len(held) == 1:
            proof = frozenset({world.touch[held[0]]})
            question = f"What does {person} have?"
            asked.append(_Asked("carries", question, f"{person} has the {held[0]}.", held[0], proof))
    return asked


def _object(world: _World) -> list[_Asked]:
    asked = []
    for thing, stays in world.stays.items():
        now = stays[-1]
        holder = world.holder[thing]
        proof = now.proof if holder is None else frozenset({world.touch[thing], world.walks[holder][-1][0]})
        asked.append(
            _Asked("object", f"Where is the {thing}?", f"The {thing} is in the {now.place}.", now.place, proof)
        )
    return asked


def _origin(world: _World) -> list[_Asked]:
    asked = []
    for thing, stays in world.stays.items():
        if len(stays) > 1:
            old, now = stays[-2:]
            question = f"Where was the {thing} before the {now.place}?"
            answer = f"The {thing} was in the {old.place}."
            asked.append(_Asked("origin", question, answer, old.place, old.proof | now.proof))
    return asked


_ASK: dict[str, Callable[[_World], list[_Asked]]] = {
    "where": _where,
    "before": _before,
    "together": _together,
    "carries": _carries,
    "object": _object,
    "origin": _origin,
}
