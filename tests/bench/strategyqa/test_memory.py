import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.strategyqa.adaptive import question_type
from sigma0.bench.strategyqa.memory import Pattern, PatternMemory

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
