"""What the shipped models say of themselves is what the world's own lists say."""

import json

import pytest
from typer.testing import CliRunner

import sigma0
from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.card import about
from sigma0.bench.pocket.world import draw
from sigma0.checkpoints import resolve_model
from sigma0.checkpoints.about import read_about


@pytest.mark.grid(fast=1, slow=2)
@pytest.mark.parametrize("name", sigma0.shipped_models())
def test_the_shipped_files_are_what_the_command_prints(name):
    shipped = read_about(resolve_model(name))
    assert json.loads(CliRunner().invoke(app, ["about", name]).stdout) == shipped.model_dump(mode="json")


@pytest.mark.slow
def test_every_word_of_other_stories_is_in_the_list():
    known = about()
    for item in (item for index in range(300) for item in draw("test", 11, index).items):
        assert known.unseen(f"{item.prompt} {item.answer}") == []
