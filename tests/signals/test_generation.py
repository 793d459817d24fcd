"""What a generation tells of itself beside its text."""

import json
from dataclasses import replace

import pytest

import sigma0
from sigma0.signals.verdict import DoorPolicy


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
    assert json.loads(json.dumps(output)) == json.loads(json.dumps(generation.to_dict()))
