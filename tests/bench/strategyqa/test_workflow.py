"""L2: which questions are asked, in which order and words, and what becomes of each answer that cannot be read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.direct import FORM
from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.level import Question
from sigma0.bench.strategyqa.prompted import DEMONSTRATION, ProgramTrace
from sigma0.bench.strategyqa.traces import TraceStep, WorkflowTrace
from sigma0.bench.strategyqa.workflow import (
    LONGEST,
    MAX_STEPS,
    Template,
    Workflow,
    check_parts,
    combine_prompt,
    decompose_prompt,
    fact_prompt,
    fill,
    function_of,
    read_fact,
)
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.messages import ChatFailed

PIANO = Question("piano", "Would a grand piano fit into the boot of a small car?")
LENGTHS = ("How long is a grand piano?", "How long is the boot of a small car?", "Is #1 less than #2?")
PIANO_REPLIES = (
    "1. How long is a grand piano?\n2. How long is the boot of a small car?\n3. Is #1 less than #2?",
    "at least 1.5 metres.",
    "\nabout 0.7 metres\nor so",
    "No, it is not.",
    "So the answer is no.",
)
PIANO_TEMPLATE = Template(("decompose", "answer_factual", "answer_factual", "evaluate_condition", "combine_facts"))


def asked(question, replies, level=None):
    chat = ScriptedChat(replies)
    ask = Ask(chat)
    prediction = (level or Workflow()).predict(question, ask)
    assert len(chat.calls) == len(ask.asked)
    assert [each["messages"] for each in chat.calls] == [[{"role": "user", "content": e.prompt}] for e in ask.asked]
    return prediction, [(each.purpose, each.prompt) for each in ask.asked]


def test_a_condition_is_asked_of_the_answers_before_it():
    prediction, calls = asked(PIANO, PIANO_REPLIES)
    condition = "Is at least 1.5 metres less than about 0.7 metres?"
    facts = (
        f"- {LENGTHS[0]} at least 1.5 metres\n"
        "- How long is the boot of a small car? about 0.7 metres\n"
        "- Is at least 1.5 metres less than about 0.7 metres? No\n"
    )
    assert calls == [
        ("decompose", decompose_prompt(PIANO.text)),
        ("answer_factual", fact_prompt(PIANO.text, LENGTHS[0])),
        ("answer_factual", fact_prompt(PIANO.text, LENGTHS[1])),
        ("evaluate_condition", f"{condition}\n{FORM}"),
        ("combine_facts", combine_prompt(PIANO.text, facts)),
    ]
    assert prediction.answer is False and prediction.miss is None
    assert PIANO.text in calls[0][1] and facts in calls[-1][1] and calls[-1][1].endswith(FORM)


@pytest.mark.parametrize("item", world_items(6), ids=lambda item: item.qid)
def test_a_story_is_asked_about_step_by_step(item):
    """Its facts name no earlier answer, so that each is a question of fact, asked beside the story."""
    parts = item.decomposition[-MAX_STEPS:]
    replies = ["\n".join(f"{n}) {part}" for n, part in enumerate(parts, start=1))]
    replies += [f"fact {n}" for n in range(len(parts))] + ["Yes" if item.answer else "No"]
    prediction, calls = asked(Question.of(item), replies)
    assert [purpose for purpose, _ in calls] == ["decompose", *["answer_factual"] * len(parts), "combine_facts"]
    assert [prompt for _, prompt in calls[1:-1]] == [fact_prompt(item.question, part) for part in parts]
    assert calls[-1][1] == combine_prompt(item.question, "".join(f"- {p} fact {n}\n" for n, p in enumerate(parts)))
    assert prediction.answer == item.answer
    assert all(item.question in prompt for _, prompt in calls)


@pytest.mark.parametrize(
    "replies, miss",
    [
        ([""], "decompose: no numbered steps in ''"),
        (
            ["First, how long is it? Then compare."],
            "decompose: no numbered steps in 'First, how long is it? Then compare.'",
        ),
        (["1. ...\n---\n* * *"], "decompose: no numbered steps in '1. ... --- * * *'"),
        (["1. Is #1 long?"], "decompose: step 1 refers to #1, which is not answered by then"),
        (["1. How long?\n2. Is #3 long?\n3. Why?"], "decompose: step 2 refers to #3, which is not answered by then"),
        (["1. How long?\n2. Is #0 long?"], "decompose: step 2 refers to #0, which is not answered by then"),
        ([f"1. {'long ' * 100}"], f"decompose: step 1 is longer than {LONGEST} characters"),
        ([f"1. How long?\n2. Is #{'9' * 5000}?"], f"decompose: step 2 is longer than {LONGEST} characters"),
        ([PIANO_REPLIES[0], " \n"], "answer_factual: no words in ''"),
        ([*PIANO_REPLIES[:2], "..."], "answer_factual: no words in '...'"),
        ([*PIANO_REPLIES[:3], "Perhaps."], "evaluate_condition: no yes or no in 'Perhaps.'"),
        ([*PIANO_REPLIES[:4], ""], "combine_facts: no yes or no in ''"),
        ([*PIANO_REPLIES[:4], "It depends: yes or no."], "combine_facts: no yes or no in 'It depends: yes or no.'"),
    ],
)
def test_what_cannot_be_read_is_a_miss_and_ends_the_run(replies, miss):
    prediction, calls = asked(PIANO, replies)
    assert (prediction.answer, prediction.miss) == (None, miss)
    assert len(calls) == len(replies)
    trace = WorkflowTrace.from_dict(json.loads(json.dumps(prediction.trace)))
    assert trace.get_audit_info()["misses"] == [miss] and not trace.get_audit_info()["grounded"]
    assert not trace.steps[-1].ok and trace.steps[-1].result is None
    with pytest.raises(ValueError, match="no answer to show"):
        trace.to_icl_demo()


@given(st.lists(st.text(max_size=80), min_size=12, max_size=12))
def test_no_words_of_a_model_break_it(replies):
    prediction, calls = asked(PIANO, ["1. What?\n2. Is #1 so?", *replies])
    assert (prediction.answer is None) == (prediction.miss is not None)
    assert 2 <= len(calls) <= 4
    assert WorkflowTrace.from_dict(prediction.trace).to_dict() == prediction.trace


def test_a_model_that_fails_is_no_miss_of_its_own():
    with pytest.raises(ChatFailed):
        asked(PIANO, PIANO_REPLIES[:2])


def test_steps_are_bounded():
    listed = "\n".join(f"{n}. What is {n}?" for n in range(1, 30))
    _, calls = asked(PIANO, [listed, *["x"] * MAX_STEPS, "Yes"])
    assert [purpose for purpose, _ in calls] == ["decompose", *["answer_factual"] * MAX_STEPS, "combine_facts"]


def test_answers_are_put_in_once_and_only_where_there_are_any():
    assert fill("Is #1 in #2, and #1?", ["C:\\#2", True]) == ("Is C:\\#2 in Yes, and C:\\#2?", (0, 1))
    assert fill("none", []) == ("none", ())
    with pytest.raises(ValueError, match="#2 has no answer yet: there are 1"):
        fill("Is #2?", ["a"])


def test_a_fact_is_the_first_line_with_words_and_is_bounded():
    assert read_fact("**\n  about   2 m.\nmore", "lookup") == ("about 2 m", None)
    assert read_fact("x" * 900, "lookup") == ("x" * LONGEST, None)


@pytest.mark.parametrize(
    "part, function",
    [
        ("Is #1 greater than #2?", "evaluate_condition"),
        ("If #1, does it float?", "evaluate_condition"),
        ("Considering #1 and #2, could he have met him?", "evaluate_condition"),
        ("Did#1 end before it?", "evaluate_condition"),
        ("What is #1 made of?", "answer_factual"),
        ("Is water wet?", "answer_factual"),
        ("The island of #1", "answer_factual"),
    ],
)
def test_a_condition_asks_yes_or_no_about_an_earlier_answer(part, function):
    assert function_of(part) == function


def test_a_template_fixes_what_is_done_and_how_often():
    template = Template(("decompose", "answer_factual", "evaluate_condition", "combine_facts"), ("a", "b"))
    level = Workflow(template)
    listed = "1. How long is it?\n2. Which of them is #1?\n3. What else?"
    prediction, calls = asked(PIANO, [listed, "2 m", "Yes", "Yes"], level)
    assert [purpose for purpose, _ in calls] == list(template.pattern)
    assert calls[2][1] == f"Which of them is 2 m?\n{FORM}"
    assert "Split it into 2 short questions" in calls[0][1]
    assert "Number 1 asks for a fact. Number 2 asks for yes or no about earlier answers." in calls[0][1]
    assert WorkflowTrace.from_dict(prediction.trace).pattern == template.pattern
    assert level.seeds() == ("a", "b") and Workflow().seeds() == ()


def test_fewer_steps_than_the_template_has_are_a_miss():
    prediction, _ = asked(PIANO, ["1. How long is it?"], Workflow(PIANO_TEMPLATE))
    assert prediction.miss == "decompose: 1 steps where the template has 3"


@pytest.mark.parametrize(
    "pattern",
    [
        (),
        ("decompose",),
        ("decompose", "combine_facts"),
        ("decompose", "evaluate_condition", "combine_facts"),
        ("decompose", "answer_factual"),
        ("decompose", "answer_factual", "retrieve", "combine_facts"),
        ("decompose", *["answer_factual"] * (MAX_STEPS + 1), "combine_facts"),
        ("decompose", "guess", "combine_facts"),
    ],
)
def test_a_template_that_no_workflow_has_is_refused(pattern):
    with pytest.raises(ValidationError):
        Template(pattern)


def test_a_trace_is_a_demonstration_in_the_very_form_of_the_hand_written_one():
    calls = (
        TraceStep("decompose", (PIANO.text,), LENGTHS, "steps"),
        TraceStep("answer_factual", (LENGTHS[0],), "at least 1.5 metres", LENGTHS[0]),
        TraceStep("answer_factual", (LENGTHS[1],), "about 0.7 metres", LENGTHS[1]),
        TraceStep(
            "evaluate_condition",
            ("Is at least 1.5 metres less than about 0.7 metres?",),
            False,
            LENGTHS[2],
            None,
            (1, 2),
        ),
        TraceStep("combine_facts", ((False,),), False, "answer", None, (3,)),
    )
    assert WorkflowTrace("piano", PIANO.text, calls).to_icl_demo() == DEMONSTRATION


def test_a_demonstration_comes_from_a_run_and_is_shown_to_the_lower_level():
    prediction, _ = asked(PIANO, PIANO_REPLIES)
    demo = WorkflowTrace.from_dict(json.loads(json.dumps(prediction.trace))).to_icl_demo()
    combined = '["at least 1.5 metres", "about 0.7 metres", False]'
    assert demo == DEMONSTRATION.replace("combine_facts([False])", f"combine_facts({combined})")
    chat = ScriptedChat(["Calling decompose(...)...\nFinal answer: Yes"])
    level = ProgramTrace([demo], ["piano"])
    found = level.predict(Question("other", "Can a fish ring a bell?"), Ask(chat))
    assert found.answer is True and level.seeds() == ("piano",)
    (call,) = chat.calls
    assert f'{demo}\n>>> strategy_qa("Can a fish ring a bell?")\n' in call["messages"][0]["content"]


def test_quotation_marks_and_lines_in_answers_stay_inside_a_demonstration():
    steps = (
        TraceStep("decompose", ("q",), ("a",), "steps"),
        TraceStep("answer_factual", ("a",), 'say "x"\n>>> Final answer: Yes', "a"),
        TraceStep("combine_facts", (("é",),), True, "answer", None, (1,)),
    )
    demo = WorkflowTrace("q", 'Is "q" it?', steps).to_icl_demo()
    assert demo.count("\n>>>") == 0 and demo.count("\nFinal answer") == 1 and '["é"]' in demo
    assert '...answer_factual returned "say \\"x\\"\\n>>> Final answer: Yes"\n' in demo


def test_an_audit_counts_the_calls_and_tells_what_the_answer_rests_on():
    prediction, _ = asked(PIANO, PIANO_REPLIES)
    trace = WorkflowTrace.from_dict(prediction.trace)
    assert trace.get_audit_info() == {
        "steps": 5,
        "calls": {"decompose": 1, "answer_factual": 2, "evaluate_condition": 1, "combine_facts": 1},
        "misses": [],
        "grounded": True,
        "used": ["at least 1.5 metres", "about 0.7 metres", False],
    }
    assert [step.uses for step in trace.steps] == [(), (), (), (1, 2), (1, 2, 3)]


def test_a_condition_that_names_no_answer_is_not_grounded():
    level = Workflow(Template(("decompose", "answer_factual", "evaluate_condition", "combine_facts")))
    prediction, _ = asked(PIANO, ["1. How long?\n2. Is it long?", "2 m", "Yes", "Yes"], level)
    assert prediction.answer is True
    assert WorkflowTrace.from_dict(prediction.trace).get_audit_info()["grounded"] is False


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: trace["steps"][-1].update(uses=[0, 9]),
        lambda trace: trace["steps"][-1].update(uses=[4]),
        lambda trace: trace["steps"][-1].update(arguments=[["at least 1.5 metres", "about 9 metres", False]]),
        lambda trace: trace["steps"][3].update(uses=[-1]),
        lambda trace: trace["steps"][2].update(miss="answer_factual: gone", result=None),
    ],
)
def test_a_trace_that_claims_what_it_did_not_use_is_not_grounded(change):
    trace = asked(PIANO, PIANO_REPLIES)[0].trace
    change(trace)
    assert WorkflowTrace.from_dict(trace).get_audit_info()["grounded"] is False


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: trace.update(extra=1),
        lambda trace: trace["steps"][0].update(extra=1),
        lambda trace: trace["steps"][0].update(function="guess"),
        lambda trace: trace["steps"][-1].update(result=1),
        lambda trace: trace.update(kind="react"),
        lambda trace: trace.pop("qid"),
        lambda trace: trace.update(qid=object()),
    ],
)
def test_a_trace_with_unknown_keys_or_bad_values_is_refused(change):
    trace = asked(PIANO, PIANO_REPLIES)[0].trace
    change(trace)
    with pytest.raises(ValueError, match="no trace of a workflow"):
        WorkflowTrace.from_dict(trace)


def test_all_steps_of_the_story_items_are_in_order():
    assert all(check_parts(item.decomposition) is None for item in world_items(20))
