"""A small repository about the micro-world's rules, and faults to be planted in it: what the agent is tried on."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FILES: Mapping[str, str] = {
    "places.py": '''"""Where people and things are: what was told last of each counts."""


def pointers(facts):
    """The last place or holder told of each name."""
    found = {}
    for name, goal in facts:
        found[name] = goal
    return found


def place(facts, name):
    """Where a name is in the end."""
    found = pointers(facts)
    while name in found:
        name = found[name]
    return name


def holder(facts, name, people):
    """Who has a thing; None if nobody does."""
    found = pointers(facts)
    while name in found:
        name = found[name]
        if name in people:
            return name
    return None
''',
    "ages.py": '''"""How old people are, by comparisons with others."""


def age(told, compared, name):
    """The age of a name: told, or that of another and a difference."""
    if name in told:
        return told[name]
    other, difference = compared[name]
    return age(told, compared, other) + difference


def is_older(told, compared, first, second):
    """Whether the first of two is older."""
    return age(told, compared, first) > age(told, compared, second)
''',
    "test_places.py": """from places import holder, place, pointers

FACTS = [("coin", "cup"), ("cup", "Mary"), ("Mary", "park"), ("Mary", "barn")]


def test_the_last_fact_counts():
    assert pointers(FACTS)["Mary"] == "barn"


def test_things_are_where_their_holders_are():
    assert place(FACTS, "coin") == "barn"
    assert place(FACTS, "park") == "park"


def test_holders():
    assert holder(FACTS, "coin", {"Mary"}) == "Mary"
    assert holder(FACTS, "coin", {"Ann"}) is None
""",
    "test_ages.py": """from ages import age, is_older

TOLD = {"Rosa": 5}
COMPARED = {"John": ("Rosa", 1), "Lucy": ("John", -2)}


def test_ages_are_summed_along_the_way():
    assert age(TOLD, COMPARED, "Rosa") == 5
    assert age(TOLD, COMPARED, "Lucy") == 4


def test_older():
    assert is_older(TOLD, COMPARED, "John", "Lucy")
    assert not is_older(TOLD, COMPARED, "Lucy", "Rosa")
    assert not is_older(TOLD, COMPARED, "Rosa", "Rosa")
""",
}


class Fault(NamedTuple):
    """A change that makes tests fail: in a file, what stands `wrong` in place of what is `right`."""

    name: str
    file: str
    right: str
    wrong: str


_LOOP = "    while name in found:\n        name = found[name]\n"
FAULTS = (
    Fault("the sign of a difference", "ages.py", "other) + difference", "other) - difference"),
    Fault("older or as old", "ages.py", "first) > age", "first) >= age"),
    Fault("the first fact counts", "places.py", "found[name] = goal", "found.setdefault(name, goal)"),
    Fault("one step only", "places.py", f"{_LOOP}    return name", "    return found[name]"),
    Fault("whoever is last has it", "places.py", "        if name in people:\n            return name\n", ""),
)


def write(folder: Path, fault: Fault | None) -> None:
    """Writes the repository, with a fault planted in it."""
    for name, text in FILES.items():
        if fault is not None and fault.file == name:
            assert text.count(fault.right) == 1, fault
            text = text.replace(fault.right, fault.wrong)
        (folder / name).write_text(text, encoding="utf-8")
