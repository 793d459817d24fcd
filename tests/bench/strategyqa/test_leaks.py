"""No level has an item's label before it has answered it, whatever the model makes of what it is shown."""

import pickle
import random
import re
from functools import cache
from hashlib import sha256

import pytest

from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.runner import run_level
from sigma0.bench.strategyqa.statistics import majority
from sigma0.reason.chat import ChatFailed, ScriptedChat
from tests.bench.strategyqa.definitions import DEFINITIONS
from tests.bench.strategyqa.definitions import made as made_of

SETTINGS = AskSettings()
LEVELS = list(DEFINITIONS)
STEPS = "1. What is it?\n2. Is #1 so?"
_LABEL = re.compile(r"(?:answer is|Answer:|answer:) (Yes|No)\b")
_WORD = re.compile(r"\w+")
# a line of a prompt, without what may stand before a question, and the characters that tell questions apart
_ASKED = re.compile(r'^(?:Question: |>>> strategy_qa\(")?(.*)$', re.MULTILINE)
_BEGINNING = 80


def made(name):
    return made_of(name, tuple(stories("train", 40)))


@cache
def stories(split="test", n=200):
    """Items of the world under ids of which none is the beginning of another."""
    return [item.model_copy(update={"qid": f"{split}-{place:04d}"}) for place, item in enumerate(world_items(n, split))]


def labelled(items, labels):
    return [item.model_copy(update={"answer": label}) for item, label in zip(items, labels, strict=True)]


def shuffled(seed, n=200):
    items = stories()[:n]
    labels = [item.answer for item in items]
    random.Random(seed).shuffle(labels)
    return labelled(items, labels)


def words(text):
    return frozenset(_WORD.findall(text.lower()))


def goes_on(prompt, answer):
    """What keeps a level going, with an answer wherever one can stand."""
    if "Action: one of" in prompt:
        return f"Thought: so\nAction: {f'finish[{answer}]' if 'Observation:' in prompt else 'lookup[What is it?]'}"
    if "numbered" in prompt:
        return f"{STEPS}\nCondition: #2"
    return "medium" if "How hard is it" in prompt else f"{answer}."


class Exploits:
    """A scripted model that remembers all texts with a label that it was ever shown, and copies that of the likeliest.

    A text that has the question in it is the likeliest, else the one that shares most words with it. Without any it
    says what is right most often.
    """

    def __init__(self, items):
        self.words = {item.question: words(item.question) for item in items}
        self.asked = {question[:_BEGINNING]: question for question in self.words}
        assert len(self.asked) == len(items)
        yes = sum(item.answer for item in items)
        self.guess = "Yes" if 2 * yes >= len(items) else "No"
        self.known = {}

    def __call__(self, messages, **_):
        prompt = messages[0]["content"]
        for text in prompt.split("\n\n"):
            label = _LABEL.search(text)
            if label is not None and text not in self.known:
                self.known[text] = (words(text), label.group(1))
        begun = (line[:_BEGINNING] for line in reversed(_ASKED.findall(prompt)))
        asked = next((self.asked[line] for line in begun if line in self.asked), "")
        return goes_on(prompt, self.likeliest(asked))

    def likeliest(self, asked):
        if not asked or not self.known:
            return self.guess
        wanted = self.words[asked]

        def likeness(text):
            found, _ = self.known[text]
            return asked in text, len(found & wanted) / len(found | wanted)

        return self.known[max(self.known, key=likeness)][1]


def share(level, items):
    run = run_level(level, items, ScriptedChat(Exploits(items)), SETTINGS, retries=0)
    assert not run.misses
    return run.right / len(items)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", LEVELS)
def test_with_shuffled_labels_no_level_is_above_what_the_commoner_label_scores(name, seed):
    items = shuffled(seed)
    guess = majority([item.answer for item in items]).interval[1]
    found = share(made(name), items)
    assert found <= guess
    # and it is no model that is always wrong: that would be a leak too
    assert found >= 1 - guess


@pytest.mark.parametrize("name", LEVELS)
def test_a_label_in_a_question_would_show(name):
    """The model does exploit what it is shown, through every level: else the test above would mean nothing."""
    items = [
        item.model_copy(update={"question": f"The answer is {'Yes' if item.answer else 'No'}. {item.question}"})
        for item in shuffled(0, 60)
    ]
    assert share(made(name), items) == 1.0


def decided(messages, **_):
    """An answer that the prompt alone decides."""
    prompt = messages[0]["content"]
    return goes_on(prompt, "Yes" if sha256(prompt.encode()).digest()[0] % 2 else "No")


def prompts(name, items):
    """What is asked of each item."""
    chat = ScriptedChat(decided)
    run = run_level(made(name), items, chat, SETTINGS)
    asked = iter(call["messages"][0]["content"] for call in chat.calls)
    return [[next(asked) for _ in each.purposes] for each in run.answered], run


@pytest.mark.parametrize("name", LEVELS)
def test_no_prompt_depends_on_the_label_of_its_item_or_of_a_later_one(name):
    items = stories()[:24]
    labels = [item.answer for item in items]
    place = 12
    changed = labelled(items, [*labels[:place], *(not label for label in labels[place:])])
    first, run = prompts(name, items)
    second, again = prompts(name, changed)
    assert first[: place + 1] == second[: place + 1]
    assert [each.prediction for each in run.answered[: place + 1]] == [
        each.prediction for each in again.answered[: place + 1]
    ]
    # those behind are of the same questions: only what learns may ask otherwise, and does
    assert (first == second) == (name != "L5")


@pytest.mark.parametrize("name", LEVELS)
def test_of_an_item_nothing_but_its_question_is_ever_shown(name):
    items = [
        item.model_copy(
            update={
                **{key: f"Secret {key}" for key in ("term", "description")},
                **{key: (f"Secret {key}",) for key in ("facts", "decomposition")},
                "qid": f"Secret id {place}",
                "evidence": [["Secret paragraph"]],
            }
        )
        for place, item in enumerate(stories()[:12])
    ]
    asked, _ = prompts(name, items)
    assert all("ecret" not in prompt for each in asked for prompt in each)
    assert all(any(item.question in prompt for prompt in each) for item, each in zip(items, asked, strict=True))


class Watched:
    """A level whose whole state is looked at before each prediction, and as it learns."""

    def __init__(self, level, items):
        self.level = level
        self.name, self.learns = level.name, level.learns
        self.left = [item.qid for item in items]
        self.learned = list(level.seeds())
        self.states = {pickle.dumps(level)}

    def seeds(self):
        return self.level.seeds()

    def predict(self, question, ask):
        self.look()
        assert question.qid == self.left[0] and set(vars(question)) == {"qid", "text"}
        # one that is begun anew waits for the label of the item that it is asked
        if question.qid not in getattr(self.level, "_waiting", ()):
            state = pickle.dumps(self.level)
            self.states.add(state)
            assert not [qid for qid in self.left if qid.encode() in state]
        found = self.level.predict(question, ask)
        if not self.learns:
            self.left.pop(0)
        return found

    def learn(self, item, prediction):
        self.look()
        self.level.learn(item, prediction)
        self.learned.append(self.left.pop(0))
        assert self.learned[-1] == item.qid
        self.look()

    def look(self):
        memory = getattr(self.level, "memory", None)
        if memory is not None:
            assert list(memory.seen) == self.learned
            assert {pattern.source for pattern in memory.patterns} <= set(self.learned)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_memory_never_holds_an_item_before_it_was_scored(concurrency):
    """Also where calls fail and an item is begun anew, and where several items at a time are wanted."""
    items = shuffled(5, 120)
    exploits, calls = Exploits(items), iter(range(10**6))

    def said(messages, **_):
        if next(calls) % 7 == 3:
            raise ChatFailed("the line is cut")
        return exploits(messages)

    level = Watched(made("L5"), items)
    run = run_level(level, items, ScriptedChat(said), SETTINGS, concurrency=concurrency, retries=3)
    assert not level.left and len(level.learned) == len(items) == len(run.answered)
    assert len(level.states) == len(items) and not run.misses


@pytest.mark.parametrize("name", [name for name in LEVELS if name != "L5"])
def test_nothing_in_a_level_that_does_not_learn_changes_as_it_answers(name):
    items = stories()[:10]
    level = Watched(made(name), items)
    run = run_level(level, items, ScriptedChat(decided), SETTINGS)
    assert len(run.answered) == 10 and not level.left
    assert level.states == {pickle.dumps(level.level)}
