"""When a unit goes up, at the edge of every threshold, and how long a larger model stays."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sigma0.ladder.triggers import (
    AllOf,
    Always,
    AnyOf,
    Collapse,
    Divergence,
    Doubt,
    Entropy,
    Hysteresis,
    Margin,
    Never,
    Parking,
    Random,
    Saturation,
    ShutDoor,
    Signs,
    Ungrounded,
    trigger_from_dict,
    trigger_to_dict,
)
from sigma0.signals.verdict import DoorPolicy
from tests.ranges import check_range
from tests.signals.test_verdict import make


def signs(entropy=0.1, margin=0.9, sequence=0, position=0, **verdict):
    return Signs(sequence, position, make(**{"proximity": 0.1, "grounded": 0.9, **verdict}), entropy, margin)


SURE = signs()
DOUBTED = "its confidence is 0.50, under 0.90; its proximity to collapse is 0.70, not under 0.50"
BOTH = AllOf((Always(), Entropy(0.5)))


@pytest.mark.parametrize(
    "trigger, why, fires, passes",
    [
        (Always(), "always", [SURE], []),
        (Never(), None, [], [SURE, signs(reason="divergence")]),
        (Saturation(), "saturated", [signs(reason="max_depth")], [SURE, signs(reason=None)]),
        (
            Divergence(),
            "diverging",
            [signs(stable="diverge"), signs(reason="divergence")],
            [SURE, signs(stable="spiral")],
        ),
        (Divergence(), None, [], [signs(stable=None)]),
        (Collapse(), "proximity 0.50", [signs(proximity=0.5)], [SURE, signs(proximity=0.4999)]),
        (Collapse(0.8), "proximity 0.80", [signs(proximity=0.8)], [signs(proximity=0.7999)]),
        (Ungrounded(), "grounded 0.50", [signs(grounded=0.5)], [signs(grounded=0.5001), signs(grounded=None)]),
        (Ungrounded(0.2, unknown=True), "groundedness unknown", [signs(grounded=None)], [signs(grounded=0.3)]),
        (Entropy(0.5), "entropy 0.51", [signs(0.51)], [signs(0.5), signs(None), signs(0.0)]),
        (Margin(0.5), "margin 0.49", [signs(margin=0.49)], [signs(margin=0.5), signs(margin=None)]),
        (Doubt(0.6), "confidence 0.59", [signs(confidence=0.59)], [signs(confidence=0.6), signs(confidence=None)]),
        (ShutDoor(), "its confidence is not known", [signs(confidence=None)], [SURE]),
        (ShutDoor(), DOUBTED, [signs(confidence=0.5, proximity=0.7)], []),
        (ShutDoor(DoorPolicy(min_confidence=0.4)), None, [], [signs(confidence=0.5)]),
        (AnyOf((Never(), Entropy(0.5), Always())), "always", [SURE], []),
        (AnyOf((Never(), Entropy(0.5), Always())), "entropy 0.60", [signs(0.6)], []),
        (AnyOf((Never(), Margin(0.5))), "margin 0.10", [signs(margin=0.1)], [SURE]),
        (BOTH, "always, entropy 0.60", [signs(0.6)], [SURE]),
    ],
)
def test_what_fires_and_why(trigger, why, fires, passes):
    assert [trigger.fires(unit) for unit in (*fires, *passes)] == [why] * len(fires) + [None] * len(passes)


@given(st.integers(0, 2**16))
def test_chance_depends_on_the_place_alone(seed):
    places = [(sequence, position) for sequence in range(10) for position in range(40)]
    fired = [Random(0.3, seed).fires(signs(sequence=k, position=n)) for k, n in places]
    assert fired == [Random(0.3, seed).fires(signs(0.7, 0.2, k, n, confidence=0.1)) for k, n in places]
    # 400 draws at 0.3: five standard deviations
    assert abs(fired.count("chance") / 400 - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 400)
    assert {Random(0.0, seed).fires(unit) for unit in (SURE, signs(sequence=1))} == {None}
    assert {Random(1.0, seed).fires(unit) for unit in (SURE, signs(sequence=1))} == {"chance"}


def test_other_seeds_and_sequences_draw_anew():
    drawn = {
        (seed, sequence): tuple(Random(0.5, seed).fires(signs(sequence=sequence, position=n)) for n in range(60))
        for seed in (0, 1)
        for sequence in (0, 1)
    }
    assert len(set(drawn.values())) == 4
    assert drawn[0, 0] == tuple(Random(0.5).fires(signs(position=n)) for n in range(60)), "0 is the seed by default"


ALL = [
    Always(), Never(), Saturation(), Divergence(), Collapse(0.25), Ungrounded(0.75, True), Entropy(1.5), Margin(0.25),
    Doubt(0.5), Random(0.125, 7), ShutDoor(DoorPolicy(patience=3)), AnyOf((Always(), AllOf((Never(), Doubt(0.1))))),
]  # fmt: skip


@pytest.mark.parametrize("trigger", ALL, ids=lambda trigger: trigger.kind)
def test_json_and_back(trigger):
    stored = trigger_to_dict(trigger)
    assert stored["kind"] == trigger.kind and trigger_from_dict(stored) == trigger
    with pytest.raises(ValueError, match="no_such_field"):
        trigger_from_dict({**stored, "no_such_field": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        trigger.kind = "other"


def test_signs_in_json_and_back():
    for unit in (SURE, signs(None, None, 3, 4, grounded=None, reason=None)):
        assert Signs.from_dict(unit.to_dict()) == unit
    assert SURE.to_dict()["verdict"]["confidence"] == 0.95
    with pytest.raises(ValueError, match="position"):
        Signs.from_dict({**SURE.to_dict(), "position": "first"})
    with pytest.raises(ValueError, match="kind"):
        trigger_from_dict({"kind": "whim"})


@pytest.mark.parametrize(
    "kind, field, good, bad",
    [
        *((kind, "below", (0, 1), (-0.01, 1.01)) for kind in (Ungrounded, Margin, Doubt)),
        (Collapse, "above", (0, 1), (-0.01, 1.01)),
        (Entropy, "above", (0, 9), (-0.01,)),
        (Random, "rate", (0, 1), (-0.01, 1.01)),
        (Hysteresis, "stay", (0, 5), (-1,)),
        (Hysteresis, "leave", (0, 1, None), (-0.01, 1.01)),
        *((kind, "triggers", ((Always(),),), ((),)) for kind in (AnyOf, AllOf)),
    ],
)
def test_thresholds_lie_in_their_range(kind, field, good, bad):
    check_range(kind, field, good, bad, ValidationError)


def test_a_larger_model_stays_as_long_as_it_was_told_or_is_unsure():
    parking = Parking(Hysteresis(stay=2))
    assert parking.start(0) == 0
    parking.wrote(0, 1, True, 0.1)
    starts = []
    for _ in range(3):
        starts.append(parking.start(0))
        parking.wrote(0, parking.start(0), False, 0.1)
    assert starts == [1, 1, 0] and parking.start(0) == 0
    assert parking.start(1) == 0, "of another sequence nothing is known"
    # a hand-up from there begins anew
    for climbed, start in ((True, 2), (False, 2), (True, 2), (False, 2), (False, 0)):
        parking.wrote(0, 2, climbed, 0.1)
        assert parking.start(0) == start
    parking = Parking(Hysteresis())
    parking.wrote(0, 1, True, 0.0)
    assert parking.start(0) == 0
    parking = Parking(Hysteresis(leave=0.5))
    for margin, start in ((0.49, 1), (0.5, 0), (None, 0), (0.0, 1)):
        parking.wrote(0, 1, False, margin)
        assert parking.start(0) == start, margin
    # the margin of the lowest rung keeps nobody
    parking.wrote(0, 0, False, 0.0)
    assert parking.start(0) == 0
