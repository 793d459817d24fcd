"""What calibrations are made of: small models, prompts of random ids, questions with answers; and the command."""

import pytest
import torch
from typer.testing import CliRunner

from sigma0.bench.pocket.prompts import json_line, micro_world
from sigma0.cli import app
from tests.ladder.conftest import looped, tokenizer

__all__ = ["looped", "tokenizer"]


def run(*arguments):
    """What `sigma0 calibrate` says."""
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def random_prompts(count, shortest, lengths, low=8, high=61):
    """Ids of prompts, whose lengths go round from the shortest on."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(shortest + place % lengths,) for place in range(count)]
    return [tuple(torch.randint(low, high, size, generator=generator).tolist()) for size in sizes]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Writes a file of so many questions with their answers."""

    def write(count):
        path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
        path.write_text("\n".join(json_line(prompt) for prompt in micro_world(count, "calibration", 5)))
        return path

    return write
