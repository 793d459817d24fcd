"""`python -m sigma0.bench grounding`: facts with a number altered or a name swapped against untouched ones."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from sigma0.bench.core.options import ReportFile
from sigma0.bench.core.output import BenchTable, tell_report
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson
from sigma0.signals.grounding.check import check
from sigma0.signals.grounding.claims import checkable


def grounding(
    facts: Annotated[Path, typer.Argument(help="A StrategyQA file: a JSON list of items with facts.")],
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Recall and precision of unanchored claims: a number altered or a name swapped, against untouched facts."""
    with one_line_errors():
        made = cases(read_facts(facts))
        with progress_bar("facts", len(made), hidden=as_json) as advance:
            result = measure(made, advance)
    report = {
        "file": facts.name,
        "sha256": sha256(facts.read_bytes()).hexdigest(),
        "cases": len(made),
        "detections": result,
    }
    if not tell_report(report, out, as_json):
        return
    headings = ("falsified", "facts", "found", "recall", "untouched", "false alarms", "precision")
    cells = []
    for item in result:
        shown = {**item, "recall": f"{item['recall']:.1%}", "precision": f"{item['precision']:.1%}"}
        columns = ("kind", "falsified", "found", "recall", "untouched", "false_alarms", "precision")
        cells.append([str(shown[column]) for column in columns])
    BenchTable(headings, cells, f"facts of {facts.name}").show()


_SEED = 0
_DIGITS = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+|(?<![\w.,])\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Case:
    """A fact to be checked against all facts of its question."""

    text: str  # The fact, falsified or not
    context: tuple[str, ...]  # The untouched facts
    falsified: str | None  # "number", "entity", or None


def read_facts(path: Path) -> list[tuple[str, ...]]:
    """The facts of each question of a StrategyQA file."""
    items = json.loads(path.read_text())
    if not isinstance(items, list) or not all(isinstance(item, dict) and "facts" in item for item in items):
        raise ValueError(f"{path} is no list of items with facts")
    groups = [[fact.strip() for fact in item["facts"]] for item in items if item["facts"]]
    return [tuple(fact if fact.endswith((".", "!", "?")) else f"{fact}." for fact in group) for group in groups]


def cases(facts: Sequence[tuple[str, ...]]) -> list[Case]:
    """Each fact untouched, with its first number altered, and with a name swapped for one of another question."""
    random = Random(_SEED)
    names = [name for group in facts for fact in group for name in _names_of(fact)]
    result = []
    for group in facts:
        for fact in group:
            result.append(Case(fact, group, None))
            for kind, text in (("number", _altered(fact, random)), ("entity", _swapped(fact, group, names, random))):
                if text is not None:
                    result.append(Case(text, group, kind))
    return result


def _names_of(fact: str) -> tuple[str, ...]:
    """Names that do not stand at the beginning, where a capital says little."""
    return tuple(name for name in checkable(fact).names if not fact.startswith(name))


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


def measure(made: Sequence[Case], on_case: Callable[[int], None] = lambda done: None) -> list[dict[str, Any]]:
    """Recall and precision for each way of falsifying; `on_case` is told how many cases are done.

    Returns:
        For each `kind` the facts `falsified` in this way, and of these the number `found`, which have a claim that is
        not anchored, and its share, `recall`; the `untouched` facts with something checkable, and the `false_alarms`
        among them; and the `precision`: of the facts with an unanchored claim the share that was falsified, were there
        as many untouched facts as falsified ones.
    """
    alarmed = {kind: [0, 0] for kind in (None, "number", "entity")}
    for done, case in enumerate(made, start=1):
        on_case(done)
        output = check(case.text, case.context)
        if case.falsified is None and output.score is None:
            continue
        alarmed[case.falsified][0] += 1
        alarmed[case.falsified][1] += bool(output.unanchored)
    untouched, false = alarmed[None]
    groups = {"number": ("number",), "entity": ("entity",), "both": ("number", "entity")}
    result = []
    for kind, members in groups.items():
        falsified, hits = (sum(alarmed[member][place] for member in members) for place in (0, 1))
        recall, alarm = hits / max(falsified, 1), false / max(untouched, 1)
        precision = recall / (recall + alarm) if recall + alarm else 0.0
        counts = {"falsified": falsified, "found": hits, "untouched": untouched, "false_alarms": false}
        result.append({"kind": kind, **counts, "recall": round(recall, 4), "precision": round(precision, 4)})
    return result
