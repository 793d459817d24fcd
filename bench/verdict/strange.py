"""Prompts that are not of pocket's world: how often the door stays shut.

`strange.jsonl` holds 50 questions of general knowledge, 50 pieces of code to go on with, 50 stories of the world with
words that it does not have (other names; other things, places and cities; or all of them), and 50 held-out stories of
it with their words shuffled. They were written or drawn for this bench. Each is asked as a plain text and as a chat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sigma0.bench.verdict.asking import Asker, switched
from sigma0.calibrate.bootstrap import Estimate, share
from sigma0.config import Messages
from sigma0.jsonl import read_lines
from sigma0.signals.generation import Generation
from sigma0.signals.verdict import DoorPolicy

FILE = Path(__file__).parent / "strange.jsonl"
ALL = "all"
FORMS = ("plain", "chat")


class StrangePrompt(BaseModel):
    """One line of the file.

    Attributes:
        kind: What is strange about it.
        prompt: Text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    prompt: str


@dataclass(frozen=True)
class StrangeRow:
    """Strange prompts of one kind, or of all.

    Attributes:
        kind: Which.
        form: `plain` or `chat`.
        prompts: How many.
        shut: Share whose door stays shut.
        strange: Share that is out of calibration.
        doubted: Share whose confidence would keep it shut by itself.
    """

    kind: str
    form: str
    prompts: int
    shut: Estimate
    strange: Estimate
    doubted: Estimate


def read_strange(file: Path = FILE) -> list[StrangePrompt]:
    """Reads strange prompts.

    Raises:
        ValueError: For a malformed line, naming it.
    """
    return read_lines(file, StrangePrompt.model_validate_json, "strange prompt")


def strange_rows(asker: Asker, prompts: Sequence[StrangePrompt]) -> tuple[StrangeRow, ...]:
    """Asks every prompt in both forms; rows of each kind, then of all.

    Args:
        asker: The model.
        prompts: Of any kinds.
    """
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    rows = []
    for form in FORMS:
        with switched({"SIGMA0_VERDICT": "1"}):
            runs = asker.generations([_content(each.prompt, form) for each in prompts])
        for kind in (*kinds, ALL):
            told = [run for run, each in zip(runs, prompts, strict=True) if kind in (each.kind, ALL)]
            rows.append(_row(kind, form, told, asker.policy))
    return tuple(rows)


def _content(prompt: str, form: str) -> str | Messages:
    return prompt if form == "plain" else [{"role": "user", "content": prompt}]


def _row(kind: str, form: str, runs: Sequence[Generation], policy: DoorPolicy) -> StrangeRow:
    verdicts = [run.verdict for run in runs if run.verdict is not None]
    counts = (
        sum(run.door != "converge" for run in runs),
        sum(verdict.reason == "out_of_calibration" for verdict in verdicts),
        sum(verdict.confidence is None or verdict.confidence < policy.min_confidence for verdict in verdicts),
    )
    return StrangeRow(kind, form, len(runs), *(share(count, len(runs)) for count in counts))
