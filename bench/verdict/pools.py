"""Pools: many answers of one model to questions of its world, kept in a file that later benches read."""

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerFast

from sigma0.bench.gate.doubt import LONGEST_ANSWER
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.risk import Answered, answer_all
from sigma0.commands.console import progress_bar
from sigma0.jsonl import read_lines
from sigma0.models.hf_generate import DepthGenerationMixin

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
