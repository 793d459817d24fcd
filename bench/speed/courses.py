"""Courses of tokens to replay: stated here or in a file, or recorded from a model by `sigma0.bench course`."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from sigma0.bench.core.conditions import Conditions, Strict, describe, utc_now
from sigma0.bench.core.options import LEDGER, OWN, ExitJson, parsed_exit
from sigma0.bench.core.replay import Trace
from sigma0.bench.fidelity.grid import threshold
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.prompts import encode_prompts
from sigma0.commands.console import one_line_errors
from sigma0.config import ExitConfig
from sigma0.errors import needs_extra, one_line
from sigma0.models.load import load

PROMPTS = 24
NEW_TOKENS = 32
# Made up, and harder than what `pocket-large` does on its own world: tokens stop half-way on average, and one proposal
# in six is withdrawn, at the next loop or later.
STATED = Trace(
    4,
    exits=(2, 1, 2, 1, 3, 2, 1, 2, 4, 1, 2, 2, 3, 1, 2, 1, 2, 4, 1, 3),
    settled=(2, 1, 1, 3, 2, 2, 1, 4, 4, 1, 1, 2, 1, 1, 3, 1, 2, 3, 1, 3),
)
# Written by the command `course`, replayed by `--course recorded`.
RECORDED = LEDGER.with_name("course-pocket-large.json")
_OWN_COURSE = OWN.with_name(RECORDED.name)
_TRACE = TypeAdapter(Trace)
Parsed = TypeVar("Parsed")


class RecordedCourse(Strict):
    """The course of a shipped model's tokens along its own answers, up to their ends, and what it was recorded with."""

    time: str  # When, ISO 8601, UTC
    conditions: Conditions  # Model, prompts, code, libraries and machine
    mode: str  # The exit rule
    settings: dict[str, float | int | str]  # Its parameters
    exits: tuple[int, ...]  # Loop at which each new token that is fed back stops
    settled: tuple[int, ...]  # Loop from which on its argmax is that of loop T

    @property
    def trace(self) -> Trace:
        """The course, for the number of loops of that model."""
        return Trace(self.conditions.total_loops, self.exits, self.settled)

    @property
    def source(self) -> str:
        """Where it comes from."""
        settings = ", ".join(f"{field} {value}" for field, value in self.settings.items())
        return f"{self.conditions.model} ({self.mode}: {settings}), answers to {self.conditions.n} questions"

    @classmethod
    def read(cls, path: Path) -> "RecordedCourse":
        """From a file that the command `course` has written."""
        return _parsed(path, cls.model_validate_json, "recorded course")


def stated(path: Path) -> Trace:
    """A course from a JSON file with `total_loops`, `exits` and `settled`."""
    return _parsed(path, _TRACE.validate_json, "course")


def _parsed(path: Path, parse: Callable[[str], Parsed], what: str) -> Parsed:
    try:
        return parse(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} holds no {what}: {one_line(error)}") from error


def chosen_course(course: str, by_default: bool, config: ExitConfig | None) -> tuple[Trace | None, str]:
    """The course that `--course` asks for, and where it comes from; None to follow the exit rule.

    Where none is named, the stated course is replayed if that is so by default.
    """
    if course == "rule" or not (course or by_default):
        return None, ""
    if course not in ("", "recorded", "stated") and not course.endswith(".json"):
        result = record_course(course, config)
        return result.trace, result.source
    if config is not None:
        raise ValueError("a stated course replaces the exit rule: leave --exit-config out, or name a model as --course")
    if course == "recorded":
        result = RecordedCourse.read(RECORDED)
        return result.trace, f"recorded from {result.source}"
    return (stated(Path(course)), Path(course).name) if course.endswith(".json") else (STATED, "stated")


def record_course(name: str, config: ExitConfig | None = None) -> RecordedCourse:
    """Records the course of a shipped model's tokens, by its own rule or another, along its answers to questions."""
    with needs_extra("bench"):
        from sigma0.bench.lossless.measure import full_texts, record

    model, tokenizer = load(name, device="cpu", dtype="float32")
    rule = model.resolve_exit_config(config)
    questions = list(micro_world(PROMPTS))
    prompts = encode_prompts(model, tokenizer, questions, NEW_TOKENS)
    ends = model.generation_config.eos_token_id
    texts = [
        cut_at_end(text, len(prompt), ends)
        for prompt, text in zip(prompts, full_texts(model, prompts, NEW_TOKENS), strict=True)
    ]
    traces, exits = record(model, prompts, texts, rule)
    answers = [question.answer for question in questions]
    return RecordedCourse(
        time=utc_now("seconds"),
        conditions=describe(
            model, name, "questions of pocket's world, test split, seed 0", prompts, answers, NEW_TOKENS
        ),
        mode=rule.mode,
        settings=threshold(rule),
        exits=tuple(chain(*map(np.ndarray.tolist, exits))),
        settled=tuple(chain(*map(settled_loops, traces))),
    )


def cut_at_end(text: Tensor, prompt: int, ends: int | list[int] | None) -> Tensor:
    """A text `[1, S]` up to the first end after its first `prompt` ids."""
    known = [] if ends is None else [ends] if isinstance(ends, int) else ends
    result = torch.isin(text[0, prompt:], torch.tensor(known, device=text.device)).nonzero()
    return text[:, : prompt + int(result[0]) + 1] if len(result) else text


def described(trace: Trace, source: str) -> str:
    """Where a course comes from, how deep it goes and how often it is wrong."""
    early = [(exit, right) for exit, right in zip(trace.exits, trace.settled, strict=False) if exit < trace.total_loops]
    wrong = sum(exit < right for exit, right in early) / max(len(early), 1)
    mean = sum(trace.exits) / len(trace.exits)
    return (
        f"{source}; mean exit {mean:.2f} of {trace.total_loops} loops, {100 * wrong:.0f} % of the proposals withdrawn"
    )


def settled_loops(argmax: NDArray[np.int64]) -> list[int]:
    """First loop from which on the argmax is that of loop T; of the argmax at loop 1 to T, `[T, n]`."""
    differs = argmax != argmax[-1]  # [T, n]
    total = len(argmax)
    last = np.where(differs.any(0), total - np.argmax(differs[::-1], axis=0), 0)
    return [int(loop) + 1 for loop in last]


def course(
    model: Annotated[str, typer.Argument(help="Shipped name, or a folder of such a model.")] = "pocket-large",
    exit_config: ExitJson = "",
    out: Annotated[Path, typer.Option(help="Where to write it, as JSON.")] = _OWN_COURSE,
) -> None:
    """Record at which loop each token of a shipped model's answers stops, and from which loop on it is settled."""
    with one_line_errors():
        result = record_course(model, parsed_exit(exit_config))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(result.model_dump_json(indent=1) + "\n")
    typer.echo(f"{described(result.trace, result.source)}; {len(result.exits)} tokens in {out}")
