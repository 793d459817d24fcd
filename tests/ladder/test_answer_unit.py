"""How whole texts climb, under every outcome; checks before a run, and the door after it."""

import itertools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import get_args

import pytest

from sigma0.ladder.answer_unit import Attempt, Climb, Given, attempt_from, attempt_of, climb
from sigma0.ladder.budget import Budget, BudgetTracker, Spending
from sigma0.ladder.rungs import declines_nothing
from sigma0.ladder.settling import check_policy, check_settings, final_door, not_tried
from sigma0.ladder.texts import write_texts
from sigma0.ladder.trail import Decision, Trail
from sigma0.ladder.triggers import Always, AnyOf, Entropy, Never
from sigma0.signals.verdict import Door, DoorPolicy
from tests.signals.test_verdict import make

VERDICT = make(proximity=0.1, confidence=0.5)


def attempt(text, entropy=0.5, stop="eos", **more):
    return Attempt(text, VERDICT, entropy, 0.25, stop, **more)


@dataclass
class Rungs:
    """A writer whose rungs say these things in turn, each for two passes."""

    said: list
    budget: Budget = field(default_factory=Budget)
    doors: DoorPolicy = field(default_factory=DoorPolicy)
    declines: object = declines_nothing
    kept: str = ""

    def __post_init__(self):
        self.rungs = [SimpleNamespace(declines=self.declines) for _ in self.said]
        self.purse, self.trail, self.asked = BudgetTracker(self.budget), Trail(), []

    def forecast(self, rung, prompt, new):
        return Spending(loop_passes=2, large_tokens=new if rung else 0)

    def write(self, rung, prompt, new):
        self.asked.append((rung, prompt, new))
        self.purse.pay(Spending(loop_passes=2), f"write {rung}", 0.0)
        said = self.said[rung]
        return (None, said) if isinstance(said, str) else (said, "ok")

    def given(self, rung, prompt, new, draft):
        return Given(prompt, "", new) if draft is None else Given(f"{prompt}+{draft.text}@{rung}", self.kept, new - 1)

    def after(self, attempt, kept):
        return replace(attempt, text=f"{kept}|{attempt.text}")

    def outcomes(self):
        return [(line.rung, line.outcome, line.why, line.lacking) for line in self.trail.lines]


A, B, C = attempt("a"), attempt("b"), attempt("c")


def test_a_text_stays_or_goes_up_until_no_rung_is_left():
    writer = Rungs([A, B])
    assert climb(writer, Never(), "q", 5, 3, 4) == Climb(A, 0, False, False)
    assert writer.asked == [(0, "q", 5)]
    (line,) = writer.trail.lines
    signs = {"sequence": 3, "position": 4, "verdict": VERDICT.to_dict(), "entropy": 0.5, "margin": 0.25}
    assert line == Decision(3, 4, 0, signs, None, "accept") and not line.whole
    assert climb(Rungs([A]), Never(), "q", 5) == Climb(A, 0, False, True)
    writer = Rungs([A, B, C])
    assert climb(writer, Always(), "q", 5, whole=True) == Climb(C, 2, False, True)
    assert writer.outcomes() == [
        (0, "hand_up", "always", None), (1, "hand_up", "always", None), (2, "top_rung", "always", None),
    ]  # fmt: skip
    assert [line.asked for line in writer.trail.lines] == [Spending(2, 5), Spending(2, 5), None]
    assert all(line.whole for line in writer.trail.lines)
    assert climb(Rungs([A, attempt("b", 0.1), C]), Entropy(0.3), "q", 5) == Climb(attempt("b", 0.1), 1, False, False)


def test_rungs_that_fail_cost_themselves_and_what_one_declines_stands_where_no_other_gives_more():
    writer = Rungs([A, "timeout", C])
    assert climb(writer, Always(), "q", 5) == Climb(C, 2, False, True)
    assert writer.outcomes()[1] == (1, "error", "timeout", None) and writer.trail.lines[1].signs is None
    writer = Rungs([A, "timeout"])
    assert climb(writer, Always(), "q", 5) == Climb(A, 0, False, True)
    assert writer.trail.lines[1].asked is None
    writer = Rungs(["refused", B])
    assert climb(writer, Never(), "q", 5) == Climb(B, 1, False, True)
    assert climb(Rungs(["refused"]), Never(), "q", 5) == Climb(None, 0, False, True)

    def declines(text):
        return text in ("no", "nothing")

    no, nothing = attempt("no"), attempt("nothing")
    assert climb(Rungs([no, nothing], declines=declines), Never(), "q", 5) == Climb(no, 0, False, True)
    assert climb(Rungs([no, B], declines=declines), Never(), "q", 5) == Climb(B, 1, False, True)
    writer = Rungs([A, no, C], declines=declines)
    assert climb(writer, Always(), "q", 5) == Climb(C, 2, False, True)
    assert writer.outcomes()[1] == (1, "decline", "no answer", None)
    assert climb(Rungs([A, no], declines=declines), Always(), "q", 5) == Climb(A, 0, False, True)


@pytest.mark.parametrize(
    "position, text, stop, outcome",
    [
        (0, "", "eos", "decline"), (1, "", "eos", "accept"), (1, " \n", "eos", "accept"), (2, "", "eos", "accept"),
        (1, "", "length", "decline"), (1, "", "stop", "decline"), (1, "", "collapse", "decline"),
        (1, "x", "eos", "accept"), (1, "I do not know", "eos", "decline"),
    ],
)  # fmt: skip
def test_a_later_draft_may_be_nothing_but_the_end_of_the_text(position, text, stop, outcome):
    writer = Rungs([attempt(text, stop=stop)], declines=lambda said: not said.strip() or "not know" in said)
    climb(writer, Never(), "q", 5, position=position)
    assert writer.outcomes()[0][1] == outcome


def test_without_a_budget_nothing_is_begun_nor_asked_again():
    writer = Rungs([A, B], Budget(loop_passes=1))
    assert climb(writer, Always(), "q", 5) == Climb(None, 0, True, False) and writer.trail.lines == []
    # what is there already stands
    assert climb(writer, Always(), "q", 5, written=A) == Climb(A, 0, True, False)
    assert writer.outcomes() == [(0, "abort", "always", "loop_passes")] and writer.asked == []
    writer = Rungs([A, "timeout, then no calls left", C])
    assert climb(writer, Always(), "q", 5) == Climb(C, 2, True, True)
    assert not climb(Rungs([A, "leftovers", C]), Always(), "q", 5).aborted


@pytest.mark.parametrize("said, outcome, why", [(A, "abort", "always"), ("timeout", "error", "timeout")])
def test_a_budget_keeps_a_text_where_it_is(said, outcome, why):
    writer = Rungs([said, B], Budget(loop_passes=3))
    result = climb(writer, Always(), "q", 5)
    assert result == Climb(A if said is A else None, 0, True, False)
    assert writer.outcomes() == [(0, outcome, why, "loop_passes")]
    assert writer.trail.lines[0].asked == Spending(2, 5)
    assert climb(Rungs([said, B], Budget(loop_passes=4)), Always(), "q", 5) == Climb(B, 1, False, True)
    assert climb(Rungs([said, B], Budget(large_tokens=4)), Always(), "q", 5).aborted


@pytest.mark.parametrize("writing, kept", [(0, None), (1, A), (2, B)])
def test_time_is_asked_for_by_the_rung_that_is_to_write(writing, kept):
    writer = Rungs([A, B, C], Budget(seconds=1000.0))
    writer.purse.longest[f"write {writing}"] = 2000.0
    assert climb(writer, Always(), "q", 5) == Climb(kept, max(0, writing - 1), True, False)


def test_a_text_that_is_there_goes_on_from_its_rung():
    writer = Rungs([A, B, C])
    assert climb(writer, Never(), "q", 5, written=attempt("w"), start=1) == Climb(attempt("w"), 1, False, False)
    assert writer.asked == []
    assert climb(writer, Always(), "q", 5, written=attempt("w"), start=1) == Climb(C, 2, False, True)
    assert writer.asked == [(2, "q", 5)]
    assert climb(writer, Never(), "q", 5, start=1) == Climb(B, 1, False, False)
    for unit, prompts in (("draft", ["q"]), ("answer", ["q", "r"])):
        with pytest.raises(ValueError, match="one answer to one prompt"):
            write_texts(SimpleNamespace(), prompts, unit, written=attempt("w"))


def test_a_warm_start_gives_the_draft_along_and_keeps_its_part():
    writer = Rungs([A, B, C], kept="K")
    assert climb(writer, Always(), "q", 5, warm_start=True).attempt.text == "K|c"
    assert writer.asked == [(0, "q", 5), (1, "q+a@1", 4), (2, "q+K|b@2", 4)]
    cold = Rungs([A, B], kept="K")
    assert climb(cold, Always(), "q", 5).attempt.text == "b" and cold.asked[1] == (1, "q", 5)


def token(text="", entropy=0.5, margin=0.5):
    return SimpleNamespace(text=text, entropy=entropy, margin=margin)


def test_a_draft_is_judged_by_its_tokens():
    sure = VERDICT.model_copy(update={"confidence": 1.0, "reason": "max_depth"})
    tokens = tuple(SimpleNamespace(verdict=sure) for _ in range(3))
    draft = attempt("d", tokens=tokens)

    def judged(position, **more):
        result = climb(Rungs([draft]), Never(), "q", 5, position=position, **more).attempt
        return result.verdict.confidence, result.verdict.reason

    assert judged(0) == judged(1) == (0.5, "threshold_met")
    # the first one continues the question itself
    assert judged(0, is_draft=True) == (1.0, "threshold_met")
    assert judged(1, is_draft=True) == (1.0, "max_depth")
    assert climb(Rungs([A]), Never(), "q", 5, is_draft=True).attempt == A


def test_signs_of_a_text_are_those_of_its_tokens_and_need_a_verdict():
    parts = [token("I", 0.25, 0.5), token(" do", None, 0.25), token(" not", 0.75, 0.25), token(".", 0.5, 0.75)]
    result = attempt_from("I do not.", parts, VERDICT, "eos")
    assert result == Attempt("I do not.", VERDICT, 0.5, 0.25, "eos", "I")
    # a margin that is not known is the least
    parts[3] = token(".", None, None)
    result = attempt_from("I do not.", parts, VERDICT, "length")
    assert (result.entropy, result.margin, result.sure, result.stop_reason) == (0.5, None, "I do not", "length")
    result = attempt_from("I", [token("I", None, 0.5)], VERDICT, "eos")
    assert (result.entropy, result.margin, result.sure, result.tokens) == (None, 0.5, "", ())
    generation = SimpleNamespace(text="I", tokens=(token("I"),), verdict=VERDICT, stop_reason="eos")
    assert attempt_of(generation) == Attempt("I", VERDICT, 0.5, 0.5, "eos", "", generation.tokens)
    generation.verdict = None
    with pytest.raises(ValueError, match="pass verdict=True"):
        attempt_of(generation)


def test_the_door_of_a_whole_text():
    for aborted, converges, exhausted in itertools.product((True, False), repeat=3):
        door = final_door(aborted, converges, exhausted)
        # a text that the budget kept down stays marked, whatever its verdict
        assert (door == "abort") == (aborted or (exhausted and not converges))
        assert (door == "converge") == (converges and not aborted)
        assert door in get_args(Door)


def test_a_number_of_tokens_is_at_least_one_texts_are_given_in_lists_and_a_trail_can_hold_a_policy():
    for settings, message in (
        *(((tokens, (), ()), "max_new_tokens") for tokens in (0, -1, 2.5, "3", None)),
        ((1, "end", ()), "stop takes a list of strings, got the string 'end'"),
        ((1, (), "source"), "sources takes a list"),
        ((1, ("end", ""), ()), "must not be empty"),
    ):
        with pytest.raises(ValueError, match=message):
            check_settings(*settings)
    check_settings(1, ("end",), ("source",))
    check_policy(AnyOf((Always(), Never())))
    with pytest.raises(ValueError, match="policy is a SimpleNamespace"):
        check_policy(SimpleNamespace(fires=lambda signs: None))


def test_what_was_not_tried_is_told_once_with_its_limit():
    def line(rung, why, lacking):
        return SimpleNamespace(rung=rung, why=why, lacking=lacking)

    names = ("small", "middle", "large")
    trail = SimpleNamespace(
        decisions=[
            line(1, "margin 0.10", "calls"), line(0, "margin 0.10", "large_tokens"), line(0, "chance", None),
            line(1, "parked", "seconds"), line(0, "chance", "large_tokens"), line(2, "always", "money"),
        ]
    )  # fmt: skip
    assert not_tried(trail, names) == ("large: calls", "large: money", "middle: large_tokens", "middle: seconds")
    assert not_tried(SimpleNamespace(decisions=[line(0, "chance", None)]), names) == ("small: the next step",)
