"""Every level over twenty items: the very calls that its definition says, and the answers that follow from them."""

from dataclasses import asdict

import pytest

from sigma0.bench.strategyqa import EXPERIMENTS
from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.registry import ALIASES, ONCE
from sigma0.bench.strategyqa.runner import run_level
from sigma0.reason.chat import ScriptedChat
from tests.bench.strategyqa.definitions import DEFINITIONS, Case, made
from tests.bench.strategyqa.scripts import ITEMS, SCRIPTS, TRAIN

SETTINGS = AskSettings("high", max_tokens=48, temperature=0.25, seed=7, stop=("<end>",))


def run(level, name, truthful):
    expected = [DEFINITIONS[name](Case(number, truthful)) for number in range(len(ITEMS))]
    chat = ScriptedChat([call.reply for calls in expected for call in calls])
    return expected, run_level(level, ITEMS, chat, SETTINGS, retries=0), chat.calls


def check(expected, found, asked):
    """Compares all calls of a run with those that must come: their number, order, settings and every word."""
    assert [each.purposes for each in found.answered] == [tuple(call.purpose for call in calls) for calls in expected]
    assert len(asked) == sum(map(len, expected))
    for call, given in zip((call for calls in expected for call in calls), asked, strict=True):
        (message,) = given.pop("messages")
        assert message.pop("role") == "user" and set(message) == {"content"}
        call.check(message["content"])
        assert given == {**asdict(SETTINGS), "stop": ("<end>", *call.stop)}


def test_every_level_has_a_definition_and_the_items_are_of_every_kind():
    assert {name.partition(" by ")[0] for name in DEFINITIONS} == set(ONCE)
    assert {*ONCE, *ALIASES} == set(EXPERIMENTS)
    assert len(ITEMS) == 20 and sum(item.answer for item in ITEMS) == 12
    assert {script.difficulty for script in SCRIPTS.values()} == {"simple", "medium", "hard"}
    assert not {item.qid for item in ITEMS} & {item.qid for item in TRAIN}
    asked = [call.prompt for number in range(20) for call in DEFINITIONS["L2-rag"](Case(number))]
    shown = sum(prompt.startswith("Passages:\n- ") for prompt in asked)
    assert 20 < shown < sum("Answer only this part" in prompt for prompt in asked)


@pytest.mark.parametrize("truthful", [True, False], ids=["oracle", "opposite"])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_level_makes_the_calls_that_its_definition_says_and_no_others(name, truthful):
    expected, found, asked = run(made(name), name, truthful)
    check(expected, found, asked)
    assert found.right == (20 if truthful else 0)
    assert not found.misses
    assert found.usage.calls == len(asked)


@pytest.mark.parametrize("alias, name", ALIASES.items())
def test_another_name_is_the_same_level(alias, name):
    expected, found, asked = run(made(alias), {"L4": "L4 by rules"}.get(name, name), True)
    check(expected, found, asked)
    assert (found.level, found.right) == (name, 20)


def test_python_decides_for_a_pipeline_wherever_its_condition_can_be_worked_out():
    for truthful in (True, False):
        _, found, _ = run(made("L4-pipeline"), "L4-pipeline", truthful)
        by_model = [each.qid for each in found.answered if each.prediction.trace["decided"] == "model"]
        assert by_model == ["aristotle", "smoke", "leap", "gelatine", "hamlet", "ice", "tomato"]
