"""The list of benchmarks, and a command without what it needs."""

import inspect
import sys
from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

from sigma0.bench.commands import COMMANDS, app


def test_a_missing_library_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sigma0.bench.lossless.command", None)
    result = CliRunner().invoke(app, ["lossless", "--help"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error:") and result.stderr.endswith("pip install 'sigma0-lm[bench]'\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_listed_help_is_the_commands_own(name):
    target = COMMANDS[name]
    defined = getattr(import_module(target.module), target.name)
    text = defined.info.help if isinstance(defined, typer.Typer) else inspect.getdoc(defined)
    assert text.partition("\n\n")[0].replace("\n", " ") == target.help
