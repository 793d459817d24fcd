"""L2 and L3: how steps, actions and paragraphs are read and bounded, and the traces that are audited and shown."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
from pydantic import ValidationError

from sigma0.bench.strategyqa import workflow as flow
from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.level import Level, Question, listed
from sigma0.bench.strategyqa.registry import DEMONSTRATION, EXPERIMENTS, Makings
from tests.bench.strategyqa.calls import act, asked

TEXTS = {
    "Piano-1": ("Piano", "A grand piano is between 1.5 and 3 metres long."),
    "Piano-2": ("Piano", "The piano was invented in Italy."),
    "Car-1": ("Car", "The boot of a small car is about 0.7 metres long."),
    "Fish-1": ("Fish", "Fish live in water."),
    "Fish-2": ("Fish", "Fish live in water."),
}


@pytest.fixture
def index():
    return flow.ParagraphIndex(
        {name: flow.Paragraph(title=title, content=text) for name, (title, text) in TEXTS.items()}
    )


def ids(index, query):
    return [name for name, _ in index.search(query)]


def test_the_best_paragraph_comes_first_and_strangers_not_at_all(index):
    assert ids(index, "How long is a grand piano?") == ["Piano-1", "Piano-2", "Car-1"]
    assert ids(index, "zebra") == ids(index, "") == []
    # equal ones stand in the order of the file
    assert ids(index, "Fish live in water")[:2] == ids(index, "fish") == ["Fish-1", "Fish-2"]
    for paragraphs in ({}, {"a": flow.Paragraph(title="", content="!")}):
        with pytest.raises(ValueError, match="hold no words"):
            flow.ParagraphIndex(paragraphs)


def test_a_published_file_is_searched(tmp_path):
    path = tmp_path / "paragraphs.json"
    more = {"section": "s", "headers": [["h"]], "para_index": 1}
    paragraphs = {name: {"title": title, "content": text, **more} for name, (title, text) in TEXTS.items()}
    path.write_text(json.dumps(paragraphs))
    assert ids(flow.ParagraphIndex(flow.load_paragraphs(path)), "fish") == ["Fish-1", "Fish-2"]
    assert EXPERIMENTS["L2-rag"](Makings(paragraphs=path)).name == "L2-rag"


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"a": {"title": "t"}}', '{"a": {"title": "t", "content": "c", "x": 1}}']
)
def test_what_is_no_paragraph_file_is_refused(tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ValueError, match="no paragraph file"):
        flow.load_paragraphs(tmp_path / "p.json")
    with pytest.raises(ValueError, match="cannot be read"):
        flow.load_paragraphs(tmp_path / "none.json")


def test_a_missing_library_is_told_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(ValueError, match=r"sigma0-lm\[bench\]"):
        flow.ParagraphIndex({"a": flow.Paragraph(title="t", content="some words")})


def test_facts_of_items_are_paragraphs():
    items = world_items(3)
    paragraphs = flow.fact_paragraphs(items)
    assert len(paragraphs) == sum(len(item.facts) for item in items)
    ((name, obtained), *_) = flow.ParagraphIndex(paragraphs).search(items[0].facts[0])
    assert obtained.content == items[0].facts[0] and name == f"{items[0].qid}-0"


def test_what_was_searched_is_in_the_trace_and_the_query_holds_the_answers_before_it(index):
    replies = ["1. What is in Italy?\n2. Who invented #1?\n3. Zebra?\n4. Is #1 it?", "a piano", "x", "y", "Yes", "Yes"]
    prediction, calls = asked(Level("L2-rag", partial(flow.workflow, None, index)), "Q?", *replies)
    trace = prediction.trace["workflow"]
    searched = [step for step in trace.steps if step.function == "retrieve"]
    assert [step.arguments[0] for step in searched] == ["What is in Italy?", "Who invented a piano?", "Zebra?"]
    assert [step.result[:1] for step in searched] == [("Piano-2",), ("Piano-2",), ()]
    assert "Passages:\n- Piano: The piano was invented in Italy.\n" in calls[2][1]
    assert not any("Passages" in prompt for _, prompt in (calls[0], *calls[3:]))
    assert trace.grounded and trace.pattern == tuple(purpose for purpose, _ in calls)
    assert flow.shown([("p", flow.Paragraph(title="T", content="long\n" * 500))], 9) == "- T: long long\n"


PIANO = Question("piano", "Would a grand piano fit into the boot of a small car?")
LENGTHS = ("How long is a grand piano?", "How long is the boot of a small car?", "Is #1 less than #2?")
SAID = ("at least 1.5 metres", "about 0.7 metres", "No")
PIANO_REPLIES = (listed(LENGTHS), *SAID, "So the answer is no.")
THOUGHTS = (
    act("decompose", PIANO.text), listed(LENGTHS), act("lookup", LENGTHS[0]), SAID[0], act("lookup", LENGTHS[1]),
    SAID[1], act("evaluate", LENGTHS[2]), SAID[2], act("finish", "No"),
)  # fmt: skip
ALL = ("decompose", "lookup", "evaluate", "finish")
PATTERN = ("decompose", "answer_factual", "evaluate_condition", "combine_facts")


def steps(template=None):
    return Level("L2", partial(flow.workflow, template, None))


def loop(simple=False, limit=flow.STEP_LIMIT):
    return Level("L3", partial(flow.react, simple, limit))


def trace_of(level, *replies):
    return asked(level, PIANO, *replies)[0].trace["workflow"]


def test_steps_and_answers_are_bounded():
    _, calls = asked(steps(), PIANO, listed(f"What is {n}?" for n in range(30)), *["x"] * flow.MAX_STEPS, "Yes")
    assert [purpose for purpose, _ in calls] == ["decompose", *["answer_factual"] * flow.MAX_STEPS, "combine_facts"]
    assert flow.read_fact("**\n  about   2 m.\nmore", "lookup") == ("about 2 m", None)
    assert flow.read_fact("x" * 900, "lookup") == ("x" * flow.LONGEST, None)


def test_answers_are_put_in_once_and_only_where_there_are_any():
    assert flow.fill("Is #1 in #2, and #1?", ["C:\\#2", True]) == ("Is C:\\#2 in Yes, and C:\\#2?", (0, 1))
    assert flow.fill("none", []) == ("none", ())
    with pytest.raises(ValueError, match="#2 has no answer yet: there are 1"):
        flow.fill("Is #2?", ["a"])


@pytest.mark.parametrize(
    "part, is_condition",
    [
        ("Is #1 greater than #2?", True),
        ("If #1, does it float?", True),
        ("Considering #1 and #2, could he have met him?", True),
        ("Did#1 end before it?", True),
        ("What is #1 made of?", False),
        ("Is water wet?", False),
        ("The island of #1", False),
    ],
)
def test_a_condition_asks_yes_or_no_about_an_earlier_answer(part, is_condition):
    assert flow.function_of(part) == ("evaluate_condition" if is_condition else "answer_factual")


def test_a_template_fixes_what_is_done_and_how_often():
    level = steps(flow.Template(PATTERN, ("a", "b")))
    replies = ["1. How long is it?\n2. Which of them is #1?\n3. What else?", "2 m", "Yes", "Yes"]
    prediction, calls = asked(level, PIANO, *replies)
    assert tuple(purpose for purpose, _ in calls) == PATTERN
    assert calls[2][1] == "Which of them is 2 m?\nAnswer with Yes or No."
    assert "Split it into 2 short questions" in calls[0][1]
    assert "Number 1 asks for a fact. Number 2 asks for yes or no about earlier answers." in calls[0][1]
    assert prediction.trace["workflow"].pattern == PATTERN
    assert asked(level, PIANO, "1. How?")[0].miss == "decompose: 1 steps where the template has 2"


@pytest.mark.parametrize(
    "pattern",
    [
        (),
        ("decompose", "combine_facts"),
        ("decompose", "evaluate_condition", "combine_facts"),
        ("decompose", "answer_factual"),
        ("decompose", "answer_factual", "retrieve", "combine_facts"),
        ("decompose", *["answer_factual"] * (flow.MAX_STEPS + 1), "combine_facts"),
    ],
)
def test_a_template_that_no_workflow_has_is_refused(pattern):
    with pytest.raises(ValidationError):
        flow.Template(pattern)


@pytest.mark.parametrize(
    "said, why",
    [
        ("", "the first line is no 'Thought: ...' but ''"),
        ("Action: finish[yes]", "the first line is no 'Thought: ...' but 'Action: finish[yes]'"),
        ("Thought: a", "the second line is no 'Action: name[argument]' but ''"),
        ("Thought: a\nAction: f[a] b", "the second line is no 'Action: name[argument]' but 'Action: f[a] b'"),
        ("Thought: a\nAction: finish[yes]\nThought: b", "there is more than one thought and one action: 'Thought: b'"),
        ("Thought: a\nAction: search[x]", f"there is no action 'search': take one of {', '.join(ALL)}"),
        ("Thought: a\nAction: lookup[ ]", f"the argument has 0 characters: give 1 to {flow.LONGEST}"),
        (f"Thought: a\nAction: lookup[{'x' * 301}]", f"the argument has 301 characters: give 1 to {flow.LONGEST}"),
    ],
)
def test_words_that_are_no_step_say_why(said, why):
    assert flow.read_step(said, ALL) == why


@pytest.mark.parametrize(
    "replies, miss",
    [
        ([act("decompose", "q"), "1. Is #1 so?"], "decompose: step 1 refers to #1, which is not answered by then"),
        ([act("lookup", "#1?")], "lookup: #1 has no answer yet: there are 0"),
        ([act("evaluate", "Is #2 so?")], "evaluate: #2 has no answer yet: there are 0"),
        ([act("finish", "maybe")], "finish: takes yes or no, not 'maybe'"),
    ],
)
def test_an_action_that_fails_is_told_to_the_model_and_counted(replies, miss):
    prediction, calls = asked(loop(), PIANO, *replies, act("finish", "Yes"))
    assert prediction.answer is True
    assert calls[-1][0] == "act" and "Observation: That failed: " in calls[-1][1] and "Facts so far" not in calls[-1][1]
    trace = prediction.trace["workflow"]
    assert trace.misses == (miss,) and not trace.grounded


def test_no_answer_within_the_limit_is_a_miss():
    quiet, calls = asked(loop(limit=2), PIANO, *[act("lookup", "q"), "fact"] * 2)
    assert quiet.miss == "finish: none within 2 steps" and len(calls) == 4
    both, _ = asked(loop(limit=1), PIANO, act("finish", "both"))
    assert both.answer is None and "finish: takes yes or no, not 'both'" in both.miss


def test_the_simple_loop_has_no_other_actions_and_no_numbers_of_facts():
    replies = [act("evaluate", "Is it?"), act("lookup", "Who is #1 in the charts?"), "Ann", act("finish", "yes")]
    prediction, calls = asked(loop(simple=True), PIANO, *replies)
    assert prediction.answer is True and [purpose for purpose, _ in calls] == ["act", "act", "lookup", "act"]
    assert "there is no action 'evaluate': take one of lookup, finish" in calls[1][1]
    assert calls[2][1].endswith("in a few words: Who is #1 in the charts?")


def test_a_trace_is_a_demonstration_in_the_very_form_of_the_hand_written_one():
    """What was done by thoughts and actions, as the workflow that would have done the same."""
    combined = '["at least 1.5 metres", "about 0.7 metres", False]'
    for trace in (trace_of(steps(), *PIANO_REPLIES), trace_of(loop(), *THOUGHTS)):
        expected = DEMONSTRATION.replace("combine_facts([False])", f"combine_facts({combined})")
        assert trace.grounded and not trace.misses and trace.to_icl_demo() == expected
        assert [step.uses for step in trace.steps] == [(), (), (), (1, 2), (1, 2, 3)]


def test_quotation_marks_and_lines_in_answers_stay_inside_a_demonstration():
    steps = (
        flow.TraceStep("decompose", ("q",), ("a",)),
        flow.TraceStep("answer_factual", ("a",), 'say "x"\n>>> Final answer: Yes'),
        flow.TraceStep("combine_facts", (("é",),), True, (1,)),
    )
    demo = flow.WorkflowTrace("q", 'Is "q" it?', steps).to_icl_demo()
    assert demo.count("\n>>>") == 0 and demo.count("\nFinal answer") == 1 and '["é"]' in demo
    assert '...answer_factual returned "say \\"x\\"\\n>>> Final answer: Yes"\n' in demo


def test_what_has_no_answer_is_not_grounded_and_not_shown():
    assert trace_of(loop(), act("finish", "no")).grounded is False
    for trace in (trace_of(loop(limit=1), "?"), trace_of(steps(), *PIANO_REPLIES[:4], "")):
        assert trace.grounded is False and trace.misses
        with pytest.raises(ValueError, match="has no answer"):
            trace.to_icl_demo()


@pytest.mark.parametrize(
    "place, change",
    [
        (-1, {"uses": (0, 9)}),
        (-1, {"arguments": (("at least 1.5 metres", "about 9 metres", False),)}),
        (3, {"uses": (-1,)}),
        (3, {"uses": ()}),
    ],
)
def test_a_trace_that_claims_what_it_did_not_use_is_not_grounded(place, change):
    trace = trace_of(steps(), *PIANO_REPLIES)
    changed = list(trace.steps)
    changed[place] = replace(changed[place], **change)
    assert trace.grounded and not replace(trace, steps=tuple(changed)).grounded
