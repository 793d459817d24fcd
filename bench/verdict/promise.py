"""Whether a chosen door keeps its promise: calibrations drawn over and over from one pool of answers.

Each draw takes the answers of a fit and of a test out of the pool, without replacement, and chooses a door by
`sigma0.calibrate.risk.choose_door` itself; the rest of the pool, many times as large, says the door's true risk. Where
loops ordinarily go (`fit_fates`) is the one thing that is not drawn anew.

A pool is many answers of one model to questions of its world, kept in a file that later benches read.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter
from scipy.sparse import csr_matrix
from scipy.special import expit
from transformers import PreTrainedTokenizerFast

from sigma0.bench.gate.doubt import LONGEST_ANSWER
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.verdict.scores import CONFIDENCE, PLAIN, middle
from sigma0.calibrate.bootstrap import Estimate, share
from sigma0.calibrate.doors import Judged, judge
from sigma0.calibrate.risk import Answered, ChosenDoor, answer_all, choose_door
from sigma0.commands.console import progress_bar
from sigma0.jsonl import read_lines
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.signals.confidence import ConfidenceModel, pair_codes, transformed
from sigma0.signals.evidence import FEATURES
from sigma0.signals.verdict import DoorPolicy

_ANSWERED = TypeAdapter(Answered)


def open_pool(
    model: DepthGenerationMixin, tokenizer: PreTrainedTokenizerFast, file: Path | None, n: int, seed: int, quiet: bool
) -> list[Answered]:
    """Answers out of a file, or to questions of the calibration split, which then fill it."""
    if file is not None and file.exists():
        return read_pool(file)
    prompts = list({str(item.content): item for item in micro_world(n, "calibration", seed)}.values())
    config = model.resolve_exit_config(None)
    with progress_bar("answers", len(prompts), hidden=quiet) as advance:
        parts, _ = answer_all(model, tokenizer, prompts, config, LONGEST_ANSWER, advance)
    answers = [answer for part in parts for answer in part]
    if file is not None:
        write_pool(answers, file)
    return answers


def write_pool(pool: list[Answered], file: Path) -> None:
    """Writes answers as JSON lines."""
    lines = [json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in pool]
    file.write_text("".join(lines), encoding="utf-8")


def read_pool(file: Path) -> list[Answered]:
    """Reads what `write_pool` wrote."""
    return read_lines(file, _ANSWERED.validate_json, "answer of a pool")


class DrawnDoor(NamedTuple):
    """A drawn door on the rest of the pool: shares let through, and its risk, None where it lets nothing through."""

    risk: float | None
    opened: float
    opened_of_right: float


@dataclass(frozen=True)
class PromiseRow:
    """Doors of one kind, over all draws; intervals of coverage and risk are the middle 95 % of the draws."""

    score: str  # What the door reads
    kept: Estimate  # Share of the draws whose door keeps the risk
    shut: int  # Draws without a door that keeps it on the test; they count as kept, and let nothing through
    opened: Estimate  # Mean share of the answers let through
    opened_of_right: Estimate  # Of the right ones
    risk: Estimate | None  # Mean risk of the doors that let anything through; None where none does


@dataclass(frozen=True)
class PromiseReport:
    """The simulation of one model."""

    model: str  # Its name
    rule: dict[str, Any]  # The exit rule
    allowed: float  # Risk that is stated
    confidence: float  # With which it is to be kept
    pool: int  # Answers of the pool
    right: float  # Share of right ones among them
    parts: tuple[int, int]  # Answers of each fit and of each test
    draws: int  # How many
    rows: tuple[PromiseRow, ...]  # One for each kind of door
    # Share of the answers that the door on the fitted confidence lets through, less that of mean entropy's, in
    # points of 100: mean, and the middle 95 % of the draws
    more: Estimate


class Pool:
    """Answers that are judged by many doors: `judge` of the verdict of each, for all at once."""

    def __init__(self, answers: Sequence[Answered]) -> None:
        self._answers = answers
        self._right = np.array([answer.right for answer in answers], dtype=np.bool_)
        self._evidence = np.stack([answer.evidence for answer in answers])
        self._plain: dict[DoorPolicy, Judged] = {}
        codes = [pair_codes(answer.prompt_ids) for answer in answers]
        self._codes, columns = np.unique(np.concatenate([*codes, []]).astype(np.int64), return_inverse=True)
        self._pairs = np.array([len(item) for item in codes])
        ends = np.concatenate([[0], np.cumsum(self._pairs)])
        self._counts = csr_matrix((np.ones(len(columns)), columns, ends), (len(answers), len(self._codes)))

    def judged(self, policy: DoorPolicy, model: ConfidenceModel | None, places: npt.NDArray[np.int64]) -> Judged:
        """The answers at some places as a door sees them; no model stands for exp(-mean entropy)."""
        key = replace(policy, min_confidence=0.0)
        if key not in self._plain:
            self._plain[key] = judge([item.verdict(key, None) for item in self._answers], self._right, key)
        plain, right = self._plain[key], self._right[places]
        if model is None:
            return Judged(plain.confidence[places], plain.vetoed[places], right)
        read = self._evidence[:, [FEATURES.index(name) for name in model.features]][places]
        confidence = expit(model.bias - transformed(read) @ np.array(model.weights))
        strange = (read > model.most).any(1) | (self._evidence[places, FEATURES.index("length")] > model.longest)
        if model.pairs is not None:
            new = ~np.isin(self._codes, model.pairs)
            strange |= (self._counts @ new)[places] > model.most_new * self._pairs[places]
        return Judged(confidence, plain.vetoed[places] | strange, right)


def draw_doors(
    pool: Sequence[Answered],
    base: DoorPolicy,
    parts: tuple[int, int],
    draws: int,
    risk: float,
    confidence: float,
    on_draw: Callable[[int], None] = lambda done: None,
) -> dict[str, list[DrawnDoor]]:
    """Doors on the fitted confidence and on mean entropy, of every draw."""
    if sum(parts) >= len(pool):
        raise ValueError(f"{sum(parts)} answers of a fit and a test leave no rest of a pool of {len(pool)}")
    rng, known = np.random.default_rng(0), Pool(pool)
    result: dict[str, list[DrawnDoor]] = {CONFIDENCE: [], PLAIN: []}
    for done in range(1, draws + 1):
        first, second, rest = np.split(rng.permutation(len(pool)), [parts[0], sum(parts)])
        fitting, testing = ([pool[place] for place in part] for part in (first, second))
        for score in result:
            door = choose_door(fitting, testing, base, risk, confidence, fit=score == CONFIDENCE)
            result[score].append(on_rest(door, known, rest))
        on_draw(done)
    return result


def on_rest(door: ChosenDoor, pool: Pool, rest: npt.NDArray[np.int64]) -> DrawnDoor:
    """What a chosen door does with answers that had no part in its choice, those at the places `rest`, `[m]`."""
    if not door.passed:
        return DrawnDoor(None, 0.0, 0.0)
    policy = door.passed[-1]
    judged = pool.judged(policy, door.model, rest)
    opened, wrong = judged.opened_and_wrong(policy)
    right = int(judged.right.sum())
    return DrawnDoor(wrong / opened if opened else None, opened / len(rest), (opened - wrong) / max(1, right))


def report_promise(
    doors: dict[str, list[DrawnDoor]], model: str, rule: dict[str, Any], pool: Sequence[Answered],
    parts: tuple[int, int], risk: float, confidence: float,
) -> PromiseReport:  # fmt: skip
    """Counts over all draws of `draw_doors`, which had the same pool, parts, risk and confidence."""
    opened = {score: np.array([door.opened for door in drawn]) for score, drawn in doors.items()}
    return PromiseReport(
        model=model,
        rule=rule,
        allowed=risk,
        confidence=confidence,
        pool=len(pool),
        right=sum(answer.right for answer in pool) / len(pool),
        parts=parts,
        draws=len(opened[PLAIN]),
        rows=tuple(_row(score, drawn, risk) for score, drawn in doors.items()),
        more=middle(100 * (opened[CONFIDENCE] - opened[PLAIN])),
    )


def _row(score: str, drawn: Sequence[DrawnDoor], allowed: float) -> PromiseRow:
    risks = [door.risk for door in drawn if door.risk is not None]
    return PromiseRow(
        score=score,
        kept=share(len(drawn) - sum(risk > allowed for risk in risks), len(drawn)),
        shut=len(drawn) - len(risks),
        opened=middle([door.opened for door in drawn]),
        opened_of_right=middle([door.opened_of_right for door in drawn]),
        risk=middle(risks) if risks else None,
    )
