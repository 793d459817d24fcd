"""Runs the commands of the benchmarks as a user does, in this process; and where committed results lie."""

import json

from typer.testing import CliRunner

from sigma0.bench.commands import app
from tests.test_layout import ROOT

RESULTS = ROOT / "bench" / "results"
LEDGER = RESULTS / "leaderboard.jsonl"


def bench(*words, code=0):
    """What a command says that ends with this exit code."""
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == code, result.output
    return result


def refused(*words):
    """What a command says, as one line, to words that it does not take."""
    return " ".join(bench(*words, code=2).stderr.split())


def reported(*words):
    return json.loads(bench(*words, "--json").stdout)
