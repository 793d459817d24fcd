"""What is one level's alone: how L1 and L4 read and route, what L4's pipeline decides, what L5 learns."""

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.strategyqa import adaptive as routing
from sigma0.bench.strategyqa.adaptive import asked as without_story
from sigma0.bench.strategyqa.adaptive import question_type
from sigma0.bench.strategyqa.items import Item, world_items
from sigma0.bench.strategyqa.level import Level, Prediction, Question, read
from sigma0.bench.strategyqa.memory import Improving, Pattern, PatternMemory, seeded
from sigma0.reason.messages import ChatFailed, Completion
from tests.bench.strategyqa.calls import GOOD, LOST, asked, made

UNSURE = GOOD.model_copy(update={"confidence": 0.5})
SIMPLE, MEDIUM, HARD = "Do gulls eat fish?", "Could gulls eat fish?", "Could gulls or crows eat more than 3 fish?"


def test_a_trace_ends_where_another_doctest_begins():
    said = 'Final answer: Yes\n>>> strategy_qa("Do hens swim?")\nFinal answer: No'
    assert asked(made("L1-ptp"), SIMPLE, said)[0].answer is True
    assert asked(made("L1-ptp"), SIMPLE, f">>>{said}")[0].miss == "trace: no yes or no in ''"


@pytest.mark.parametrize(
    "said, answer",
    [
        ('if gulls == "birds":\n    print("Answer: Yes")\nelse:\n    print("Answer: No")', None),
        ('print ("Answer: No")\nAnswer: Yes', True),
        ("print('Answer: Yes')\nIt prints 'Answer: No'.", False),
        ("swims = True\nAnswer: Yes", True),
    ],
)
def test_what_stands_in_a_program_is_not_what_it_prints(said, answer):
    result, _ = asked(made("L1-coc"), SIMPLE, said)
    assert (result.answer, result.trace) == (answer, {"program": said})


def named(name, question, ask):
    return read(ask(name, f"{name}: {question.text}"), "answer", {"said": name})


def routed(route, text, *replies):
    levels = [Level(name, partial(named, name)) for name in ("one", "two", "three")]
    return asked(Level("L4", partial(routing.adaptive, levels, route)), text, *replies)


@pytest.mark.parametrize(
    "text, difficulty, why",
    [
        (SIMPLE, "simple", "no sign"),
        (MEDIUM, "medium", "possibility"),
        ("Are gulls larger to look at?", "medium", "comparison"),
        ("Were gulls seen in 1900?", "medium", "number"),
        ("Do gulls and crows eat fish?", "medium", "conjunction"),
        ("Do gulls eat all the fish of the sea on all days?", "medium", "more than 10 words"),
        ("Do gulls eat " + "all " * 14 + "fish?", "hard", "more than 10 words, more than 16 words"),
        (HARD, "hard", "comparison, number, conjunction, possibility"),
    ],
)
def test_rules_count_signs_of_a_question(text, difficulty, why):
    assert routing.by_rules(text) == routing.by_rules(f"Ella is 5 years older than Tom. {text}") == (difficulty, why)
    result, calls = routed("rules", text, "Yes.")
    name = {"simple": "one", "medium": "two", "hard": "three"}[difficulty]
    assert calls == [(name, f"{name}: {text}")] and result.answer is True
    output = {"route": "rules", "difficulty": difficulty, "why": why, "level": name}
    assert result.trace == {**output, "trace": {"said": name}}


@pytest.mark.parametrize(
    "said, name",
    [("simple", "one"), (" Medium.\n", "two"), ("**HARD**", "three")]
    + [(said, None) for said in ("", "It is hard", "simple or hard", "easy", "simplehard", "\x00", "hard hard")],
)
def test_a_model_that_says_one_of_three_words_decides_and_else_the_rules(said, name):
    result, calls = routed("model", MEDIUM, said, "No")
    assert [purpose for purpose, _ in calls] == ["route", name or "two"]
    unread = None if name else f"route: none of simple, medium, hard but {said!r}"
    assert result.trace.get("unread_route") == unread
    assert result.trace["why"] == ("the model says so" if name else "possibility")


@pytest.mark.parametrize(
    "verdict, door, name, why",
    [
        (GOOD, "converge", None, "its door is converge"),
        (UNSURE, "escalate", "two", "its confidence is 0.50, under 0.90"),
        (LOST, "abort", "three", "its reason is divergence; "),
        (None, None, "two", "its first answer has no verdict"),
        (None, "abort", "two", "its first answer has no verdict"),
        (GOOD, "escalate", "two", "its door is escalate"),
    ],
)
def test_how_far_a_first_verdict_is_off_tells_where_a_question_goes(verdict, door, name, why):
    result, calls = routed("verdict", SIMPLE, Completion("Yes", verdict=verdict, door=door), "No")
    assert [purpose for purpose, _ in calls] == ["first", *([name] if name else [])]
    assert result.answer is (name is None) and result.trace["why"].startswith(why)
    difficulty = {None: "simple", "two": "medium", "three": "hard"}[name]
    assert [result.trace[key] for key in ("first", "door", "difficulty")] == ["Yes", door, difficulty]


HENS = "Is a hen heavier than a swan?"
ANALYSIS = "1. weight of a hen\n2. weight of a swan\nCondition: #1 > #2"
STEPS = "1. How heavy is a hen?\n2. How heavy is a swan?"


def test_python_combines_what_it_can_compare():
    result, calls = asked(made("L4-pipeline"), HENS, ANALYSIS, STEPS, "2 kg", "**\nabout 10,000 g\nOr so.")
    assert len(calls) == 4 and result.answer is False
    needs = ["weight of a hen", "weight of a swan"]
    assert json.loads(json.dumps(result.trace)) == {
        "analysis": {"question_type": "comparison", "needs": needs, "condition": "#1 > #2"},
        "steps": [
            {"question": "How heavy is a hen?", "answer": "2 kg", "value": "2000 g"},
            {"question": "How heavy is a swan?", "answer": "about 10,000 g", "value": "10000 g"},
        ],
        "decided": "python",
        "why": "#1 > #2",
    }


@pytest.mark.parametrize(
    "condition, answers, why",
    [
        ("#1 > #2", ("2 kg", "3 m"), "2000 g and 3 m have different units"),
        ("#1 > #2", ("light", "heavy"), "light and heavy are no numbers, so that neither is smaller"),
        ("#1 = #2", ("a swan", "maybe"), "'maybe' is no short answer"),
        ("No", ("2 kg", "3 kg"), "the condition names no step"),
        ("not (1 < 2 or 7 = 7)", ("2 kg", "3 kg"), "the condition names no step"),
        ("#1 > #2", ("swan",), "2 things were to be known, and 1 steps were taken"),
        ("#1 is more", ("2 kg", "3 kg"), "'is' is no part of a condition"),
        ("#1 > #3", ("2 kg", "3 kg"), "there is no step #3"),
        ("", ("2 kg", "3 kg"), "no condition was stated"),
    ],
)
def test_the_model_combines_what_python_cannot(condition, answers, why):
    analysis = ANALYSIS.replace("#1 > #2", condition)
    result, calls = asked(made("L4-pipeline"), HENS, analysis, STEPS[: 23 * len(answers)], *answers, "Yes, it is.")
    assert [purpose for purpose, _ in calls] == ["analyse", "decompose", *["answer"] * len(answers), "combine"]
    assert result.answer is True and result.trace["decided"] == "model" and result.trace["why"].startswith(why)


def test_a_miss_of_the_pipeline_keeps_the_work_that_was_done():
    result, _ = asked(made("L4-pipeline"), HENS, ANALYSIS, STEPS, "2 kg", "")
    assert [step["answer"] for step in result.trace["steps"]] == ["2 kg", ""]
    assert asked(made("L4-pipeline"), HENS, "nonsense")[0].trace == {"analysis": "nonsense"}


def test_answers_stand_for_their_numbers_in_later_steps_of_which_there_are_five():
    assert routing.with_answers("Is #2 the garage? #7 #0 #1", ["#2", "it"]) == "Is it the garage? #7 #0 #2"
    eight = "\n".join(f"{number}. What?" for number in range(1, 9))
    _, calls = asked(made("L4-pipeline"), HENS, ANALYSIS, eight, *["this"] * 5, "Yes")
    assert [purpose for purpose, _ in calls].count("answer") == 5


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
    assert routing.read_analysis("Was Bach born before Liszt?", text) == routing.Analysis("temporal", needs, condition)


@pytest.mark.parametrize(
    "said", ["\n" * 10**5, "-\n" * 10**4, ". \n" * 10**4, "condition:" + " " * 10**5], ids=range(4)
)
def test_long_nonsense_is_read_in_time_that_grows_with_its_length(said):
    """Where the time grew with the square of it, these would take minutes."""
    assert routing.read_analysis(HENS, said) is None


def item(qid, question, answer, decomposition=("What?",)):
    return Item(qid=qid, term="", description="", question=question, answer=answer, decomposition=decomposition)


def learned(level, entry, *replies):
    result, _ = asked(level, Question(entry.qid, entry.question), *replies)
    level.learn(entry, result)
    return result


def test_learning_counts_the_patterns_that_were_shown_and_a_miss_is_a_lesson():
    level = Improving()
    for qid, label in (("a", True), ("b", True), ("c", False)):
        learned(level, item(qid, f"Do gulls eat {qid * 3}?", label), STEPS, "Yes")
    missed = learned(level, item("d", "Could it be?", True), "no list")
    assert missed.trace["patterns"] and not missed.answer
    with pytest.raises(ChatFailed):
        asked(level, Question("e", "Is it so?"))
    level.learn(item("e", "Is it so?", False), Prediction(None, "no answer came"))
    patterns = level.memory.patterns
    assert [entry.source for entry in patterns] == ["a", "b", "c", "d", "e"]
    assert [entry.kind for entry in patterns] == ["positive", "positive", "negative", "negative", "negative"]
    assert [(entry.uses, entry.successes) for entry in patterns] == [(3, 1), (2, 0), (1, 0), (0, 0), (0, 0)]
    assert patterns[3].decomposition == ()
    assert [entry.lesson for entry in patterns[3:]] == [
        "No answer could be read (decompose: no numbered question in 'no list'); the answer is Yes.",
        "No answer could be read (no answer came); the answer is No.",
    ]


def test_nothing_is_learned_before_it_was_predicted_or_twice():
    level, first = Improving(), world_items(1)[0]
    with pytest.raises(ValueError, match="was not predicted"):
        level.learn(first, Prediction(True))
    result = learned(level, first, STEPS, "Yes")
    with pytest.raises(ValueError, match="or was learned from"):
        level.learn(first, result)
    with pytest.raises(ValueError, match=f"learned from '{first.qid}'"):
        asked(level, Question(first.qid, first.question))
    with pytest.raises(ValueError, match=f"learned from '{first.qid}'"):
        asked(seeded([first]), Question(first.qid, first.question))
    with pytest.raises(ValueError, match="'a' has no decomposition"):
        seeded([item("a", "Do gulls swim?", True, ())])


def test_so_many_patterns_are_kept():
    level = Improving(limit=1)
    for entry in (item("a", "Do gulls swim?", True), item("b", "Could crows sing?", True)):
        learned(level, entry, STEPS, "Yes")
    assert len(level.memory) == 1 and list(level.memory.seen) == ["a", "b"]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Are the flags of Chad and Romania similar?", "similarity"),
        ("Is a ton of steel the same as a ton of wool?", "similarity"),
        ("Is the Nile longer than the Rhine?", "comparison"),
        ("Would a week be enough time to read it?", "comparison"),
        ("Is this the heaviest of all planets?", "comparison"),
        ("Was the bridge built before the tower?", "temporal"),
        ("Did anyone vote by telephone in 1650?", "temporal"),
        ("Did drought cause the famine?", "causal"),
        ("Did Led Zeppelin play in Oslo?", "factual"),
        ("Did the strike lead to a new law?", "causal"),
        ("Could a cat drive a bus?", "possibility"),
        ("WOULD a cat drive a bus?", "possibility"),
        ("Do gulls eat fish?", "factual"),
        ("", "factual"),
        # the first rule that holds decides
        ("Could both be of the same size, or is one larger?", "similarity"),
        ("Could one be larger?", "comparison"),
    ],
)
def test_words_of_a_question_tell_its_type(text, expected):
    assert routing.question_type(text) == expected


def test_a_story_before_the_question_does_not_count():
    assert routing.question_type("Ella is older than Tom. Does Ella sing?") == "factual"
    for item in world_items(20):
        assert without_story(item.question) == item.decomposition[-1]
    for text in ("Would Dr. Seuss like St. Paul?", "Who? Me?", "No question at all. None.", ""):
        assert without_story(text) == text


WORD = st.sampled_from(["gull", "crow", "fish", "lamp", "older", "could", "river", "stone", "than"])
WORDS = st.lists(WORD, min_size=1, max_size=6)


def filled(*texts, limit=200, **settings):
    memory = PatternMemory(limit)
    for number, text in enumerate(texts):
        memory.add("positive", text, ["a step"], "The answer is Yes.", f"q{number}", **settings)
    return memory


def ids(patterns):
    return [pattern.id for pattern in patterns]


def test_a_pattern_keeps_what_it_is_from():
    memory = PatternMemory()
    result = memory.add("negative", "Tom is 3. Is Ella older than Tom?", ["How old?"], "Went wrong.", "q7", 0.25)
    assert result == Pattern(
        id="p1",
        kind="negative",
        question_type="comparison",
        question="Is Ella older than Tom?",
        decomposition=("How old?",),
        lesson="Went wrong.",
        confidence=0.25,
        source="q7",
    )
    assert (memory.patterns, list(memory.seen)) == ((result,), ["q7"])


def test_patterns_of_the_same_type_come_first_then_the_most_alike():
    memory = filled(
        "Could gulls eat fish?", "Do lamps burn oil?", "Do gulls swim far?", "Do gulls eat fish whole?", "Is it?"
    )
    assert ids(memory.retrieve("Do gulls eat fish?", 5)) == ["p4", "p3", "p2", "p5", "p1"]
    assert ids(memory.retrieve("Can gulls eat fish?", 1)) == ["p1"]
    assert memory.retrieve("Do gulls eat fish?", 0) == []
    # rare words weigh more than common ones
    memory = filled("Do gulls nest?", "Do gulls dive?", "Do gulls sleep?", "Do storks dance?")
    assert ids(memory.retrieve("Do gulls dance?", 1)) == ["p4"]


def test_confidence_weighs_likeness_and_ties_go_to_the_older():
    memory = PatternMemory()
    memory.add("positive", "Do gulls eat fish?", [], "The answer is Yes.", "a", 0.3)
    memory.add("positive", "Do gulls eat bread?", [], "The answer is Yes.", "b", 0.9)
    memory.add("negative", "Do gulls eat bread?", [], "The answer is No.", "c", 0.9)
    assert ids(memory.retrieve("Do gulls eat fish?", 3)) == ["p2", "p3", "p1"]


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=30))
def test_a_confidence_is_the_mean_of_where_it_began_and_its_outcomes(first, outcomes):
    memory = filled("Do gulls eat fish?", confidence=first)
    for outcome in outcomes:
        memory.record_use("p1", outcome)
    result = memory.patterns[0]
    assert result.confidence == pytest.approx((2 * first + sum(outcomes)) / (2 + len(outcomes)))
    assert (result.uses, result.successes) == (len(outcomes), sum(outcomes))


def test_near_duplicates_become_one_that_keeps_its_words():
    memory = filled("Do gulls eat fish?", confidence=1.0)
    memory.record_use("p1", False)
    merged = memory.add("positive", "Did a gull eat fishes?", ["else"], "The answer is Yes.", "other", 0.0)
    assert (len(memory), merged.id, merged.question, merged.source) == (1, "p1", "Do gulls eat fish?", "q0")
    assert merged.confidence == pytest.approx((3 * (2 / 3) + 2 * 0.0) / 5)
    assert (merged.uses, merged.successes) == (1, 0)
    assert list(memory.seen) == ["q0", "other"]


@pytest.mark.parametrize(
    "kind, text, lesson",
    [
        ("negative", "Do gulls eat fish?", "The answer is Yes."),
        ("positive", "Could gulls eat fish?", "The answer is Yes."),
        ("positive", "Do gulls eat fish?", "The answer is No."),
        ("positive", "Do gulls eat bread?", "The answer is Yes."),
    ],
)
def test_what_differs_in_kind_type_lesson_or_words_stays_apart(kind, text, lesson):
    memory = filled("Do gulls eat fish?")
    assert memory.add(kind, text, [], lesson, "other").id == "p2"
    assert len(memory) == 2


def test_pruning_drops_the_lowest_then_the_least_used_then_the_oldest():
    memory = filled("Do gulls swim?", "Do crows fly?", "Do lamps burn?", "Do stones roll?", "Do rivers run?", limit=2)
    memory.record_use("p1", False)
    for success in (True, False):
        memory.record_use("p2", success)
    memory.record_use("p5", True)
    assert ids(memory.prune()) == ["p1", "p3", "p4"]
    assert ids(memory.patterns) == ["p2", "p5"]
    assert memory.prune() == []
    assert "q0" in memory.seen
    assert "p1" not in memory
    # a number is never given twice
    assert memory.add("positive", "Do hens lay?", [], "The answer is Yes.", "c").id == "p6"


@given(st.lists(WORDS, max_size=12), WORDS, st.integers(1, 6), st.integers(0, 5))
def test_retrieval_is_bounded_sorted_and_repeatable(texts, query, limit, top_k):
    memory, again = (filled(*(" ".join(text) for text in texts), limit=limit) for _ in range(2))
    assert memory.prune() == again.prune()
    result = memory.retrieve(" ".join(query), top_k)
    assert result == again.retrieve(" ".join(query), top_k)
    assert len(result) == min(top_k, len(memory))
    assert len(memory) <= limit
    kind = question_type(" ".join(query))
    others = [pattern.question_type != kind for pattern in memory.retrieve(" ".join(query), 99)]
    assert others == sorted(others)
