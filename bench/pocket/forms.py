"""The forms of `sigma0.reason.forms` as questions about a story, with their replies: what `pocket-solver` is taught."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from random import Random

from sigma0.bench.pocket.items import Item, Scene, words_of
from sigma0.bench.pocket.stories import CITIES, NAMES, PLACES
from sigma0.checkpoints.about import Form
from sigma0.reason.forms import NEXT, NO, PLAN, RIGHT, YES, Action, asking, write_action
from sigma0.reason.lemma.graph import FINAL, MAX_LEMMAS

# How often each form is drawn; answers are asked as ever.
WEIGHTS: dict[Form, float] = {"answer": 2.0, "look": 2.0, "check": 2.0, "plan": 2.5, "act": 1.5}
# Pieces of the forms' texts that are one token each.
TOKENS = (
    *('{"L', '"}, "L', '": {"statement": "', '": {"verify": "', '", "statement": "', '", "depends": "L', ", L"),
    *('"}, "FINAL": {"statement": "', '"}, "FINAL": {"verify": "', '"}}'),
    *('{"act": "look", "at": "', '{"act": "note", "text": "', '{"act": "answer", "text": "', '"}'),
    *(" What is told of", " Plan.", " Next?", " Right?", " So", "What is told of", " +", " -"),
)
# What decides among replies that are alike otherwise, as it stands in a text; among calls and JSON also the values.
DECIDING = ("Yes", " Yes", "No", " No", " yes", " no", " +", " -")
DECIDING_VALUES = ("true", "false", *"0123456789")
_AGE = re.compile(r"(\w+) is (\d+) years old\.")
_COMPARED = re.compile(r"(\w+) is (?:as old as|(\d+) years? (older|younger) than) (\w+)\.")
_THING = re.compile(r"The (\w+) (?:is|was)\b")
_CHILD = re.compile(r"(?:The parent of|The family of)? ?([A-Z]\w+)\b")


@dataclass(frozen=True)
class Step:
    """One step of a solution."""

    statement: str  # A sentence: of the story, a sum, or the answer
    depends: tuple[int, ...] = ()  # Places of the steps that it builds on
    name: str = ""  # Whom or what a look-up asks about; empty for other steps
    total: str = ""  # A sum as an expression; empty for other steps

    @property
    def verify(self) -> str:
        """How the step is checked: the question of a look-up, or a sum."""
        return asking(self.name) if self.name else self.total


def solution(item: Item) -> tuple[Step, ...]:
    """The steps to an item's answer: look-ups in the order of the way, sums back along it, the answer last."""
    proof = item.derivation[:-1]
    if item.family not in ("age", "older"):
        looks = _looked_up(proof, 0)
        return (*looks, Step(item.answer, (len(looks) - 1,)))
    steps: list[Step] = []
    ends: list[int] = []
    chain: list[str] = []
    for sentence in proof:
        chain.append(sentence)
        if _AGE.fullmatch(sentence):
            steps += _counted(chain, len(steps))
            ends.append(len(steps) - 1)
            chain = []
    if item.family == "age" and len(steps) > 1:
        return (*steps[:-1], replace(steps[-1], statement=item.answer))
    return (*steps, Step(item.answer, tuple(ends)))


def named(sentence: str) -> str:
    """Whom or what a sentence of a story tells of, as it is named in a question."""
    thing = _THING.match(sentence)
    if thing is not None and not sentence.startswith(("The parent of", "The family of")):
        return f"the {thing[1]}"
    person = _CHILD.match(sentence)
    assert person is not None, sentence
    return person[1]


def form_scene(scene: Scene, seed: str, share: float) -> Scene:
    """The same story with `share` of its questions in forms that are drawn by `WEIGHTS`, always the same by a seed."""
    if not share:
        return scene
    rng = Random(f"forms/{seed}")
    items = [formed(item, rng) if rng.random() < share and _has_forms(item) else item for item in scene.items]
    return Scene(scene.story, tuple(items))


def _has_forms(item: Item) -> bool:
    return item.family != "unsaid" and not item.answer.startswith("{")


def formed(item: Item, rng: Random) -> Item:
    """An item in a form that is drawn."""
    return in_form(item, rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0], rng)


def in_form(item: Item, form: Form, rng: Random) -> Item:
    """An item in a form; a plan that would be too long is asked as an answer."""
    steps = solution(item)
    if form == "look":
        return look_item(item, rng.choice([step for step in steps if step.name]))
    if form == "check":
        return check_item(item, item.answer if rng.random() < 0.5 else wrong_answer(item, rng))
    if form == "plan" and len(steps) <= MAX_LEMMAS:
        return plan_item(item, 0 if rng.random() < 0.6 else rng.randrange(len(steps)))
    if form == "act":
        return act_item(item, rng.randrange(len(steps)))
    return item


def look_item(item: Item, step: Step) -> Item:
    """Asks for the sentence of one step."""
    return _asked(item, asking(step.name), step.statement)


def check_item(item: Item, proposed: str) -> Item:
    """Asks whether an answer is right."""
    reasons = [step.statement for step in solution(item)[:-1]]
    reply = " ".join((*reasons, item.derivation[-1], YES if proposed == item.answer else NO))
    return _asked(item, f"{item.question} {proposed} {RIGHT}", reply)


def plan_item(item: Item, known: int = 0) -> Item:
    """Asks for the steps that are left when the first `known` are known."""
    steps = solution(item)
    return _asked(item, _known(item, steps[:known], PLAN), plan_text(steps, known))


def act_item(item: Item, known: int) -> Item:
    """Asks for the action that comes next when the first `known` steps are known."""
    steps = solution(item)
    return _asked(item, _known(item, steps[:known], NEXT), write_action(action_of(steps, known)))


def action_of(steps: Sequence[Step], place: int) -> Action:
    """The action that a step is."""
    step = steps[place]
    if place == len(steps) - 1:
        return Action("answer", step.statement)
    return Action("look", step.name) if step.name else Action("note", step.statement)


def plan_text(steps: Sequence[Step], known: int = 0) -> str:
    """The steps after the first `known` as lemmas in JSON, counted from L1; what they build on is told among them."""
    names = {place: f"L{place - known + 1}" for place in range(known, len(steps) - 1)}
    names[len(steps) - 1] = FINAL
    lemmas = {}
    for place, name in names.items():
        step = steps[place]
        builds_on = ", ".join(names[other] for other in step.depends if other in names)
        # what is asked stands before what comes of it, so that it is worked out first
        fields = {"verify": step.verify, "statement": step.statement, "depends": builds_on}
        lemmas[name] = {field: value for field, value in fields.items() if value}
    return json.dumps(lemmas)


def wrong_answer(item: Item, rng: Random) -> str:
    """An answer of the same kind that is wrong."""
    if item.family == "older":
        swaps = {"Yes, ": "No, ", "older": "younger"} if item.key == "Yes" else {"No, ": "Yes, ", "younger": "older"}
        return reduce(lambda text, swap: text.replace(*swap), swaps.items(), item.answer)
    if item.family == "age":
        return item.answer.replace(item.key, str(rng.choice([age for age in range(2, 10) if str(age) != item.key])))
    goal = item.trail[-1]
    kinds = next(kinds for kinds in (PLACES, CITIES, NAMES) if goal in kinds)
    output = set(re.findall(r"\w+", item.story))
    others = [word for word in kinds if word in output and word not in (goal, item.subject)]
    others = others or [word for word in kinds if word not in (goal, item.subject)]
    if not item.binary:
        return item.answer.replace(goal, rng.choice(others))
    asked = next(word for word in reversed(re.findall(r"\w+", item.question)) if word in kinds)
    if item.key == "Yes":
        return item.answer.replace("Yes,", "No,").replace(goal, rng.choice(others))
    return item.answer.replace("No,", "Yes,").replace(goal, asked)


def _looked_up(chain: Sequence[str], first: int) -> list[Step]:
    """A look-up for each sentence, each building on the one before; the first is step number `first`."""
    return [Step(sentence, (first + place - 1,) * (place > 0), named(sentence)) for place, sentence in enumerate(chain)]


def _counted(chain: Sequence[str], first: int) -> list[Step]:
    """Look-ups along a chain of comparisons, then its sums back to the person asked about."""
    steps = _looked_up(chain, first)
    output = _AGE.fullmatch(chain[-1])
    assert output is not None, chain
    age, at = int(output[2]), first + len(chain) - 1
    for place in reversed(range(len(chain) - 1)):
        compared = _COMPARED.fullmatch(chain[place])
        assert compared is not None, chain[place]
        step = int(compared[2] or 0) * (1 if compared[3] == "older" else -1)
        total = f"{age} {'+' if step >= 0 else '-'} {abs(step)}"
        age += step
        steps.append(Step(f"{compared[1]} is {age} years old.", (first + place, at), total=total))
        at = first + len(steps) - 1
    return steps


def _asked(item: Item, question: str, reply: str) -> Item:
    """The item with another question and reply, at which no loop has a target of its own."""
    return replace(item, question=question, answer=reply, key=words_of(reply)[-1], trail=())


def _known(item: Item, steps: Sequence[Step], asks: str) -> str:
    return " ".join((item.question, *(step.statement for step in steps), asks))
