"""The command line: `sigma0 generate`, `sigma0 calibrate`, `sigma0 doctor`, `sigma0 export`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sigma0.doctor import examine
from sigma0.export import export as write_folder
from sigma0.extras import needs_extra
from sigma0.loading import checkpoint_folder, load, shipped_models
from sigma0.prompts import encode_prompts, read_prompts
from sigma0.rendering import one_line_errors, print_report, print_stream, progress_bar, quiet_transformers
from sigma0.settings import ExitConfig
from sigma0.text import stream

app = typer.Typer(
    help="Looped language models with a depth of its own for each token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Which exit modes read which threshold.
THRESHOLDS = {"q": ("qexit",), "eps": ("converge", "accel"), "patience": ("accel",), "theta": ("margin",)}

Model = Annotated[str, typer.Option(help="Shipped name, folder, or hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def exit_settings(options: dict[str, Any], default: ExitConfig | None = None) -> ExitConfig | None:
    """The options that were given, over the checkpoint's own settings where no mode was named.

    Args:
        options: Fields of `ExitConfig`, None where not given.
        default: The checkpoint's settings, once they are known.

    Raises:
        ValueError: For bad values.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return default
    if "mode" not in given:
        if default is None:
            ExitConfig(**{name: value for name, value in given.items() if name != "depth"})
            return None
        given = {**default.to_dict(), **given}
    config = ExitConfig(**given)
    for name, option in THRESHOLDS.items():
        if options.get(name) is not None and config.mode not in option:
            raise ValueError(f"--{name} has no effect with exit mode '{config.mode}', only with {' or '.join(option)}")
    return config


def calibrated_folder(model: str, out: Path | None) -> Path | None:
    """Where a calibrated setting goes: the model's own folder, or a new one; None if nowhere.

    Raises:
        ValueError: If `out` holds something.
    """
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"--out {str(out)!r} is not a new or empty folder")
        out.mkdir(parents=True, exist_ok=True)
        return out
    is_folder = model not in shipped_models() and Path(model).expanduser().is_dir()
    return Path(model).expanduser() if is_folder else None


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue as it is; - reads it from standard input.")],
    model: Model = "pocket",
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    exit: Annotated[
        str | None, typer.Option("--exit", help="Exit rule: full, fixed, qexit, converge, accel or margin.")
    ] = None,
    q: Annotated[float | None, typer.Option(help="Threshold of qexit, in (0, 1].")] = None,
    eps: Annotated[float | None, typer.Option(help="Threshold of converge and accel.")] = None,
    patience: Annotated[int | None, typer.Option(help="Loops running on which accel must hold.")] = None,
    theta: Annotated[float | None, typer.Option(help="Threshold of margin, in (0, 1].")] = None,
    depth: Annotated[int | None, typer.Option(help="Loop that fixed stops at.")] = None,
    min_loops: Annotated[int | None, typer.Option(help="No token stops before this loop.")] = None,
    after: Annotated[str | None, typer.Option(help="Deeper loops after the exit: finish or drop.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above, sampling.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    svg: Annotated[str | None, typer.Option(help="Also write the coloured text to this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt; each token is coloured by the loop that it was read at."""
    options: dict[str, Any] = {
        "mode": exit,
        "q": q,
        "eps": eps,
        "patience": patience,
        "theta": theta,
        "depth": depth,
        "min_loops": min_loops,
        "after_exit": after,
    }
    with one_line_errors():
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must be a number of at least 0, got {temperature}")
        if svg is not None and as_json:
            raise ValueError("--svg and --json exclude each other")
        if seed is not None and not 0 <= seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), got {seed}")
        exit_settings(options)
        # the newline that echo and editors add is no part of the text
        text = sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r") if prompt == "-" else prompt
        if not text:
            raise ValueError("the prompt is empty")
        quiet_transformers()
        looped, tokenizer = load(model, device=device, dtype=dtype)
        tokens = stream(
            looped,
            tokenizer,
            [{"role": "user", "content": text}] if chat else text,
            exit_config=exit_settings(options, looped.resolve_exit_config(None)),
            max_new_tokens=max_new_tokens,
            stop=stop or (),
            seed=seed,
            do_sample=temperature > 0,
            **({"temperature": temperature} if temperature > 0 else {}),
        )
        if as_json:
            for _ in tokens:
                pass
            typer.echo(json.dumps({"model": model, **tokens.generation.to_dict()}, indent=2, ensure_ascii=False))
        else:
            print_stream(tokens, looped.num_loops, text, svg)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Shipped name, folder, or hub id.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with a prompt each (*.jsonl), or paragraphs of text.")],
    agreement: Annotated[float, typer.Option(help="Share of new tokens that must keep full depth's choice.")] = 0.99,
    confidence: Annotated[float, typer.Option(help="With which that is to hold.")] = 0.95,
    exit: Annotated[str, typer.Option("--exit", help="Exit rule: qexit, margin, converge or accel.")] = "qexit",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt at most.")] = 64,
    out: Annotated[
        Path | None, typer.Option(help="New or empty folder for a calibrated copy of a model that is no folder.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Turn a quality budget into an exit threshold, and store it in generation_config.json."""
    quiet_transformers()
    torch.set_num_threads(threads)
    with one_line_errors(), needs_extra("bench"):
        from sigma0.calibration import calibrate as find
        from sigma0.calibration import check_mode, prompts_needed
        from sigma0.calibration_report import copy_checkpoint, print_calibration, refusal, write_calibration

        mode = check_mode(exit)
        prompts_needed(agreement, confidence)
        folder = calibrated_folder(model, out)
        read = read_prompts(prompts)
        looped, tokenizer = load(model, device=device, dtype=dtype)
        ids = encode_prompts(looped, tokenizer, read, max_new_tokens)
        with progress_bar("prompts", len(ids), hidden=as_json) as advance:
            found = find(looped, ids, mode, agreement, confidence, max_new_tokens, advance)
        if as_json:
            typer.echo(json.dumps(asdict(found), indent=1))
        else:
            print_calibration(found)
        if found.chosen is None:
            typer.echo(refusal(found) if as_json else "nothing was stored", err=True)
            raise typer.Exit(1)
        if folder is None:
            told = "not stored: pass --out FOLDER for a calibrated copy"
        else:
            if out is not None:
                copy_checkpoint(checkpoint_folder(model), folder)
            write_calibration(looped, found.chosen, folder)
            told = f"stored in {folder / 'generation_config.json'}"
    typer.echo(told, err=as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Print versions, devices, and what is installed or off, and why."""
    report = examine()
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Shipped name, folder, or hub id.")],
    folder: Annotated[str, typer.Argument(help="A new or empty folder.")],
) -> None:
    """Write a folder that other tools load with trust_remote_code=True, through this package."""
    with one_line_errors():
        quiet_transformers()
        target = write_folder(*load(model, device="cpu"), folder)
    typer.echo(f"wrote {target}")


if __name__ == "__main__":
    app()
