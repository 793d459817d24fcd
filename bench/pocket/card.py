"""What the shipped models say of themselves (`about.json`), and the tables of a model card, in Markdown.

The tables are of the figures that `eval` and `gate` print with --json.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sigma0.bench.core.output import BenchTable
from sigma0.bench.pocket.forms import TOKENS
from sigma0.bench.pocket.recipe import RECIPES
from sigma0.bench.pocket.structured import KEYS, LISTS, UNKNOWN, repairs
from sigma0.bench.pocket.structured import TOKENS as TOOL_TOKENS
from sigma0.bench.pocket.world import LOOK_UPS, MIX, draw
from sigma0.calibrate.agreement import THRESHOLD
from sigma0.checkpoints.about import About, Example, split_words
from sigma0.reason.forms import FORMS

Figures = Mapping[str, Any]
# Up to so many loops each has a column.
_ALL_LOOPS = 8


def accuracy_table(evaluation: Figures) -> str:
    """Whole answers right by group and loop, with the interval at full depth, and what the exit rule does."""
    total = len(evaluation["groups"]["all"]["all"]["loops"])
    loops = [loop for loop in range(1, total + 1) if total <= _ALL_LOOPS or loop in (1, 2, 3, 4, 6, 8, 12, total)]
    head = ("questions", "n", *map(str, loops), "interval", "at the exits", "mean depth")
    groups = evaluation["groups"].items()
    return _table(
        head, [(group_label(name, value), *_cells(part[value], loops)) for name, part in groups for value in part]
    )


def evaluation_table(groups: Mapping[str, Mapping[str, Figures]], title: str) -> Table:
    """The same for a terminal: percent right by loop, in short."""
    loops = len(groups["all"]["all"]["loops"])
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    for column in ("read at loop", "n", *map(str, range(1, loops + 1)), "95 %", "exits", "depth"):
        table.add_column(column, justify="left" if column == "read at loop" else "right", no_wrap=True)
    for name, part in groups.items():
        for value, group in part.items():
            n, *_, full, interval, right, depth = _cells(group, range(1, loops + 1))
            shares = (f"{100 * share:.0f}" for share in group["loops"][:-1])
            table.add_row(group_label(name, value), n, *shares, full, interval.replace(" to ", "-"), right, depth)
        table.add_section()
    return table


def group_label(name: str, value: str) -> str:
    """What a table calls a group."""
    if name in ("all", "family", "form"):
        return value
    return name.replace("half", f"{value} half") if name.endswith("half") else f"{name} {value}"


def depth_table(gate: Figures) -> str:
    """Mean exit, oracle and settled depths by difficulty, of the keys and of all answer tokens."""
    head = ("difficulty", "keys: exit", "oracle", "settled", "answer tokens: exit", "oracle", "settled", "agreement")
    rows = []
    for level, answers in gate["by_difficulty"].items():
        keys = gate["key_by_difficulty"][level]
        depths = (f"{group[name]:.2f}" for group in (keys, answers) for name in ("exit", "oracle", "settled"))
        rows.append((level, *depths, _share(answers["agreement"])))
    return _table(head, rows)


def rule_table(gate: Figures) -> str:
    """The exit rules side by side, and the oracles."""
    head = ("rule", "agreement, all tokens", "agreement, answers", "same answers", "passes_saved", "rows_saved")
    rows: list[tuple[str, ...]] = []
    for mode, row in gate["rules"].items():
        if row is None:
            rows.append((mode, "none reaches 98 %", "", "", "", ""))
            continue
        agreement = (_share(row["agreement"]), _share(row["agreement_on_answers"]))
        free = (_percent(row["free"][name]) for name in ("same", "passes_saved", "rows_saved"))
        rows.append((_rule(row["rule"]), *agreement, *free))
    for name, saved in (("oracle", "oracle_saved"), ("settled oracle", "settled_saved")):
        rows.append((name, "", "", "", _percent(gate[saved]), ""))
    return _table(head, rows)


def forms_table(evaluation: Figures) -> BenchTable:
    """Whole replies right by form, half and loop, with the interval at full depth, and what the exit rule does."""
    groups = evaluation["groups"]
    loops = range(1, len(groups["answer"]["all"]["loops"]) + 1)
    head = ("form", "half", "n", *map(str, loops), "interval", "at the exits", "mean depth")
    rows = [(form, half, *_cells(halves[half], loops)) for form, halves in groups.items() for half in halves]
    return BenchTable(head, rows, "Whole replies right, %, by the loop they are read at", left=head[:2])


def people_table(groups: Mapping[str, Figures], title: str = "") -> BenchTable:
    """Answers to what people ask, written freely: right by kind and loop, and at the exits, with their doors."""
    loops = range(1, len(groups["all"]["loops"]) + 1)
    head = ("questions", "n", *map(str, loops), "at the exits", "door open", "of those right")
    rows = [
        (kind, str(row["n"]), *map(_percent, (*row["loops"], *(row[name] for name in ("right", "open", "open_right")))))
        for kind, row in groups.items()
    ]
    return BenchTable(head, rows, title)


def _cells(group: Figures, loops: Iterable[int]) -> list[str]:
    """Of some questions: how many, the share that is right at each loop, the interval at full depth, and the exits."""
    return [
        str(group["n"]),
        *(_percent(group["loops"][loop - 1]) for loop in loops),
        " to ".join(map(_percent, group["intervals"][-1])),
        _percent(group["exit"]),
        f"{group['exit_depth']:.2f}",
    ]


def doubt_rows(gate: Figures, text: Callable[[Figures], str]) -> list[tuple[str, ...]]:
    """How well each score tells wrong answers: AUROC, AURC, AUGRC."""
    rows = gate["abstention"].items()
    areas = ("auroc", "aurc", "augrc")
    return [(name, *("-" if score[area] is None else text(score[area]) for area in areas)) for name, score in rows]


def correlation_rows(gate: Figures, text: Callable[[Figures], str]) -> list[tuple[str, str]]:
    """What the exit depth goes with."""
    return [(name, "constant" if rho is None else text(rho)) for name, rho in gate["correlations"].items()]


def model_card(evaluation: Figures, gate: Figures | None = None) -> str:
    """All tables of a card; of a model without a gate, the accuracy alone.

    Raises:
        ValueError: If one of the two is something else.
    """
    for figures, command, keys in ((evaluation, "eval", ("groups", "n")), (gate, "gate", ("rules", "abstention"))):
        if missing := [] if figures is None else [key for key in keys if key not in figures]:
            raise ValueError(f"these are not the figures of `{command} --json`: no {', '.join(missing)}")
    asked = "held-out look-ups" if evaluation.get("look_ups") else "held-out questions"
    right = (
        f"Whole answers right, in per cent, by the loop they are read at ({evaluation['n']:,} {asked}):",
        accuracy_table(evaluation),
    )
    if gate is None:
        return "\n\n".join(right)
    wrong = _percent(gate["wrong"])
    return "\n\n".join(
        (
            *right,
            f"Mean loops, {gate['items']:,} held-out questions, {_rule(gate['rule'])}; agreement in %:",
            depth_table(gate),
            f"Rules at thresholds chosen on the calibration split, {gate['rules_items']} held-out questions, in %:",
            rule_table(gate),
            f"Telling the {wrong} % wrong answers at full depth ({gate['items']:,} questions):",
            _table(("score", "AUROC", "AURC", "AUGRC"), doubt_rows(gate, lambda area: estimate_text(area, 3))),
            _table(("Spearman's rho of", ""), correlation_rows(gate, lambda rho: estimate_text(rho, 2))),
        )
    )


def _rule(rule: Figures) -> str:
    mode = rule["mode"]
    return f"{mode}, {THRESHOLD[mode]} = {rule[THRESHOLD[mode]]:g}" if mode in THRESHOLD else str(mode)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def estimate_text(estimate: Figures, digits: int, scale: float = 1, form: str = "{} ({} to {})") -> str:
    """A figure and its interval in words."""
    return form.format(*(f"{scale * entry:.{digits}f}" for entry in (estimate["value"], *estimate["interval"])))


def _share(estimate: Figures) -> str:
    return estimate_text(estimate, 1, 100)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


_STORIES = "short stories of who went where, who holds what"
_ASKED_KNOW = (
    f"{_STORIES}, whose child somebody is and how old people are, and answers questions about the story at hand, also "
    "in JSON or by calls of the tools look_up and add; nothing else"
)
KNOWS = {
    "pocket": _ASKED_KNOW,
    "pocket-large": _ASKED_KNOW,
    "pocket-raven": (
        f"{_STORIES} and whose child somebody is, and looks up where a thing is, who has it or which city a family "
        "comes from; no yes or no, no ages, nothing else"
    ),
    "pocket-solver": (
        f"{_STORIES}, whose child somebody is and how old people are; it answers questions about the story at hand, "
        "checks an answer with reasons, plans by look-ups, and takes them one by one"
    ),
}
# of the test split: the story's number, and which of its questions
EXAMPLES = ((13, 1), (14, 1), (17, 0), (13, 0))
# the same of stories that `LOOK_UPS` draws, of difficulty 1
LOOK_UP_EXAMPLES = ((4, 0), (1, 0), (6, 0), (2, 0))
_SEED, _QUESTIONS, _HARDEST = 3, 4, 4
# every word of the world comes up long before
_SCENES = 1000


def about(name: str = "pocket") -> About:
    """What a shipped model says, by what its recipe teaches last."""
    last = RECIPES[name].lessons[-1]
    places = LOOK_UP_EXAMPLES if last.mix == LOOK_UPS else EXAMPLES
    examples = []
    for index, question in places:
        easy, mix = (1, LOOK_UPS) if last.mix == LOOK_UPS else (None, MIX)
        item = draw("test", _SEED, index, easy, _QUESTIONS, _HARDEST, mix).items[question]
        examples.append(Example(prompt=item.prompt, answer=item.answer))
    texts = []
    for index in range(_SCENES):
        scene = draw("train", 0, index, mix=last.mix)
        texts += [scene.story, *(f"{item.more} {item.question} {item.answer}" for item in scene.items)]
        if last.repairs:
            texts += [f"{asked} {reply}" for asked, reply in repairs(0, index)]
    if last.in_json:
        texts += [*TOOL_TOKENS, *LISTS, *chain(*KEYS.values()), UNKNOWN, "Where are and"]
    if last.forms:
        texts += [*TOKENS, "told"]
    return About(
        knows=KNOWS[name],
        examples=tuple(examples),
        words=tuple(sorted({word for text in texts for word in split_words(text)})),
        forms=FORMS if last.forms > 0.5 else (),
    )
