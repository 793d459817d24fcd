"""How well claims that were falsified are told from untouched ones: facts with a number altered or a name swapped."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from sigma0.signals.grounding.check import check
from sigma0.signals.grounding.claims import checkable

_SEED = 0
_DIGITS = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+|(?<![\w.,])\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Case:
    """A fact to be checked against all facts of its question.

    Attributes:
        text: The fact, falsified or not.
        context: The untouched facts.
        falsified: "number", "entity", or None.
    """

    text: str
    context: tuple[str, ...]
    falsified: str | None


@dataclass(frozen=True)
class Detection:
    """How falsified facts were found.

    Attributes:
        kind: "number", "entity" or "both".
        falsified: Facts that were falsified in this way.
        found: Those with a claim that is not anchored.
        untouched: Untouched facts with something checkable.
        false_alarms: Those with a claim that is not anchored.
        recall: found / falsified.
        precision: Of the facts with an unanchored claim, the share that was falsified, were there as many untouched
            facts as falsified ones.
    """

    kind: str
    falsified: int
    found: int
    untouched: int
    false_alarms: int
    recall: float
    precision: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def read_facts(path: Path) -> list[tuple[str, ...]]:
    """The facts of each question of a StrategyQA file.

    Raises:
        ValueError: If the file is none.
    """
    items = json.loads(path.read_text())
    if not isinstance(items, list) or not all(isinstance(item, dict) and "facts" in item for item in items):
        raise ValueError(f"{path} is no list of items with facts")
    return [tuple(_ended(fact) for fact in item["facts"]) for item in items if item["facts"]]


def _ended(fact: str) -> str:
    fact = fact.strip()
    return fact if fact.endswith((".", "!", "?")) else f"{fact}."


def cases(facts: Sequence[tuple[str, ...]]) -> list[Case]:
    """Each fact untouched, with its first number altered, and with a name swapped for one of another question."""
    random = Random(_SEED)
    names = [name for group in facts for fact in group for name in _names_of(fact)]
    found = []
    for group in facts:
        for fact in group:
            found.append(Case(fact, group, None))
            altered = _altered(fact, random)
            if altered is not None:
                found.append(Case(altered, group, "number"))
            swapped = _swapped(fact, group, names, random)
            if swapped is not None:
                found.append(Case(swapped, group, "entity"))
    return found


def _names_of(fact: str) -> tuple[str, ...]:
    """Names that do not stand at the beginning, where a capital says little."""
    told = checkable(fact)
    return tuple(name for name in told.names if not fact.startswith(name))


def _altered(fact: str, random: Random) -> str | None:
    """The first number made 1.2 to 3 times as large, or as small; of a year, 3 to 60 years off."""
    match = _DIGITS.search(fact)
    if match is None:
        return None
    digits = match.group().replace(",", "")
    value = float(digits)
    if 1000 <= value <= 2100 and "," not in match.group() and "." not in digits:
        changed = value + random.choice([-1, 1]) * random.randint(3, 60)
    else:
        changed = value * random.uniform(1.2, 3.0) if random.random() < 0.5 else value / random.uniform(1.2, 3.0)
    decimals = len(digits.split(".")[1]) if "." in digits else 0
    text = f"{changed:,.{decimals}f}" if "," in match.group() else f"{changed:.{decimals}f}"
    if float(text.replace(",", "")) == value:
        text = f"{value + 2:.{decimals}f}"
    return fact[: match.start()] + text + fact[match.end() :]


def _swapped(fact: str, group: tuple[str, ...], names: Sequence[str], random: Random) -> str | None:
    mine = _names_of(fact)
    if not mine:
        return None
    old = random.choice(mine)
    everything = " ".join(group).lower()
    for _ in range(100):
        new = random.choice(names)
        if new.lower() not in everything:
            return fact.replace(old, new, 1)
    return None


def measure(made: Sequence[Case], on_case: Callable[[int], None] = lambda done: None) -> list[Detection]:
    """Recall and precision for each way of falsifying.

    Args:
        made: The cases.
        on_case: Told how many are done.
    """
    alarmed = {kind: [0, 0] for kind in (None, "number", "entity")}
    for done, case in enumerate(made, start=1):
        on_case(done)
        told = check(case.text, case.context)
        if case.falsified is None and told.score is None:
            continue
        alarmed[case.falsified][0] += 1
        alarmed[case.falsified][1] += bool(told.unanchored)
    untouched, false = alarmed[None]
    groups = {"number": ("number",), "entity": ("entity",), "both": ("number", "entity")}
    found = []
    for kind, members in groups.items():
        falsified, hits = (sum(alarmed[member][place] for member in members) for place in (0, 1))
        recall, alarm = hits / max(falsified, 1), false / max(untouched, 1)
        precision = recall / (recall + alarm) if recall + alarm else 0.0
        found.append(Detection(kind, falsified, hits, untouched, false, round(recall, 4), round(precision, 4)))
    return found
