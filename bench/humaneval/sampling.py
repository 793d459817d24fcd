"""Completions of prompts as they are: no chat template, fixed stop strings, any exit setting.

They are kept in a file, one JSON line each: a run is resumed from them, and can be judged later.
"""

import json
import time
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, model_validator

from sigma0.api import generate
from sigma0.bench.core.conditions import Conditions, Strict
from sigma0.bench.core.lines import append, cut, parsed
from sigma0.bench.humaneval.problems import Problem
from sigma0.decode.detokenizer import eos_ids, truncate_at_stop
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.limits import check_context
from sigma0.models.prompts import encode

# where the function that is asked for is over (Chen et al., 2021, section 2.1)
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
MAX_NEW_TOKENS = 512


class SampleSettings(Strict):
    """What all completions of a run have in common, beside the model."""

    exit_config: dict[str, Any] | None  # Of a looped model, whole; None of others
    dtype: str  # Of the weights
    temperature: float = Field(default=0.0, ge=0)  # 0 is greedy
    max_new_tokens: int = Field(default=MAX_NEW_TOKENS, ge=1)  # Of each completion at most
    seed: int = 0  # Of all of them; each has one of its own, made from this, its problem and its number
    stop: tuple[str, ...] = STOPS  # Strings that end a completion
    strip_prompt: bool = False  # Whether white space at the end of a prompt is left for the model to write

    def prompt_of(self, problem: Problem) -> str:
        """What the model continues."""
        return problem.prompt.rstrip() if self.strip_prompt else problem.prompt


class Sample(Strict):
    """A completion."""

    task_id: str  # Of its problem
    problem_sha256: str  # `Problem.digest`
    number: int = Field(ge=0)  # Among the samples of the problem, from 0
    completion: str  # The new text ahead of the first stop string
    finished: bool  # Whether it ended by itself, and not at the limit of new tokens
    new_tokens: int = Field(ge=1)  # Ids written, those of the stop string included
    # Sum of exit depths over the tokens after the first; None of a model without loops, as are the next two
    depths: int | None = None
    passes: int | None = None  # Calls of the shared block after the prompt
    rows: int | None = None  # Rows in them
    seconds: float = Field(ge=0)  # From prompt to completion

    @model_validator(mode="after")
    def _loops_or_not(self) -> "Sample":
        if len({item is None for item in (self.depths, self.passes, self.rows)}) > 1:
            raise ValueError("depths, passes and rows are all known or all unknown")
        return self


def write_sample(model: Any, tokenizer: Any, problem: Problem, number: int, settings: SampleSettings) -> Sample:
    """Continues the prompt of a problem by a causal model, looped or not: its sample of that number, from 0.

    Raises:
        ValueError: If the model's context cannot hold it, or for settings that the model refuses.
    """
    began = time.monotonic()
    seed = sample_seed(settings.seed, problem, number)
    write = _looped if isinstance(model, DepthGenerationMixin) else _plain
    try:
        written = write(model, tokenizer, settings.prompt_of(problem), settings, seed)
    except ValueError as error:
        raise ValueError(f"{problem.task_id}: {error}") from error
    whole = written.pop("text")
    text = truncate_at_stop(whole, settings.stop)
    return Sample(
        task_id=problem.task_id,
        problem_sha256=problem.digest,
        number=number,
        completion=text,
        finished=written.pop("ended") or text != whole,
        seconds=time.monotonic() - began,
        **written,
    )


def sample_seed(seed: int, problem: Problem, number: int) -> int:
    """A seed of its own for each sample, whatever is written before it; below 2**32."""
    return int.from_bytes(sha256(f"{seed}/{problem.task_id}/{number}".encode()).digest()[:4], "big")


def _drawing(settings: SampleSettings) -> dict[str, Any]:
    """For `generate`: the whole distribution, whatever top-k or top-p the checkpoint asks for."""
    if settings.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}


def _looped(model: Any, tokenizer: Any, prompt: str, settings: SampleSettings, seed: int) -> dict[str, Any]:
    """A continuation before it is cut, whether it ended by itself, and what it took."""
    written = generate(
        model,
        tokenizer,
        prompt,
        exit_config=settings.exit_config,
        max_new_tokens=settings.max_new_tokens,
        stop=settings.stop,
        seed=seed,
        verdict=False,
        on_collapse="ignore",
        **_drawing(settings),
    )
    return {
        "text": written.text,
        "ended": written.stop_reason != "length",
        "new_tokens": len(written.tokens),
        "depths": sum(token.depth for token in written.tokens[1:]),
        "passes": written.loop_passes,
        "rows": written.loop_rows,
    }


def _plain(model: Any, tokenizer: Any, prompt: str, settings: SampleSettings, seed: int) -> dict[str, Any]:
    """Likewise, of a model without loops."""
    ids = encode(tokenizer, prompt).to(model.device)
    check_context(model, ids.shape[1], settings.max_new_tokens)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=settings.max_new_tokens,
            stop_strings=list(settings.stop),
            tokenizer=tokenizer,
            **_drawing(settings),
        )
    new = out[0, ids.shape[1] :]
    text = str(tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    ends = eos_ids(model.generation_config.eos_token_id)
    return {"text": text, "ended": int(new[-1]) in ends, "new_tokens": len(new)}


class Run(Strict):
    """What was asked for at once."""

    kind: Literal["run"] = "run"  # "run"
    conditions: Conditions  # Model, machine and code
    settings: SampleSettings  # Of all its samples
    samples: int = Field(ge=1)  # Of each problem

    @property
    def id(self) -> str:
        """A short name."""
        unnamed = {"conditions": self.conditions.unnamed}
        return sha256(self.model_dump_json(exclude=unnamed).encode()).hexdigest()[:16]

    @property
    def maker(self) -> str:
        """What its samples depend on beside their problems and numbers: weights, the model's other files, settings."""
        output = [self.conditions.model_sha256, self.conditions.settings_sha256, self.settings.model_dump(mode="json")]
        return json.dumps(output, sort_keys=True)


class SavedSample(Strict):
    """A sample, and the run that wrote it."""

    kind: Literal["sample"] = "sample"  # "sample"
    run: str  # `Run.id`
    sample: Sample  # It


_LINE: TypeAdapter[Run | SavedSample] = TypeAdapter(Annotated[Run | SavedSample, Field(discriminator="kind")])


class SampleFile:
    """Samples of any number of runs, by what made them; runs of one maker share theirs.

    They are in a file, of which a last line that was not written to its end is cut off, or in memory alone.

    Raises:
        ValueError: If the file holds a line that is none of these, or a sample of a run that stands nowhere before it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._runs: dict[str, Run] = {}
        self._saved: dict[tuple[str, str, int], SavedSample] = {}
        if path is not None:
            cut(path)
            parsed(path, lambda line: self._take(_LINE.validate_json(line)), "run and no sample")

    @property
    def latest(self) -> list[Run]:
        """The last run of each maker."""
        return list({run.maker: run for run in self._runs.values()}.values())

    def begin(self, run: Run) -> None:
        """Makes a run known."""
        if run.id not in self._runs:
            self._put(run)

    def add(self, run: Run, sample: Sample) -> None:
        """Keeps a sample of a run that is known."""
        self._put(SavedSample(run=run.id, sample=sample))

    def find(self, run: Run, problem: Problem, number: int) -> Sample | None:
        """The sample that the run's maker wrote before; None where it did not."""
        result = self._saved.get((run.maker, problem.digest, number))
        return None if result is None else result.sample

    def all_of(self, run: Run, problems: list[Problem]) -> list[list[Sample]]:
        """The samples of a run, for each of its problems."""
        result = [[self.find(run, problem, number) for number in range(run.samples)] for problem in problems]
        whole = [[sample for sample in row if sample is not None] for row in result]
        there, needed = sum(map(len, whole)), run.conditions.n * run.samples
        if there < needed:
            raise ValueError(
                f"{there} of {needed} samples of {run.conditions.model} are there for these problems: write the rest "
                "first, with the same command and --out-samples"
            )
        return whole

    def commits(self, run: Run, problems: list[Problem]) -> tuple[str | None, ...]:
        """Of the code that wrote the samples of a run, each once."""
        keys = [(run.maker, problem.digest, number) for problem in problems for number in range(run.samples)]
        written = (self._runs[self._saved[key].run].conditions.commit for key in keys)
        return tuple(dict.fromkeys(written))

    def _put(self, line: Run | SavedSample) -> None:
        self._take(line)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, line.model_dump_json().encode())

    def _take(self, line: Run | SavedSample) -> None:
        if isinstance(line, Run):
            self._runs[line.id] = line
            return
        if line.run not in self._runs:
            raise ValueError(f"run {line.run!r} stands nowhere before its sample")
        key = (self._runs[line.run].maker, line.sample.problem_sha256, line.sample.number)
        self._saved.setdefault(key, line)
