"""The way `published`: the same weights decoded by a model's published code, in a Python that can run it."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from sigma0.bench.speed.decoders import Decoded, Decoder

PROCESS = Path(__file__).with_name("published_process.py")


class Published(Decoder):
    """Published code at full depth, as its own `generate` calls it; the process waits between requests.

    Args:
        process: Of `published_process.py`.
        model: The looped model whose weights it holds, for counts.
        ids: The prompts, `[B, S]`.
        new_tokens: New tokens of each.

    Attributes:
        versions: Of the libraries of that Python.
    """

    def __init__(self, process: "subprocess.Popen[str]", model: Any, ids: Tensor, new_tokens: int) -> None:
        super().__init__(model, ids, new_tokens)
        self._process = process
        found = self._answer()
        self.versions = {f"published code on {name}": found[name] for name in sorted(found)}

    def prompt(self) -> float:
        """Reads the prompts, up to a token of each; seconds."""
        return float(self._ask(1)["prompt_seconds"])

    def decode(self) -> Decoded:
        """Reads the prompts anew and continues them; timed from the first new token on."""
        answer = self._ask(self.new_tokens)
        return self.whole_depth(answer["seconds"], torch.tensor(answer["tokens"]))

    def _ask(self, new_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        request = {"ids": self.ids.tolist(), "new_tokens": new_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(
                f"the published code ended with exit code {self._process.wait()}; above is what it wrote: "
                "--published-python must have the transformers that the code was written for"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def published(model: Any, ids: Tensor, new_tokens: int, python: str, code: Path) -> Iterator[Published]:
    """Published code that holds a model's weights, in a process that ends with this context.

    Args:
        model: A looped model with weights of floats.
        ids: The prompts, `[B, S]`.
        new_tokens: New tokens of each.
        python: Interpreter that has the libraries of the code.
        code: Folder with the code and a `config.json` whose `auto_map` names its classes. It is run.

    Raises:
        ValueError: If the weights are quantised, the folder has no such file, or the code does not run.
    """
    if getattr(model, "quantization", None) is not None:
        raise ValueError(f"published code takes weights of floats: leave --quantization {model.quantization} out")
    try:
        auto_map = json.loads((code / "config.json").read_text())["auto_map"]
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(code)!r} has no config.json with an auto_map, so it holds no published code") from error
    with TemporaryDirectory() as folder:
        _write(model, Path(folder), code, auto_map)
        options = [folder, str(model.dtype).removeprefix("torch."), str(model.device), str(torch.get_num_threads())]
        # where transformers copies code before it imports it
        place = {**os.environ, "HF_MODULES_CACHE": f"{folder}/modules"}
        with subprocess.Popen(
            [python, str(PROCESS), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=place
        ) as process:
            try:
                yield Published(process, model, ids, new_tokens)
            finally:
                process.kill()


def _write(model: Any, folder: Path, code: Path, auto_map: dict[str, str]) -> None:
    """A checkpoint with a model's weights whose code is the published one's."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()  # has settings of ours
    for path in code.glob("*.py"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    # names of transformers 4
    config |= {"auto_map": auto_map, "rope_theta": config["rope_parameters"]["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config))
