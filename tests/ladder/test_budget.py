"""Hard limits: no run exceeds any, whatever is asked, and what is refused is told."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sigma0 import ExitConfig
from sigma0.ladder import (
    Always,
    Budget,
    FidelityLadder,
    Hysteresis,
    Margin,
    Never,
    Price,
    Random,
    Rung,
    Spending,
    replay,
)
from sigma0.ladder.budget import BudgetTracker, RungCost, total_bytes
from tests.reference import tiny_model

TEXTS = ["Mary has a hat.", "Where is the key that John took?"]
ASKED = {"max_new_tokens": 9, "exit_config": ExitConfig(q=0.4)}
MOST = {"loop_passes": 120, "large_tokens": 12, "catch_up_tokens": 60}
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.exhaustive
@SLOW
@given(
    st.fixed_dictionaries({}, optional={name: st.integers(0, most) for name, most in MOST.items()}),
    st.sampled_from([0.2, 0.6, 1.0]),
    st.integers(0, 3),
    st.integers(1, 2),
)
@example({"large_tokens": 3}, 1.0, 0, 1)
@example({"large_tokens": 3}, 0.6, 2, 2)
@example({"catch_up_tokens": 40}, 0.6, 0, 2)
@example({"loop_passes": 60}, 0.6, 1, 2)
def test_no_limit_is_ever_exceeded(rungs, limits, rate, stay, batch):
    result, free = (
        FidelityLadder(rungs, budget, Random(rate, 1), Hysteresis(stay=stay)).generate_batch(TEXTS[:batch], **ASKED)
        for budget in (Budget(**limits), None)
    )
    spent = result[0].spent
    for name, limit in limits.items():
        assert getattr(spent, name) <= limit
    small, large = result[0].costs
    assert spent.loop_passes == small.passes + small.prompt_passes + large.passes + large.prompt_passes
    assert spent.large_tokens == large.tokens == sum(token.rung == "large" for item in result for token in item.tokens)
    for item, unlimited in zip(result, free, strict=True):
        refused = [token for token in item.tokens if token.low_confidence]
        assert bool(refused or len(item.tokens) < 9) == item.low_confidence == bool(item.not_tried)
        assert item.door == "abort" or not item.low_confidence
        # up to the first refusal nothing differs
        same = next((place for place, token in enumerate(item.tokens) if token.low_confidence), len(item.tokens))
        assert [token.id for token in item.tokens[:same]] == [token.id for token in unlimited.tokens[:same]]
    assert replay(result[0].trail) == []


@SLOW
@given(
    st.sampled_from([0.002, 0.003, 0.006, 0.01, 0.015]), st.integers(1, 4), st.integers(2, 3), st.integers(30, 300),
    st.integers(36, 70),
)  # fmt: skip
@example(0.006, 3, 3, 175, 66)
@example(0.003, 3, 2, 217, 45)
@example(0.015, 4, 2, 126, 53)
@example(0.01, 2, 3, 32, 55)
@pytest.mark.slow
def test_no_limit_is_exceeded_by_two_rungs_at_once(looped, tokenizer, below, stay, batch, passes, catch_up):
    """Sequences at different rungs in one step: what either costs may fit the budget, and both together not."""
    middle = tiny_model(seed=9, vocab_size=len(tokenizer), total_ut_steps=5)
    middle.generation_config.eos_token_id = None
    models = zip([looped[0], middle, looped[1]], ("low", "middle", "high"), strict=True)
    rungs = [Rung.local(model, tokenizer, name) for model, name in models]
    budget = Budget(loop_passes=passes, catch_up_tokens=catch_up)
    ladder = FidelityLadder(rungs, budget, Margin(below=below), Hysteresis(stay=stay))
    texts = [*TEXTS, "12 and 7"][:batch]
    spent = ladder.generate_batch(texts, **ASKED)[0].spent
    assert spent.loop_passes <= passes and spent.catch_up_tokens <= catch_up


def test_without_a_single_pass_there_is_no_text_and_what_is_refused_is_told(rungs):
    result = FidelityLadder(rungs, Budget(loop_passes=3), Never()).generate(TEXTS[0], max_new_tokens=5)
    assert result.text == "" and result.tokens == () and result.stop_reason == "budget" and result.door == "abort"
    assert result.not_tried == ("small: the next step",) and result.spent.loop_passes == 0
    late = FidelityLadder(rungs, Budget(seconds=0.0), Always()).generate(TEXTS[0], max_new_tokens=8)
    assert late.stop_reason == "budget" and late.tokens == ()
    answer = FidelityLadder(rungs, Budget(loop_passes=3)).generate(TEXTS[0], unit="answer", max_new_tokens=5)
    assert answer.text == "" and answer.door == "abort" and answer.stop_reason == "budget"
    result = FidelityLadder(rungs, Budget(large_tokens=3), Always()).generate(TEXTS[0], max_new_tokens=8)
    assert [token.rung for token in result.tokens] == ["large"] * 3 + ["small"] * 5
    assert [token.low_confidence for token in result.tokens] == [False] * 3 + [True] * 5
    assert result.door == "abort" and result.not_tried == ("large: large_tokens",)


def test_parsing():
    assert Budget.parse("large_tokens=200, seconds=1.5") == Budget(large_tokens=200, seconds=1.5)
    assert Budget.parse("") == Budget()
    for text, message in (
        ("tokens=3", "not name=value"),
        ("calls", "not name=value"),
        ("calls=1,calls=2", "given twice"),
    ):
        with pytest.raises(ValueError, match=message):
            Budget.parse(text)
    for bad in ({"calls": -1}, {"money": float("inf")}, {"seconds": float("nan")}, {"tokens": 1}):
        with pytest.raises((ValidationError, TypeError)):
            Budget(**bad)
    with pytest.raises(ValidationError):
        Budget.parse("calls=many")


def test_costs_of_requests_and_of_several_runs_are_summed():
    price = Price(prompt_token=0.5, new_token=2.0, call=3.0)
    assert price.of(0, 0) == 3.0 and price.of(4, 0) == 5.0 and price.of(4, 5) == 15.0
    assert Price().of(7, 9) == 0.0
    for name in ("prompt_token", "new_token", "call"):
        for value in (float("inf"), float("nan"), -0.1):
            with pytest.raises(ValueError, match=f"price {name}"):
                Price(**{name: value})
    counts = ("tokens", "passes", "prompt_passes", "rows", "read", "catch_ups", "refills", "calls")
    counts += ("money", "seconds", "beside_bytes")
    assert {getattr(RungCost("small"), name) for name in (*counts, "block_bytes", "parameters")} == {0}
    first = RungCost("small", *range(1, 12), block_bytes=7, parameters=3)
    second = RungCost("small", *range(10, 120, 10), block_bytes=7, parameters=3)
    both = first.plus(second)
    assert [getattr(both, name) for name in counts] == [11 * k for k in range(1, 12)]
    assert (both.name, both.block_bytes, both.parameters) == ("small", 7, 3)
    # 2 passes and 3 of prompts, 11 bytes beside, and ten times as many
    assert both.bytes_read == 11 * (7 * 5 + 11) == total_bytes((first, second))
    assert first.to_dict()["bytes_read"] == 46 and first.to_dict()["row_parameters"] == 12


@pytest.mark.parametrize("name", ["loop_passes", "large_tokens", "catch_up_tokens", "calls", "money"])
def test_a_limit_may_be_reached_and_not_passed(name):
    purse = BudgetTracker(Budget(**{name: 5}))
    purse.pay(Spending(**{name: 2}), "step", 0.0)
    assert purse.lacks(Spending(**{name: 3}), "step") is None and purse.refused == set()
    assert purse.lacks(Spending(**{name: 4}), "step") == name and purse.refused == {name}
    others = dict.fromkeys({"loop_passes", "large_tokens", "catch_up_tokens", "calls", "money"} - {name}, 1000)
    assert purse.lacks(Spending(**others), "step") is None, "what has no limit is not limited"


def test_time_that_is_left_is_longer_than_the_longest_step_of_its_kind():
    purse = BudgetTracker(Budget(seconds=60.0))
    purse.pay(Spending(), "read 1", 99.0)
    assert purse.lacks(Spending(), "read 0") is None and not purse.refused
    assert purse.lacks(Spending(), "read 1") == "seconds" and purse.refused == {"seconds"}
    purse = BudgetTracker(Budget(seconds=60.0))
    purse.began -= 50.0
    assert 49.9 < purse.seconds < 60 and 0 < purse.seconds_left <= 10.0
    purse.pay(Spending(), "step", 9.0)
    purse.pay(Spending(), "step", 1.0)
    assert purse.longest == {"step": 9.0}
    assert BudgetTracker(Budget()).seconds_left is None and Budget().to_dict() == {}
