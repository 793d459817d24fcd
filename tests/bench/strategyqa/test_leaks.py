"""No level has an item's label before it has answered it: no prompt and no state of it depends on one."""

import pickle
from functools import cache
from hashlib import sha256

import pytest

from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.runner import run_level
from sigma0.reason.chat import ChatFailed, ScriptedChat
from tests.bench.strategyqa.definitions import DEFINITIONS
from tests.bench.strategyqa.definitions import made as made_of

SETTINGS = AskSettings()
LEVELS = list(DEFINITIONS)


def made(name):
    return made_of(name, tuple(stories("train", 40)))


@cache
def stories(split="test", n=120):
    """Items of the world under ids of which none is the beginning of another."""
    return [item.model_copy(update={"qid": f"{split}-{place:04d}"}) for place, item in enumerate(world_items(n, split))]


def decided(messages, **_):
    """What keeps a level going, with an answer wherever one can stand that the prompt alone decides."""
    prompt = messages[0]["content"]
    answer = "Yes" if sha256(prompt.encode()).digest()[0] % 2 else "No"
    if "Action: one of" in prompt:
        return f"Thought: so\nAction: {f'finish[{answer}]' if 'Observation:' in prompt else 'lookup[What is it?]'}"
    if "numbered" in prompt:
        return "1. What is it?\n2. Is #1 so?\nCondition: #2"
    return "medium" if "How hard is it" in prompt else f"{answer}."


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
    turned = [*labels[:place], *(not label for label in labels[place:])]
    changed = [item.model_copy(update={"answer": label}) for item, label in zip(items, turned, strict=True)]
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
    items, calls = stories(), iter(range(10**6))

    def said(messages, **_):
        if next(calls) % 7 == 3:
            raise ChatFailed("the line is cut")
        return decided(messages)

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
