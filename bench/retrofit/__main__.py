"""Command line: `python -m sigma0.bench.retrofit` and `text`, `train`, `curve`, `pack`, `eval`, `tasks` and so on."""

import json
import time
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from sigma0.bench.core.output import drawing, measuring, step_bar
from sigma0.bench.retrofit.text import HELD_OUT, digest, read_text, turns, write_text
from sigma0.bench.retrofit.train import LOG, Recipe, Report, TeacherStates, agreement, perplexities, train
from sigma0.bench.speed.decoders import FULL, Decoded, Decoder, Ours, PromptedCache, median_figure
from sigma0.bench.speed.decoders import turns as in_turn
from sigma0.bench.speed.peer import Stock
from sigma0.checkpoints import resolve_model
from sigma0.commands.console import depth_style, one_line_errors, progress_bar
from sigma0.commands.options import AsJson
from sigma0.config import ExitConfig
from sigma0.errors import needs_extra
from sigma0.models.load import load
from sigma0.models.raven_causal import RavenForCausalLM
from sigma0.models.retrofit import Cut, pack, retrofitted

BIG_BENCH = ("general_knowledge", "human_organs_senses", "similarities_abstraction")
app = typer.Typer(help="A pretrained decoder made into one that loops.", no_args_is_help=True)
Teacher = Annotated[str, typer.Argument(help="Folder of a Llama-like checkpoint.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


@app.command("text")
def text_command(
    teacher: Teacher,
    out: Annotated[Path, typer.Argument(help="File of rows; one that is there is gone on with.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in all.")] = 2_000_000,
    length: Annotated[int, typer.Option(min=32, help="Tokens of a row at most.")] = 256,
    seed: Annotated[int, typer.Option(min=0, max=4095, help="Seed of what is drawn.")] = 0,
    temperature: Annotated[float, typer.Option(help="At which both turns are drawn.")] = 0.8,
    device: Device = "cpu",
) -> None:
    """Let the teacher write chats, both sides of them."""
    with one_line_errors():
        model, tokenizer = _teacher(teacher, device), _tokenizer(teacher)
        with progress_bar("tokens", tokens) as advance:
            write_text(model, tokenizer, out, tokens, length, seed, temperature, advance)


@app.command("train")
def train_command(
    teacher: Teacher,
    text: Annotated[Path, typer.Argument(help="What `text` wrote.")],
    out: Annotated[Path, typer.Argument(help="Run folder; a run found here is continued.")],
    cut: Annotated[str, typer.Option(help="PRELUDE/CORE/CODAxLOOPS.")] = "11/4/11x2",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run.")] = 270,
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

        source = _teacher(teacher, device)
        rows = _written_by(source, text)
        model = train(source, rows.to(device), recipe, out, minutes, show)
        if model is None:
            console.print(f"Time is up; run again to continue in {out}.")
            return
        model.save_pretrained(out / "final")
        _tokenizer(teacher).save_pretrained(out / "final")
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


@app.command("pack")
def pack_command(
    teacher: Teacher,
    model: Annotated[str, typer.Argument(help="What `train` has written.")],
    out: Annotated[Path, typer.Argument(help="File for the learned parts, a byte a weight.")],
) -> None:
    """Keep of a trained model what it has learned, as differences from its teacher's layers."""
    with one_line_errors():
        student = _retrofit(model)
        cut = _cut(student)
        parts = pack(student, retrofitted(_teacher(teacher, "cpu"), cut))
        save_file(parts, out, metadata={"cut": str(cut)})
        typer.echo(f"{out}: {sum(part.nbytes for part in parts.values()) / 1e6:.1f} MB, {cut}")


@app.command("eval")
def eval_command(
    teacher: Teacher,
    model: Annotated[str, typer.Argument(help="A retrofit of it.")],
    text: Annotated[Path, typer.Argument(help="What `text` wrote.")],
    n: Annotated[int, typer.Option("-n", min=1, help="Rows, the first ones, which `train` holds out.")] = HELD_OUT,
    as_json: AsJson = False,
) -> None:
    """Say by loop how well a retrofit foretells its teacher's text, and how often it says what the teacher says."""
    with one_line_errors():
        source, student = _teacher(teacher, "cpu"), _retrofit(model)
        rows, cut = _written_by(source, text), _cut(student)
        layers = [cut.prelude, *cut.stands_for(source.config.num_hidden_layers)]
        states_of = TeacherStates(source, rows[:n], layers, None)
        first, *others = perplexities(student, states_of, len(rows[:n]))
        same = agreement(student, states_of, len(rows[:n]))
        if as_json:
            tokens = int((rows[:n] >= 0).sum())
            typer.echo(json.dumps({"tokens": tokens, "teacher": first, "perplexity": others, "agreement": same}))
            return
        typer.echo(f"teacher: perplexity {first:.3f}")
        for loop, (perplexity, share) in enumerate(zip(others, same, strict=True), start=1):
            typer.echo(f"loop {loop}: perplexity {perplexity:.3f}, the teacher's own token in {100 * share:.1f} %")


@app.command("tasks")
def tasks_command(
    teacher: Teacher,
    model: Annotated[str, typer.Argument(help="A retrofit of it.")],
    data: Annotated[Path, typer.Argument(help="Folder benchmark_tasks of the package bigbench.")],
    as_json: AsJson = False,
) -> None:
    """Answer tasks of BIG-bench in lm-eval: the teacher, and its retrofit by the loop that is read and at its exits."""
    with one_line_errors(), needs_extra("eval"):
        import lm_eval

        # which are known once they are imported
        from lm_eval.models.huggingface import HFLM  # noqa: F401
        from lm_eval.tasks import TaskManager

        from sigma0.bench.harness.language_model import Sigma0LM  # noqa: F401

        asked = json.loads((Path(__file__).parent / "big_bench.json").read_text())
        tasks = []
        for name in BIG_BENCH:
            files = {"field": "examples", "data_files": {"test": str(data / name / "task.json")}}
            tasks.append({**asked, "task": name, "dataset_kwargs": files})
        ways: dict[str, tuple[str, dict[str, Any]]] = {"teacher": ("hf", {"pretrained": resolve_model(teacher)})}
        for loop in range(1, _retrofit(model).num_loops + 1):
            ways[f"loop {loop}"] = "sigma0", {"model": model, "exit": "fixed", "depth": loop}
        ways["at its exits"] = "sigma0", {"model": model}
        manager, report = TaskManager(), []
        with step_bar("ways", len(ways), hidden=as_json) as step:
            for way, (kind, arguments) in ways.items():
                result = lm_eval.simple_evaluate(
                    kind, model_args={**arguments, "dtype": "float32"}, tasks=tasks, task_manager=manager,
                    batch_size=16, device="cpu", bootstrap_iters=0, log_samples=False,
                )  # fmt: skip
                for task in BIG_BENCH:
                    share, n = result["results"][task]["acc,none"], result["n-samples"][task]["effective"]
                    depth = result["config"].get("sigma0", {}).get("tasks", {}).get(task, {}).get("mean_depth")
                    report.append({"way": way, "task": task, "n": n, "right": round(share * n), "mean_depth": depth})
                step()
        if as_json:
            typer.echo(json.dumps(report))
            return
        for row in report:
            typer.echo(f"{row['way']:14} {row['task']:26} {row['right']:3} of {row['n']}")


@app.command("speed")
def speed_command(
    teacher: Teacher,
    model: Annotated[str, typer.Argument(help="A retrofit of it.")],
    text: Annotated[Path, typer.Argument(help="What `text` wrote.")],
    n: Annotated[int, typer.Option("-n", min=1, help="Rows continued, the first ones that are long enough.")] = 4,
    context: Annotated[int, typer.Option(min=2, help="Tokens read of each.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 32,
    rounds: Annotated[int, typer.Option(min=2, help="Interleaved rounds; medians are reported.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Time a token by the loop that is read, at margin's exits, and of the teacher's own `generate`, in turn."""
    with measuring(1):
        source, student = _teacher(teacher, "cpu"), _retrofit(model)
        source.generation_config.eos_token_id, source.generation_config.pad_token_id = None, 0
        rows = _written_by(source, text)
        rows = rows[(rows >= 0).sum(1) >= context][:n, :context]
        if len(rows) < n:
            raise ValueError(f"{text} has {len(rows)} rows of {context} tokens, not {n}: lower --context or -n")
        ways = {f"loop {loops}": (_retrofit(model, loops), FULL) for loops in range(1, student.num_loops + 1)}
        for after in ("finish", "verify"):
            config = ExitConfig(mode="margin", after_exit=after)
            ways[f"margin, {after}"] = student, student.resolve_exit_config(config)
        decoders: dict[str, list[Decoder]] = {"teacher": [], **{way: [] for way in ways}}
        for ids in rows[:, None]:
            decoders["teacher"].append(Stock(student, ids, new_tokens, stock=source))
            for way, (looped, config) in ways.items():
                decoders[way].append(Ours(PromptedCache(looped, ids, new_tokens), config, None))
        runs: dict[str, list[list[Decoded]]] = {way: [] for way in decoders}
        with step_bar("runs", len(decoders) * (rounds + 1), hidden=as_json) as step:
            for number, way in in_turn(list(decoders), rounds):
                decoded = [decoder.decode() for decoder in decoders[way]]
                # round 0 warms up
                if number:
                    runs[way].append(decoded)
                step()
        tokens = n * (new_tokens - 1)
        report = {}
        for way, rounds_of in runs.items():
            seconds = np.array([sum(run.seconds for run in decoded) for decoded in rounds_of])
            report[way] = median_figure(1000 * seconds / tokens)
        if as_json:
            typer.echo(json.dumps({way: {"ms_per_token": figure.model_dump()} for way, figure in report.items()}))
            return
        for way, figure in report.items():
            typer.echo(f"{way:16} {figure.value:6.1f} ms a token ({figure.low:.1f} to {figure.high:.1f})")


@app.command("prompts")
def prompts_command(
    teacher: Teacher,
    text: Annotated[Path, typer.Argument(help="What `text` wrote.")],
    n: Annotated[int, typer.Option("-n", min=1, help="At most.")] = 200,
) -> None:
    """Print the users' turns of a text as JSON lines, chats of one message each."""
    with one_line_errors():
        # each once: a calibration takes no copies
        for content in list(dict.fromkeys(turns(_tokenizer(teacher), read_text(text)[0])))[:n]:
            typer.echo(json.dumps({"prompt": [{"role": "user", "content": content}]}))


def _written_by(teacher: LlamaForCausalLM, text: Path) -> Tensor:
    rows, drawn = read_text(text)
    if drawn.get("teacher") != digest(teacher):
        raise ValueError(f"{text} was not written by this teacher")
    return rows


def _tokenizer(teacher: str) -> Any:
    return AutoTokenizer.from_pretrained(resolve_model(teacher), local_files_only=True)


def _retrofit(folder: str, recurrence: int | None = None) -> RavenForCausalLM:
    model, _ = load(folder, device="cpu", dtype="float32", recurrence=recurrence)
    if not isinstance(model, RavenForCausalLM):
        raise ValueError(f"{folder} holds a {type(model).__name__}, not a retrofit")
    return model


def _cut(student: RavenForCausalLM) -> Cut:
    config = student.config
    stages = config.n_layers_in_prelude, config.n_layers_in_recurrent_block, config.n_layers_in_coda
    return Cut(*stages, student.num_loops)


def _teacher(folder: str, device: str) -> Any:
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device takes cpu, and cuda where there is a GPU, got {device!r}")
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(folder), local_files_only=True, use_safetensors=True, dtype=torch.float32
    )
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(f"{folder} holds a {type(model).__name__}, not a Llama-like checkpoint")
    return model.to(device).eval()


if __name__ == "__main__":
    app()
