"""Command line: `python -m sigma0.bench.retrofit text`, `train` and `curve`."""

import json
import time
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from sigma0.bench.core.output import drawing
from sigma0.bench.retrofit.cut import Cut
from sigma0.bench.retrofit.text import digest, read_text, write_text
from sigma0.bench.retrofit.train import LOG, Recipe, Report, train
from sigma0.commands.console import depth_style, one_line_errors, progress_bar

app = typer.Typer(help="A pretrained decoder made into one that loops.", no_args_is_help=True)
Teacher = Annotated[str, typer.Argument(help="Folder of a Llama-like checkpoint.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


@app.command("text")
def text_command(
    teacher: Teacher,
    out: Annotated[Path, typer.Argument(help="File of rows; one that is there is gone on with.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in all.")] = 2_000_000,
    length: Annotated[int, typer.Option(min=32, help="Tokens of a row at most.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
    temperature: Annotated[float, typer.Option(help="At which both turns are drawn.")] = 0.8,
    device: Device = "cpu",
) -> None:
    """Let the teacher write chats, both sides of them."""
    with one_line_errors():
        model, tokenizer = _teacher(teacher, device), AutoTokenizer.from_pretrained(teacher)
        with progress_bar("tokens", tokens) as advance:
            write_text(model, tokenizer, out, tokens, length, seed, temperature, advance)


@app.command("train")
def train_command(
    teacher: Teacher,
    text: Annotated[Path, typer.Argument(help="What `text` wrote.")],
    out: Annotated[Path, typer.Argument(help="Run folder; a run found here is continued.")],
    cut: Annotated[str, typer.Option(help="PRELUDE/CORE/CODAxLOOPS.")] = "7/6/11x2",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 4,
    rate: Annotated[float, typer.Option(help="Peak of the learning rate.")] = 5e-4,
    seed: Annotated[int, typer.Option(help="Seed of order and loops.")] = 0,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long; run again to continue.")] = None,
    device: Device = "cpu",
) -> None:
    """Heal the cut by what the teacher says, and write the model to OUT/final."""
    with one_line_errors():
        recipe = Recipe(Cut.parse(cut), batch, steps, rate, seed=seed)
        console, begun = Console(highlight=False), time.monotonic()
        seen: list[int] = []

        def show(report: Report) -> None:
            seen.append(report.tokens)
            if report.perplexity is None:
                return
            first, *others = report.perplexity
            rate = (seen[-1] - seen[0]) / (time.monotonic() - begun)
            states, loops = (" ".join(f"{value:.3f}" for value in part) for part in (report.state, others))
            console.print(
                f"step {report.step + 1:6}  tokens {report.tokens:9} ({rate:.0f}/s)  states {states}  "
                f"KL {report.divergence:.3f}  held-out perplexity by loop {loops}  (teacher {first:.3f})"
            )

        source, (rows, drawn) = _teacher(teacher, device), read_text(text)
        if drawn.get("teacher") != digest(source):
            raise ValueError(f"{text} was not written by {teacher}")
        model = train(source, rows.to(device), recipe, out, minutes, show)
        if model is None:
            console.print(f"Time is up; run again to continue in {out}.")
            return
        model.save_pretrained(out / "final")
        AutoTokenizer.from_pretrained(teacher).save_pretrained(out / "final")
        console.print(f"Model written to {out / 'final'}.")


@app.command("curve")
def curve_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or their logs.")],
    out: Annotated[Path, typer.Option(help="Picture to write, .png or .svg.")] = Path("curve.png"),
) -> None:
    """Draw held-out perplexity over the teacher's, by loop, over the tokens seen."""
    with one_line_errors(), drawing([out], (8, 4.5), dpi=150) as figure:
        axes = figure.subplots()
        for run, line in zip(runs, cycle(("-", "--", ":", "-.")), strict=False):
            log = run if run.is_file() else run / LOG
            entries = [json.loads(text) for text in log.read_text().splitlines()]
            looks = [entry for entry in entries if entry["perplexity"] is not None]
            if not looks:
                raise ValueError(f"{run} has no look at held-out rows yet")
            for loop in range(1, len(looks[0]["perplexity"])):
                ratios = [entry["perplexity"][loop] / entry["perplexity"][0] for entry in looks]
                colour = depth_style(loop, len(looks[0]["perplexity"]) - 1)
                tokens = [entry["tokens"] for entry in looks]
                axes.plot(tokens, ratios, line, color=colour, label=f"{run.stem}, loop {loop}")
        axes.set(xlabel="tokens", ylabel="perplexity over the teacher's", yscale="log", xscale="log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter("{x:g}")
        figure.legend(fontsize=8, loc="outside right center")


def _teacher(folder: str, device: str) -> Any:
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device takes cpu, and cuda where there is a GPU, got {device!r}")
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
    )
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(f"{folder} holds a {type(model).__name__}, not a Llama-like checkpoint")
    return model.to(device).eval()


if __name__ == "__main__":
    app()
