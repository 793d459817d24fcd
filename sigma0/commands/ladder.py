"""`sigma0 generate --ladder`, and trails of ladders: texts styled by rung, and the recorded decisions."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigma0.commands.options import ExitOptions, LoadOptions, check_known
from sigma0.config import ExitConfig, Messages
from sigma0.errors import needs_extra
from sigma0.ladder import Budget, EndpointRung, FidelityLadder, LadderGeneration, LocalRung, Rung, read_trail, replay
from sigma0.ladder.trail import Heading, Trail, Unit
from sigma0.ladder.triggers import trigger_from_dict
from sigma0.models.load import load_causal

# The lowest rung's tokens are plain, those above stand out without colour too.
STYLES = ("", "bold underline #d73027", "bold italic underline #984ea3", "bold reverse")
# Columns of a trail that stand in the signs of a decision, or in their verdict.
_NUMBERS = ("confidence", "margin", "entropy", "depth")


def open_ladder(
    names: str, budget: str, policy: str | None, loaded: LoadOptions, known: Mapping[str, tuple[Any, Any]] | None = None
) -> FidelityLadder:
    """A ladder from the command line.

    Rungs are comma-separated, the lowest first: names of models, those `known` with their tokenizers being loaded
    already, or `model@http://host/v1` for an endpoint, whose key is in the variable OPENAI_API_KEY. The budget is as
    `Budget.parse` takes it, the policy a trigger as JSON; None: the unit's default.

    Raises:
        ValueError: For a bad name, budget or policy.
    """
    limits = Budget.parse(budget)
    trigger = None
    if policy is not None:
        try:
            value = json.loads(policy)
        except json.JSONDecodeError as error:
            raise ValueError(f"policy {policy!r} is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f'policy {policy!r} is no object such as {{"kind": "entropy", "above": 0.5}}')
        trigger = trigger_from_dict(value)
    rungs: list[LocalRung | EndpointRung] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        model, at, url = name.partition("@")
        if at:
            rungs.append(Rung.endpoint(url, model, os.environ.get("OPENAI_API_KEY") or "none", name=model))
        else:
            place = {name: getattr(loaded, name) for name in ("device", "dtype", "backend")}
            local = (known or {}).get(model) or load_causal(model, **place)
            rungs.append(Rung.local(*local, Path(model).name))
    return FidelityLadder(rungs, limits, trigger, rule=loaded.door_rule)


def ladder_exits(exits: ExitOptions, ladder: FidelityLadder) -> ExitConfig | None:
    """The options that were given, over the first looped rung's own settings; None where none was given."""
    if exits == ExitOptions():
        return None
    looped = [rung for rung in ladder.rungs if isinstance(rung, LocalRung) and rung.is_looped]
    if not looped:
        raise ValueError("no rung of this ladder has loops to exit from: leave the exit options out")
    return exits.over(looped[0].model.resolve_exit_config(looped[0].exit_config))


def run_ladder(
    ladder: FidelityLadder, prompt: str | Messages, unit: str, trail: Path | None, as_json: bool, **settings: Any
) -> None:
    """Continues a prompt and prints the text by rung, the costs and the verdict."""
    if trail is not None and not trail.absolute().parent.is_dir():
        raise ValueError(f"--trail {str(trail)!r}: there is no such folder")
    check_known("unit", unit, get_args(Unit))
    console = Console(highlight=False, soft_wrap=True)
    names = [rung.name for rung in ladder.rungs]

    def show(text: str, rung: str, end: str = "") -> None:
        if not as_json:
            console.print(Text(text, style=_style(names, rung)), end=end)

    with needs_extra("ladder"):
        if unit == "token":
            run, printed = ladder.stream(prompt, takes_back=True, **settings), ""
            for token in chain.from_iterable(run):
                printed += token.text
                show(token.text, token.rung)
            generation = run.generations[0]
            if generation.text != printed and not as_json:
                console.print(f"\n\nthe whole does not open its door; {generation.rung} writes in its place:\n")
                show(generation.text, generation.rung)
        else:
            generation = ladder.generate(prompt, cast(Unit, unit), **settings)
    if trail is not None:
        generation.trail.write(trail)
    if as_json:
        typer.echo(json.dumps(generation.to_dict(), indent=2, ensure_ascii=False))
        return
    if unit == "answer":
        show(generation.text, generation.rung, "\n")
    for rung, text in generation.drafts:
        show(text, rung)
    console.print("\n")
    for line in report_lines(generation, names):
        console.print(line)


def _style(names: list[str], rung: str) -> str:
    return STYLES[min(names.index(rung), len(STYLES) - 1)]


def report_lines(generation: LadderGeneration, names: list[str]) -> list[Text]:
    """Tokens and cost of each rung, the reasons for hand-ups, and the door."""
    lines = []
    whole = max(1, generation.bytes_read)
    for cost in generation.costs:
        line = f"{cost.name:15} {cost.tokens} tokens, {cost.passes} passes and {cost.prompt_passes} of prompts"
        if cost.catch_ups or cost.refills:
            line += f", caught up {cost.catch_ups} times, read anew {cost.refills} times"
        if cost.calls:
            line += f", {cost.calls} calls, money {cost.money:g}"
        line += f", {cost.bytes_read / whole:.0%} of the bytes read" if cost.block_bytes else ""
        lines.append(Text(line, style=_style(names, cost.name).replace("underline ", "")))
    why = Counter(decision.why for decision in generation.trail.decisions if decision.outcome == "hand_up")
    if why:
        lines.append(Text(f"handed up       {', '.join(f'{count} {reason}' for reason, count in why.most_common(5))}"))
    asked = "the highest rung was asked, " if generation.top_rung else ""
    lines.append(Text(f"door            {generation.door} ({asked}ended by {generation.stop_reason})"))
    if generation.not_tried:
        advice = "the budget does not allow it, trust this less (a lower --max-new-tokens asks for less)"
        lines.append(Text(f"not tried       {', '.join(generation.not_tried)}: {advice}"))
    return lines


def show_trail(file: Path, as_json: bool) -> None:
    """Shows a ladder's decisions, each made again from what was recorded; exits with 1 if one came out otherwise."""
    read = read_trail(file)
    differences = replay(read)
    if as_json:
        counts = Counter(decision.outcome for decision in read.decisions)
        typer.echo(json.dumps({"outcomes": counts, "decisions": len(read.decisions), "differences": differences}))
    else:
        print_trail(read, differences)
    if differences:
        raise typer.Exit(1)


def print_trail(read: Trail, differences: list[str]) -> None:
    """The heading, a line for each decision, and what came out otherwise."""
    heading = read.lines[0]
    assert isinstance(heading, Heading)
    console = Console(highlight=False)
    names = [str(rung["name"]) for rung in heading.rungs]
    console.print(f"unit {heading.unit}; rungs {', '.join(names)}; policy {json.dumps(heading.policy)}")
    console.print(f"budget {json.dumps(heading.budget)}; hysteresis {json.dumps(heading.hysteresis)}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("sequence", "position", "rung", "outcome", "why", *_NUMBERS, "lacking"):
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    for line in read.decisions:
        signs = line.signs or {}
        known = signs | signs.get("verdict", {})
        numbers = ("-" if known.get(name) is None else f"{known[name]:.2f}" for name in _NUMBERS)
        rung = names[line.rung] if line.rung < len(names) else str(line.rung)
        cells = (str(line.sequence), str(line.position), rung, line.outcome, line.why or "", *numbers)
        table.add_row(*cells, line.lacking or "")
    console.print(table)
    count = len(read.decisions)
    same = f"{count} decisions, all the same when made again"
    console.print(f"{len(differences)} of {count} decisions came out otherwise:" if differences else same)
    for difference in differences:
        console.print(f"  {difference}")
