import json

import pytest

from sigma0.bench.grounding.command import Case, cases, measure
from tests.bench.running import refused, reported

FACTS = [
    ("The tower in Paris is 330 meters tall.", "It was opened by Gustave Eiffel in 1889."),
    ("About 1,200 people live on Tristan da Cunha.", "Whales sing."),
]


def test_falsified_facts_differ_in_one_number_or_name():
    made = cases(FACTS)
    assert [case.text for case in made if case.falsified is None] == [fact for group in FACTS for fact in group]
    numbers = [case for case in made if case.falsified == "number"]
    assert len(numbers) == 3 and not any(case.text in case.context for case in numbers)
    assert not any("330" in case.text or "1889" in case.text or "1,200" in case.text for case in numbers)
    swapped = [case for case in made if case.falsified == "entity"]
    assert swapped and all(case.text not in case.context for case in swapped)
    assert made == cases(FACTS), "the cases are not the same twice"


def test_recall_and_precision_by_hand():
    context = ("The tower is 330 meters tall.",)
    made = [
        Case("The tower is 330 meters tall.", context, None),
        Case("The tower is 331.5 kilometers tall.", context, None),  # a false alarm
        Case("What a tower.", context, None),  # nothing to check: not counted
        Case("The tower is 950 meters tall.", context, "number"),
        Case("The tower is 330 meters tall.", context, "entity"),  # missed
    ]
    number, entity, both = measure(made)
    counts = {"falsified": 1, "found": 1, "untouched": 2, "false_alarms": 1}
    assert number == {"kind": "number", **counts, "recall": 1.0, "precision": pytest.approx(1 / 1.5, abs=1e-4)}
    assert (entity["recall"], entity["precision"]) == (0.0, 0.0)
    assert (both["recall"], both["precision"]) == (0.5, 0.5)


def test_the_command_reads_a_file_and_refuses_another(tmp_path):
    file = tmp_path / "facts.json"
    file.write_text(json.dumps([{"facts": list(group)} for group in FACTS]))
    assert [row["kind"] for row in reported("grounding", file)["detections"]] == ["number", "entity", "both"]
    file.write_text("{}")
    assert "is no list of items with facts" in refused("grounding", file)
