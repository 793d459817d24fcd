"""Every level under words that are made to break it: it answers, or misses and says at which step."""

import json
import re
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.bench.strategyqa.asking import AskSettings
from sigma0.bench.strategyqa.react_traces import ReactTrace
from sigma0.bench.strategyqa.runner import run_level
from sigma0.bench.strategyqa.traces import WorkflowTrace
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.messages import Completion
from tests.bench.strategyqa.definitions import DEFINITIONS, GOOD, LOST, SPIRAL, made
from tests.bench.strategyqa.scripts import ITEMS

# what the readers of answers, lists, conditions, values, thoughts and routes look for
FRAGMENTS = (
    *("Yes", "No", "yes", "no.", "true", "Answer: ", "The answer is ", "Final answer: No", "or", "/", "**", "maybe"),
    *("1. ", "2) ", "- ", "* ", "99999999999999999999. ", "\n", "\r\n", "\u2028", "\x0b", " ", "\t", "\x00", "🙃", "٣"),
    *("#1", "#2", "#0", "#999999999999999999999", "#", "Is #1 so?", "What is #1?", "If #1, is it #2?", "What is it?"),
    *("Condition: ", "condition", ":", "#1 < #2", "#1 = #2", "not ", "(", ")", "and ", '"', "'", "<", ">=", "!="),
    *("2 km", "3", "1e99", "-9" * 30, "9 trillion", "44 BC", "in 1776", "31 February 1900", "0000-00-00", "99.99.9999"),
    *("Thought: ", "Thought: so\nAction: ", "Action: ", "lookup[", "evaluate[", "decompose[", "finish[", "yes]", "#1]"),
    *(
        "Observation: ",
        "That failed: ",
        "Facts so far:\n",
        "simple",
        "Medium",
        "hard",
        ">>> ",
        "print(",
        "{",
        "}",
        "\\",
    ),
    *("A question that was answered well: ", "Question: ", "No answer", "Yes and no", "x" * 400, "_" * 400, "\n" * 400),
)
soup = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=8).map("".join)
parts = (
    st.sampled_from(("What is it?", "Is #1 so?", "What is #1?", "Is #2 more than #1?", "If #1, is it? #3", "?")) | soup
)
lists = st.lists(parts, max_size=4).map(
    lambda found: "\n".join(f"{number}. {part}" for number, part in enumerate(("Which?", *found), start=1))
)
conditions = st.sampled_from(("#1 < #2", "#1 = #2", "#1", "not #2", "No", "#1 or #2", "#7", "")) | soup
actions = st.sampled_from(("lookup", "evaluate", "decompose", "finish", "search"))
arguments = st.sampled_from(("What is it?", "Is #1 so?", "#1", "yes", "No")) | soup
answers = st.sampled_from(("Yes", "No.", "simple", "medium", "hard", "2 km", "3 kg", "a swan", "maybe")) | soup


def reply(said, wild, verdict, door):
    """What a model says to a prompt: a list, an action or an answer, as is asked for, or any words in their place."""

    def to(prompt):
        place = 1 if "Action: one of" in prompt else 0 if "numbered" in prompt else 2
        return Completion(said[place] if wild is None else wild, verdict=verdict, door=door)

    return to


REPLIES = st.builds(
    reply,
    st.tuples(
        st.builds("{}\nCondition: {}".format, lists, conditions),
        st.builds("Thought: so\nAction: {}[{}]".format, actions, arguments),
        answers,
    ),
    st.none() | st.none() | st.none() | soup,
    st.sampled_from((None, GOOD, SPIRAL, LOST)),
    st.sampled_from((None, None, "converge", "escalate", "abort")),
)

WORKFLOW = "decompose(?: (?:answer_factual|evaluate_condition)){0,5}(?: combine_facts)?"
REACT = "act(?:(?: decompose| lookup| evaluate)? act){0,5}(?: decompose| lookup| evaluate)?"
BELOW = f"(?:reason(?: answer)?|{WORKFLOW}|{REACT})"
# the calls of one item, in words
ORDER = {
    "L0": "answer",
    "L1-cot": "reason(?: answer)?",
    "L1-coc": "answer",
    "L1-ptp": "trace",
    "L2": WORKFLOW,
    "L2-rag": WORKFLOW,
    "L3": REACT,
    "L3-simple": "act(?:(?: lookup)? act){0,5}(?: lookup)?",
    "L4 by rules": BELOW,
    "L4 by model": f"route {BELOW}",
    "L4 by verdict": f"first(?: {BELOW})?",
    "L4-pipeline": "analyse(?: decompose(?: answer){0,5}(?: combine)?)?",
    "L5": "decompose(?: answer)?",
    "L5-icl": "decompose(?: answer)?",
}
STEPS = {"L1-cot": {"reason", "answer"}, "L2": set(re.findall("[a-z_]{5,}", WORKFLOW)), "L3": {"finish"}}


kept = cache(made)


def steps_of(name):
    """What the reason of a miss may begin with."""
    if name.startswith("L4 by"):
        below = {f"{level}: {step}" for level, steps in STEPS.items() for step in steps}
        return below | {"first"}
    return {"finish"} if name.startswith("L3") else set(re.findall("[a-z_]{5,}", ORDER[name]))


def check_trace(trace):
    """Plain JSON; those that distillation reads are read back, and audited."""
    json.dumps(trace)
    # a router holds the trace of the level below
    for each in (trace, trace.get("trace")):
        if not isinstance(each, dict):
            continue
        kind = {"workflow": WorkflowTrace, "react": ReactTrace}.get(each.get("kind"))
        if kind is None:
            continue
        found = kind.from_dict(json.loads(json.dumps(each)))
        assert found.to_dict() == each
        assert set(found.get_audit_info()) == {"steps", "calls", "misses", "grounded", "used"}
        if found.answer is not None:
            demo = (found.to_workflow() if kind is ReactTrace else found).to_icl_demo()
            assert demo.count("\n>>>") == 0 and demo.count("\nFinal answer: ") == 1


def check_answer(prediction, said):
    """An answer is a word that the model said, or what Python made of a condition on its answers."""
    if prediction.trace.get("decided") == "python":
        assert "#" in prediction.trace["why"]
        return
    word = "yes" if prediction.answer else "no"
    assert any(re.search(rf"(?<![^\W_]){word}(?![^\W_])", text.lower()) for text in said)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(DEFINITIONS)), st.lists(REPLIES, min_size=1, max_size=8), st.integers(0, 17))
def test_no_words_break_a_level_or_make_it_say_what_was_not_said(name, replies, start):
    """Three items in a row, so that what one left in a memory is shown to the next; replies begin anew at their end."""
    level = made(name) if name == "L5" else kept(name)
    heard = []

    def said(messages, **_):
        heard.append(replies[len(heard) % len(replies)](messages[0]["content"]))
        return heard[-1]

    chat = ScriptedChat(said)
    found = run_level(level, ITEMS[start : start + 3], chat, AskSettings(), retries=0)
    done = 0
    for each in found.answered:
        prediction = each.prediction
        assert re.fullmatch(ORDER[name], " ".join(each.purposes)), each.purposes
        check_trace(prediction.trace)
        if prediction.answer is None:
            assert any(prediction.miss.startswith(f"{step}: ") for step in steps_of(name)), prediction.miss
            assert len(prediction.miss) < 500
        else:
            check_answer(prediction, [one.text for one in heard[done : done + len(each.purposes)]])
        done += len(each.purposes)
    assert done == len(chat.calls)
    assert sum(found.misses.values()) == sum(each.prediction.answer is None for each in found.answered)
    assert all(len(call["messages"][0]["content"]) < 20_000 for call in chat.calls)


@settings(max_examples=25, deadline=None)
@given(replies=st.lists(REPLIES, min_size=12, max_size=12))
def test_whatever_was_learned_is_shown_in_blocks(replies):
    level, items, left = made("L5"), ITEMS[:6], iter(replies)
    chat = ScriptedChat(lambda messages, **_: next(left)(messages[0]["content"]))
    run_level(level, items, chat, AskSettings(), retries=0)
    for call in chat.calls:
        # no words of a model end a block or begin one: each is of a question that was asked before
        *blocks, _ = call["messages"][0]["content"].split("\n\n")
        heads = [
            re.match(r"A question that (?:was answered well|went wrong): (.*)\n", f"{block}\n") for block in blocks
        ]
        assert all(head and head.group(1) in {item.question for item in items} for head in heads)
