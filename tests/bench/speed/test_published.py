"""The way `published`: code of a folder, run by a process of its own with the same weights."""

import json
import sys

import pytest
from typer.testing import CliRunner

from sigma0.bench.__main__ import app
from sigma0.bench.core.ledger import parse_row

CODE = "from sigma0.models import OuroConfig, OuroForCausalLM\n"
AUTO_MAP = {"AutoConfig": "code.OuroConfig", "AutoModelForCausalLM": "code.OuroForCausalLM"}


def run(code, *arguments):
    asked = ["speed", "pocket", "--context", "9", "--new-tokens", "5", "--rounds", "2", "--dtype", "float32"]
    return CliRunner().invoke(app, [*asked, "--published-code", str(code), *arguments])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "code.py").write_text(CODE)
    (tmp_path / "code" / "config.json").write_text(json.dumps({"auto_map": AUTO_MAP}))
    return tmp_path / "code"


@pytest.mark.exhaustive
def test_it_writes_the_tokens_of_full_depth(folder, tmp_path):
    result = run(folder, "--ways", "full", "--out", str(tmp_path / "ledger.jsonl"), "--json")
    assert result.exit_code == 0, result.output
    full, published = (parse_row(line) for line in result.stdout.splitlines())
    assert published.way == "published" and published.same_tokens is True and published.runner == "eager"
    assert published.passes_per_token == full.passes_per_token == full.total_loops
    assert published.kv_bytes_in_use == full.kv_bytes_in_use
    assert published.speed_ratio.value > 0 and published.prompt_tokens_per_second > 0
    assert {"published code on torch", "published code on transformers"} < set(published.versions)


@pytest.mark.slow
def test_what_cannot_run_is_refused(folder, tmp_path):
    (folder / "code.py").write_text("import a_module_that_nobody_has\n")
    ended = run(folder, "--ways", "full", "--published-python", sys.executable, "--out", str(tmp_path / "rows.jsonl"))
    assert ended.exit_code == 2 and "ended with exit code 1" in ended.output
    (folder / "config.json").write_text("{}")
    assert "has no config.json with an auto_map" in run(folder, "--ways", "full").output
    assert "leave out with the engine" in run(folder, "--ways", "full", "--by", "engine").output
