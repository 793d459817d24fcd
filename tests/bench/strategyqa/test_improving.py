import random

import pytest

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.improving import Improving, Seeded
from sigma0.bench.strategyqa.items import Item, world_items
from sigma0.bench.strategyqa.level import Prediction, Question
from sigma0.bench.strategyqa.memory import PatternMemory
from sigma0.bench.strategyqa.statistics import majority
from sigma0.reason.chat import ScriptedChat

STEPS = "1. What is it?\n2. Is #1 so?"
WORLD = world_items(20)


def item(qid, question, answer, decomposition=("What?",)):
    return Item(qid=qid, term="", description="", question=question, answer=answer, decomposition=decomposition)


def asking(level, text, *replies, qid="new"):
    ask = Ask(ScriptedChat(replies))
    return level.predict(Question(qid, text), ask), ask


def follows_memory(messages, **_):
    """Splits as it is told, and answers what the best pattern that it is shown says; Yes without any."""
    prompt = messages[0]["content"]
    if "Write a numbered list" in prompt:
        return STEPS
    lessons = [line for line in prompt.splitlines() if "nswer is " in line]
    return lessons[-1].rstrip(".").split()[-1] if lessons else "Yes"


def prequential(level, items, watch=lambda level, item: None):
    """Whether each prediction was right; each label is shown after its own."""
    right = []
    for each in items:
        watch(level, each)
        prediction = level.predict(Question.of(each), Ask(ScriptedChat(follows_memory)))
        right.append(prediction.answer == each.answer)
        level.learn(each, prediction)
    return right


def shuffled(seed, n=300):
    items = world_items(n, seed=seed)
    labels = [each.answer for each in items]
    random.Random(seed).shuffle(labels)
    return [each.model_copy(update={"answer": label}) for each, label in zip(items, labels, strict=True)]


def test_an_item_is_answered_in_two_calls_without_a_memory():
    for each in WORLD:
        level = Improving()
        found, ask = asking(level, each.question, STEPS, "Answer: " + ("Yes" if each.answer else "No"), qid=each.qid)
        assert [(asked.purpose, asked.prompt) for asked in ask.asked] == [
            (
                "decompose",
                f"Question: {each.question}\nDo not answer it yet. Write a numbered list of 2 to 4 short questions "
                "that lead to the answer. #1 stands for the answer to the first.",
            ),
            (
                "answer",
                f"Question: {each.question}\nSteps:\n{STEPS}\nAnswer the steps in your mind. Answer with Yes or No.",
            ),
        ]
        assert found.answer == each.answer
        assert found.trace["patterns"] == []
        assert found.trace["steps"] == ["What is it?", "Is #1 so?"]


def test_what_was_learned_stands_before_the_next_question_the_best_last():
    level = Improving()
    for qid, text, label, said in (("a", "Do gulls swim?", True, "Yes"), ("b", "Do gulls eat fish?", False, "Yes")):
        found, _ = asking(level, text, STEPS, said, qid=qid)
        level.learn(item(qid, text, label), found)
    found, ask = asking(level, "Do gulls eat bread?", STEPS, "No")
    shown = (
        f"A question that was answered well: Do gulls swim?\n{STEPS}\nThe answer is Yes.\n\n"
        f"A question that went wrong: Do gulls eat fish?\n{STEPS}\n"
        "These steps led to Yes, which is wrong; the answer is No.\n\n"
    )
    assert [asked.prompt.startswith(f"{shown}Question: Do gulls eat bread?\n") for asked in ask.asked] == [True, True]
    assert found.trace["patterns"] == ["p2", "p1"]


def test_learning_counts_the_patterns_that_were_shown():
    level = Improving(top_k=1)
    for qid, label in (("a", True), ("b", True), ("c", False)):
        text = f"Do gulls eat {qid * 3}?"
        found, _ = asking(level, text, STEPS, "Yes", qid=qid)
        level.learn(item(qid, text, label), found)
    first, second, third = level.memory.patterns
    assert [(each.kind, each.uses, each.successes) for each in (first, second, third)] == [
        ("positive", 1, 1),
        ("positive", 1, 0),
        ("negative", 0, 0),
    ] or [(first.uses, first.successes), (second.uses, second.successes)] == [(2, 1), (0, 0)]
    assert [each.source for each in level.memory.patterns] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "replies, miss",
    [
        ([""], "decompose: no numbered question in ''"),
        (["1. ?\n***"], "decompose: no numbered question in '1. ? ***'"),
        (["First, what is it?"], "decompose: no numbered question in 'First, what is it?'"),
        ([STEPS, ""], "answer: no yes or no in ''"),
        ([STEPS, "It depends."], "answer: no yes or no in 'It depends.'"),
    ],
)
@pytest.mark.parametrize("make", [Improving, lambda: Seeded(WORLD)])
def test_malformed_words_at_any_step_are_a_miss_that_says_why(make, replies, miss):
    found, ask = asking(make(), "Do gulls swim?", *replies)
    assert (found.answer, found.miss) == (None, miss)
    assert len(ask.asked) == len(replies)


def test_a_miss_is_a_lesson_of_its_own_and_no_step_of_it_is_made_up():
    level = Improving()
    found, _ = asking(level, "Do gulls swim?", "no list", qid="a")
    level.learn(item("a", "Do gulls swim?", True), found)
    (pattern,) = level.memory.patterns
    assert (pattern.kind, pattern.decomposition) == ("negative", ())
    assert pattern.lesson == (
        "No answer could be read (decompose: no numbered question in 'no list'); the answer is Yes."
    )


def test_an_item_whose_question_failed_is_learned_from_as_a_miss():
    level = Improving()
    with pytest.raises(RuntimeError):
        asking(level, "Do gulls swim?", qid="a")
    level.learn(item("a", "Do gulls swim?", False), Prediction(None, "no answer came"))
    assert level.memory.patterns[0].lesson == "No answer could be read (no answer came); the answer is No."


def test_the_memory_is_pruned_as_it_grows():
    level = Improving(PatternMemory(7))
    prequential(level, world_items(40, seed=3))
    assert len(level.memory) == 7
    assert len(level.memory.seen) == 40


def test_nothing_is_learned_before_it_was_predicted_or_twice():
    level = Improving()
    first = WORLD[0]
    with pytest.raises(ValueError, match="was not predicted"):
        level.learn(first, Prediction(True))
    found, _ = asking(level, first.question, STEPS, "Yes", qid=first.qid)
    level.learn(first, found)
    with pytest.raises(ValueError, match="or was learned from"):
        level.learn(first, found)
    with pytest.raises(ValueError, match=f"has learned from '{first.qid}'"):
        asking(level, first.question, STEPS, "Yes", qid=first.qid)


@pytest.mark.parametrize("seed", range(6))
def test_with_shuffled_labels_nothing_is_learned_and_no_item_is_known_before_its_prediction(seed):
    items = shuffled(seed)

    def no_trace_of_it(level, each):
        assert each.qid not in level.memory.seen
        assert all(pattern.source != each.qid for pattern in level.memory.patterns)

    right = prequential(Improving(), items, no_trace_of_it)
    guess = majority([each.answer for each in items])
    assert sum(right) / len(right) <= guess.high
    # and it is no coin that falls wrong: a leak would show at once
    assert sum(right) / len(right) > 0.35


@pytest.mark.parametrize("seed", range(2))
def test_a_leak_would_show(seed):
    items = shuffled(seed)
    level = Improving()
    for each in items:
        level.memory.add("positive", f"{each.question[:-1]} {each.qid}?", [], _lesson(each), f"leak-{each.qid}")
    leaky = [each.model_copy(update={"question": f"{each.question[:-1]} {each.qid}?"}) for each in items]
    right = prequential(level, leaky)
    assert sum(right) / len(right) > majority([each.answer for each in items]).high


def _lesson(each):
    return f"The answer is {'Yes' if each.answer else 'No'}."


def test_with_true_labels_a_rule_in_the_questions_is_learned():
    draw = random.Random(0)
    animals = {"gulls": True, "crows": False, "storks": True, "hens": False, "ducks": False, "swans": True}
    items = []
    for number in range(120):
        animal = draw.choice(sorted(animals))
        place = "".join(draw.choices("bcdfglmnprst", k=5))
        items.append(item(f"q{number}", f"Do {animal} live in {place}?", animals[animal]))
    right = prequential(Improving(), items)
    early, late = sum(right[:12]) / 12, sum(right[60:]) / 60
    assert late >= 0.95
    assert early <= 0.8
    assert late > majority([each.answer for each in items]).high


def test_a_run_is_the_same_again_and_behind_a_saved_memory(tmp_path):
    items = world_items(60, seed=5)
    levels = Improving(), Improving()
    assert prequential(levels[0], items) == prequential(levels[1], items)
    assert levels[0].memory.patterns == levels[1].memory.patterns
    levels[0].memory.save(tmp_path / "memory.json")
    later = Improving(PatternMemory.load(tmp_path / "memory.json"))
    assert set(later.seeds()) == {each.qid for each in items}
    more = world_items(20, seed=6)
    assert prequential(later, more) == prequential(levels[0], more)
    assert set(later.seeds()) == {each.qid for each in items}


def test_a_level_that_begins_with_nothing_has_no_seeds():
    level = Improving()
    prequential(level, WORLD[:3])
    assert (level.name, level.learns, level.seeds()) == ("L5", True, ())


def test_a_seeded_level_shows_training_items_with_their_steps():
    items = [
        item("a", "Do gulls eat fish?", True, ("What do gulls eat?", "Is #1 fish?")),
        item("b", "Could crows read?", False),
    ]
    level = Seeded(items, top_k=1)
    found, ask = asking(level, "Do gulls eat bread?", STEPS, "No")
    shown = (
        "A question that was answered well: Do gulls eat fish?\n1. What do gulls eat?\n2. Is #1 fish?\n"
        "The answer is Yes.\n\n"
    )
    assert [asked.purpose for asked in ask.asked] == ["decompose", "answer"]
    assert all(asked.prompt.startswith(f"{shown}Question: Do gulls eat bread?\n") for asked in ask.asked)
    assert (found.answer, found.trace["patterns"]) == (False, ["p1"])
    assert (level.name, level.learns, level.seeds()) == ("L5-icl", False, ("a", "b"))


def test_a_seeded_level_learns_nothing_and_refuses_its_seeds():
    level = Seeded(WORLD)
    before = level.memory.patterns
    level.learn(world_items(21)[-1], Prediction(True))
    assert level.memory.patterns == before
    assert level.seeds() == tuple(each.qid for each in WORLD)
    with pytest.raises(ValueError, match="was seeded from"):
        asking(level, WORLD[0].question, STEPS, "Yes", qid=WORLD[0].qid)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        Seeded([])
    with pytest.raises(ValueError, match="'a' has no decomposition"):
        Seeded([item("a", "Do gulls swim?", True, ())])
    with pytest.raises(ValueError, match="top_k"):
        Improving(top_k=-1)
