"""Small repositories and faults to be planted in them: what the agent is tried on.

One is about the micro-world's rules. The others are drawn: modules of toy functions of one line each, with a test for
each function, and one operator of one function changed. Which changes are for training, and which are held out, is a
function of their text.
"""

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import NamedTuple

from sigma0.reason.agent.actions import EditFile
from sigma0.reason.agent.choices import edits_of

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


class Toy(NamedTuple):
    """A function of one line, and calls that tell it from what it is with one operator changed."""

    name: str
    takes: str
    returns: str
    calls: tuple[tuple[str, str], ...]  # Arguments and results

    @property
    def line(self) -> str:
        """Its source."""
        return f"def {self.name}({self.takes}): return {self.returns}"

    @property
    def test(self) -> str:
        """The test of it."""
        checks = [f"    assert {self.name}({given}) == {result}\n" for given, result in self.calls]
        return f"def test_{self.name}():\n{''.join(checks)}"


_ITEMS = "[4, 7, 9]"
TOYS: Mapping[str, tuple[Toy, ...]] = {
    "sums": (
        Toy("add", "a, b", "a + b", (("3, 2", "5"),)),
        Toy("subtract", "a, b", "a - b", (("5, 2", "3"),)),
        Toy("multiply", "a, b", "a * b", (("3, 4", "12"),)),
        Toy("double", "a", "a * 2", (("5", "10"),)),
        Toy("half", "a", "a // 2", (("8", "4"),)),
        Toy("successor", "a", "a + 1", (("5", "6"),)),
        Toy("predecessor", "a", "a - 1", (("5", "4"),)),
        Toy("square", "a", "a * a", (("4", "16"),)),
    ),
    "signs": (
        Toy("is_larger", "a, b", "a > b", (("3, 2", "True"), ("2, 2", "False"))),
        Toy("is_smaller", "a, b", "a < b", (("1, 2", "True"), ("2, 2", "False"))),
        Toy("is_same", "a, b", "a == b", (("2, 2", "True"),)),
        Toy("differs", "a, b", "a != b", (("2, 3", "True"),)),
        Toy("is_even", "a", "a % 2 == 0", (("4", "True"),)),
        Toy("is_odd", "a", "a % 2 == 1", (("3", "True"),)),
    ),
    "lists": (
        Toy("first", "items", "items[0]", ((_ITEMS, "4"),)),
        Toy("last", "items", "items[-1]", ((_ITEMS, "9"),)),
        Toy("size", "items", "len(items)", ((_ITEMS, "3"),)),
        Toy("total", "items", "sum(items)", ((_ITEMS, "20"),)),
        Toy("largest", "items", "max(items)", ((_ITEMS, "9"),)),
        Toy("smallest", "items", "min(items)", ((_ITEMS, "4"),)),
    ),
}


class Planted(NamedTuple):
    """A repository with a fault."""

    files: Mapping[str, str]  # As they are, by path
    mend: EditFile  # What takes the fault back
    toy: Toy  # Whose fault it is

    @property
    def mended(self) -> str:
        """The file as it was before the fault."""
        return self.files[self.mend.path].replace(self.mend.old, self.mend.new)

    def write(self, folder: Path) -> None:
        """Writes the files."""
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")


def is_held_out(line: str) -> bool:
    """Whether a wrong line is for tests alone: about a quarter of all."""
    return blake2b(line.encode(), digest_size=1).digest()[0] < 64


def planted(seed: int, index: int, held_out: bool) -> Planted:
    """A repository that is drawn, with a fault of the held-out ones or of the others."""
    rng = Random(f"toys/{held_out}/{seed}/{index}")
    while True:
        chosen = {name: rng.sample(toys, rng.choice((2, 3))) for name, toys in TOYS.items()}
        files = {f"{name}.py": "".join(f"{toy.line}\n\n\n" for toy in toys) for name, toys in chosen.items()}
        name = rng.choice(list(chosen))
        toy, path = rng.choice(chosen[name]), f"{name}.py"
        faults = [edit for edit in edits_of(path, toy.line) if is_held_out(edit.new) == held_out]
        if not faults:
            continue
        fault = rng.choice(faults)
        files[path] = files[path].replace(fault.old, fault.new)
        for other, toys in chosen.items():
            names = ", ".join(sorted(toy.name for toy in toys))
            tests = "\n\n".join(toy.test for toy in toys)
            files[f"test_{other}.py"] = f"from {other} import {names}\n\n\n{tests}"
        return Planted(files, fault.model_copy(update={"old": fault.new, "new": fault.old}), toy)
