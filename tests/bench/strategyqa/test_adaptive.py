import pytest

from sigma0.bench.strategyqa.adaptive import Adaptive, by_rules, by_verdict
from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.items import world_items
from sigma0.bench.strategyqa.level import Prediction, Question, read
from sigma0.bench.strategyqa.prompted import ChainOfThought
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.messages import ChatFailed, Completion
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict

GOOD = ReasonVerdict(
    converged=True, depth=2.0, proximity=0.1, grounded=None, stable="contract", reason="threshold_met", confidence=0.95
)
UNSURE = GOOD.model_copy(update={"confidence": 0.5})
LOST = UNSURE.model_copy(update={"converged": False, "proximity": 0.9, "stable": "diverge", "reason": "divergence"})
SIMPLE, MEDIUM, HARD = "Do gulls eat fish?", "Could gulls eat fish?", "Could gulls or crows eat more than 3 fish?"


class Named:
    """A level of one call that says its name."""

    learns = False

    def __init__(self, name, seeds=(), learns=False):
        self.name = name
        self.learns = learns
        self._seeds = seeds

    def predict(self, question, ask):
        return read(ask(self.name, f"{self.name}: {question.text}"), "answer", {"said": self.name})

    def learn(self, item, prediction):
        raise AssertionError("not called")

    def seeds(self):
        return self._seeds


def router(route):
    return Adaptive(Named("one"), Named("two"), Named("three"), route=route)


def asking(level, text, *replies):
    ask = Ask(ScriptedChat(replies))
    return level.predict(Question("q", text), ask), ask


def purposes(ask):
    return [asked.purpose for asked in ask.asked]


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
    assert by_rules(text) == (difficulty, why)
    assert by_rules(f"Ella is 5 years older than Tom. {text}") == (difficulty, why)


@pytest.mark.parametrize("text, name", [(SIMPLE, "one"), (MEDIUM, "two"), (HARD, "three")])
def test_rules_send_a_question_on_without_a_call_of_their_own(text, name):
    found, ask = asking(router("rules"), text, "Yes.")
    assert [(asked.purpose, asked.prompt) for asked in ask.asked] == [(name, f"{name}: {text}")]
    assert found.answer is True
    assert found.trace == {
        "route": "rules",
        "difficulty": {"one": "simple", "two": "medium", "three": "hard"}[name],
        "why": by_rules(text)[1],
        "level": name,
        "trace": {"said": name},
    }


@pytest.mark.parametrize("said, name", [("simple", "one"), (" Medium.\n", "two"), ("**HARD**", "three")])
def test_a_model_that_says_one_of_three_words_decides(said, name):
    found, ask = asking(router("model"), HARD, said, "No")
    assert purposes(ask) == ["route", name]
    assert ask.asked[0].prompt == (
        f"Question: {HARD}\nHow hard is it to answer? Reply with one word: simple, medium or hard."
    )
    assert found.answer is False
    assert "unread_route" not in found.trace


@pytest.mark.parametrize("said", ["", "It is simple", "simple or hard", "easy", "simplehard", "\x00", "hard hard"])
def test_where_a_model_says_anything_else_that_is_told_and_the_rules_decide(said):
    found, ask = asking(router("model"), MEDIUM, said, "No")
    assert purposes(ask) == ["route", "two"]
    assert found.trace["unread_route"] == f"route: none of simple, medium, hard but {said!r}"
    assert found.trace["why"] == "possibility"


def test_a_first_answer_whose_door_is_converge_stands():
    found, ask = asking(router("verdict"), HARD, Completion("No, never.", verdict=GOOD, door="converge"))
    assert [(asked.purpose, asked.prompt) for asked in ask.asked] == [("first", f"{HARD}\nAnswer with Yes or No.")]
    assert found.answer is False
    assert (found.trace["difficulty"], found.trace["door"]) == ("simple", "converge")


def test_a_first_answer_that_stands_but_cannot_be_read_is_a_miss():
    found, ask = asking(router("verdict"), HARD, Completion("Well, hm", verdict=GOOD, door="converge"))
    assert (found.answer, found.miss, len(ask.asked)) == (None, "first: no yes or no in 'Well, hm'", 1)


@pytest.mark.parametrize(
    "verdict, door, name, why",
    [
        (UNSURE, "escalate", "two", "its confidence is 0.50, under 0.90"),
        (LOST, "abort", "three", "its reason is divergence; its confidence is 0.50, under 0.90; "),
        (None, None, "two", "its first answer has no verdict"),
        (None, "abort", "two", "its first answer has no verdict"),
        (GOOD, "escalate", "two", "its door is escalate"),
    ],
)
def test_how_far_a_first_verdict_is_off_tells_where_a_question_goes(verdict, door, name, why):
    found, ask = asking(router("verdict"), SIMPLE, Completion("Yes", verdict=verdict, door=door), "No")
    assert purposes(ask) == ["first", name]
    assert found.answer is False
    assert found.trace["why"].startswith(why)
    assert (found.trace["first"], found.trace["door"]) == ("Yes", door)


def test_the_policy_tells_what_a_verdict_lacks():
    assert by_verdict(Completion("Yes", verdict=UNSURE), DoorPolicy())[0] == "medium"
    assert by_verdict(Completion("Yes", verdict=UNSURE), DoorPolicy(require_grounding=True))[0] == "hard"


@pytest.mark.parametrize("route, first", [("rules", []), ("model", ["simple"]), ("verdict", [])])
def test_a_miss_of_the_level_below_keeps_its_reason(route, first):
    if route == "verdict":
        first = [Completion("Yes")]
    found, _ = asking(router(route), SIMPLE, *first, "who knows")
    assert found.answer is None
    assert found.miss.endswith(": answer: no yes or no in 'who knows'")
    assert found.miss.startswith(found.trace["level"])


@pytest.mark.parametrize("route", ["rules", "model", "verdict"])
def test_items_of_the_world_go_to_the_levels_that_there_are(route):
    for item in world_items(20):
        first = {"rules": [], "model": ["simple"], "verdict": [Completion("No", verdict=UNSURE, door="escalate")]}
        level = Adaptive(ChainOfThought(), ChainOfThought(), ChainOfThought(), route=route)
        ask = Ask(ScriptedChat([*first[route], "thought", "Yes" if item.answer else "No"]))
        assert level.predict(Question.of(item), ask).answer == item.answer
        before = {"rules": [], "model": ["route"], "verdict": ["first"]}[route]
        assert purposes(ask) == [*before, "reason", "answer"]
        assert all(item.question in asked.prompt for asked in ask.asked)


def test_a_model_that_fails_is_not_taken_for_an_answer():
    with pytest.raises(ChatFailed):
        asking(router("verdict"), SIMPLE, "Yes")


def test_seeds_are_those_of_all_levels_once():
    level = Adaptive(Named("one", ("a", "b")), Named("two"), Named("three", ("b", "c")))
    assert level.seeds() == ("a", "b", "c")
    assert (level.name, level.learns) == ("L4", False)
    assert level.learn(world_items(1)[0], Prediction(True)) is None


def test_bad_routes_and_learning_levels_are_refused():
    with pytest.raises(ValueError, match="unknown route 'dice': take one of rules, model, verdict"):
        router("dice")
    with pytest.raises(ValueError, match="do not learn, and five does"):
        Adaptive(Named("one"), Named("two"), Named("five", learns=True))
