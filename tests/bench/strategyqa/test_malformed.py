"""Every level, every step, every kind of malformed words: a miss that is counted and says why, or the stated fallback.

Nothing here is read as No that does not say No, and nothing breaks.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.react_traces import ReactTrace
from sigma0.bench.strategyqa.runner import run_level
from sigma0.bench.strategyqa.workflow import Template, Workflow
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.messages import Completion
from tests.bench.strategyqa.definitions import DEFINITIONS, GOOD, Case, asked, made
from tests.bench.strategyqa.scripts import ITEMS
from tests.marks import named

# words, though none that were asked for: whoever asks for a fact or for reasoning takes them
WORDS = {
    "prose": "Well, that is a hard question to split or to answer in only one go.",
    "maybe": "maybe",
    "no idea": "No idea.",
    "the form": "Yes or No",
    "unclosed JSON": '{"steps": ["What is it',
    "long": "x" * 10_000,
}
NO_WORDS = {
    "empty": "",
    "whitespace": " \n\t\r\n ",
    "punctuation": "- ...\n* **\n?!\n#",
    "control": "\x00\x07\x1b[\x7f\u2028\u202e",
    "emoji": "🙃 👍🏽",
    "long punctuation": "*" * 10_000,
}
MALFORMED = {**WORDS, **NO_WORDS}
NAMES = {item.qid: number for number, item in enumerate(ITEMS)}
# a level with one item; a router with one for each level that it sends to. All have room for one step more.
ITEM_OF = {
    **dict.fromkeys(DEFINITIONS, ("violin",)),
    "L4 by rules": ("penguins", "violin", "elephants"),
    "L4 by model": ("aristotle", "violin", "goldfish"),
    "L4 by verdict": ("penguins", "violin", "goldfish", "aristotle"),
    "L4-pipeline": ("violin", "eiffel", "leap", "boiling"),
}
# steps that take any words, and go on with them
FREE = {("", "reason"), ("", "answer_factual"), ("L3", "lookup"), ("L4-pipeline", "answer")}
# after these a looping level tells the model what was wrong, and goes on
LOOPING = {"act", "lookup", "evaluate", "decompose"}


def level_below(name, calls):
    """The level whose steps these are: a router's calls are of another one behind its own."""
    if not name.startswith("L4 by"):
        return name
    purposes = {call.purpose for call in calls} - {"route", "first"}
    return next(
        level for sign, level in (("reason", "L1-cot"), ("combine_facts", "L2"), ("act", "L3")) if sign in purposes
    )


kept = cache(made)


def run(name, qid, replies):
    chat = ScriptedChat(replies)
    # one that learns is a new one each time
    level = made(name) if name == "L5" else kept(name)
    found = run_level(level, [ITEMS[NAMES[qid]]], chat, AskSettings(), retries=0)
    return found, found.answered[0].prediction, chat.calls


def takes_words(level, purpose):
    return ("", purpose) in FREE or (level, purpose) in FREE or (level == "L3-simple" and purpose == "lookup")


def is_miss(found, prediction, asked, reason, calls):
    """Counted once, under its step, with what was said; nothing was asked after it."""
    assert prediction.answer is None
    assert prediction.miss.startswith(f"{reason}: ")
    assert len(prediction.miss) < 200 and "no answer: " not in prediction.miss
    assert dict(found.misses) == {reason.partition(":")[0]: 1} and found.right == 0
    assert len(asked) == calls


@pytest.mark.parametrize("name", DEFINITIONS)
def test_malformed_words_at_a_step_are_a_miss_or_its_fallback(name):
    for qid in ITEM_OF[name]:
        for place, kind in product(range(len(DEFINITIONS[name](Case(NAMES[qid])))), MALFORMED):
            with named(name, qid, place, kind):
                check_malformed(name, qid, place, kind)


def check_malformed(name, qid, place, kind):
    calls = DEFINITIONS[name](Case(NAMES[qid]))
    level, purpose = level_below(name, calls) if len(calls) > 1 else name, calls[place].purpose
    label = ITEMS[NAMES[qid]].answer
    bad, good = MALFORMED[kind], [call.reply for call in calls]
    said = replace(good[place], text=bad) if isinstance(good[place], Completion) else bad
    behind = good[place + 1 :]

    if purpose == "route":
        check_route(name, qid, bad)
    elif purpose == "first" and behind:
        # its words do not count where its door did not open
        _, prediction, asked = run(name, qid, [said, *behind])
        assert prediction.answer is label and len(asked) == len(calls)
    elif level == "L4-pipeline" and purpose == "answer" and kind in WORDS:
        check_answer_in_words(qid, place, said, good)
    elif takes_words(level, purpose) and kind in WORDS:
        found, prediction, asked = run(name, qid, [*good[:place], said, *behind])
        assert prediction.answer is label and not found.misses and len(asked) == len(calls)
        if purpose != "reason":
            assert all(len(each["messages"][0]["content"]) < 3000 for each in asked)
    elif level in ("L3", "L3-simple") and purpose in LOOPING:
        # the model tries the same again: the thought alone, or the thought and what it asked for
        again = good[place:] if purpose == "act" else good[place - 1 :]
        check_told(name, qid, [*good[:place], said, *again], place, purpose)
    else:
        below = name.startswith("L4 by") and purpose != "first"
        found, prediction, asked = run(name, qid, [*good[:place], said, *behind])
        is_miss(found, prediction, asked, f"{level}: {purpose}" if below else purpose, place + 1)


def check_route(name, qid, bad):
    """A route that cannot be read is told, and the rules decide."""
    expected = DEFINITIONS["L4 by rules"](Case(NAMES[qid]))
    found, prediction, asked = run(name, qid, [bad, *(call.reply for call in expected)])
    assert [each["messages"][0]["content"] for each in asked[1:]] == [call.prompt for call in expected]
    assert prediction.answer is ITEMS[NAMES[qid]].answer and not found.misses
    assert prediction.trace["unread_route"].startswith("route: none of simple, medium, hard but ")


def check_told(name, qid, replies, place, purpose):
    """What was wrong is shown at the next thought and counted, and the level goes on to its answer."""
    found, prediction, asked = run(name, qid, replies)
    assert prediction.answer is ITEMS[NAMES[qid]].answer and not found.misses
    assert len(asked) == len(replies)
    told = {"act": "could not be read", "decompose": "failed", "lookup": "failed", "evaluate": "failed"}[purpose]
    assert f"\nObservation: That {told}: " in asked[place + 1]["messages"][0]["content"]
    trace = prediction.trace if "steps" in prediction.trace else prediction.trace["trace"]
    (miss,) = ReactTrace.from_dict(trace).get_audit_info()["misses"]
    assert miss.startswith(f"{purpose}: ")


def check_answer_in_words(qid, place, said, good):
    """Words that are no value leave the condition open where it rests on them: then the model combines."""
    places = {"violin": (2, 3), "eiffel": (2, 3), "leap": (2, 3), "boiling": (4,)}[qid]
    replies = [*good[:place], said, *good[place + 1 :]]
    replies += ["Answer: Yes"] if qid != "leap" else []
    _, prediction, asked = run("L4-pipeline", qid, replies)
    by_model = place in places
    assert prediction.trace["decided"] == ("model" if by_model else "python")
    assert prediction.answer is (True if by_model else ITEMS[NAMES[qid]].answer)
    assert len(asked) == (len(replies) if by_model else len(good))
    assert len(asked[-1]["messages"][0]["content"]) < 3000


@pytest.mark.parametrize("name", ["L3", "L3-simple", "L4 by model"])
def test_a_loop_of_nothing_but_malformed_words_ends_in_one_miss(name):
    """To the end of its steps, or of what it is routed to; no answer is made up."""
    step = "L3: finish" if name == "L4 by model" else "finish"
    for kind, words in MALFORMED.items():
        found, prediction, asked = run(name, "elephants", [words] * 20)
        assert prediction.answer is None and sum(found.misses.values()) == 1, kind
        assert prediction.miss.startswith(f"{step}: none within 6 steps, 6 failed, the last of them: act: "), kind
        assert len(asked) == (7 if name == "L4 by model" else 6), kind


def test_a_first_answer_that_stands_is_read_as_strictly():
    for kind, words in MALFORMED.items():
        with named(kind):
            said = Completion(words, verdict=GOOD, door="converge")
            is_miss(*run("L4 by verdict", "violin", [said]), "first", 1)


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
