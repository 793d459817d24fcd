"""The door of a finished text: what the verdict does not let pass goes up while rungs and budget are left."""

import copy
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sigma0
import sigma0.ladder.texts
from sigma0.ladder import (
    Always,
    AnyOf,
    Budget,
    Collapse,
    Divergence,
    Entropy,
    FidelityLadder,
    Margin,
    Never,
    Random,
    Rung,
    Saturation,
    ShutDoor,
    read_trail,
    replay,
)
from sigma0.signals.verdict import DoorPolicy, door
from tests.calibrated import calibrated

POLICIES = st.one_of(
    st.sampled_from((None, Never(), Always(), Saturation(), ShutDoor(DoorPolicy(spiral_share=0.0)))),
    st.floats(0.0, 6.0).map(Entropy),
    st.floats(0.0, 1.0).map(Margin),
    st.builds(Random, st.floats(0.0, 1.0), st.integers(0, 99)),
)
LIMITS = {"loop_passes": 120, "large_tokens": 12, "catch_up_tokens": 40}
BUDGETS = st.builds(Budget, **{name: st.none() | st.integers(0, most) for name, most in LIMITS.items()})
DOORS = st.builds(
    DoorPolicy,
    tau_c=st.sampled_from((0.0, 0.5, 1.0)),
    require_grounding=st.booleans(),
    spiral_share=st.sampled_from((0.0, 0.5, 1.0)),
    saturated_share=st.sampled_from((0.0, 0.5, 1.0)),
)
PROMPT = "Mary went to the park. Where is Mary?"
GROUNDED = DoorPolicy(require_grounding=True)
# nothing in the texts of random models can be checked, so that no single token is to blame
CALM = DoorPolicy(require_grounding=True, tau_c=1.0)


@pytest.fixture
def no_doubt(rungs, monkeypatch):
    """No token is too unsure, as those of random models are."""
    monkeypatch.setattr(sigma0.ladder.ladder, "TOKEN_CONFIDENCE", 0.0)
    return [replace(rung, exit_config=sigma0.ExitConfig(mode="margin", theta=1e-6)) for rung in rungs]


@pytest.fixture(scope="module")
def all_rungs(looped, plain, tokenizer):
    """Looped ones, one that declines, one whose context no prompt fits into, and one without loops."""
    short = copy.deepcopy(looped[1])
    short.config.max_position_embeddings = 4
    return (
        Rung.local(looped[0], tokenizer, "small"),
        Rung.local(looped[1], tokenizer, "large"),
        Rung.local(looped[1], tokenizer, "dumb", declines=lambda text: True),
        Rung.local(short, tokenizer, "short"),
        Rung.local(plain, tokenizer, "plain"),
    )


@pytest.mark.exhaustive
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    POLICIES,
    BUDGETS,
    DOORS,
    st.lists(st.integers(1, 4), max_size=3, unique=True),
    st.sampled_from(("token", "draft", "answer", "take_over")),
    st.integers(1, 6),
)
def test_a_finished_text_ends_at_escalate_by_a_policy_of_the_callers_own_alone(
    all_rungs, policy, budget, doors, above, unit, new
):
    rungs = [all_rungs[0], *(all_rungs[place] for place in above if unit != "token" or place != 3)]
    ladder = FidelityLadder(rungs, budget, policy, doors=doors)
    if unit == "take_over":
        written = sigma0.generate(rungs[0].model, rungs[0].tokenizer, PROMPT, max_new_tokens=new, policy=doors)
        result = ladder.take_over(PROMPT, written, max_new_tokens=new)
    else:
        result = ladder.generate(PROMPT, unit, max_new_tokens=new, **({"draft_tokens": 2} if unit == "draft" else {}))
    passes = door(result.verdict, doors) == "converge"
    if result.door == "escalate":
        assert policy is not None and unit != "take_over" and not passes and not result.top_rung
    if result.door == "converge":
        assert passes
    if result.door == "abort":
        assert result.not_tried or (result.top_rung and not passes)
    if result.top_rung:
        assert max(line.rung for line in result.trail.decisions) == len(rungs) - 1
    assert replay(result.trail) == []


@pytest.mark.parametrize("policy", [None, Never(), Entropy(0.5)])
def test_an_answer_that_is_taken_over_goes_up_by_its_door(rungs, tokenizer, policy):
    written = sigma0.generate(rungs[0].model, tokenizer, PROMPT, max_new_tokens=4, policy=GROUNDED)
    assert written.door == "escalate"
    result = FidelityLadder(rungs, policy=policy, doors=GROUNDED).take_over(PROMPT, written, max_new_tokens=4)
    assert (result.door, result.top_rung, result.rung) == ("abort", True, "large") and replay(result.trail) == []
    assert {token.rung for token in result.tokens} == {"large"} and result.costs[0].passes == 0


@pytest.mark.parametrize("stored", [True, False])
def test_a_certificate_decides_what_goes_up(pocket, stored):
    """The lowest rung's own, or one that is asked for: it lets answers stand that the confidence doubts."""
    model, tokenizer = copy.copy(pocket[0]), pocket[1]
    model.generation_config = copy.deepcopy(model.generation_config)
    if stored:
        model.generation_config.door_policy = replace(model.door_policy, rule="certificate")
    rungs = [Rung.local(model, tokenizer, "pocket"), Rung.local(*pocket, "above")]
    ladder = FidelityLadder(rungs, rule=None if stored else "certificate")
    assert ladder.policy_for("token") == AnyOf((Saturation(), Divergence(), Collapse()))
    assert ladder.over(rungs).doors == ladder.doors == ladder.policy_for("answer").policy
    doors = set()
    for place in ("park", "garden", "office", "kitchen"):
        prompt = f"Mary went to the {place}. Tom has the hat. Where is Mary?"
        written = sigma0.generate(*pocket, prompt, max_new_tokens=20)
        result = ladder.generate(prompt, "answer", max_new_tokens=20)
        certified = door(written.verdict, DoorPolicy(tau_g=None, rule="certificate"))
        assert (result.rung == "pocket") == (certified == "converge") and replay(result.trail) == []
        doors.add((written.door, certified))
    assert ("escalate", "converge") in doors


def test_a_text_that_the_callers_policy_or_a_short_budget_keeps_stays_where_it_is(rungs, no_doubt):
    ladder = FidelityLadder(rungs, policy=Never(), doors=GROUNDED)
    for unit in ("token", "draft", "answer"):
        result = ladder.generate(PROMPT, unit, max_new_tokens=4)
        assert (result.door, result.top_rung, result.rung) == ("escalate", False, "small")
    result = FidelityLadder(no_doubt, Budget(large_tokens=4), doors=CALM).generate(PROMPT, max_new_tokens=5)
    assert (result.door, result.top_rung, result.rung) == ("abort", False, "small")
    assert result.not_tried == ("large: large_tokens",) and result.low_confidence
    assert replay(result.trail) == []


def test_a_highest_rung_that_fails_leaves_none_to_be_asked(all_rungs):
    small, _, _, short, _ = all_rungs
    result = FidelityLadder([small, short], doors=GROUNDED).generate(PROMPT, "answer", max_new_tokens=4)
    assert (result.door, result.top_rung, result.rung) == ("abort", True, "small")
    assert result.trail.decisions[-1].outcome == "error"


def test_a_text_of_tokens_goes_up_whole_where_its_verdict_does_not_pass(tmp_path, no_doubt):
    ladder = FidelityLadder(no_doubt, doors=CALM)
    result = ladder.generate(PROMPT, max_new_tokens=5)
    above = no_doubt[1]
    alone = sigma0.generate(
        above.model, above.tokenizer, PROMPT, max_new_tokens=5, exit_config=above.exit_config, policy=CALM
    )
    assert (result.door, result.rung, result.text) == ("abort", "large", alone.text)
    assert result.top_rung and not result.not_tried and result.to_dict()["top_rung"]
    assert [(token.id, token.rung) for token in result.tokens] == [(token.id, "large") for token in alone.tokens]
    small, large = result.costs
    assert small.tokens == large.tokens == 5 and large.passes == alone.loop_passes
    outcomes = [(line.rung, line.outcome) for line in result.trail.decisions if line.whole]
    assert outcomes == [(0, "hand_up"), (1, "top_rung")]
    path = tmp_path / "trail.jsonl"
    result.trail.write(path)
    assert replay(read_trail(path)) == []
    output = ladder.stream(PROMPT, max_new_tokens=5)
    streamed = "".join(token.text for (token,) in output)
    # tokens that were shown are not taken back
    assert (output.generations[0].text, output.generations[0].door) == (streamed, "escalate")


def test_drafts_that_pass_one_by_one_go_up_where_the_whole_does_not(pocket, monkeypatch):
    rungs = [Rung.local(*pocket, "pocket"), Rung.local(*pocket, "above")]
    prompt = "Sara went to the barn. Tom went to the park. Where is Tom?"
    asked = {"max_new_tokens": 20, "draft_tokens": 3}
    settled = FidelityLadder(rungs).generate(prompt, "draft", **asked)
    assert (settled.door, settled.rung, len(settled.drafts)) == ("converge", "pocket", 3)
    # what no draft shows by itself: the whole has no anchor
    whole, check = settled.text, sigma0.ladder.texts.check
    monkeypatch.setattr(
        sigma0.ladder.texts,
        "check",
        lambda text, context: replace(check(text, context), score=0.0) if text == whole else check(text, context),
    )
    result = FidelityLadder(rungs, doors=DoorPolicy(tau_g=0.5)).generate(prompt, "draft", **asked)
    assert result.rung == "above" and result.drafts == (("above", whole),)
    outcomes = [(line.rung, line.whole, line.outcome) for line in result.trail.decisions[-2:]]
    assert outcomes == [(0, True, "hand_up"), (1, True, "accept")]
    assert replay(result.trail) == []


def test_drafts_have_no_calibrated_confidence_but_a_strange_question_shuts_the_door(pocket):
    ladder = FidelityLadder([Rung.local(*calibrated(pocket, ["Where is Sara?"]), "pocket")])
    for prompt, strange in (("Where is Sara?", False), ("Who is the president?", True)):
        result = ladder.generate(prompt, "draft", max_new_tokens=12, draft_tokens=3)
        assert len(result.drafts) > 1
        for line in result.trail.decisions:
            verdict = line.signs["verdict"]
            assert verdict["confidence"] == pytest.approx(math.exp(-line.signs["entropy"]))
            assert (verdict["reason"] == "out_of_calibration") == (strange and line.position == 0)
        assert (result.verdict.reason == "out_of_calibration") == strange
        assert result.top_rung and (result.door == "abort" or not strange)


def test_fates_are_those_of_all_loops_that_were_run(pocket):
    """A token that spirals where it was read may settle in the loops that run after its exit."""
    rungs = [Rung.local(*pocket, "pocket"), Rung.local(*pocket, "above")]
    prompt = "Sara went to the bedroom. John went to the park. Where is Sara?"
    result = FidelityLadder(rungs, policy=Never()).generate(prompt, max_new_tokens=20)
    alone = sigma0.generate(*pocket, prompt, max_new_tokens=20)
    assert [token.id for token in result.tokens] == [token.id for token in alone.tokens]
    assert [token.fate for token in result.tokens] == [token.fate for token in alone.tokens]
    assert result.verdict.stable == alone.verdict.stable


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_a_ladder_that_is_switched_off_is_no_silent_one(pocket, monkeypatch, recwarn, value):
    monkeypatch.setenv("SIGMA0_LADDER", value)
    for ladder in (FidelityLadder([Rung.local(*pocket, "pocket")], policy=Always()), None):
        sigma0.generate(*pocket, PROMPT, max_new_tokens=4, ladder=ladder)
    ours = [str(item.message) for item in recwarn if "ladder" in str(item.message)]
    assert ours == ([] if value == "1" else ["a ladder is given, but SIGMA0_LADDER is not 1: no answer goes up"])
