"""What cannot be read at a step: a miss that is counted and says why, or the stated fallback; never No."""

import pytest

from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.react_traces import ReactTrace
from sigma0.bench.strategyqa.runner import run_level
from sigma0.bench.strategyqa.workflow import Template, Workflow
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.messages import Completion
from tests.bench.strategyqa.definitions import DEFINITIONS, GOOD, Case, asked, made
from tests.bench.strategyqa.scripts import ITEMS

# words, though none that were asked for: whoever asks for a fact or for reasoning takes them
WORDS = ("Well, that is a hard question.", "maybe", "No idea.", "Yes or No", '{"steps": ["What is it', "x" * 10_000)
NO_WORDS = ("", " \n\t\r\n ", "- ...\n* **\n?!\n#", "\x00\x07\x1b[\x7f\u2028\u202e", "🙃 👍🏽", "*" * 10_000)
FREE = {"reason", "answer_factual"}


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if not name.startswith("L3")])
def test_malformed_words_at_a_step_are_a_miss_under_its_name(name):
    """Of the pipeline an answer is taken as it is, and combined by the model where it is no value."""
    case = Case(1)
    calls = DEFINITIONS[name](case)
    for place, call in enumerate(calls):
        if call.purpose in ("route", "first") or (name, call.purpose) == ("L4-pipeline", "answer"):
            continue
        for words in (*WORDS, *NO_WORDS):
            said = [each.reply for each in calls]
            said[place] = words
            found = run_level(made(name), [case.item], ScriptedChat(said), AskSettings(), retries=0)
            prediction, purposes = found.answered[0].prediction, found.answered[0].purposes
            if words in WORDS and call.purpose in FREE:
                assert prediction.answer is case.item.answer and len(purposes) == len(calls)
                continue
            assert prediction.answer is None and len(prediction.miss) < 200 and len(purposes) == place + 1
            assert list(found.misses.values()) == [1] and f"{call.purpose}: " in prediction.miss


@pytest.mark.parametrize(
    "place, purpose", enumerate(["act", "decompose", "act", "lookup", "act", "lookup", "act", "evaluate"])
)
def test_a_loop_is_told_what_was_wrong_and_goes_on(place, purpose):
    case = Case(1)
    calls = [call.reply for call in DEFINITIONS["L3"](case)]
    for words in NO_WORDS if purpose == "lookup" else (*WORDS, *NO_WORDS):
        again = calls[place:] if purpose == "act" else calls[place - 1 :]
        prediction, prompts = asked(made("L3"), case.text, *calls[:place], words, *again)
        assert prediction.answer is case.item.answer
        told = "could not be read" if purpose == "act" else "failed"
        assert f"\nObservation: That {told}: " in prompts[place + 1][1]
        (miss,) = ReactTrace.from_dict(prediction.trace).get_audit_info()["misses"]
        assert miss.startswith(f"{purpose}: ")


@pytest.mark.parametrize("name", ["L3", "L3-simple", "L4 by model"])
def test_a_loop_of_nothing_but_malformed_words_ends_in_one_miss(name):
    """To the end of its steps, or of what it is routed to; no answer is made up."""
    step = "L3: finish" if name == "L4 by model" else "finish"
    for words in (*WORDS, *NO_WORDS):
        found, calls = asked(made(name), ITEMS[4].question, *[words] * 20)
        assert found.answer is None and len(calls) == (7 if name == "L4 by model" else 6)
        assert found.miss.startswith(f"{step}: none within 6 steps, 6 failed, the last of them: act: ")


def test_a_first_answer_that_stands_is_read_as_strictly():
    for words in (*WORDS, *NO_WORDS):
        found, calls = asked(made("L4 by verdict"), "Is it?", Completion(words, verdict=GOOD, door="converge"))
        assert found.answer is None and found.miss.startswith("first: ") and len(calls) == 1


def test_misses_are_counted_by_step_over_a_run():
    """One level, twenty items, each malformed at another step: none is lost, and none is right."""
    chosen = {number: number % len(DEFINITIONS["L2"](Case(number))) for number in range(20)}
    replies, expected = [], {}
    for number, place in chosen.items():
        calls = DEFINITIONS["L2"](Case(number))
        replies += [*(call.reply for call in calls[:place]), ""]
        expected[calls[place].purpose] = expected.get(calls[place].purpose, 0) + 1
    found = run_level(made("L2"), ITEMS, ScriptedChat(replies), AskSettings(), retries=0)
    assert dict(found.misses) == expected and sum(expected.values()) == 20 and len(expected) == 4
    assert found.right == 0


LISTED = "1. What is it?\n2. Is #1 so?"


@pytest.mark.parametrize(
    "name, replies, miss",
    [
        ("L0", ["It depends."], "answer: no yes or no in 'It depends.'"),
        ("L1-cot", ["____"], "reason: no words in '____'"),
        ("L1-coc", ['print("Answer: Yes")'], "answer: no yes or no outside of print in 'print(\"Answer: Yes\")'"),
        ("L2", ["First, how long?"], "decompose: no numbered steps in 'First, how long?'"),
        ("L2", ["1. ...\n---\n* * *"], "decompose: no numbered steps in '1. ... --- * * *'"),
        ("L2", ["1. Is #1 long?"], "decompose: step 1 refers to #1, which is not answered by then"),
        ("L2", ["1. A?\n2. Is #3 B?\n3. C?"], "decompose: step 2 refers to #3, which is not answered by then"),
        ("L2", ["1. A?\n2. Is #0 B?"], "decompose: step 2 refers to #0, which is not answered by then"),
        ("L2", [f"1. A?\n2. Is #{'9' * 5000}?"], "decompose: step 2 is longer than 300 characters"),
        ("L2", [LISTED, "..."], "answer_factual: no words in '...'"),
        ("L2", [LISTED, "a", "Perhaps."], "evaluate_condition: no yes or no in 'Perhaps.'"),
        ("L2", [LISTED, "a", "Yes", "It is yes or no."], "combine_facts: no yes or no in 'It is yes or no.'"),
        ("L4-pipeline", ["Condition: #1 < #2"], "analyse: no numbered thing in 'Condition: #1 < #2'"),
        ("L4-pipeline", [LISTED, "How?"], "decompose: no numbered question in 'How?'"),
        ("L4-pipeline", [LISTED, LISTED, "2 kg", "...\n**"], "answer: nothing was said to step 2"),
        ("L4-pipeline", [LISTED, LISTED, "a", "b", "Perhaps."], "combine: no yes or no in 'Perhaps.'"),
        ("L5", ["1. ?\n***"], "decompose: no numbered question in '1. ? ***'"),
        ("L5-icl", [LISTED, ""], "answer: no yes or no in ''"),
    ],
)
def test_a_miss_says_what_was_read_and_ends_the_run(name, replies, miss):
    found, calls = asked(made(name), "Do gulls swim?", *replies)
    assert (found.answer, found.miss, len(calls)) == (None, miss, len(replies))


def test_fewer_steps_than_the_template_has_are_a_miss():
    level = Workflow(Template(("decompose", "answer_factual", "answer_factual", "combine_facts")))
    assert asked(level, "Is it?", "1. How?")[0].miss == "decompose: 1 steps where the template has 2"
