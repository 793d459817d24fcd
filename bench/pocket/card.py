"""The tables of a model card, in Markdown, from the figures that `eval` and `gate` print with --json."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sigma0.bench.core.tables import BenchTable
from sigma0.bench.pocket.evaluate import group_label

Figures = Mapping[str, Any]
# Up to so many loops each has a column.
_ALL_LOOPS = 8
_THRESHOLD = {"qexit": "q", "margin": "theta", "converge": "eps", "accel": "eps"}


def accuracy_table(evaluation: Figures) -> str:
    """Whole answers right by group and loop, with the interval at full depth, and what the exit rule does."""
    total = len(evaluation["groups"]["all"]["all"]["loops"])
    loops = [loop for loop in range(1, total + 1) if total <= _ALL_LOOPS or loop in (1, 2, 3, 4, 6, 8, 12, total)]
    head = ("questions", "n", *(str(loop) for loop in loops), "interval", "at the exits", "mean depth")
    rows = []
    for name, part in evaluation["groups"].items():
        for value, group in part.items():
            low, high = group["intervals"][-1]
            rows.append(
                (
                    group_label(name, value),
                    group["n"],
                    *(_percent(group["loops"][loop - 1]) for loop in loops),
                    f"{_percent(low)} to {_percent(high)}",
                    _percent(group["exit"]),
                    f"{group['exit_depth']:.2f}",
                )
            )
    return _table(head, rows)


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
    rows: list[Sequence[object]] = []
    for mode, row in gate["rules"].items():
        if row is None:
            rows.append((mode, "none reaches 98 %", "", "", "", ""))
            continue
        free = row["free"]
        rows.append(
            (
                _rule(row["rule"]),
                _share(row["agreement"]),
                _share(row["agreement_on_answers"]),
                *(_percent(free[name]) for name in ("same", "passes_saved", "rows_saved")),
            )
        )
    rows += [
        ("oracle", "", "", "", _percent(gate["oracle_saved"]), ""),
        ("settled oracle", "", "", "", _percent(gate["settled_saved"]), ""),
    ]
    return _table(head, rows)


def forms_table(evaluation: Figures) -> BenchTable:
    """Whole replies right by form, half and loop, with the interval at full depth, and what the exit rule does."""
    groups = evaluation["groups"]
    loops = len(groups["answer"]["all"]["loops"])
    head = ("form", "half", "n", *(str(loop) for loop in range(1, loops + 1)), "interval", "at the exits", "mean depth")
    rows = [
        (
            *(form, half, str(group["n"])),
            *(_percent(right) for right in group["loops"]),
            " to ".join(map(_percent, group["intervals"][-1])),
            _percent(group["exit"]),
            f"{group['exit_depth']:.2f}",
        )
        for form, halves in groups.items()
        for half, group in halves.items()
    ]
    return BenchTable(head, rows, "Whole replies right, %, by the loop they are read at", left=head[:2])


def doubt_table(gate: Figures) -> str:
    """How well each score tells wrong answers."""
    rows = []
    for name, score in gate["abstention"].items():
        figures = (score["auroc"], score["aurc"], score["augrc"])
        rows.append((name, *("-" if each is None else _estimate(each, 3) for each in figures)))
    return _table(("score", "AUROC", "AURC", "AUGRC"), rows)


def correlation_table(gate: Figures) -> str:
    """What the exit depth goes with."""
    rows = [(name, "constant" if rho is None else _estimate(rho, 2)) for name, rho in gate["correlations"].items()]
    return _table(("Spearman's rho of", ""), rows)


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
            doubt_table(gate),
            correlation_table(gate),
        )
    )


def _rule(rule: Figures) -> str:
    mode = rule["mode"]
    return f"{mode}, {_THRESHOLD[mode]} = {rule[_THRESHOLD[mode]]:g}" if mode in _THRESHOLD else str(mode)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _share(estimate: Figures) -> str:
    low, high = estimate["interval"]
    return f"{_percent(estimate['value'])} ({_percent(low)} to {_percent(high)})"


def _estimate(estimate: Figures, digits: int) -> str:
    low, high = estimate["interval"]
    return f"{estimate['value']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
