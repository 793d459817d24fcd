"""The command without what it needs."""

import runpy
import sys
from pathlib import Path

import pytest


def test_a_missing_library_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sigma0.bench.commands", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(__file__).parents[2] / "bench" / "__main__.py"))
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error:") and told.endswith("pip install 'sigma0-lm[bench]'\n") and told.count("\n") == 1
