"""L3: what is asked at each thought, what the model is told, and what becomes of words that cannot be read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.direct import FORM
from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.level import Question
from sigma0.bench.strategyqa.prompted import DEMONSTRATION
from sigma0.bench.strategyqa.react import STEP_LIMIT, React, SimpleReact, read_step
from sigma0.bench.strategyqa.react_traces import ReactTrace
from sigma0.bench.strategyqa.retrieval import Paragraph, ParagraphIndex, fact_paragraphs
from sigma0.bench.strategyqa.workflow import LONGEST, decompose_prompt, fact_prompt
from sigma0.reason.chat import ScriptedChat
from tests.bench.strategyqa.test_workflow import LENGTHS, PIANO, asked

ALL = ("decompose", "lookup", "evaluate", "finish")
RULES = (
    "Answer the question step by step. Reply with two lines:\nThought: what to do next\nAction: one of\n"
    "- decompose[question] splits it into shorter ones\n"
    "- lookup[question] tells a fact\n"
    "- evaluate[question] answers yes or no from the facts so far\n"
    "- finish[yes] or finish[no] answers the question\n"
)
SIMPLE_RULES = (
    "Answer the question step by step. Reply with two lines:\nThought: what to do next\nAction: one of\n"
    "- lookup[question] tells a fact\n"
    "- finish[yes] or finish[no] answers the question\n"
)


def act(action, thought="so it is"):
    return f"Thought: {thought}\nAction: {action}"


PIANO_REPLIES = (
    act(f"decompose[{PIANO.text}]"),
    f"1. {LENGTHS[0]}\n2. {LENGTHS[1]}\n3. {LENGTHS[2]}",
    act(f"lookup[{LENGTHS[0]}]"),
    "at least 1.5 metres",
    act(f"lookup[{LENGTHS[1]}]"),
    "about 0.7 metres",
    act(f"evaluate[{LENGTHS[2]}]"),
    "No.",
    act("finish[No]"),
)


def test_thoughts_actions_and_facts_are_shown_until_it_finishes():
    prediction, calls = asked(PIANO, PIANO_REPLIES, React())
    assert [purpose for purpose, _ in calls] == [
        "act", "decompose", "act", "lookup", "act", "lookup", "act", "evaluate", "act",
    ]  # fmt: skip
    first = (
        f"Thought: so it is\nAction: decompose[{PIANO.text}]\n"
        f"Observation: 1. {LENGTHS[0]}; 2. {LENGTHS[1]}; 3. {LENGTHS[2]}\n"
    )
    looked = [
        f"Thought: so it is\nAction: lookup[{LENGTHS[0]}]\nObservation: at least 1.5 metres\n",
        f"Thought: so it is\nAction: lookup[{LENGTHS[1]}]\nObservation: about 0.7 metres\n",
    ]
    evaluated = f"Thought: so it is\nAction: evaluate[{LENGTHS[2]}]\nObservation: No\n"
    facts = [
        f"#1 {LENGTHS[0]} at least 1.5 metres\n",
        f"#2 {LENGTHS[1]} about 0.7 metres\n",
        "#3 Is at least 1.5 metres less than about 0.7 metres? No\n",
    ]
    head = f"{RULES}\nQuestion: {PIANO.text}\n"
    assert calls[0][1] == head
    assert calls[1][1] == decompose_prompt(PIANO.text)
    assert calls[2][1] == head + first
    assert calls[3][1] == fact_prompt(PIANO.text, LENGTHS[0])
    assert calls[4][1] == f"{head}{first}{looked[0]}Facts so far:\n{facts[0]}"
    assert calls[6][1] == f"{head}{first}{''.join(looked)}Facts so far:\n{''.join(facts[:2])}"
    condition = "Is at least 1.5 metres less than about 0.7 metres?"
    assert calls[7][1] == f"Facts:\n{''.join(facts[:2])}Question: {condition}\n{FORM}"
    assert calls[8][1] == f"{head}{first}{''.join(looked)}{evaluated}Facts so far:\n{''.join(facts)}"
    assert prediction.answer is False and prediction.miss is None


def test_only_thoughts_are_stopped_at_an_observation():
    chat = ScriptedChat(PIANO_REPLIES)
    React().predict(PIANO, Ask(chat))
    assert [call["stop"] for call in chat.calls] == [("Observation:",) if n % 2 == 0 else () for n in range(9)]


@pytest.mark.parametrize("item", world_items(6), ids=lambda item: item.qid)
def test_a_story_is_asked_about_by_lookups(item):
    """The same actions by the whole loop and by the simple one, which shows no list of facts."""
    facts = item.facts[: STEP_LIMIT - 1]
    word = "yes" if item.answer else "no"
    replies = [reply for fact in facts for reply in (act(f"lookup[{fact}]"), "true")] + [act(f"finish[{word}]")]
    whole, calls = asked(Question.of(item), replies, React())
    simple, fewer = asked(Question.of(item), replies, SimpleReact())
    assert whole.answer == simple.answer == item.answer
    assert [purpose for purpose, _ in calls] == [*["act", "lookup"] * len(facts), "act"]
    assert [purpose for purpose, _ in fewer] == [purpose for purpose, _ in calls]
    assert calls[1][1] == fewer[1][1] == fact_prompt(item.question, facts[0])
    told = "".join(f"Thought: so it is\nAction: lookup[{fact}]\nObservation: true\n" for fact in facts)
    assert fewer[-1][1] == f"{SIMPLE_RULES}\nQuestion: {item.question}\n{told}"
    known = "".join(f"#{n} {fact} true\n" for n, fact in enumerate(facts, start=1))
    assert calls[-1][1] == f"{RULES}\nQuestion: {item.question}\n{told}Facts so far:\n{known}"


@pytest.mark.parametrize(
    "said, why",
    [
        ("", "the first line is no 'Thought: ...' but ''"),
        ("The answer is yes.", "the first line is no 'Thought: ...' but 'The answer is yes.'"),
        ("Action: finish[yes]", "the first line is no 'Thought: ...' but 'Action: finish[yes]'"),
        ("Thought:\nAction: finish[yes]", "the first line is no 'Thought: ...' but 'Thought:'"),
        ("Thought: a", "the second line is no 'Action: name[argument]' but ''"),
        ("Thought: a\nfinish[yes]", "the second line is no 'Action: name[argument]' but 'finish[yes]'"),
        ("Thought: a\nAction: finish yes", "the second line is no 'Action: name[argument]' but 'Action: finish yes'"),
        ("Thought: a\nAction: f[a] b", "the second line is no 'Action: name[argument]' but 'Action: f[a] b'"),
        ("Thought: a\nAction: finish[yes]\nThought: b", "there is more than one thought and one action: 'Thought: b'"),
        ("Thought: a\nAction: search[x]", f"there is no action 'search': take one of {', '.join(ALL)}"),
        ("Thought: a\nAction: lookup[ ]", f"the argument has 0 characters: give 1 to {LONGEST}"),
        (f"Thought: a\nAction: lookup[{'x' * 301}]", f"the argument has 301 characters: give 1 to {LONGEST}"),
    ],
)  # fmt: skip
def test_words_that_are_no_step_are_told_to_the_model_and_counted(said, why):
    assert read_step(said, ALL) == why
    prediction, calls = asked(PIANO, [said, act("finish[no]")], React())
    assert prediction.answer is False
    assert calls[1][1] == f"{RULES}\nQuestion: {PIANO.text}\nObservation: That could not be read: {why}.\n"
    assert ReactTrace.from_dict(prediction.trace).get_audit_info()["misses"] == [f"act: {why}"]


@pytest.mark.parametrize(
    "replies, miss",
    [
        ([act("decompose[q]"), "no list"], "decompose: no numbered steps in 'no list'"),
        ([act("decompose[q]"), "1. Is #1 so?"], "decompose: step 1 refers to #1, which is not answered by then"),
        ([act("lookup[q]"), "  "], "lookup: no words in ''"),
        ([act("lookup[#1?]")], "lookup: #1 has no answer yet: there are 0"),
        ([act("evaluate[q]"), "Perhaps"], "evaluate: no yes or no in 'Perhaps'"),
        ([act("evaluate[Is #2 so?]")], "evaluate: #2 has no answer yet: there are 0"),
        ([act("finish[maybe]")], "finish: takes yes or no, not 'maybe'"),
    ],
)
def test_an_action_that_fails_is_told_to_the_model_and_counted(replies, miss):
    prediction, calls = asked(PIANO, [*replies, act("finish[Yes]")], React())
    assert prediction.answer is True
    assert calls[-1][0] == "act" and "Observation: That failed: " in calls[-1][1] and "Facts so far" not in calls[-1][1]
    audit = ReactTrace.from_dict(prediction.trace).get_audit_info()
    assert audit["misses"] == [miss] and not audit["grounded"] and audit["used"] == []


def test_no_answer_within_the_limit_is_a_miss_that_counts_what_failed():
    prediction, calls = asked(PIANO, ["what?"] * STEP_LIMIT, React())
    why = "act: the first line is no 'Thought: ...' but 'what?'"
    assert prediction.answer is None and len(calls) == STEP_LIMIT
    assert prediction.miss == f"finish: none within {STEP_LIMIT} steps, {STEP_LIMIT} failed, the last of them: {why}"
    audit = ReactTrace.from_dict(prediction.trace).get_audit_info()
    assert audit["calls"] == {"": STEP_LIMIT} and len(audit["misses"]) == STEP_LIMIT
    quiet, calls = asked(PIANO, [act("lookup[q]"), "fact"] * 2, React(limit=2))
    assert quiet.miss == "finish: none within 2 steps" and len(calls) == 4


def test_a_bad_finish_at_the_limit_is_no_answer():
    prediction, _ = asked(PIANO, [act("finish[both]")], React(limit=1))
    assert prediction.answer is None and "finish: takes yes or no, not 'both'" in prediction.miss


@given(st.lists(st.text(max_size=80) | st.sampled_from([act(f"{a}[x #1]") for a in ALL]), min_size=12, max_size=12))
def test_no_words_of_a_model_break_it(replies):
    prediction, calls = asked(PIANO, replies, React())
    assert (prediction.answer is None) == (prediction.miss is not None)
    assert 1 <= len(calls) <= 2 * STEP_LIMIT
    assert ReactTrace.from_dict(prediction.trace).to_dict() == prediction.trace


def test_the_simple_loop_has_no_other_actions_and_no_numbers_of_facts():
    replies = [act("evaluate[Is it?]"), act("lookup[Who is #1 in the charts?]"), "Ann", act("finish[yes]")]
    prediction, calls = asked(PIANO, replies, SimpleReact())
    assert prediction.answer is True
    assert [purpose for purpose, _ in calls] == ["act", "act", "lookup", "act"]
    assert "there is no action 'evaluate': take one of lookup, finish" in calls[1][1]
    assert calls[2][1] == fact_prompt(PIANO.text, "Who is #1 in the charts?")
    assert "Facts so far" not in calls[3][1]


def test_an_index_tells_facts_in_place_of_the_model():
    index = ParagraphIndex({"a": Paragraph(title="Piano", content="A piano is\n2 metres long.")})
    replies = [act("lookup[How long is a piano?]"), act("lookup[zebra]"), act("finish[no]")]
    prediction, calls = asked(PIANO, replies, React(index))
    assert [purpose for purpose, _ in calls] == ["act", "act", "act"]
    assert "Observation: - Piano: A piano is 2 metres long.\n" in calls[1][1]
    assert calls[1][1].endswith("Facts so far:\n#1 How long is a piano? - Piano: A piano is 2 metres long.\n")
    assert "Observation: Nothing was found.\n" in calls[2][1]
    assert ReactTrace.from_dict(prediction.trace).get_audit_info()["misses"] == [
        "lookup: nothing was found for 'zebra'"
    ]


@pytest.mark.parametrize("level", [React, SimpleReact])
def test_stories_are_asked_about_beside_an_index_of_their_facts(level):
    items = world_items(20)
    index = ParagraphIndex(fact_paragraphs(items))
    for item in items:
        replies = [act(f"lookup[{item.facts[0]}]"), act("finish[yes]")]
        prediction, calls = asked(Question.of(item), replies, level(index, top_k=1))
        assert prediction.answer is True and len(calls) == 2 and item.facts[0] in calls[1][1].split("Observation:")[1]


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="limit 0"):
        React(limit=0)


def test_a_finished_trace_is_the_workflow_that_would_have_done_the_same():
    trace = ReactTrace.from_dict(json.loads(json.dumps(asked(PIANO, PIANO_REPLIES, React())[0].trace)))
    workflow = trace.to_workflow()
    combined = '["at least 1.5 metres", "about 0.7 metres", False]'
    assert workflow.to_icl_demo() == DEMONSTRATION.replace("combine_facts([False])", f"combine_facts({combined})")
    assert [step.uses for step in workflow.steps] == [(), (), (), (1, 2), (1, 2, 3)]
    assert trace.get_audit_info() == {
        "steps": 5,
        "calls": {"decompose": 1, "lookup": 2, "evaluate": 1, "finish": 1},
        "misses": [],
        "grounded": True,
        "used": ["at least 1.5 metres", "about 0.7 metres", False],
    }


def test_an_answer_from_nothing_is_not_grounded_and_an_unfinished_one_is_no_workflow():
    guessed = ReactTrace.from_dict(asked(PIANO, [act("finish[no]")], React())[0].trace)
    assert guessed.get_audit_info()["grounded"] is False
    unfinished = ReactTrace.from_dict(asked(PIANO, ["?"], React(limit=1))[0].trace)
    assert unfinished.get_audit_info()["grounded"] is False
    with pytest.raises(ValueError, match="has no answer"):
        unfinished.to_workflow()


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: trace.update(extra=1),
        lambda trace: trace["steps"][0].update(extra=1),
        lambda trace: trace["steps"][0].update(action="guess"),
        lambda trace: trace.update(kind="workflow"),
        lambda trace: trace.pop("limit"),
    ],
)
def test_a_trace_with_unknown_keys_or_bad_values_is_refused(change):
    trace = asked(PIANO, PIANO_REPLIES, React())[0].trace
    change(trace)
    with pytest.raises(ValueError, match="no trace of thoughts and actions"):
        ReactTrace.from_dict(trace)
