import json

import pytest

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.level import Prediction, Question
from sigma0.bench.strategyqa.pipeline import Analysis, Pipeline, read_analysis, with_answers
from sigma0.reason.chat import ScriptedChat

TEXT = "Is a hen heavier than a swan?"
ANALYSIS = "1. weight of a hen\n2. weight of a swan\nCondition: #1 > #2"
STEPS = "1. How heavy is a hen?\n2. How heavy is a swan?"


def asking(*replies, text=TEXT):
    ask = Ask(ScriptedChat(replies))
    return Pipeline().predict(Question("q", text), ask), ask


def purposes(ask):
    return [asked.purpose for asked in ask.asked]


def test_python_combines_what_it_can_compare():
    found, ask = asking(ANALYSIS, STEPS, "2 kg", "about 10,000 g\nOr so.")
    assert [(asked.purpose, asked.prompt) for asked in ask.asked] == [
        (
            "analyse",
            f"Question: {TEXT}\nDo not answer it yet. Write a numbered list of 2 to 5 short things that must be known "
            "to answer it. Then write a last line that says when the answer is yes, such as 'Condition: #1 < #2', "
            "'Condition: #1 = #2' or 'Condition: #1 and not #2', where #1 is the first thing.",
        ),
        (
            "decompose",
            f"Question: {TEXT}\nTo answer this question of comparison, one must know:\n1. weight of a hen\n"
            "2. weight of a swan\nWrite a numbered list with one short question for each, in this order. "
            "#1 stands for the answer to the first.",
        ),
        ("answer", f"{TEXT}\nTo work this out, first: How heavy is a hen?\nAnswer in a few words."),
        ("answer", f"{TEXT}\nTo work this out, first: How heavy is a swan?\nAnswer in a few words."),
    ]
    assert found.answer is False
    assert found.trace == {
        "analysis": {
            "question_type": "comparison",
            "needs": ("weight of a hen", "weight of a swan"),
            "condition": "#1 > #2",
        },
        "steps": [
            {"question": "How heavy is a hen?", "answer": "2 kg", "value": "2000 g"},
            {"question": "How heavy is a swan?", "answer": "about 10,000 g", "value": "10000 g"},
        ],
        "decided": "python",
        "why": "#1 > #2",
    }
    json.dumps(found.trace)


@pytest.mark.parametrize(
    "analysis, steps, answers, why",
    [
        (ANALYSIS, STEPS, ("2 kg", "3 m"), "2000 g and 3 m have different units"),
        (ANALYSIS, STEPS, ("light", "heavy"), "light and heavy are no numbers, so that neither is smaller"),
        (ANALYSIS.replace(">", "="), STEPS, ("a swan", "maybe"), "'maybe' is no short answer"),
        (ANALYSIS.replace(">", "!="), STEPS, ("I do not know.", "a swan"), "'i do not know' is no short answer"),
        (ANALYSIS.replace("#1 > #2", "No"), STEPS, ("2 kg", "3 kg"), "the condition names no step"),
        (ANALYSIS.replace("#1 > #2", "not (1 < 2 or 7 = 7)"), STEPS, ("2 kg", "3 kg"), "the condition names no step"),
        (ANALYSIS, "1. Which is heavier?", ("swan",), "2 things were to be known, and 1 steps were taken"),
        (ANALYSIS.replace("#1 > #2", "#1 is more"), STEPS, ("2 kg", "3 kg"), "the condition goes on with 'is'"),
        (ANALYSIS.replace("#1 > #2", "#1 > #3"), STEPS, ("2 kg", "3 kg"), "there is no step #3"),
        (ANALYSIS[: ANALYSIS.index("Condition")], STEPS, ("2 kg", "3 kg"), "no condition was stated"),
        (ANALYSIS.replace("#1 > #2", ""), STEPS, ("2 kg", "3 kg"), "no condition was stated"),
    ],
)
def test_the_model_combines_what_python_cannot(analysis, steps, answers, why):
    found, ask = asking(analysis, steps, *answers, "Yes, it is.")
    assert purposes(ask) == ["analyse", "decompose", *["answer"] * len(answers), "combine"]
    assert found.answer is True
    assert found.trace["decided"] == "model"
    assert found.trace["why"].startswith(why)
    known = "\n".join(f"{step['question']} {step['answer']}" for step in found.trace["steps"])
    assert ask.asked[-1].prompt == (
        f"Question: {TEXT}\nKnown:\n{known}\nSo, going by what is known: Answer with Yes or No."
    )


@pytest.mark.parametrize(
    "replies, miss",
    [
        ([""], "analyse: no numbered thing in ''"),
        (["It is a comparison."], "analyse: no numbered thing in 'It is a comparison.'"),
        (["Condition: #1 < #2"], "analyse: no numbered thing in 'Condition: #1 < #2'"),
        ([ANALYSIS, ""], "decompose: no numbered question in ''"),
        ([ANALYSIS, "How heavy is a hen?"], "decompose: no numbered question in 'How heavy is a hen?'"),
        (["1. ...\n---"], "analyse: no numbered thing in '1. ... ---'"),
        ([ANALYSIS, STEPS, " \n"], "answer: nothing was said to step 1"),
        ([ANALYSIS, STEPS, "...\n**"], "answer: nothing was said to step 1"),
        ([ANALYSIS, STEPS, "2 kg", ""], "answer: nothing was said to step 2"),
        ([ANALYSIS, STEPS, "light", "dark", "Perhaps."], "combine: no yes or no in 'Perhaps.'"),
        ([ANALYSIS, STEPS, "light", "dark", ""], "combine: no yes or no in ''"),
    ],
)
def test_malformed_words_at_any_step_are_a_miss_that_says_why(replies, miss):
    found, ask = asking(*replies)
    assert (found.answer, found.miss) == (None, miss)
    assert len(ask.asked) == len(replies)


def test_an_answer_is_the_first_line_with_words():
    found, _ = asking(ANALYSIS, STEPS, "**\n 2 kg \nor so", "10 kg")
    assert [step["answer"] for step in found.trace["steps"]] == ["2 kg", "10 kg"]


def test_a_miss_keeps_the_work_that_was_done():
    found, _ = asking(ANALYSIS, STEPS, "2 kg", "")
    assert [step["answer"] for step in found.trace["steps"]] == ["2 kg", ""]
    assert asking("nonsense")[0].trace == {"analysis": "nonsense"}


def test_answers_stand_for_their_numbers_in_later_steps():
    steps = "1. Who has the map?\n2. Where is #1?\n3. Is #2 the garage? #7"
    analysis = "1. holder\n2. place\n3. whether\nCondition: #3"
    found, ask = asking(analysis, steps, "Ben", "cellar", "No")
    assert [asked.prompt.splitlines()[1].split("first: ")[1] for asked in ask.asked[2:]] == [
        "Who has the map?",
        "Where is Ben?",
        "Is cellar the garage? #7",
    ]
    assert found.answer is False
    assert with_answers("#1 #2 #0", ["#2"]) == "#2 #2 #0"


def test_no_more_than_five_steps_are_taken():
    steps = "\n".join(f"{number}. What?" for number in range(1, 9))
    _, ask = asking(ANALYSIS, steps, *["this"] * 5, "Yes")
    assert purposes(ask) == ["analyse", "decompose", *["answer"] * 5, "combine"]


@pytest.mark.parametrize(
    "text, needs, condition",
    [
        ("Sure!\n1. birth\n 2) death \n**Condition:** `#1 < #2`.", ("birth", "death"), "#1 < #2"),
        ("- birth\n* Condition: #1", ("birth",), "#1"),
        ("1. birth\n2. Condition: #1", ("birth",), "#1"),
        ("1. birth\nconditions: #1", ("birth",), ""),
        ("1. birth\n'Condition: not #1'", ("birth",), "not #1"),
        ("\n".join(f"{number}. what" for number in range(9)), ("what",) * 5, ""),
    ],
)
def test_an_analysis_is_read_with_marks_around_it(text, needs, condition):
    assert read_analysis("Was Bach born before Liszt?", text) == Analysis("temporal", needs, condition)


@pytest.mark.parametrize(
    "said",
    ["\n" * 10**5, "-\n" * 10**4, ". \n" * 10**4, "condition:" + " " * 10**5],
    ids=["lines", "bullets", "dots", "spaces"],
)
def test_long_nonsense_is_read_in_time_that_grows_with_its_length(said):
    """Where the time grew with the square of it, these would take minutes."""
    assert read_analysis(TEXT, said) is None


def test_items_of_the_world_are_answered_by_their_own_steps():
    for item in world_items(20):
        needs = "\n".join(f"{number}. a fact" for number in range(1, len(item.decomposition) + 1))
        number = min(len(item.decomposition), 5)
        steps = "\n".join(f"{place}. {step}" for place, step in enumerate(item.decomposition, start=1))
        answers = ["it is so"] * (number - 1) + ["Yes" if item.answer else "No"]
        analysis = f"{needs}\nCondition: #{number}"
        ask = Ask(ScriptedChat([analysis, steps, *answers]))
        found = Pipeline().predict(Question.of(item), ask)
        assert (found.answer, found.trace["decided"]) == (item.answer, "python")
        assert purposes(ask) == ["analyse", "decompose", *["answer"] * number]
        assert all(item.question in asked.prompt for asked in ask.asked)


def test_a_pipeline_learns_nothing_and_knows_no_items():
    level = Pipeline()
    assert (level.name, level.learns, level.seeds()) == ("L4-pipeline", False, ())
    assert level.learn(world_items(1)[0], Prediction(True)) is None
