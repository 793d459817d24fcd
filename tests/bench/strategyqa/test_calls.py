"""Every level: the calls that it must make, none of which knows a label, and what it makes of malformed words.

What cannot be read at a step is a miss that is counted and says why, or the stated fallback; never No.
"""

import json
import pickle
import re
from dataclasses import asdict
from functools import cache
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.level import run_level
from sigma0.bench.strategyqa.memory import Improving
from sigma0.bench.strategyqa.registry import ALIASES, EXPERIMENTS, ONCE
from sigma0.reason.chat import ChatFailed, ScriptedChat
from sigma0.reason.messages import Completion
from tests.bench.strategyqa.calls import CALLS, GOOD, ITEMS, LOST, RIGHT, SPIRAL, asked, made

SETTINGS = AskSettings("high", max_tokens=48, temperature=0.25, seed=7, stop=("<end>",))
NAMES = {**{name: name for name in CALLS}, **ALIASES, "L4-adaptive": "L4 by rules"}


def test_there_are_just_these_levels():
    names = ["L0", "L1-cot", "L1-coc", "L1-ptp", "L2", "L2-rag", "L3", "L3-simple", "L4", "L4-pipeline", "L5", "L5-icl"]
    assert [*ONCE] == names and {name.partition(" by ")[0] for name in CALLS} == set(names)
    assert {*EXPERIMENTS} == {*names, "L0-baseline", "L2-trace", "L3-react", "L4-adaptive", "L5-improving"}


@pytest.mark.parametrize("name, same", NAMES.items())
def test_a_level_makes_these_calls_and_no_others(name, same):
    """Their number, order, settings and every word: answers that were kept are known by them."""
    chat = ScriptedChat([call.reply for calls in CALLS[same] for call in calls])
    result = run_level(made(name), ITEMS, chat, SETTINGS, retries=0)
    for entry, calls in zip(result.answered, CALLS[same], strict=True):
        assert entry.purposes == tuple(call.purpose for call in calls)
    for call, output in zip((call for calls in CALLS[same] for call in calls), chat.calls, strict=True):
        assert output.pop("messages") == [{"role": "user", "content": call.prompt}]
        assert output == {**asdict(SETTINGS), "stop": ("<end>", *call.stop)}
    assert [entry.right for entry in result.answered] == RIGHT and not result.misses
    assert result.level == same.partition(" by ")[0] and result.usage.calls == len(chat.calls)


@cache
def stories(split="test", n=48):
    """Items of the world under ids of which none is the beginning of another."""
    return [item.model_copy(update={"qid": f"{split}-{place:04d}"}) for place, item in enumerate(world_items(n, split))]


def of_world(name):
    return made(name, tuple(stories("train", 40)))


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
    chat = ScriptedChat(decided)
    run = run_level(of_world(name), items, chat, SETTINGS)
    left = iter(call["messages"][0]["content"] for call in chat.calls)
    return [([next(left) for _ in entry.purposes], entry.prediction) for entry in run.answered]


@pytest.mark.parametrize("name", CALLS)
def test_no_prompt_depends_on_the_label_of_its_item_or_of_a_later_one(name):
    items, place = stories()[:24], 12
    turned = [item.model_copy(update={"answer": not item.answer}) for item in items[place:]]
    first, second = prompts(name, items), prompts(name, [*items[:place], *turned])
    assert first[: place + 1] == second[: place + 1]
    # those after it are of the same questions: only what learns may ask otherwise, and does
    assert (first == second) == (name != "L5")


@pytest.mark.parametrize("name", CALLS)
def test_of_an_item_nothing_but_its_question_is_ever_shown(name):
    secret = {key: f"Secret {key}" for key in ("term", "description")}
    secret |= {key: (f"Secret {key}",) for key in ("facts", "decomposition")}
    items = [
        item.model_copy(update={**secret, "qid": f"Secret id {place}", "evidence": [["Secret paragraph"]]})
        for place, item in enumerate(stories()[:12])
    ]
    for item, (shown, _) in zip(items, prompts(name, items), strict=True):
        assert all("ecret" not in prompt for prompt in shown) and any(item.question in prompt for prompt in shown)


class Watched(Improving):
    """Whose memory is looked at before each prediction: it holds the items before this one, whatever failed."""

    def _predict(self, question, ask):
        # one that is begun anew waits for the label of the item that it is asked
        if question.qid not in self._waiting:
            before = [*self.memory.seen, question.qid]
            assert before == [item.qid for item in stories()[: len(before)]]
        return super()._predict(question, ask)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_memory_never_holds_an_item_before_it_was_scored(concurrency):
    calls = iter(range(10**6))

    def said(messages, **_):
        if next(calls) % 7 == 3:
            raise ChatFailed("the line is cut")
        return decided(messages)

    run = run_level(Watched(), stories(), ScriptedChat(said), SETTINGS, concurrency=concurrency, retries=3)
    assert len(run.answered) == len(stories()) and not run.misses


@pytest.mark.parametrize("name", [name for name in CALLS if name != "L5"])
def test_nothing_in_a_level_that_does_not_learn_changes_as_it_answers(name):
    level = of_world(name)
    state = pickle.dumps(level)
    run_level(level, stories()[:10], ScriptedChat(decided), SETTINGS)
    assert pickle.dumps(level) == state and level.learn is None


# words, though none that were asked for: whoever asks for a fact or for reasoning takes them
WORDS = ("Well, that is a hard question.", "maybe", "No idea.", "Yes or No", '{"steps": ["What is it', "x" * 10_000)
NO_WORDS = ("", " \n\t\r\n ", "- ...\n* **\n?!\n#", "\x00\x07\x1b[\x7f\u2028\u202e", "🙃 👍🏽", "*" * 10_000)


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("L3")])
def test_malformed_words_at_a_step_are_a_miss_under_its_name(name):
    """Of the pipeline an answer is taken as it is, and combined by the model where it is no value."""
    calls = CALLS[name][1]
    for place, call in enumerate(calls):
        if call.purpose in ("route", "first") or (name, call.purpose) == ("L4-pipeline", "answer"):
            continue
        for words in (*WORDS, *NO_WORDS):
            said = [entry.reply for entry in calls]
            said[place] = words
            result = run_level(made(name), [ITEMS[1]], ScriptedChat(said), AskSettings(), retries=0)
            prediction, purposes = result.answered[0].prediction, result.answered[0].purposes
            if words in WORDS and call.purpose in ("reason", "answer_factual"):
                assert result.right and len(purposes) == len(calls)
                continue
            assert prediction.answer is None and len(prediction.miss) < 200 and len(purposes) == place + 1
            assert list(result.misses.values()) == [1] and f"{call.purpose}: " in prediction.miss


@pytest.mark.parametrize("place", range(8))
def test_a_loop_is_told_what_was_wrong_and_goes_on(place):
    calls = [call.reply for call in CALLS["L3"][1]]
    purpose = CALLS["L3"][1][place].purpose
    for words in NO_WORDS if purpose == "lookup" else (*WORDS, *NO_WORDS):
        again = calls[place:] if purpose == "act" else calls[place - 1 :]
        prediction, shown = asked(made("L3"), ITEMS[1].question, *calls[:place], words, *again)
        assert prediction.answer is ITEMS[1].answer
        output = "could not be read" if purpose == "act" else "failed"
        assert f"\nObservation: That {output}: " in shown[place + 1][1]
        (miss,) = prediction.trace["workflow"].misses
        assert miss.startswith(f"{purpose}: ")


@pytest.mark.parametrize("name", ["L3", "L3-simple", "L4 by model"])
def test_a_loop_of_nothing_but_malformed_words_ends_in_one_miss(name):
    """To the end of its steps, or of what it is routed to; no answer is made up."""
    step = "L3: finish" if name == "L4 by model" else "finish"
    for words in (*WORDS, *NO_WORDS):
        result, calls = asked(made(name), "Could elephants be heavier than 3 whales?", *[words] * 20)
        assert result.answer is None and len(calls) == (7 if name == "L4 by model" else 6)
        assert result.miss.startswith(f"{step}: none within 6 steps, 6 failed, the last of them: act: ")


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
        ("L4 by verdict", [Completion("maybe", verdict=GOOD, door="converge")], "first: no yes or no in 'maybe'"),
        ("L4-pipeline", ["Condition: #1 < #2"], "analyse: no numbered thing in 'Condition: #1 < #2'"),
        ("L4-pipeline", [LISTED, "How?"], "decompose: no numbered question in 'How?'"),
        ("L4-pipeline", [LISTED, LISTED, "2 kg", "...\n**"], "answer: nothing was said to step 2"),
        ("L4-pipeline", [LISTED, LISTED, "a", "b", "Perhaps."], "combine: no yes or no in 'Perhaps.'"),
        ("L5", ["1. ?\n***"], "decompose: no numbered question in '1. ? ***'"),
        ("L5-icl", [LISTED, ""], "answer: no yes or no in ''"),
    ],
)
def test_a_miss_says_what_was_read_and_ends_the_run(name, replies, miss):
    result, calls = asked(made(name), "Do gulls swim?", *replies)
    assert (result.answer, result.miss, len(calls)) == (None, miss, len(replies))


# what the readers of answers, lists, conditions, values, thoughts and routes look for
_MARKS = (
    "Yes|No|no.|true|Answer: |The answer is |Final answer: No|or|/|**|maybe|1. |2) |- |99999999999999999999. |#1|#2|#0|"
    "#999999999999999999999|#|Is #1 so?|If #1, is it #2?|Condition: |#1 < #2|not |(|)|and |\"|'|!=|2 km|1e99|"
    "9 trillion|44 BC|31 February 1900|0000-00-00|Thought: so\nAction: |lookup[|finish[|yes]|#1]|That failed: |Medium|"
    ">>> |print(|{|\\|A question that was answered well: |Question: |Yes and no|\n|\r\n|\u2028|\x0b|\t|\x00|🙃|٣"
)
FRAGMENTS = (*_MARKS.split("|"), "x" * 400, "_" * 400, "\n" * 400, "-9" * 30)
soup = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=8).map("".join)
parts = st.lists(st.sampled_from(("What is #1?", "Is #2 more than #1?", "If #1, is it? #3")) | soup, max_size=4)
conditions = st.sampled_from(("#1 < #2", "not #2", "#1 or #2", "#7")) | soup
actions = st.sampled_from(("lookup", "evaluate", "decompose", "finish", "search"))
arguments = st.sampled_from(("What is it?", "Is #1 so?", "yes", "No")) | soup
answers = st.sampled_from(("Yes", "No.", "simple", "medium", "hard", "2 km", "3 kg", "a swan")) | soup


def listing(result, condition):
    return "".join(f"{number}. {part}\n" for number, part in enumerate(("Which?", *result), start=1)) + condition


# in place of a list, of an action and of an answer, whichever is asked for
REPLIES = st.tuples(
    st.builds(listing, parts, conditions.map("Condition: {}".format)) | soup,
    st.builds("Thought: so\nAction: {}[{}]".format, actions, arguments) | soup,
    answers,
    st.sampled_from((None, GOOD, SPIRAL, LOST)),
    st.sampled_from((None, None, "converge", "escalate", "abort")),
)


def check_trace(prediction):
    """Plain JSON beside the workflow, which is shown where it answers."""
    json.dumps(asdict(prediction))
    # a router holds the trace of the level below
    for entry in (prediction.trace, prediction.trace.get("trace")):
        result = entry.get("workflow") if isinstance(entry, dict) else None
        if result is not None and result.answer is not None:
            demo = result.to_icl_demo()
            assert demo.count("\n>>>") == 0 and demo.count("\nFinal answer: ") == 1


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CALLS)), st.lists(REPLIES, min_size=1, max_size=12))
def test_no_words_break_a_level_or_make_it_say_what_was_not_said(name, replies):
    """Four items in a row, so that what one left in a memory is shown to the next; replies begin anew at their end."""
    heard, questions = [], {item.question for item in ITEMS}

    def said(messages, **_):
        prompt = messages[0]["content"]
        *words, verdict, door = replies[len(heard) % len(replies)]
        place = 1 if "Action: one of" in prompt else 0 if "numbered" in prompt else 2
        heard.append(words[place])
        if name == "L5":
            # no words of a model end a block or begin one: each is of a question that was asked before
            for block in prompt.split("\n\n")[:-1]:
                head = re.match(r"A question that (?:was answered well|went wrong): (.*)\n", f"{block}\n")
                assert head and head.group(1) in questions
        return Completion(words[place], verdict=verdict, door=door)

    result = run_level(made(name), ITEMS, ScriptedChat(said), AskSettings(), retries=0)
    steps = {call.purpose for level in CALLS.values() for calls in level for call in calls} | {"finish"}
    done = 0
    for entry in result.answered:
        prediction, mine = entry.prediction, heard[done : done + len(entry.purposes)]
        check_trace(prediction)
        if prediction.answer is None:
            assert any(step in steps for step in prediction.miss.split(": ")[:2]) and len(prediction.miss) < 500
        elif prediction.trace.get("decided") != "python":
            word = "yes" if prediction.answer else "no"
            assert any(re.search(rf"(?<![^\W_]){word}(?![^\W_])", text.lower()) for text in mine)
        done += len(entry.purposes)
    assert done == len(heard)
