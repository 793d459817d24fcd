"""Which command makes which report of `bench/results`, with which models and out of which files."""

# ruff: noqa: E501  (a report is a line)
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sigma0.bench.core.ledger import parse_row
from sigma0.bench.core.rows import AnyRow
from sigma0.checkpoints import FETCHED, fetched_folder, shipped_models

# sums of float32 in another order, on another processor; a single other token or answer shows far above it
TOLERANCE = 2e-4
# characters of a value that is told
_LENGTH = 40
# what a run says of itself, not of the model
OF_THE_RUN = frozenset({"device", "commit", "time", "seconds", "threads", "versions"})
# times, speeds, memory in use, and everything worked out from them
_TIMED = re.compile(r"second|speed|time|tokens_per_|peak|bandwidth|rounds|_ms$|^ms_|ideal|concurrent|kv_memory|cost_s")
# digests that the report's provenance holds
_DIGESTS = frozenset({"settings_sha256", "model_sha256"})
# what was asked of a model, in place of what it answered
_ASKED = (
    "benchmark", "model", "above", "prompts_sha256", "n", "dtype", "batch_size", "max_new_tokens", "total_loops",
    "stride", "quantization", "kv", "mode", "settings", "after_exit", "policy", "family", "part", "unit", "stay",
    "warm_start", "exit_config", "way", "seed", "codec", "bits", "group", "segment", "context",
    "dtype_of_floats", "runner",
)  # fmt: skip


def differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Every place where two values of plain JSON, committed and found, differ, as `place: before, now`.

    Numbers are the same within `TOLERANCE`, relative for those over 1. `OF_THE_RUN` is left out.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now} - OF_THE_RUN):
            if key not in before or key not in now:
                yield f"{place}.{key}: only {'now' if key in now else 'before'}"
            else:
                yield from differences(before[key], now[key], f"{place}.{key}")
    elif isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            yield f"{place}: {len(before)} entries, now {len(now)}"
        for number, (old, new) in enumerate(zip(before, now, strict=False)):
            yield from differences(old, new, f"{place}[{number}]")
    elif _is_number(before) and _is_number(now):
        if not math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"{place}: {before}, now {now}"
    elif type(before) is not type(now) or before != now:
        yield f"{place}: {_short(before)}, now {_short(now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def untimed(line: str) -> dict[str, Any]:
    """A printed row as plain JSON values that the same weights give again anywhere."""
    fields = parse_row(line).model_dump(mode="json")
    return {
        name: value for name, value in fields.items() if not _TIMED.search(name) and name not in OF_THE_RUN | _DIGESTS
    }


def committed(result: Sequence[Mapping[str, Any]], ledger: Sequence[AnyRow]) -> list[dict[str, Any] | None]:
    """For each row found, as `untimed` gives it, the newest of its run and setting in a ledger; None without one."""
    newest = {}
    for row in ledger:
        plain = untimed(row.model_dump_json())
        newest[_identity(plain)] = plain
    return [newest.get(_identity(item)) for item in result]


def _identity(row: Mapping[str, Any]) -> str:
    return repr([row.get(name) for name in _ASKED])


WORLDS = ("pocket", "pocket-large")
_CALIBRATE = "--dtype float32 --prompts {prompts} --out {scratch}/out --json"
_SOLVE = "--dtype float32 --memory {scratch}/memory.jsonl"
_RAVEN = """lossless pocket-raven -n 30 --new-tokens 12 --look-ups --rules '[{"mode": "converge", "eps": 0.5}, {"mode": "converge", "eps": 0.25}, {"mode": "converge", "eps": 0.1}, {"mode": "margin", "theta": 0.3}, {"mode": "margin", "theta": 0.9}]' --json --recurrence"""
_ENGLISH = "--prompts bench/retrofit/questions.jsonl --max-new-tokens 16"
_TEXTS = "--prose {lee_background.cor} --prose {train.json} --code {HumanEval.jsonl.gz} --lists {zones} --lists {questions-words.txt} --json"
# Name of a report | its command | options for a quick part | marks | options of its prompts | those of the quick part's.
# The marks are `timed`, `rows`, the option of `Recipe.file`, and models that the command does not name.
_FIRST = f"""
effort-simulation | sigma0.bench effort --json | -n 100
effort-repeats | sigma0.bench effort --rates '{{"first_right": 0.05, "repaired": 0.2, "correlation": 0.9}}' --json | -n 100
calibration-worlds | sigma0.bench worlds --sets 400 --json | --sets 8
pocket-solver-forms | sigma0.bench.pocket forms pocket-solver --n 1000 --json | --n 10
distilled-program | sigma0.bench distill pocket-solver --out {{scratch}}/rows --json | --seen 20 -n 10 | --program
outer | sigma0.bench outer pocket-solver --larger pocket-large -n 400 --out {{scratch}}/rows --json | -n 3 --ways "lemma graph" --most-votes 6 | rows
depths-pocket | sigma0.bench depths pocket -n 300 --json | -n 20
lossless-pocket-large | sigma0.bench lossless pocket-large -n 200 --json | -n 3
pocket-raven-eval | sigma0.bench.pocket eval pocket-raven --n 1000 --free 40 --look-ups --json | --n 100 --free 5
stability-pocket-raven | sigma0.bench stability pocket-raven -n 100 --look-ups --json | -n 15
stability-pocket-raven-64 | sigma0.bench stability pocket-raven -n 60 --look-ups --recurrence 64 --inner-break --json | -n 5
calibrate-pocket-raven | sigma0 calibrate pocket-raven {_CALIBRATE} --exit all --agreement 0.98 | | | --n 600 --look-ups
lossless-pocket-raven-4 | sigma0.bench {_RAVEN} 4 | -n 2
lossless-pocket-raven-8 | sigma0.bench {_RAVEN} 8 | -n 2
lossless-pocket-raven-16 | sigma0.bench {_RAVEN} 16 | -n 2
signs-pocket | sigma0.bench signs pocket pocket-large -n 700 --json | -n 60
routes-pocket | sigma0.bench routes pocket pocket-large -n 10000 --json | -n 200
effort-pocket | sigma0.bench effort --real -n 60 --json | -n 6 | pocket pocket-large
ladder-pocket | sigma0.bench ladder pocket pocket-large -n 200 --out {{scratch}}/rows --json | -n 2 | rows
collapse | sigma0.bench collapse pocket pocket-large --texts {{smollm2}} {_TEXTS} | | timed
solve-solver-progressive | sigma0 solve "Mary went to the park. The hat is with Mary. Where is the hat?" --model pocket-solver {_SOLVE} | | timed --trail
solve-solver-lemma | sigma0 solve "Mary went to the park. The hat is with Mary. Where is the hat?" --model pocket-solver --strategy lemma {_SOLVE} | | timed --trail
solve-progressive | sigma0 solve "A farmer has 3 pens with 4 sheep in each. He sells 5 sheep. How many sheep are left?" --model {{smollm2}} --max-tokens 160 --max-calls 40 {_SOLVE} | | timed --trail
solve-lemma | sigma0 solve "How many whole numbers from 1 to 30 can be divided by 3 or by 5?" --model {{smollm2}} --strategy lemma --max-tokens 256 {_SOLVE} | | timed --trail
"""
# of each of the two models that know all of the micro-world
_OF_A_WORLD = f"""
@-eval | sigma0.bench.pocket eval @ --n 7000 --json | --n 400 --free 40
people-@ | sigma0.bench.pocket people @ --n 2500 --json | --n 40
@-gate | sigma0.bench gate @ -n 1000 --rules-n 200 --json | -n 100 --rules-n 20
stability-@ | sigma0.bench stability @ -n 300 --json | -n 40
verdict-@ | sigma0.bench verdict @ -n 2000 --json | -n 60
promise-@ | sigma0.bench promise @ -n 10000 --json | -n 600 --fit 200 --test 200 --draws 40
calibrate-@ | sigma0 calibrate @ {_CALIBRATE} --exit all --agreement 0.995 | --agreement 0.98 | | --people --n 2500 | --people --n 400
doors-@ | sigma0 calibrate @ {_CALIBRATE} --objective risk --risk 0.02 | | | --people --n 6000 | --people --n 1000
fidelity-@ | sigma0.bench fidelity @ --out {{scratch}}/rows --json | -n 2 --modes margin,qexit | rows
"""
_LAST = f"""
smol-loop-eval | sigma0.bench.retrofit eval smollm2 smol-loop bench/retrofit/text.safetensors --json | -n 4
smol-loop-tasks | sigma0.bench.retrofit tasks smollm2 smol-loop {{benchmark_tasks}} --json
smol-loop-fidelity | sigma0.bench fidelity smol-loop {_ENGLISH} -n 16 --after finish,verify --modes full,margin,converge,accel,accel-steps,fixed,oracle,settled --grid '{{"margin": [0.3, 0.6, 0.9], "converge": [0.5], "accel": [0.35], "accel-steps": [0.35]}}' --out {{scratch}}/rows --json | -n 2 --after finish | rows
smol-loop-speed | sigma0.bench.retrofit speed smollm2 smol-loop bench/retrofit/text.safetensors --json | -n 1 --rounds 2 --new-tokens 4 | timed
calibrate-smol-loop | sigma0 calibrate smol-loop --prompts bench/retrofit/calibration.jsonl --max-new-tokens 24 --exit all --agreement 0.99 --dtype float32 --out {{scratch}}/out --json | --exit margin --max-new-tokens 2
smol-loop-kv | sigma0.bench kv smol-loop {_ENGLISH} -n 24 --free 8 --segment 16 --out {{scratch}}/rows --json | -n 2 --free 1 --rounds 0 --kv int8 | rows
smol-loop-ladder | sigma0.bench ladder smol-loop smollm2 {_ENGLISH} -n 5 --out {{scratch}}/rows --json | -n 2 --max-new-tokens 4 | rows
grounding | sigma0.bench grounding {{train.json}} --json
proximity | sigma0.bench proximity {{smollm2}} {_TEXTS}
kernels-compiled | sigma0.kernels --targets sm_80,sm_90 --json | | timed
kernels-cpu | sigma0.bench kernels --json | | timed
soak-pocket | sigma0.bench soak pocket --json | | timed
"""
# of this very Python, whatever `sigma0` is found first
_COMMAND_LINE = "from sigma0.cli import app; app()"


class Failed(ValueError):
    """A command that ended in an error, or printed no report."""


@dataclass(frozen=True)
class Recipe:
    """One report, or the rows of one command."""

    name: str  # Of its file, without its ending
    # What stands behind `python -m`, or the command line `sigma0`. Names in braces are replaced: `{scratch}` by
    # an empty folder, `{prompts}` by a file of prompts, others by files given
    command: str
    quick: str = ""  # Options put after the command to run a part of it in few minutes; empty where the whole is quick
    # What stands behind `python -m sigma0.bench.pocket prompts` to make the prompts that it reads, if any
    prompts: str = ""
    quick_prompts: str = ""  # The same for its quick part
    models: tuple[str, ...] = ()  # That it loads
    timed: bool = False  # Whether it holds times or loads of a machine, so that two runs differ
    file: str = ""  # Option after which the command is given the report's file; empty: it prints the report
    rows: bool = False  # Whether it prints rows of the ledger; its whole is then compared with the ledger itself

    @property
    def inputs(self) -> list[str]:
        """Names of files and folders that it reads and the repository does not hold."""
        named = re.findall(r"\{([\w.-]+)\}", self.command)
        return [name for name in named if name not in ("scratch", "prompts")]

    @property
    def is_ready(self) -> bool:
        """Whether the models are there that `sigma0 get` writes."""
        return all(fetched_folder(name).exists() for name in self.models if name in FETCHED)

    @property
    def ending(self) -> str:
        """Of its file; a trail has its provenance in a file beside it."""
        return ".jsonl" if self.file == "--trail" else ".json"

    def given(self, inputs: Mapping[str, Path]) -> dict[str, Path]:
        """Those of the files that it reads."""
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise ValueError(f"{self.name} reads {missing[0]}: give it as --input {missing[0]}=FILE")
        return {name: inputs[name] for name in self.inputs}

    def told(self, quick: bool) -> str:
        """What a reader types to have it again, names in braces as they are."""
        typed = self.command if self.command.startswith("sigma0 ") else f"python -m {self.command}"
        command = f"{typed} {self.quick}" if quick and self.quick else typed
        return f"python -m {self._prompts(quick)} > {{prompts}} && {command}" if self.prompts else command

    def run(self, quick: bool, inputs: Mapping[str, Path], scratch: Path) -> Any:
        """Runs it in a process of its own and gives its report, plain JSON values, or the text of a trail.

        `inputs` says where the files are that it reads; what it writes on the way lies in the empty folder `scratch`.

        Raises:
            Failed: Naming the command and the end of what it printed.
            ValueError: For an input that is not given.
        """
        files = {name: str(path.resolve()) for name, path in self.given(inputs).items()}
        files |= {"scratch": str(scratch), "prompts": str(scratch / "prompts.jsonl")}
        if self.prompts:
            _run(shlex.split(self._prompts(quick)), scratch / "prompts.jsonl")
        command = shlex.split(f"{self.command} {self.quick if quick else ''}")
        for name, path in files.items():
            command = [word.replace(f"{{{name}}}", path) for word in command]
        printed = scratch / "printed"
        report = scratch / f"report{self.ending}" if self.file else printed
        _run([*command, self.file, str(report)] if self.file else command, printed)
        try:
            text = report.read_text()
            if self.rows:
                return [untimed(line) for line in text.splitlines()]
            return text if self.ending == ".jsonl" else json.loads(text)
        except (json.JSONDecodeError, OSError) as error:
            raise Failed(f"{shlex.join(command)} gave no report: {error}") from error

    def _prompts(self, quick: bool) -> str:
        return f"sigma0.bench.pocket prompts {(quick and self.quick_prompts) or self.prompts}"


def _run(command: Sequence[str], out: Path) -> None:
    module = ["-c", _COMMAND_LINE, *command[1:]] if command[0] == "sigma0" else ["-m", *command]
    with out.open("w") as file:
        ended = subprocess.run([sys.executable, *module], stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        last = "\n".join(ended.stderr.strip().splitlines()[-5:])
        raise Failed(f"{shlex.join(command)} ended with {ended.returncode}: {last}")


def _recipe(line: str) -> Recipe:
    name, command, *parts = (part.strip() for part in line.split("|"))
    quick, marks, prompts, quick_prompts = [*parts, "", "", "", ""][:4]
    words = marks.split()
    models = tuple(word for word in (*command.split(), *words) if word in (*shipped_models(), *FETCHED))
    file = next((word for word in words if word.startswith("--")), "")
    return Recipe(
        name, command, quick, prompts, quick_prompts, models, "timed" in words, file=file, rows="rows" in words
    )


def recipes() -> dict[str, Recipe]:
    """All, by name."""
    table = "".join([_FIRST, *(_OF_A_WORLD.replace("@", model) for model in WORLDS), _LAST])
    return {item.name: item for item in map(_recipe, filter(None, table.splitlines()))}


def chosen(names: Sequence[str]) -> list[Recipe]:
    """Recipes by name; all for no names."""
    known = recipes()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no report is called {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())
