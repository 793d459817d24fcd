"""Command line: `python -m sigma0.bench.pocket train`, `curve`, `prompts`, `about`, `eval` and `card`."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sigma0.bench.core.conditions import figures_of
from sigma0.bench.core.options import HardHalf, LookUps, StorySeed, WorldSplit
from sigma0.bench.core.output import BenchTable, measuring, tell_report
from sigma0.bench.pocket.card import about, evaluation_table, forms_table, model_card, people_table
from sigma0.bench.pocket.prompts import check_people, evaluate, free_runs, json_line, micro_world, people, summarize
from sigma0.bench.pocket.recipe import RECIPES, Recipe
from sigma0.bench.pocket.train import LOG, Report, draw_curve, finish, read_log, train
from sigma0.bench.pocket.world import LOOK_UPS, MIX
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson, ModelArgument
from sigma0.errors import needs_extra
from sigma0.models.load import load
from sigma0.reason.forms import FORMS

app = typer.Typer(help="The recipes of the shipped models.", no_args_is_help=True)
_SMOOTH = 0.95


@app.command("train")
def train_command(
    name: Annotated[str, typer.Argument(help=f"Recipe: {', '.join(RECIPES)}.")] = "pocket",
    out: Annotated[Path, typer.Option(help="Run folder; a run found here is continued.")] = Path("run"),
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data; by default the recipe's.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long; run again to continue.")] = None,
) -> None:
    """Train on one CPU thread, fit the gate where there is one, and write the model to OUT/final.

    A recipe that goes on from another's weights trains that one first, in OUT/base.
    """
    with one_line_errors():
        _train(_recipe(name, seed), out, None if minutes is None else time.monotonic() + 60 * minutes)


def _train(recipe: Recipe, out: Path, until: float | None) -> Path | None:
    """The model folder, at once where it is there; None where the time is up first."""
    final = out / "final"
    if (final / "model.safetensors").exists():
        return final
    start = None if recipe.start is None else _train(_recipe(recipe.start, recipe.seed), out / "base", until)
    if recipe.start is not None and start is None:
        return None
    console = Console()
    tokenizer = recipe.tokenizer()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=recipe.steps)
        smooth: dict[int, float] = {}

        def show(report: Report) -> None:
            # the loss stands at 0; not every step reads every loop
            for loop, new in {0: report.loss, **report.answers}.items():
                smooth[loop] = _SMOOTH * smooth.get(loop, new) + (1 - _SMOOTH) * new
            loops = " ".join(f"{100 * smooth[loop]:.0f}" for loop in sorted(smooth) if loop)
            progress.update(task, completed=report.step + 1, description=f"loss {smooth[0]:.3f}  answers % {loops}")

        minutes = None if until is None else (until - time.monotonic()) / 60
        model = train(recipe, tokenizer, out, minutes, on_step=show, start=start)
    if model is None:
        console.print(f"Time is up; run again to continue in {out}.")
        return None
    tried = finish(model, tokenizer, recipe, final)
    if tried:
        title = "Exit thresholds on the calibration split"
        headings = ("q", "mean depth", "answers as at full depth, %", "all tokens, %", "")
        cells = [
            (f"{q:g}", f"{depth:.2f}", f"{100 * fidelity:.2f}", f"{100 * agreement:.2f}", "chosen" if chosen else "")
            for q, depth, fidelity, agreement, chosen in tried
        ]
        BenchTable(headings, cells, title, left=()).show()
    console.print(f"Model written to {final}.")
    return final


@app.command("curve")
def curve_command(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    name: Annotated[str, typer.Option(help=f"Its recipe: {', '.join(RECIPES)}.")] = "pocket",
    out: Annotated[Path, typer.Option(help="Picture to write, .png or .svg.")] = Path("curve.png"),
) -> None:
    """Draw accuracy by loop over training."""
    with one_line_errors(), needs_extra("bench"):
        draw_curve(list(read_log(run / LOG)), _recipe(name), out)


@app.command("card")
def card_command(
    evaluation: Annotated[Path, typer.Argument(help="What `eval --json` printed, or its report.")],
    gate: Annotated[
        Path | None, typer.Argument(help="What `python -m sigma0.bench gate --json` printed; none without a gate.")
    ] = None,
) -> None:
    """Print the tables of a model card in Markdown."""
    with one_line_errors():
        typer.echo(model_card(figures_of(evaluation), None if gate is None else figures_of(gate)))


@app.command("prompts")
def prompts_command(
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Stories, one question each.")] = 2000,
    split: WorldSplit = "calibration",
    seed: StorySeed = 0,
    hard: HardHalf = False,
    look_ups: LookUps = False,
    hardest: Annotated[int, typer.Option(min=1, max=6, help="The highest difficulty drawn.")] = 6,
    forms: Annotated[float, typer.Option(min=0, max=1, help="Share asked in the forms of outer loops.")] = 0.0,
    as_people: Annotated[bool, typer.Option("--people", help="As people ask: few sentences, later turns.")] = False,
) -> None:
    """Print questions with their answers as JSON lines, every other one as chat."""
    with one_line_errors():
        asked = micro_world(n, split, seed, hard, LOOK_UPS if look_ups else MIX, hardest, forms=forms)
        for prompt in (one.prompt for one in people(n, split, seed)) if as_people else asked:
            typer.echo(json_line(prompt))


@app.command("people")
def people_command(
    model: ModelArgument = "pocket",
    n: Annotated[int, typer.Option(min=1, help="Chats, one question each.")] = 1000,
    split: WorldSplit = "test",
    seed: StorySeed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure answers and doors on held-out questions as people ask them, by kind."""
    with measuring(1):
        looped, tokenizer = load(model, device="cpu", dtype="float32")
        with progress_bar("questions", n, as_json) as advance:
            groups = check_people(looped, tokenizer, n, split, seed, advance)
    if tell_report({"model": model, "split": split, "seed": seed, "n": n, "groups": groups}, None, as_json):
        people_table(groups, f"{model}, {split} split, seed {seed}").show()


@app.command("about")
def about_command(
    name: Annotated[str, typer.Argument(help=f"Of {', '.join(RECIPES)}.")] = "pocket",
) -> None:
    """Print the `about.json` of a model of the micro-world: what it knows, examples, and the words it has seen."""
    with one_line_errors():
        _recipe(name)
        typer.echo(json.dumps(about(name).model_dump(), indent=1))


@app.command("eval")
def eval_command(
    model: ModelArgument = "pocket",
    n: Annotated[int, typer.Option(min=1, help="Stories, one question each.")] = 2000,
    split: WorldSplit = "test",
    seed: StorySeed = 0,
    free: Annotated[int, typer.Option(min=1, help="The first of them, generated freely as well.")] = 200,
    look_ups: LookUps = False,
    as_json: AsJson = False,
) -> None:
    """Measure exact-answer accuracy on held-out stories by family, hops, difficulty and loop."""
    with measuring(1):
        looped, tokenizer = load(model, device="cpu", dtype="float32")
        config = looped.resolve_exit_config(None)
        if free > n:
            raise ValueError(f"--free {free} is more than the {n} stories asked about")
        mix = LOOK_UPS if look_ups else MIX
        groups = summarize(evaluate(looped, tokenizer, looped.exit_rule(config), n, split, seed, mix))
        runs = free_runs(looped, tokenizer, free, split, seed, mix=mix)
    output = {"model": model, "split": split, "seed": seed, "n": n, **({"look_ups": True} if look_ups else {})}
    if not tell_report({"free": runs, **output, "exit": config.to_dict(), "groups": groups}, None, as_json):
        return
    console = Console()
    rule = config.mode if config.threshold is None else f"{config.mode} {config.threshold:g}"
    console.print(evaluation_table(groups, f"Answers right to the last token, % ({split} split, seed {seed}, {rule})"))
    console.print(f"{runs['n']} of them generated freely, each alone, at the exits (finish):")
    for name, share in runs.items():
        if name != "n":
            console.print(f"  {name:20} {share:.1%}", highlight=False)


@app.command("forms")
def forms_command(
    model: ModelArgument = "pocket-solver",
    n: Annotated[int, typer.Option(min=1, help="Stories, one question each, for each form.")] = 1000,
    split: WorldSplit = "test",
    seed: StorySeed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure exact replies on held-out stories in each form that outer loops ask in, by half and loop."""
    figures = {}
    with measuring(1):
        looped, tokenizer = load(model, device="cpu", dtype="float32")
        rule = looped.exit_rule(looped.resolve_exit_config(None))
        with progress_bar("forms", len(FORMS), as_json) as advance:
            for place, form in enumerate(FORMS):
                groups = summarize(evaluate(looped, tokenizer, rule, n, split, seed, form=form))
                figures[form] = {"all": groups["all"]["all"], **groups["half"]}
                advance(place + 1)
    report = {"model": model, "split": split, "seed": seed, "n": n, "groups": figures}
    if tell_report(report, None, as_json):
        forms_table(report).show()


def _recipe(name: str, seed: int | None = None) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"no such recipe: {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name] if seed is None else replace(RECIPES[name], seed=seed)


if __name__ == "__main__":
    app()
