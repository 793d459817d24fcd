"""Which command makes which report of `bench/results`, with which models and out of which files."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WORLDS = ("pocket", "pocket-large")
_BENCH = "sigma0.bench"
_CALIBRATE = "sigma0 calibrate {model} --dtype float32 --prompts {{prompts}} --out {{scratch}}/out --json"
_RAVEN_RULES = (
    '[{"mode": "converge", "eps": 0.5}, {"mode": "converge", "eps": 0.25}, {"mode": "converge", "eps": 0.1}, '
    '{"mode": "margin", "theta": 0.3}, {"mode": "margin", "theta": 0.9}]'
)
_TEXTS = (
    "--prose {lee_background.cor} --prose {train.json} --code {HumanEval.jsonl.gz} --lists {zones} "
    "--lists {questions-words.txt}"
)
_TEXT_FILES = ("smollm2", "lee_background.cor", "train.json", "HumanEval.jsonl.gz", "zones", "questions-words.txt")


@dataclass(frozen=True)
class Recipe:
    """One report, or the rows of one command."""

    name: str  # Of its file, without `.json`
    # What stands behind `python -m`, or the command line `sigma0`. Names in braces are replaced: `{scratch}` by
    # an empty folder, `{prompts}` by a file of prompts, the names of `inputs` by files given
    command: str
    models: tuple[str, ...] = ()  # That it loads
    quick: str = ""  # Options put behind the command to run a part of it in few minutes; empty where the whole is quick
    # What stands behind `python -m sigma0.bench.pocket prompts` to make the prompts that it reads, if any
    prompts: str = ""
    quick_prompts: str = ""  # The same for its quick part
    inputs: tuple[str, ...] = ()  # Names of files and folders that the repository does not hold
    timed: bool = False  # Whether it holds times or loads of a machine, so that two runs differ
    file: str = ""  # Option behind which the command is given the report's file; empty: it prints the report
    rows: bool = False  # Whether it prints rows of the ledger; its whole is then compared with the ledger itself
    ending: str = ".json"  # Of its file; `.jsonl` for a trail, which has its provenance in a file beside it

    def words(self, quick: bool) -> list[str]:
        """The command as a list, names in braces as they are."""
        return [*shlex.split(self.command), *(shlex.split(self.quick) if quick else ())]

    def given(self, inputs: Mapping[str, Path]) -> dict[str, Path]:
        """Those of the files that it reads.

        Raises:
            ValueError: Naming one that is not given.
        """
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise ValueError(f"{self.name} reads {missing[0]}: give it as --input {missing[0]}=FILE")
        return {name: inputs[name] for name in self.inputs}


def _of_a_world(model: str) -> list[Recipe]:
    """Of one of the two models that know all of the micro-world."""
    alone = (model,)
    calibrate = _CALIBRATE.format(model=model)
    return [
        Recipe(f"{model}-eval", f"{_BENCH}.pocket eval {model} --n 7000 --json", alone, "--n 400 --free 40"),
        Recipe(f"{model}-gate", f"{_BENCH} gate {model} -n 1000 --rules-n 200 --json", alone, "-n 100 --rules-n 20"),
        Recipe(f"stability-{model}", f"{_BENCH} stability {model} -n 300 --json", alone, "-n 40"),
        Recipe(f"verdict-{model}", f"{_BENCH} verdict {model} -n 2000 --json", alone, "-n 60"),
        Recipe(
            f"promise-{model}", f"{_BENCH} promise {model} -n 10000 --json", alone,
            "-n 600 --fit 200 --test 200 --draws 40",
        ),
        Recipe(
            f"calibrate-{model}", f"{calibrate} --exit all --agreement 0.995", alone, "--agreement 0.98",
            prompts="--n 2500", quick_prompts="--n 400",
        ),
        Recipe(
            f"doors-{model}", f"{calibrate} --objective risk --risk 0.05", alone, prompts="--n 6000",
            quick_prompts="--n 500",
        ),
        Recipe(
            f"fidelity-{model}", f"{_BENCH} fidelity {model} --out {{scratch}}/rows --json", alone,
            "-n 2 --modes margin,qexit", rows=True
        ),
    ]  # fmt: skip


def _of_look_ups(model: str) -> list[Recipe]:
    """Of the model that was taught look-ups alone."""
    alone, calibrate = (model,), _CALIBRATE.format(model=model)
    lossless = f"{_BENCH} lossless {model} -n 30 --new-tokens 12 --look-ups --rules '{_RAVEN_RULES}' --json"
    return [
        Recipe(
            f"{model}-eval", f"{_BENCH}.pocket eval {model} --n 1000 --free 40 --look-ups --json", alone,
            "--n 100 --free 5",
        ),
        Recipe(f"stability-{model}", f"{_BENCH} stability {model} -n 100 --look-ups --json", alone, "-n 15"),
        Recipe(
            f"calibrate-{model}", f"{calibrate} --exit all --agreement 0.98", alone, prompts="--n 600 --look-ups",
        ),
        *(
            Recipe(f"lossless-{model}-{loops}", f"{lossless} --recurrence {loops}", alone, "-n 2")
            for loops in (4, 8, 16)
        ),
    ]  # fmt: skip


def _trails() -> list[Recipe]:
    """Questions to outer loops, with all that was asked and answered."""
    hat = '"Mary went to the park. The hat is with Mary. Where is the hat?"'
    pens = '"A farmer has 3 pens with 4 sheep in each. He sells 5 sheep. How many sheep are left?"'
    numbers = '"How many whole numbers from 1 to 30 can be divided by 3 or by 5?"'
    asked = {
        "solve-solver-progressive": (f"{hat} --model pocket-solver", ("pocket-solver",), ()),
        "solve-solver-lemma": (f"{hat} --model pocket-solver --strategy lemma", ("pocket-solver",), ()),
        "solve-progressive": (f"{pens} --model {{smollm2}} --max-tokens 160 --max-calls 40", (), ("smollm2",)),
        "solve-lemma": (f"{numbers} --model {{smollm2}} --strategy lemma --max-tokens 256", (), ("smollm2",)),
    }
    return [
        Recipe(
            name, f"sigma0 solve {told} --dtype float32 --memory {{scratch}}/memory.jsonl", models, inputs=inputs,
            timed=True, file="--trail", ending=".jsonl",
        )
        for name, (told, models, inputs) in asked.items()
    ]  # fmt: skip


def _of_both_worlds() -> list[Recipe]:
    both = " ".join(WORLDS)
    return [
        Recipe("signs-pocket", f"{_BENCH} signs {both} -n 700 --json", WORLDS, "-n 60"),
        Recipe("routes-pocket", f"{_BENCH} routes {both} -n 10000 --json", WORLDS, "-n 200"),
        Recipe("effort-pocket", f"{_BENCH} effort --real -n 60 --json", WORLDS, "-n 6"),
        Recipe(
            "ladder-pocket", f"{_BENCH} ladder {both} -n 200 --out {{scratch}}/rows --json", WORLDS, "-n 2", rows=True
        ),
        Recipe(
            "collapse", f"{_BENCH} collapse {both} --texts {{smollm2}} {_TEXTS} --json", WORLDS, inputs=_TEXT_FILES,
            timed=True,
        ),
    ]  # fmt: skip


def recipes() -> dict[str, Recipe]:
    """All, by name."""
    found = [
        Recipe("effort-simulation", f"{_BENCH} effort --json", quick="-n 100"),
        Recipe("calibration-worlds", f"{_BENCH} worlds --sets 400 --json", quick="--sets 8"),
        Recipe(
            "pocket-solver-forms", f"{_BENCH}.pocket forms pocket-solver --n 1000 --json", ("pocket-solver",), "--n 10"
        ),
        Recipe(
            "distilled-program", f"{_BENCH} distill pocket-solver --out {{scratch}}/rows --json", ("pocket-solver",),
            "--seen 20 -n 10", file="--program",
        ),
        Recipe(
            "outer", f"{_BENCH} outer pocket-solver --larger pocket-large -n 400 --out {{scratch}}/rows --json",
            ("pocket-solver", "pocket-large"), '-n 3 --ways "lemma graph" --most-votes 6', rows=True,
        ),
        Recipe("depths-pocket", f"{_BENCH} depths pocket -n 300 --json", ("pocket",), "-n 20"),
        Recipe("lossless-pocket-large", f"{_BENCH} lossless pocket-large -n 200 --json", ("pocket-large",), "-n 3"),
        *_of_look_ups("pocket-raven"),
        *_of_both_worlds(),
        *_trails(),
        *(each for model in WORLDS for each in _of_a_world(model)),
        Recipe("grounding", f"{_BENCH} grounding {{train.json}} --json", inputs=("train.json",)),
        Recipe("proximity", f"{_BENCH} proximity {{smollm2}} {_TEXTS} --json", inputs=_TEXT_FILES),
        Recipe("kernels-compiled", "sigma0.kernels --targets sm_80,sm_90 --json", timed=True),
        Recipe("kernels-cpu", f"{_BENCH} kernels --json", timed=True),
        Recipe("soak-pocket", f"{_BENCH} soak pocket --json", ("pocket",), timed=True),
    ]  # fmt: skip
    return {each.name: each for each in found}


def chosen(names: Sequence[str]) -> list[Recipe]:
    """Recipes by name; all for no names.

    Raises:
        ValueError: For a name of none.
    """
    known = recipes()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no report is called {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())
