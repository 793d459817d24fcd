"""No level has an item's label before it has answered it: no prompt and no state of it depends on one."""

import pickle
from functools import cache
from hashlib import sha256

import pytest

from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.improving import Improving
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


class Watched(Improving):
    """Whose whole state is looked at before each prediction."""

    def predict(self, question, ask):
        assert set(vars(question)) == {"qid", "text"}
        # one that is begun anew waits for the label of the item that it is asked
        if question.qid not in self._waiting:
            state, learned = pickle.dumps(self), len(self.memory.seen)
            items = stories()
            assert (
                list(self.memory.seen) == [item.qid for item in items[:learned]] and items[learned].qid == question.qid
            )
            assert not any(item.qid.encode() in state for item in items[learned:])
        return super().predict(question, ask)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_memory_never_holds_an_item_before_it_was_scored(concurrency):
    """Also where calls fail and an item is begun anew, and where several items at a time are wanted."""
    calls, level = iter(range(10**6)), Watched()

    def said(messages, **_):
        if next(calls) % 7 == 3:
            raise ChatFailed("the line is cut")
        return decided(messages)

    run = run_level(level, stories(), ScriptedChat(said), SETTINGS, concurrency=concurrency, retries=3)
    assert len(level.memory.seen) == len(run.answered) == len(stories()) and not run.misses


@pytest.mark.parametrize("name", [name for name in LEVELS if name != "L5"])
def test_nothing_in_a_level_that_does_not_learn_changes_as_it_answers(name):
    level = made(name)
    state = pickle.dumps(level)
    run = run_level(level, stories()[:10], ScriptedChat(decided), SETTINGS)
    level.learn(stories()[0], run.answered[0].prediction)
    assert pickle.dumps(level) == state and not level.learns
