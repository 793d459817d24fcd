"""What a generation tells of itself beside its text, and what its exits saved."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sigma0
from sigma0.signals.savings import Savings, savings
from sigma0.signals.verdict import DoorPolicy
from tests.reference import finish_rows


@pytest.fixture(scope="module")
def generation(pocket):
    return sigma0.generate(*pocket, "Mary went to the park. Where is Mary?", max_new_tokens=6)


def test_passes_that_forced_tokens_saved(generation):
    loops = generation.total_loops
    assert generation.tokens_forced == 0 and generation.forced_passes_saved == 0
    assert replace(generation, tokens_forced=3).forced_passes_saved == 3 * (loops - 1)


def test_the_answer_is_the_ladders_where_one_ran(generation):
    class Above:
        text, door, stop_reason, grounding = "in the park", "abort", "stop", generation.grounding
        verdict = generation.verdict.model_copy(update={"confidence": 0.25})

        def to_dict(self):
            return {"text": self.text}

    assert generation.draft is None and not {"above", "draft"} & set(generation.to_dict())
    policy = DoorPolicy(min_confidence=0.125)
    final = generation.handed_up(Above(), policy)
    assert (final.text, final.door, final.verdict) == ("in the park", "abort", Above.verdict)
    assert (final.answer, final.policy, final.draft) == ("in the park", policy, generation)
    output = final.to_dict()
    assert output["above"] == {"text": "in the park"} and output["draft"]["text"] == generation.text


def test_fields_of_a_verdict_are_told_with_it_alone(generation):
    output = generation.to_dict()
    assert output["door"] == generation.door and output["verdict"] == generation.verdict.to_dict()
    assert {"grounding", "policy"} <= set(output)
    bare = replace(generation, verdict=None)
    assert bare.door is None and not {"verdict", "door", "grounding", "policy"} & set(bare.to_dict())
    assert set(bare.to_dict()["tokens"][0]) < set(output["tokens"][0])
    assert json.dumps(output)


def test_savings_by_hand():
    """Two sequences, T = 4: depths after the first are 2, 1, 4 and 3."""
    saved = savings([[4, 2, 1, 4], [1, 3]], passes=7, rows=13, total_loops=4)
    assert saved.mean_depth == pytest.approx(10 / 4)
    assert saved.depth_saved == pytest.approx(1 - 10 / 16)
    assert saved.passes_saved == pytest.approx(1 - 7 / 12)
    assert saved.rows_saved == pytest.approx(1 - 13 / 16)


@pytest.mark.parametrize("depths", [[], [[]], [[3]], [[3], [1], []]])
def test_no_savings_to_tell_for_single_tokens(depths):
    assert savings(depths, passes=0, rows=0, total_loops=4) == Savings(None, None, None, None)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=30))
def test_identities_of_the_savings_of_one_sequence(depths):
    """`finish`: passes_saved is depth_saved; `drop`: rows_saved is passes_saved, and `finish` saves no more rows."""
    spent = sum(depths[1:])
    finish = savings([depths], passes=spent, rows=finish_rows(depths, 6), total_loops=6)
    drop = savings([depths], passes=spent, rows=spent, total_loops=6)
    assert finish.passes_saved == pytest.approx(finish.depth_saved)
    assert drop.rows_saved == pytest.approx(drop.passes_saved)
    assert finish.rows_saved <= drop.rows_saved + 1e-9
    assert -1e-9 <= finish.rows_saved < 1
