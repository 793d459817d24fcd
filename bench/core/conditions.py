"""A figure, and what it was measured with: weights, code, libraries, device; of a row, and written into a report."""

import json
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache, lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sigma0.calibrate.bootstrap import Estimate, ratio
from sigma0.checkpoints import shipped_models
from sigma0.errors import one_line
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.load import checkpoint_folder

_LIBRARIES = ("sigma0-lm", "torch", "transformers")
# git's exit code for "no repository here" and for every other trouble.
_TROUBLE = 128


class Strict(BaseModel):
    """What rows and reports are made of: no other fields, finite numbers, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Figure(Strict):
    """A measured figure and its 95 % interval over prompts."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, estimate: Estimate | None) -> "Figure | None":
        """The figure of an estimate."""
        if estimate is None:
            return None
        return cls(value=estimate.value, low=estimate.interval[0], high=estimate.interval[1])

    @classmethod
    def known(cls, estimate: Estimate | None) -> "Figure":
        """The figure of an estimate that there must be."""
        figure = cls.of(estimate)
        assert figure is not None
        return figure

    @classmethod
    def spread(cls, values: Sequence[float]) -> "Figure":
        """Median, least and greatest of some rounds."""
        return cls(value=median(values), low=min(values), high=max(values))

    @model_validator(mode="after")
    def _in_order(self) -> "Figure":
        if not self.low <= self.high:
            raise ValueError(f"the interval from {self.low} to {self.high} is upside down")
        return self


def mean_of(values: Sequence[float]) -> Estimate:
    """A mean and its interval by Student's t; of one value that value."""
    result = ratio(values, [1.0] * len(values))
    assert result is not None
    return result


def weights_sha256(name: str) -> str:
    """Digest of a checkpoint's weights, as `Conditions.model_sha256` says."""
    files = sorted(checkpoint_folder(name).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{name!r} has no *.safetensors file")
    return _digest(files[0]) if len(files) == 1 else _digest_of(files)


def settings_sha256(name: str) -> str:
    """Digest of a checkpoint's files that are not weights."""
    return _digest_of([path for path in checkpoint_folder(name).glob("*.json") if path.is_file()])


@cache
def shipped_weights(name: str) -> str | None:
    """Digest of the weights that ship under a name; None for other models."""
    return weights_sha256(name) if name in shipped_models() else None


def stale_mark(models: Mapping[str, str]) -> str:
    """What stands in a table after the names of models, each with the digest that was measured: which are stale."""
    stale = [name for name, digest in models.items() if shipped_weights(name) not in (None, digest)]
    return f" (**stale: other weights of {' and '.join(stale)} ship now**)" if stale else ""


def _digest_of(files: Sequence[Path]) -> str:
    lines = "".join(f"{_digest(file)}  {file.name}\n" for file in sorted(files))
    return sha256(lines.encode()).hexdigest()


def _digest(file: Path) -> str:
    result = sha256()
    with file.open("rb") as content:
        while chunk := content.read(2**20):
            result.update(chunk)
    return result.hexdigest()


def _digest_below(path: Path) -> str:
    """Of a file, or of the "sha256  path" lines of all files in a folder."""
    if path.is_file():
        return _digest(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return sha256("".join(f"{_digest(file)}  {file.relative_to(path)}\n" for file in files).encode()).hexdigest()


def _is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file()


class Digests(Strict):
    """A model's files."""

    weights_sha256: str  # As `Conditions.model_sha256` says
    settings_sha256: str  # As `Conditions.settings_sha256` says

    @classmethod
    def of(cls, name: str) -> "Digests":
        """Those of a shipped name, a folder or a hub id."""
        return cls(weights_sha256=weights_sha256(name), settings_sha256=settings_sha256(name))


class Conditions(Strict):
    """Under which a row was measured; two rows of one run share all of them."""

    model: str  # Name of the model, as it was loaded
    model_sha256: str  # Of its weights: of the one safetensors file, or of "sha256  name" lines where there are several
    settings_sha256: str  # Of the "sha256  name" lines of its other files (configs, tokenizer)
    total_loops: int  # T; 1 of a model without loops
    parameters: int  # How many
    device: str  # Device type, and the processor's name and caches
    dtype: str  # Of the weights
    threads: int  # CPU threads
    prompts: str  # Where they come from: a file's name, or a task and its split and seed
    prompts_sha256: str  # Of the prompts' ids and their known answers
    n: int  # Prompts
    batch_size: int  # Prompts in a batch
    max_new_tokens: int  # New tokens of each prompt at most
    # Git commit of the code, "+" and a digest of the differences after it where there are some; None outside a
    # repository
    commit: str | None
    versions: dict[str, str]  # Of Python and of the libraries that compute
    # To what the weights of the block were rounded as the model was loaded; None where they were not
    quantization: str | None = None
    stride: int = 1  # Loops that a pass runs; `total_loops` counts passes
    kv: dict[str, Any] | None = None  # How K/V were stored; None as the model computes them
    # Of a fixed product on the device (`product_ms`), which tells machines of one
    # name apart; None of rows from before it was taken. No condition: two starts of a run differ in it
    product_ms: float | None = None

    @property
    def named(self) -> str:
        """Its model's name, marked where other weights ship under it now."""
        return f"{self.model}{stale_mark({self.model: self.model_sha256})}"

    @property
    def code(self) -> str:
        """Libraries and commit, in words."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{versions}, commit {short_commit(self.commit)}"

    @property
    def unnamed(self) -> set[str]:
        """Fields that the name of a run leaves out, since they say what held before there was a choice."""
        since = {"quantization": self.quantization is None, "stride": self.stride == 1, "kv": self.kv is None}
        return {"product_ms", *(name for name, usual in since.items() if usual)}

    @property
    def run(self) -> str:
        """A short name for these conditions, the same for all rows of a run."""
        shared = {name: getattr(self, name) for name in Conditions.model_fields if name not in self.unnamed}
        return sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]


def short_commit(commit: str | None) -> str:
    """A commit in 12 digits, with what follows it where sources differed from it."""
    return "unknown" if commit is None else commit[:12] + commit[40:]


def describe(
    model: Any,
    name: str,
    prompts: str,
    ids: Sequence[tuple[int, ...]],
    answers: Sequence[str | None],
    max_new_tokens: int,
    batch_size: int = 1,
    digests: Digests | None = None,
) -> Conditions:
    """The conditions of a run over prompts with known answers; `digests` are of weights that no checkpoint holds."""
    known = [(tuple(row), answer) for row, answer in zip(ids, answers, strict=True)]
    files = digests or Digests.of(name)
    return Conditions(
        model=name,
        model_sha256=files.weights_sha256,
        settings_sha256=files.settings_sha256,
        total_loops=model.num_loops if isinstance(model, DepthGenerationMixin) else 1,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        device=device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        prompts=prompts,
        prompts_sha256=sha256(repr(known).encode()).hexdigest(),
        n=len(ids),
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        commit=git_commit(),
        versions=library_versions(),
        quantization=getattr(model, "quantization", None),
        stride=getattr(model.config, "stride", 1),
        kv=model.kv_config.to_dict() if isinstance(model, DepthGenerationMixin) and model.kv_config.is_coded else None,
        product_ms=product_ms(model.device, torch.get_num_threads()),
    )


def utc_now(timespec: str = "auto") -> str:
    """The time in ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec=timespec)


def library_versions(names: Sequence[str] = _LIBRARIES) -> dict[str, str]:
    """Versions of Python and of the libraries that compute."""
    return {"python": platform.python_version(), **{item: version(item) for item in names}}


def git_commit() -> str | None:
    """The commit of the code that runs, with "+" and a digest after it where sources differ from it.

    None outside a repository, or where these sources are not part of it; a ValueError where git refuses to tell.
    """
    if shutil.which("git") is None:
        return None
    # not so in an environment inside somebody else's repository
    tracked = _run_git("ls-files", "--error-unmatch", Path(__file__).name)
    if tracked.returncode == _TROUBLE and "not a git repository" not in tracked.stderr:
        raise ValueError(f"git does not tell the commit of these sources: {tracked.stderr.strip()}")
    if tracked.returncode:
        return None
    root = Path(_git("rev-parse", "--show-toplevel").strip())
    commit = _git("rev-parse", "HEAD").strip()
    # Results change while they are measured.
    everything_else = ("--", ":(top)", ":(top,exclude)bench/results")
    changed = _git("diff", "HEAD", *everything_else)
    new = _git("ls-files", "--others", "--exclude-standard", "--full-name", "--", ":(top)*.py").split()
    if not changed and not new:
        return commit
    text = changed + "".join(f"{name}\n{(root / name).read_text()}" for name in new)
    return f"{commit}+{sha256(text.encode()).hexdigest()[:8]}"


def _git(*arguments: str) -> str:
    result = _run_git(*arguments)
    if result.returncode:
        raise ValueError(f"git {' '.join(arguments[:2])} failed: {result.stderr.strip()}")
    return result.stdout


def _run_git(*arguments: str) -> subprocess.CompletedProcess[str]:
    folder = Path(__file__).resolve().parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def device_name(device: torch.device) -> str:
    """The device in words, with the name of the GPU or processor."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({_processor()})" if device.type == "cpu" else device.type


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    # machines of one name differ: virtual ones hide which processor they have, so the first core's caches are told too
    folders = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")
    caches = {int((item / "level").read_text()): (item / "size").read_text().strip() for item in sorted(folders)}
    return ", ".join([name, *(f"L{level} {size}" for level, size in sorted(caches.items()) if level > 1)])


@lru_cache
def product_ms(device: torch.device, threads: int) -> float:
    """Milliseconds of a fixed product, float32 `[1024, 1024]` twice, the fastest of ten: how fast a machine is."""
    matrix = torch.ones(1024, 1024, device=device)
    times = []
    for _ in range(10):
        began = perf_counter()
        # read back, so that a GPU has ended
        float((matrix @ matrix)[0, 0])
        times.append(1000 * (perf_counter() - began))
    return round(min(times), 3)


class Provenance(Strict):
    """What a report was made with."""

    command: str = Field(min_length=1)  # What was run, as one types it
    commit: str = Field(pattern=r"^[0-9a-f]{40}(\+[0-9a-f]{8})?$")  # Of the code, as `git_commit` says
    device: str = Field(min_length=1)  # Device type and the processor's name
    threads: int = Field(ge=1)  # CPU threads
    versions: dict[str, str]  # Of Python and of the libraries that compute
    models: dict[str, Digests]  # Digests of every model that was loaded, by its name
    inputs: dict[str, str] = {}  # Digests (sha256) of files and folders not of the repository, by their name
    time: datetime  # When it ended, in ISO 8601, UTC
    note: str = ""  # What else a reader must know

    @classmethod
    def here(
        cls, command: str, models: Sequence[str], inputs: Mapping[str, Path] = {}, threads: int = 1
    ) -> "Provenance":
        """That of a command that has ended on the CPU of this machine, with the models, files and folders it read."""
        commit = git_commit()
        if commit is None:
            raise ValueError("the commit of these sources is unknown: write reports in a clone of the repository")
        return cls(
            command=command,
            commit=commit,
            device=device_name(torch.device("cpu")),
            threads=threads,
            versions=library_versions(),
            models={
                **{name: Digests.of(name) for name in models},
                **{name: Digests.of(str(path)) for name, path in inputs.items() if _is_checkpoint(path)},
            },
            inputs={name: _digest_below(path) for name, path in inputs.items() if not _is_checkpoint(path)},
            time=datetime.now(timezone.utc),
        )


def write_report(path: Path, provenance: Provenance, report: Any) -> None:
    """Writes a report with its provenance before it; plain JSON values."""
    content = {"provenance": provenance.model_dump(mode="json"), "report": report}
    path.write_text(json.dumps(content, indent=1) + "\n")


def figures_of(path: Path) -> Any:
    """What a file that `--json` printed says: a report with its provenance, or the bare figures."""
    content = json.loads(path.read_text())
    return content["report"] if isinstance(content, dict) and set(content) == {"provenance", "report"} else content


def read_report(path: Path) -> tuple[Provenance, Any]:
    """A report that `write_report` wrote.

    Raises:
        ValueError: If it does not say what it was made with.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or set(content) != {"provenance", "report"}:
        raise ValueError(f"{path.name} has no provenance: write it with python -m sigma0.bench all --only {path.stem}")
    try:
        return Provenance.model_validate(content["provenance"]), content["report"]
    except ValidationError as error:
        raise ValueError(f"the provenance of {path.name} is incomplete: {one_line(error)}") from error
