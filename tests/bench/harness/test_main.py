import sys

import pytest

from sigma0.bench.harness import __main__ as command


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match=r"sigma0-lm\[eval\]"):
        command.main()
